"""One rank of ``mccl bench ddp``: a process that makes its group and model, then does what is asked.

Input and output are lines of JSON. The first is the job; each of the others is [method, arguments...].
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from mccl.bench.congestion import use_common_congestion_control
from mccl.bench.lineup import LineUp

GROUP_TIMEOUT = timedelta(seconds=120)


class Rank:
    """The group, two equal models, and the requests of the coordinator."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        if job["library"] == "mccl":
            import mccl  # noqa: F401  (registers the backend)
        torch.set_num_threads(1)
        self.torch, self.dist, self.job = torch, dist, job
        rank, n = job["rank"], job["n"]
        dist.init_process_group(
            job["library"],
            init_method=f"file://{job['store']}",
            rank=rank,
            world_size=n,
            timeout=GROUP_TIMEOUT,
        )
        self.line_up = LineUp(Path(job["page"]), rank, n, spins=False)
        self.alone = [dist.new_group([other]) for other in range(n)][rank]
        # The second one has a group of one rank: all that DDP does, except communication.
        self.models = {"step": self._ddp(None), "compute": self._ddp(self.alone)}
        self.set_batch(job["batch"])

    def _model(self) -> Any:
        nn = self.torch.nn
        self.torch.manual_seed(1)  # the same weights everywhere
        width = self.job["width"]
        layers: list[Any] = []
        for _ in range(self.job["layers"]):
            linear = nn.Linear(width, width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")  # gradients neither vanish nor grow
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers)

    def _ddp(self, group: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            self._model(), bucket_cap_mb=self.job["bucket_mb"], process_group=group
        )

    def set_batch(self, batch: int) -> None:
        """Samples a rank and step; other ones on every rank."""
        generator = self.torch.Generator().manual_seed(1000 + self.job["rank"])
        shape = batch, self.job["width"]
        self.batch = self.torch.randn(shape, generator=generator), self.torch.rand(shape, generator=generator)

    def _descend(self, model: Any) -> None:
        with self.torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-self.job["lr"])

    def train(self, which: str, count: int) -> list[tuple[float, float]]:
        """`count` training steps; (seconds of a step, seconds of its backward pass) of each."""
        model, (samples, targets) = self.models[which], self.batch
        loss_of = self.torch.nn.functional.mse_loss
        times = []
        gc.disable()
        for _ in range(count):
            self.line_up.wait()
            begin = time.perf_counter()
            model.zero_grad()
            loss: Any = loss_of(model(samples), targets)
            backward = time.perf_counter()
            loss.backward()
            end_of_backward = time.perf_counter()
            self._descend(model)
            times.append((time.perf_counter() - begin, end_of_backward - backward))
        gc.enable()
        return times

    def backward_cpu(self, count: int) -> list[float]:
        """Seconds of processor time of `count` backward passes without communication."""
        model, (samples, targets) = self.models["compute"], self.batch
        times = []
        for _ in range(count):
            loss: Any = self.torch.nn.functional.mse_loss(model(samples), targets)
            begin = time.thread_time()
            loss.backward()
            times.append(time.thread_time() - begin)
        return times

    def buckets(self) -> list[int]:
        """Bytes of each bucket, as DDP arranges them after a first step: seen by a hook of one more model."""
        model = self._ddp(self.alone)
        seen: list[int] = []

        def note(bucket: Any) -> Any:
            seen.append(bucket.buffer().nbytes)
            done: Any = self.torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        # A lambda: a hook with annotations would have to have DDP's own.
        model.register_comm_hook(None, lambda _, bucket: note(bucket))
        for _ in range(2):
            seen.clear()
            model(self.batch[0][:1]).sum().backward()
        return seen

    def communicate(self, buckets: list[int], count: int) -> list[float]:
        """`count` times an all-reduce of each bucket, one after the other, nothing else; seconds of each."""
        tensors = [self.torch.ones(n_bytes // 4) for n_bytes in buckets]
        times = []
        for _ in range(count):
            self.line_up.wait()
            begin = time.perf_counter()
            for tensor in tensors:
                self.dist.all_reduce(tensor, op=self.dist.ReduceOp.SUM)
            times.append(time.perf_counter() - begin)
        return times

    def cpu_times(self) -> dict[str, float]:
        """Seconds of processor time by name of thread; of the process where threads cannot be told apart."""
        folder = Path("/proc/self/task")
        if not folder.is_dir():
            return {"all": time.process_time()}
        found: dict[str, float] = {}
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                tid = int(entry.name)
                name = "main" if tid == os.getpid() else (entry / "comm").read_text().strip()
                # The clock of one thread, numbered as clock_gettime(2) of Linux and glibc do it.
                found[name] = found.get(name, 0.0) + time.clock_gettime((~tid << 3) | 6)
        return found

    def weights(self) -> str:
        """A digest of the trained weights."""
        digest = 0
        for parameter in self.models["step"].parameters():
            digest = zlib.crc32(parameter.detach().numpy().tobytes(), digest)
        return f"{digest:08x}"

    def save_weights(self, path: str) -> None:
        """Writes them for another library's rank to compare."""
        self.torch.save([parameter.detach() for parameter in self.models["step"].parameters()], path)

    def largest_difference(self, path: str) -> float:
        """Between these weights and those of the file."""
        pairs = zip(self.models["step"].parameters(), self.torch.load(path))
        return max(float((own.detach() - other).abs().max()) for own, other in pairs)

    def use_common_congestion_control(self) -> list[str]:
        """Sets it on all TCP connections of this process, whoever made them; what they have afterwards."""
        return use_common_congestion_control()


def main() -> None:
    """The process. Answers null when the model is there, then each request until its input ends."""
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is for people

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    rank: Any = Rank(json.loads(sys.stdin.readline()))
    answer(None)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer(getattr(rank, method)(*arguments))
    rank.dist.destroy_process_group()


if __name__ == "__main__":
    main()
