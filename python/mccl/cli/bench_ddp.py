"""``mccl bench ddp``: how well DDP hides its communication, MCCL and gloo side by side. Imports no torch.

* Each library has processes of its own, one a rank, with one torch thread each. They take turns, some steps
  each (A B A B ...), so that what else the machine does meets both. Who is not measured sleeps.
* A step is zero_grad, forward, backward, optimizer. All ranks begin it together: they line up at counters in
  a shared page, not at a library's barrier. Its time is that of the slowest rank.
* compute: the same step of an equal model whose DDP has a group of one rank. comm: all-reduces of the same
  buckets, one after the other, without compute. exposed: step - compute. hidden: 1 - exposed / wire, where
  wire is the time that the bytes take at the rate of --shape, or else comm.
* The same seeds everywhere, so the weights must come out equal: bit for bit with two ranks, where no order of
  adding can matter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mccl.bench import lineup
from mccl.cli.ddp_hosts import INTERFACE, Hosts, missing, rate_of

LIBRARIES = ("mccl", "gloo")
ANSWER_S = 300.0  # the longest that a turn may take; the groups' own time-out is shorter
# Without --batch: so many samples that the backward pass takes so many times what its gradients need at
# 5 Gbit/s, or at --shape. Less and no library could hide them; more and none could be seen to fail.
BACKWARD_TO_WIRE = 3.0
USUAL_RATE = "5gbit"
CALIBRATION_BATCH = 64
Row = dict[str, Any]


class Team:
    """The ranks of one library."""

    def __init__(self, library: str, options: argparse.Namespace, hosts: Hosts | None, folder: Path) -> None:
        self.name = library
        page = folder / f"page-{library}"
        lineup.create(page)
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(options.n):
            self._ranks.append(_start(rank, options, hosts))
            job = {
                "library": library,
                "rank": rank,
                "n": options.n,
                "store": str(folder / f"store-{library}"),
                "page": str(page),
                "lr": 0.01,
                **{name: getattr(options, name) for name in ("layers", "width", "bucket_mb")},
                "batch": options.batch or CALIBRATION_BATCH,
            }
            self._send(self._ranks[-1], job)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Every rank's answer."""
        for process in self._ranks:
            self._send(process, [method, *arguments])
        return self.answers()

    def ask_first(self, method: str, *arguments: Any) -> Any:
        """The answer of rank 0 alone."""
        self._send(self._ranks[0], [method, *arguments])
        return self._answer(0)

    def answers(self) -> list[Any]:
        """One line of each rank."""
        return [self._answer(rank) for rank in range(len(self._ranks))]

    def _send(self, process: subprocess.Popen[str], value: Any) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come tells
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()

    def _answer(self, rank: int) -> Any:
        output = self._ranks[rank].stdout
        assert output is not None
        if not select.select([output], [], [], ANSWER_S)[0]:
            raise SystemExit(f"mccl bench ddp: {self.name}: rank {rank} did not answer within {ANSWER_S:g} s")
        line = output.readline()
        if not line:
            raise SystemExit(f"mccl bench ddp: {self.name}: rank {rank} ended; its last words are above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._ranks:
            assert process.stdin and process.stdout
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout
            process.stdout.close()


def _start(rank: int, options: argparse.Namespace, hosts: Hosts | None) -> subprocess.Popen[str]:
    """The process of a rank, with what a launcher would set. The ranks are on one host, or half on each."""
    n, host = options.n, 2 * rank // options.n if hosts else 0
    on_host = [other for other in range(n) if not hosts or 2 * other // n == host]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(on_host.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(on_host)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE if hosts else loopback,
    }
    command = [*(hosts.inside(host) if hosts else ()), sys.executable, "-m", "mccl.cli.ddp_rank"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


class Measured:
    """What one library's turns have shown; seconds."""

    def __init__(self) -> None:
        self.step: list[float] = []
        self.compute: list[float] = []
        self.backward: list[float] = []
        self.comm: list[float] = []
        self.cpu: dict[str, float] = {}  # by name of thread, of all ranks, during the steps
        self.cpu_compute = 0.0

    def turn(self, team: Team, steps: int, buckets: list[int]) -> None:
        """One round of a library."""
        before = team.ask("cpu_times")
        self.step += [
            max(times) for times in zip(*([s for s, _ in r] for r in team.ask("train", "step", steps)))
        ]
        between = team.ask("cpu_times")
        computed = team.ask("train", "compute", steps)
        after = team.ask("cpu_times")
        self.compute += [max(times) for times in zip(*([s for s, _ in r] for r in computed))]
        self.backward += [max(times) for times in zip(*([b for _, b in r] for r in computed))]
        self.comm += [max(times) for times in zip(*team.ask("communicate", buckets, 1))]
        for then, now in zip(before, between):
            for name, seconds in now.items():
                self.cpu[name] = self.cpu.get(name, 0.0) + seconds - then.get(name, 0.0)
        self.cpu_compute += sum(
            seconds - then.get(name, 0.0)
            for then, now in zip(between, after)
            for name, seconds in now.items()
        )


def can_hide(buckets: list[int], backward: float, wire: float) -> float:
    """The share that a perfect library hides: buckets are ready, and travel, one after the other."""
    total, ready, free = sum(buckets), 0.0, 0.0
    for n_bytes in buckets:
        ready += backward * n_bytes / total
        free = max(free, ready) + wire * n_bytes / total
    return 1 - (free - backward) / wire


def row_of(library: str, measured: Measured, options: argparse.Namespace, buckets: list[int]) -> Row:
    """One library's line; times in ms."""
    n, n_bytes, rank_steps = options.n, sum(buckets), options.n * len(measured.step)
    row: Row = {
        "lib": library,
        "op": "ddp",
        "n": n,
        "bytes": n_bytes,
        "dtype": "float32",
        "transport": "tcp",
        "shape": options.shape,
        "batch": options.batch,
        "steps": len(measured.step),
    }
    for name in ("step", "compute", "backward", "comm"):
        times = getattr(measured, name)
        row[f"{name}_p50_ms"] = round(statistics.median(times) * 1e3, 3)
        row[f"{name}_min_ms"] = round(min(times) * 1e3, 3)
    # A rank sends and receives as much as an optimal all-reduce has to; with two, the bytes of the gradients.
    on_wire_s = 2 * (n - 1) / n * n_bytes * 8 / rate_of(options.shape) if options.shape else 0.0
    for which in ("p50", "min"):
        exposed = row[f"step_{which}_ms"] - row[f"compute_{which}_ms"]
        wire = on_wire_s * 1e3 or row[f"comm_{which}_ms"]
        row[f"exposed_{which}_ms"] = round(exposed, 3)
        row[f"wire_{which}_ms"] = round(wire, 3)
        row[f"hidden_{which}"] = round(1 - exposed / wire, 4)
        row[f"can_hide_{which}"] = round(can_hide(buckets, row[f"backward_{which}_ms"], wire), 4)
        row[f"scaling_{which}"] = round(row[f"compute_{which}_ms"] / row[f"step_{which}_ms"], 4)
    row["samples_per_s"] = round(n * options.batch / row["step_p50_ms"] * 1e3, 1)
    # Per rank and step. What the steps take more than the computation is what communication costs.
    row["cpu_ms"] = {name: round(s / rank_steps * 1e3, 2) for name, s in sorted(measured.cpu.items())}
    row["cpu_comm_ms"] = round((sum(measured.cpu.values()) - measured.cpu_compute) / rank_steps * 1e3, 2)
    return row


def print_head(options: argparse.Namespace, buckets: list[int], congestion: dict[str, list[str]]) -> None:
    """What is measured."""
    link = f"two hosts joined at {options.shape}" if options.shape else "TCP on one host"
    used = ", ".join(f"{library} {'/'.join(names) or '?'}" for library, names in congestion.items())
    print(f"# DDP, n = {options.n}, {link}, float32, one torch thread a rank; congestion control: {used}")
    sizes = ", ".join(f"{n_bytes / 1e6:.1f}" for n_bytes in buckets)
    print(
        f"# {options.layers} layers of {options.width} x {options.width}, "
        f"{sum(buckets) / 1e6:.1f} MB of gradients, buckets of {sizes} MB; batch {options.batch} a rank"
    )


def print_rows(rows: list[Row]) -> None:
    """The table, times in ms."""
    names = ("step", "compute", "backward", "comm", "exposed", "wire")
    print(
        f"#{'lib':>5} {'':>4}"
        + "".join(f"{name:>10}" for name in names)
        + f"{'hidden':>9}{'at most':>9}{'scaling':>9}"
    )
    for row in rows:
        for which in ("p50", "min"):
            times = "".join(f"{row[f'{name}_{which}_ms']:>10.1f}" for name in names)
            shares = "".join(f"{row[f'{name}_{which}']:>9.1%}" for name in ("hidden", "can_hide", "scaling"))
            print(f"{row['lib']:>6} {which:>4}{times}{shares}")
    for row in rows:
        threads = ", ".join(f"{name} {ms:.1f}" for name, ms in row["cpu_ms"].items() if ms >= 0.05)
        print(
            f"{row['lib']:>6}: {row['samples_per_s']:.0f} samples/s; processor time per rank and step, ms: "
            f"{threads}; of communication: {row['cpu_comm_ms']:.1f}"
        )


def print_verdict(rows: list[Row], equal: str) -> None:
    """MCCL against gloo in one line, and whether the weights agree."""
    by_name = {row["lib"]: row for row in rows}
    if {"mccl", "gloo"} <= by_name.keys():
        ratios = [by_name["mccl"][f"step_{w}_ms"] / by_name["gloo"][f"step_{w}_ms"] for w in ("p50", "min")]
        print(f"step time of MCCL: {ratios[0]:.3f} x gloo's at p50, {ratios[1]:.3f} x at min")
    print(equal)


def compare_weights(teams: list[Team], n: int, folder: Path) -> tuple[bool, str]:
    """Within and between libraries."""
    digests = {team.name: team.ask("weights") for team in teams}
    for name, found in digests.items():
        if len(set(found)) > 1:
            return False, f"WRONG: weights of {name} differ between ranks: {found}"
    if len({found[0] for found in digests.values()}) == 1:
        return True, f"weights after training are bit-identical on all ranks of {' and '.join(digests)}"
    path = str(folder / "weights.pt")
    teams[0].ask_first("save_weights", path)
    difference = max(team.ask_first("largest_difference", path) for team in teams[1:])
    if n == 2 or not difference < 1e-4:
        return False, f"WRONG: weights differ between libraries by up to {difference:g}"
    return (
        True,
        f"weights after training differ by at most {difference:g} between libraries (order of adding)",
    )


def calibrate(team: Team, options: argparse.Namespace, n_bytes: int) -> int:
    """A batch, a multiple of 16, for which the backward pass is as long as BACKWARD_TO_WIRE says.

    By processor time, which does not grow when others use the machine.
    """
    wire_s = 2 * (options.n - 1) / options.n * n_bytes * 8 / rate_of(options.shape or USUAL_RATE)
    backward_s: dict[int, float] = {}
    for batch in (CALIBRATION_BATCH, 2 * CALIBRATION_BATCH):
        team.ask("set_batch", batch)
        team.ask("train", "compute", 1)
        # All ranks at once, as they will be.
        backward_s[batch] = max(min(times) for times in team.ask("backward_cpu", 3))
    first, second = backward_s.values()
    per_sample = max(second - first, 0.1 * second) / CALIBRATION_BATCH
    wanted = CALIBRATION_BATCH + (BACKWARD_TO_WIRE * wire_s - first) / per_sample
    return max(16, int(wanted / 16 + 0.5) * 16)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Runs everything and prints; (what the JSON file gets, whether the weights are right)."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mccl-ddp-")))
        hosts = stack.enter_context(contextlib.closing(Hosts(options.shape))) if options.shape else None
        teams = []
        for library in options.against:
            teams.append(stack.enter_context(contextlib.closing(Team(library, options, hosts, folder))))
            teams[-1].answers()
        congestion = {
            team.name: sorted({name for names in team.ask("use_common_congestion_control") for name in names})
            for team in teams
        }
        for team in teams:
            # DDP arranges its buckets after the first step, by the order in which gradients were ready.
            team.ask("train", "step", 2)
        buckets = teams[0].ask_first("buckets")
        if not options.batch:
            options.batch = calibrate(teams[0], options, sum(buckets))
            for team in teams:
                team.ask("set_batch", options.batch)
        for team in teams:
            team.ask("train", "step", 1)
            team.ask("train", "compute", 2)
        print_head(options, buckets, congestion)
        results = {team.name: Measured() for team in teams}
        for done in range(options.rounds):
            for team in teams:
                results[team.name].turn(team, options.steps, buckets)
            if sys.stderr.isatty():
                print(f"\r{done + 1} of {options.rounds} rounds ", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print("\r" + 24 * " " + "\r", end="", file=sys.stderr, flush=True)
        rows = [row_of(name, measured, options, buckets) for name, measured in results.items()]
        right, text = compare_weights(teams, options.n, folder)
    print_rows(rows)
    print_verdict(rows, text)
    machine = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "congestion_control": congestion,
    }
    model = {name: getattr(options, name) for name in ("layers", "width", "batch", "bucket_mb")}
    result = {
        "machine": machine,
        "model": {**model, "buckets": buckets},
        "weights": text,
        "right": right,
        "rows": rows,
    }
    return result, right


def _rate(text: str) -> str:
    try:
        rate_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.strip().lower()


def _libraries(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(LIBRARIES)}")
    return names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="mccl bench ddp", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", type=int, default=2, metavar="RANKS", help="processes on this machine (2)")
    parser.add_argument(
        "--shape", type=_rate, metavar="RATE", help="two hosts, namespaces, joined at 5gbit, say; root"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each library (10)")
    parser.add_argument("--steps", type=int, default=2, help="training steps in a turn (2)")
    parser.add_argument(
        "--batch", type=int, default=0, help="samples a rank and step (so that backward can hide)"
    )
    parser.add_argument("--layers", type=int, default=24, help="of the model (24)")
    parser.add_argument("--width", type=int, default=1024, help="inputs and outputs of a layer (1024)")
    parser.add_argument("--bucket-mb", type=float, default=25, metavar="MIB", help="DDP's bucket_cap_mb (25)")
    parser.add_argument(
        "--against", type=_libraries, default=list(LIBRARIES), metavar="LIB,...", help="mccl,gloo"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if (
        options.n < 2
        or min(options.rounds, options.steps, options.layers, options.width) < 1
        or options.batch < 0
    ):
        parser.error("needs -n of at least 2, and positive numbers")
    if options.shape and (absent := missing()):
        parser.error(f"--shape needs {absent}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if weights differ."""
    options = parse(argv)
    result, right = measure(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
