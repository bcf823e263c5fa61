"""A job that torchrun restarts (FR-095): `elastic.py FOLDER PLAN`, where each life takes its part of PLAN.

PLAN is a comma-separated list, one entry a life: "1@5" means that rank 1 exits with 1 at step 5, "1@0" that
it exits before it makes the group, while rank 0 waits for it; "end" that all finish.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from patterns import assert_same, reduced, tensor


def count_life(folder: Path) -> int:
    """Counted here: with several agents TORCHELASTIC_RESTART_COUNT differs between them."""
    mine = f"rank{os.environ['RANK']}"
    life = len(list(folder.glob(f"{mine}-*")))
    (folder / f"{mine}-{life}").touch()
    return life


def main() -> None:
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder, plan = Path(sys.argv[1]), sys.argv[2].split(",")
    life = count_life(folder)
    who, _, step = plan[life].partition("@")
    if step == "0" and rank == int(who):
        time.sleep(0.7)  # by then rank 0 has published the id of this life, which nobody deletes
        os._exit(1)
    dist.init_process_group("mccl", timeout=timedelta(seconds=30))
    for i in range(8):
        value = tensor(rank, 1000, torch.float32, salt=10 * life + i)
        dist.all_reduce(value)
        assert_same(value, reduced("sum", n, 1000, torch.float32, salt=10 * life + i), (life, i))
        if step == str(i):
            if rank == int(who):
                os._exit(1)
            time.sleep(30)  # the launcher ends it: no error of its own counts as another failure
    dist.destroy_process_group()
    os.write(1, f"rank {rank}/{n} is through in life {life}\n".encode())


if __name__ == "__main__":
    main()
