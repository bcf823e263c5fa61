"""Field reports: NaN, infinities, rounding, the same bits on all ranks; for every all_reduce algorithm."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mccl
from patterns import assert_same
from ranks import Pool

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BITS = {F16: torch.int16, BF16: torch.int16, F32: torch.int32, F64: torch.int64}
CANONICAL_NAN = {F16: 0x7E00, BF16: 0x7FC0, F32: 0x7FC00000, F64: 0x7FF8 << 48}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "direct": {"allreduce_algo": "direct"},
    "two_shot": {"allreduce_algo": "two_shot"},
    "recursive_doubling": {"allreduce_algo": "recursive_doubling"},
    "rabenseifner": {"allreduce_algo": "rabenseifner"},
    "two_level": {"allreduce_algo": "two_level"},
    "ring, basic": {"allreduce_algo": "ring", "ring_algo": "basic"},
    "ring, chunked": {"allreduce_algo": "ring", "ring_algo": "chunked"},
    "ring, fast": {"allreduce_algo": "ring", "ring_algo": "fast"},
    "short messages": {"chunk_bytes": 4096, "small_msg_threshold": 0},
}


def groups() -> dict[str, dist.ProcessGroup]:
    """One per algorithm."""
    return {
        name: dist.new_group(pg_options=mccl.MCCLOptions(**settings)) for name, settings in ALGORITHMS.items()
    }


def assert_same_everywhere(rank: int, n: int, got: torch.Tensor, what: object) -> None:
    """Hashes of all ranks' bytes are equal."""
    mine = hashlib.sha256(got.detach().contiguous().view(torch.uint8).numpy().tobytes()).digest()
    digests = [torch.empty(32, dtype=torch.uint8) for _ in range(n)]
    dist.all_gather(digests, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    assert all(torch.equal(digest, digests[0]) for digest in digests), what


def ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest distance to float64 values, in units of the last place of the dtype there."""
    mantissa = {F16: 10, BF16: 7, F32: 23}[got.dtype]
    least = {F16: -14, BF16: -126, F32: -126}[got.dtype]
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=2.0**least)))
    return float(((got.double() - exact).abs() / torch.exp2(exponent - mantissa)).max())


# ---- NaN, zeros, infinities ------------------------------------------------------------------------------


def special(dtype: torch.dtype, position: int, value: float, elsewhere: float) -> torch.Tensor:
    values = torch.full((9,), elsewhere, dtype=F64).to(dtype)
    values[position] = value
    return values


def check_special_values(rank: int, n: int) -> None:
    inf = float("inf")
    for name, group in groups().items():
        for dtype in [F32, F16, BF16, F64]:
            for position in [0, 4, 8]:
                for holder in range(n):
                    for op in [MIN, MAX, SUM, PRODUCT, AVG]:
                        # a NaN with sign and payload, beside numbers and infinities on the other ranks
                        got = special(
                            dtype, position, -inf if rank == holder else inf * (rank % 2 or -1), 1 + rank
                        )
                        if rank == holder:
                            bits = got.view(BITS[dtype])
                            bits[position] = bits[position] | 1 | (1 << rank)
                            assert torch.isnan(got[position])
                        dist.all_reduce(got, op, group=group)
                        what = (name, dtype, position, holder, op)
                        assert int(got.view(BITS[dtype])[position]) == CANONICAL_NAN[dtype], (what, got)
                        assert int(torch.isnan(got).sum()) == 1, (what, got)
                        others = [1 + r for r in range(n)]
                        if op in (MIN, MAX):
                            expected = min(others) if op == MIN else max(others)
                            assert got[(position + 1) % 9] == expected, (what, got)

                    # zeros of both signs are ordered, and infinities are numbers
                    minus = -0.0 if rank == holder else 0.0
                    low, high = (
                        special(dtype, position, minus, minus),
                        special(dtype, position, -minus, -minus),
                    )
                    dist.all_reduce(low, MIN, group=group)
                    dist.all_reduce(high, MAX, group=group)
                    assert torch.signbit(low).all() and not torch.signbit(high).any(), (name, dtype, holder)
                    for op, value in [(MAX, inf), (MAX, -inf), (MIN, inf), (MIN, -inf)]:
                        got = special(dtype, position, value if rank == holder else 5.0, 2.0)
                        dist.all_reduce(got, op, group=group)
                        function = max if op == MAX else min
                        assert got[position] == function(value, 5.0), (name, dtype, op, value, got)
            opposite = special(dtype, 3, inf if rank == 0 else -inf, 1.0)
            dist.all_reduce(opposite, group=group)
            assert int(opposite.view(BITS[dtype])[3]) == CANONICAL_NAN[dtype], "infinity minus infinity"


@pytest.mark.parametrize("n", [2, 4])
def test_fr_010_nan_wins_wherever_it_is(pool: Pool, n: int) -> None:
    pool.run(n, check_special_values, timeout=100)


def check_special_scattered(rank: int, n: int) -> None:
    """The other collectives that reduce; and products of complex numbers part by part."""
    for dtype in [F32, F16, BF16, F64]:
        for holder in range(n):
            for op in [MIN, MAX, SUM]:
                data = torch.arange(3 * n).to(dtype) + rank
                if rank == holder:
                    data[::3] = -float("nan")
                got = torch.zeros(3, dtype=dtype)
                dist.reduce_scatter_tensor(got, data, op)
                assert int(got.view(BITS[dtype])[0]) == CANONICAL_NAN[dtype], (dtype, holder, op, got)
                assert not got[1:].isnan().any()
                everywhere = data.clone()
                dist.all_reduce(everywhere, op)
                assert int(everywhere.view(BITS[dtype])[0]) == CANONICAL_NAN[dtype], (dtype, holder, op)
                dist.reduce(data, holder, op)
                if rank == holder:
                    assert data.isnan().tolist() == [True, False, False] * n
                    assert int(data.view(BITS[dtype])[0]) == CANONICAL_NAN[dtype]
    data = torch.tensor([complex(float("nan"), 1.0 + rank), complex(2.0, rank)])
    dist.all_reduce(data)
    assert data.real.isnan().tolist() == [True, False] and not data.imag.isnan().any(), data


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fr_010_nan_in_reduce_and_reduce_scatter(pool: Pool, n: int) -> None:
    pool.run(n, check_special_scattered)


# ---- 16-bit floats ---------------------------------------------------------------------------------------


def check_overflow(rank: int, n: int) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = (20000 + 400 * torch.randn(n, 4099, generator=generator)).to(F16)
    exact = inputs.double().mean(0)
    for name, group in groups().items():
        got = inputs[rank].clone()
        dist.all_reduce(got, AVG, group=group)
        assert bool(got.isfinite().all()) and ulps(got, exact) <= 1, (name, ulps(got, exact))
        assert_same_everywhere(rank, n, got, name)

        got = inputs[rank].clone()
        dist.all_reduce(got, SUM, group=group)
        assert bool((got == float("inf")).all()), (name, "the sum is too large for float16, on every rank")

        got = inputs[rank].clone()  # what DDP's users do by hand: no rank's factor overflows
        dist.all_reduce(got, dist._make_nccl_premul_sum(1 / n), group=group)
        assert bool(got.isfinite().all()), name

        # A sum that leaves the range on the way and comes back does so in float32.
        terms = torch.tensor([60000.0 + 32 * r if r < n // 2 else -60000.0 for r in range(n)], dtype=F16)
        got = terms[rank].repeat(4099)
        dist.all_reduce(got, group=group)
        assert got.unique().tolist() == [terms.double().sum().item()], (name, got.unique())
    for op, expected in [(AVG, True), (SUM, False)]:
        got = inputs[rank].clone()
        dist.reduce(got, 0, op)
        if rank == 0:
            assert bool(got.isfinite().all()) is expected, op
        mine = torch.empty(100, dtype=F16)
        dist.reduce_scatter_tensor(mine, inputs[rank, : 100 * n].clone(), op)
        assert bool(mine.isfinite().all()) is expected, op


def test_fr_011_fp16_averages_do_not_overflow(pool: Pool) -> None:
    pool.run(8, check_overflow, timeout=100)


def check_accuracy(rank: int, n: int) -> None:
    count = 65536
    generator = torch.Generator().manual_seed(7)
    close = 1 + torch.randn(n, count, generator=generator) / 16
    lopsided = torch.randn(n, count, generator=generator).abs() + 0.5
    lopsided[n // 2] *= 256  # one large, the rest lost in a running sum of bfloat16
    for dtype in [BF16, F16]:
        for inputs in [close.to(dtype), lopsided.to(dtype)]:
            exact = inputs.double().sum(0)
            running = functools.reduce(torch.add, inputs)
            assert n == 2 or ulps(running, exact) > 0.6, "data that a running sum gets right shows nothing"
            for name, group in groups().items():
                got = inputs[rank].clone()
                dist.all_reduce(got, group=group)
                # half a unit for the one rounding; float32's own errors are 2 ** -16 of bfloat16's unit
                assert ulps(got, exact) <= 0.501, (dtype, name, ulps(got, exact))
                assert_same_everywhere(rank, n, got, (dtype, name))
            block = count // n
            mine = torch.empty(block, dtype=dtype)
            dist.reduce_scatter_tensor(mine, inputs[rank, : block * n].clone())
            assert ulps(mine, exact[rank * block : (rank + 1) * block]) <= 0.501, (dtype, "reduce_scatter")
            for root in {0, n - 1}:
                got = inputs[rank].clone()
                dist.reduce(got, root)
                assert rank != root or ulps(got, exact) <= 0.501, (dtype, "reduce")


@pytest.mark.parametrize("n", [2, 3, 8])
def test_fr_013_sums_of_16_bits_are_rounded_once(pool: Pool, n: int) -> None:
    pool.run(n, check_accuracy, timeout=100)


def check_fp16_sum(rank: int, n: int, count: int, any_bits: bool) -> None:
    inputs = []
    for r in range(n):
        generator = np.random.default_rng(100 + r)
        if any_bits:  # subnormals, infinities and NaN included
            inputs.append(generator.integers(0, 2**16, count, dtype=np.uint16).view(np.float16))
        else:
            values = generator.random(count, dtype=np.float32)
            inputs.append((values * 131008 - 65504).astype(np.float16))
    got = torch.from_numpy(inputs[rank].copy())
    dist.all_reduce(got)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(inputs[0] + inputs[1])
    expected[expected.isnan()] = float("nan")
    bits, wanted = got.view(torch.int16), expected.view(torch.int16)
    wrong = (bits != wanted).nonzero().flatten()[:8].tolist()
    rows = [[f"{int(t[i]) & 0xFFFF:#06x}" for t in (*map(as_bits, inputs), bits, wanted)] for i in wrong]
    assert not wrong, f"first operands, result and correct result that differ: {rows}"


def as_bits(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(values).view(torch.int16)


@pytest.mark.parametrize("count, any_bits", [(1 << 20, False), (1 << 20, True), (24063328, False)])
def test_fr_016_fp16_sums_are_correctly_rounded(pool: Pool, count: int, any_bits: bool) -> None:
    pool.run(2, check_fp16_sum, count, any_bits)


# ---- the same bits on all ranks --------------------------------------------------------------------------


def check_bits(rank: int, n: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for count in [1, 7, 1023, 65537, 1 << 20]:
        values = torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator))
        for dtype in [F32, F16, BF16]:
            for name, group in groups().items():
                got = values.to(dtype)
                dist.all_reduce(got, group=group)
                again = values.to(dtype)
                if count < 1 << 20:
                    dist.all_reduce(again, group=group)
                    assert_same(again, got, (name, dtype, count, "a second time"))
                assert_same_everywhere(rank, n, got, (name, dtype, count))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_fr_014_all_ranks_get_the_same_bits(pool: Pool, n: int) -> None:
    pool.run(n, check_bits, timeout=100)


def check_denormals(rank: int, n: int) -> None:
    """A rank whose thread flushes denormals to zero, as torch does on request, gets what the others get."""
    torch.set_flush_denormal(rank == 1)
    try:
        for dtype in [F32, F16, BF16, F64]:
            least = torch.ones(1, dtype=BITS[dtype]).view(dtype)  # the smallest number
            for op in [SUM, MAX, AVG]:
                got = least.repeat(100)
                dist.all_reduce(got, op)
                bits = got.view(BITS[dtype]).unique().tolist()
                assert bits == [n if op == SUM else 1], (dtype, op, bits)
    finally:
        torch.set_flush_denormal(False)


def test_fr_014_denormals_do_not_depend_on_a_ranks_mode(pool: Pool) -> None:
    pool.run(2, check_denormals)
    pool.run(3, check_denormals)


def check_training(rank: int, n: int, steps: int) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        (ddp(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()
        if step % 50 == 0:
            parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert_same_everywhere(rank, n, parameters, f"parameters after step {step}")


def test_fr_014_replicas_stay_equal_over_500_steps(pool: Pool) -> None:
    pool.run(3, check_training, 500)
