#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""torch's own backend tests, DistributedTest._DistTestBase out of the installed torch, on backend "mccl".

    python tests/torch/dist_suite.py [-n 3] [--rest] [--write-skips] [TEST ...]

Each test is run by n processes; backend_cases.py says how they get to mccl. A skip needs a reason that is
torch's: they are compared with the committed list, skips-<n>.txt. The exit status is 1 after a failure, after
a skip that is not in the list, or if nothing passed. Some tests want 4 or 8 ranks: --rest
runs those that 3 ranks skip for that reason.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
FEWEST = {3: 95, 4: 3, 8: 20}  # tests that have to pass, by ranks: torch may drop some, not most of them


def _tests(names: list[str], rest: bool) -> Iterator[unittest.TestCase]:
    from backend_cases import TestMCCL

    skipped = _expected(_skips_file(3))
    for name in unittest.defaultTestLoader.getTestCaseNames(TestMCCL):
        if rest and "world size" not in skipped.get(name, ""):
            continue
        if not names or any(wanted in name for wanted in names):
            yield TestMCCL(name)


def _skips_file(n: int) -> Path:
    return HERE / f"skips-{n}.txt"


def _reasons(result: unittest.TestResult) -> dict[str, str]:
    return {test.id().rpartition(".")[2]: " ".join(why.split()) for test, why in result.skipped}


def _expected(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: why for name, _, why in (line.partition("\t") for line in lines)}


def _report(result: unittest.TestResult, path: Path, options: argparse.Namespace) -> int:
    n = options.n
    skipped, expected = _reasons(result), _expected(path)
    new = {name: why for name, why in skipped.items() if expected.get(name) != why}
    failed = len(result.failures) + len(result.errors)
    passed = result.testsRun - failed - len(skipped)
    print(
        f"{n} ranks: {passed} passed, {failed} failed, {len(skipped)} skipped, {len(new)} of them unexpected"
    )
    for why, count in Counter(skipped.values()).most_common():
        print(f"  {count:4d}  {why}")
    for name, why in new.items():
        print(f"skip that {path.name} does not have: {name}: {why}")
    few = passed < FEWEST.get(n, 1) and not options.tests
    if few:
        print(f"at least {FEWEST.get(n, 1)} have to pass")
    return 1 if failed or new or few else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", type=int, default=3, help="ranks of each test (3)")
    parser.add_argument("--rest", action="store_true", help="only tests that 3 ranks are too few for")
    parser.add_argument("--write-skips", action="store_true", help="make this run's skips the expected ones")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="parts of names; all")
    options = parser.parse_args()
    os.environ["WORLD_SIZE"] = str(options.n)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    multiprocessing.set_forkserver_preload(["backend_cases"])
    tests = unittest.TestSuite(_tests(options.tests, options.rest))
    logging.disable(logging.INFO)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(tests)
    path = _skips_file(options.n)
    if options.write_skips:
        path.write_text("".join(f"{name}\t{why}\n" for name, why in sorted(_reasons(result).items())))
    return _report(result, path, options)


if __name__ == "__main__":
    sys.exit(main())
