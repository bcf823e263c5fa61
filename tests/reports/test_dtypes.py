"""Field reports: dtypes and reduce operations. What is supported is exact, what is not is refused clearly."""

from __future__ import annotations

import functools
import mmap
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import everything
import numpy as np
import pytest
import torch
import torch.distributed as dist
from refused import expect

from patterns import (
    COMPLEX,
    FLOAT8,
    INTEGERS,
    MOVABLE,
    REDUCIBLE,
    assert_same,
    ops_for,
    reduced,
    tensor,
    torch_op,
)
from ranks import Pool

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR


def noise(rank: int, salt: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers near 1, of which sums and products need rounding."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return (torch.randn(count, generator=generator) + 1).to(dtype)


def reduce_in_float32(op: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, rounded once."""
    function = {SUM: torch.add, AVG: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}[
        op
    ]
    total = functools.reduce(function, [t.float() for t in inputs])
    return (total / len(inputs) if op == AVG else total).to(inputs[0].dtype)


def check_halves(rank: int, n: int, dtype: torch.dtype) -> None:
    for count in [1, 7, 1024, 1048577]:

        def make(r: int, salt: int) -> torch.Tensor:
            return noise(r, salt, count, dtype)  # noqa: B023

        everything.move(rank, n, make)
        for op in [SUM, AVG, MIN, MAX, PRODUCT]:

            @functools.cache
            def expected(salt: int) -> torch.Tensor:
                return reduce_in_float32(op, [make(r, salt) for r in range(n)])  # noqa: B023

            if count < 10000:
                everything.reduce(rank, n, make, expected, op)
            else:
                got = make(rank, 0)
                dist.all_reduce(got, op)
                assert_same(got, expected(0), (dtype, op, count))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_fr_001_bfloat16_in_every_collective(pool: Pool, n: int, dtype: torch.dtype) -> None:
    pool.run(n, check_halves, dtype, timeout=100)


def check_bool(rank: int, n: int) -> None:
    def bits(r: int, salt: int) -> torch.Tensor:
        return torch.tensor([(r + 2 * salt + i * (r + 1)) % 3 == 0 for i in range(5)])

    def expected(salt: int, op: Any) -> torch.Tensor:
        stack = torch.stack([bits(r, salt) for r in range(n)])
        if op in (SUM, MAX, BOR):
            return stack.any(0)
        return stack.all(0) if op in (MIN, PRODUCT, BAND) else stack.sum(0) % 2 == 1

    everything.move(rank, n, bits)
    for op in [SUM, MAX, MIN, PRODUCT, BAND, BOR, BXOR]:
        everything.reduce(rank, n, bits, lambda salt: expected(salt, op), op)  # noqa: B023

        # Bytes that torch itself would not make, as in memory that another library filled.
        strange = (torch.arange(5, dtype=torch.uint8) * (rank + 2) * 16).view(torch.bool)
        dist.all_reduce(strange, op)
        assert set(strange.view(torch.uint8).tolist()) <= {0, 1}, (op, strange.view(torch.uint8))

    refuse_reductions(rank, n, torch.bool, [AVG, dist._make_nccl_premul_sum(0.5)])


def refuse_reductions(rank: int, n: int, dtype: torch.dtype, ops: list[Any]) -> None:
    """In every form, before anything is sent: the group goes on."""
    name = str(dtype).replace("torch.", "")
    for op in ops:
        data = tensor(rank, 4 * n, dtype)
        words = f"cannot reduce dtype {name}; it can reduce"
        for function, *args in [
            (dist.all_reduce, data),
            (dist.reduce_scatter_tensor, tensor(rank, 4, dtype), data),
            (dist.reduce_scatter, tensor(rank, 4, dtype), [tensor(rank, 4, dtype) for _ in range(n)]),
            (dist.all_reduce_coalesced, [data]),
        ]:
            text = expect(TypeError, words, function, *args, op=op)
            assert ("float32" in text) == (op != BOR), text
        for root in range(n):
            expect(TypeError, words, dist.reduce, data, root, op=op)
        assert_same(data, tensor(rank, 4 * n, dtype), "a refused tensor")
    after = torch.tensor([rank + 1.0])
    dist.all_reduce(after)
    assert after.item() == n * (n + 1) / 2


def test_fr_002_bool_is_moved_and_reduced_as_truth(pool: Pool) -> None:
    pool.run(2, check_bool)
    pool.run(3, check_bool)


def check_complex(rank: int, n: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))

    def make(r: int, salt: int) -> torch.Tensor:
        return tensor(r, count, dtype, salt=salt).reshape(shape)

    everything.move(rank, n, make)
    everything.reduce(rank, n, make, lambda s: reduced("sum", n, count, dtype, s).reshape(shape), SUM)
    everything.reduce(rank, n, make, lambda s: reduced("avg", n, count, dtype, s).reshape(shape), AVG)

    # torch refuses in all_reduce, we where torch does not.
    data = make(rank, 0)
    for op in [MIN, MAX, BAND, BOR, BXOR]:
        expect((ValueError, TypeError), "all_reduce.* complex", dist.all_reduce, data, op)
        expect(TypeError, "reduce: .*complex", dist.reduce, data, 0, op)
        expect(
            TypeError,
            "reduce_scatter(_v)?: .*complex",
            dist.reduce_scatter,
            data,
            [data.clone() for _ in range(n)],
            op,
        )
        expect(TypeError, "all_reduce: .*complex", dist.group.WORLD.allreduce, data, op)
    expect((ValueError, TypeError), "all_reduce.* complex", dist.all_reduce, data, PRODUCT)
    assert_same(data, make(rank, 0), "a refused tensor")

    product = tensor(rank, count, dtype, "product")
    dist.group.WORLD.allreduce(product, PRODUCT).wait()
    assert_same(product, reduced("product", n, count, dtype), "product of complex numbers")


@pytest.mark.parametrize("dtype, shape", [(torch.complex64, (3,)), (torch.complex128, (2, 2))], ids=str)
def test_fr_004_complex_numbers_in_both_parts(pool: Pool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool.run(2, check_complex, dtype, shape)
    pool.run(3, check_complex, dtype, shape)


def check_float8(rank: int, n: int, dtype: torch.dtype) -> None:
    def patterns(r: int, salt: int) -> torch.Tensor:
        """All 256 of them, in an order that depends on rank and salt."""
        codes = (torch.arange(256) * (2 * r + 1) + 17 * salt) % 256
        return codes.to(torch.uint8).view(dtype)

    everything.move(rank, n, patterns)
    refuse_reductions(rank, n, dtype, [SUM, AVG, MIN, MAX, PRODUCT, BOR])


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_fr_005_float8_is_moved_bit_by_bit_and_never_reduced(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(2, check_float8, dtype)


def check_avg(rank: int, n: int) -> None:
    part = dist.new_group([0, 2])
    for dtype in [torch.float32, torch.float64, torch.float16, torch.bfloat16]:
        for shape in [(5,), (1,), ()]:
            count = int(np.prod(shape))

            def make(r: int, salt: int = 0) -> torch.Tensor:
                return tensor(r, count, dtype, salt=salt).reshape(shape)  # noqa: B023

            def mean(ranks: list[int], salt: int = 0) -> torch.Tensor:
                return (sum(make(r, salt).double() for r in ranks) / len(ranks)).to(dtype)  # noqa: B023

            everyone = list(range(n))
            got = make(rank)
            dist.all_reduce(got, AVG)
            assert_same(got, mean(everyone), ("all_reduce", dtype, shape))
            for root in range(n):
                got = make(rank)
                dist.reduce(got, root, AVG)
                assert_same(got, mean(everyone) if rank == root else make(rank), ("reduce", dtype, shape))
            if shape:
                got = make(99)
                dist.reduce_scatter_tensor(got, torch.cat([make(rank, r) for r in range(n)]), AVG)
                assert_same(got, mean(everyone, rank), ("reduce_scatter_tensor", dtype, shape))
            if rank != 1:
                got = make(rank)
                dist.all_reduce(got, AVG, group=part)
                assert_same(got, mean([0, 2]), ("all_reduce of a subgroup", dtype, shape))
    for dtype in INTEGERS:
        refuse_reductions(rank, n, dtype, [AVG, dist._make_nccl_premul_sum(0.5)])


def test_fr_006_avg_divides_by_the_size_of_that_group(pool: Pool) -> None:
    pool.run(3, check_avg)


def unsupported() -> Iterator[tuple[str, torch.Tensor, str]]:
    """Name, tensor, and what the error has to say of it."""
    eye = torch.eye(4)
    yield "csr", eye.to_sparse_csr(), "sparse_csr tensors"
    yield "csc", eye.to_sparse_csc(), "sparse_csc tensors"
    yield "bsr", eye.to_sparse_bsr((2, 2)), "sparse_bsr tensors"
    yield "bsc", eye.to_sparse_bsc((2, 2)), "sparse_bsc tensors"
    if torch.backends.mkldnn.is_available():
        yield "mkldnn", torch.ones(4).to_mkldnn(), "mkldnn tensors"
    rows = [torch.ones(2), torch.ones(3)]
    yield "nested", torch.nested.nested_tensor(rows), r"nested tensors .*\.values\(\)"
    yield "jagged", torch.nested.nested_tensor(rows, layout=torch.jagged), r"nested tensors .*\.values\(\)"
    yield "meta", torch.ones(4, device="meta"), "device 'meta' .* supported: cpu"
    if torch.cuda.is_available():
        yield "cuda", torch.ones(4, device="cuda"), "device 'cuda:0' .* supported: cpu"
    for name in ("quint8", "qint8", "qint32"):
        quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, getattr(torch, name))
        yield name, quantised, f"dtype {name} is not supported; supported: float32"
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 0])
    channels = torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)
    yield "per channel", channels, "dtype qint8 is not supported"
    sub_byte = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    bits = ["bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"]
    for name in [*sub_byte, *bits, "float4_e2m1fn_x2", "quint4x2", "quint2x4"]:
        if hasattr(torch, name):
            packed = torch.empty(4, dtype=getattr(torch, name))
            yield name, packed, f"dtype {name} is not supported; supported: float32"
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4)
    yield "fake", fake, "FakeTensor of shape .* has no memory"
    yield "functional", torch._to_functional_tensor(torch.ones(4)), "has no memory"
    yield "zero", torch._efficientzerotensor(4), "has no memory"
    yield (
        "masked",
        torch.masked.masked_tensor(torch.ones(4), torch.ones(4) > 0),
        "MaskedTensor .* has no memory",
    )
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    yield "freed", freed, "has no memory .* freed"
    from torch.distributed.tensor import DTensor, Replicate

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    yield "DTensor", DTensor.from_local(torch.ones(4), mesh, [Replicate()]), "DTensor .* local tensor"


def check_unsupported(rank: int, n: int) -> None:
    warnings.simplefilter("ignore")
    group = dist.group.WORLD
    for name, it, words in unsupported():
        several = [it] * n
        calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
            ("all_reduce", dist.all_reduce, (it,)),
            ("all_reduce(_coalesced)?", group.allreduce_coalesced, ([it, torch.ones(4)],)),
            ("broadcast", dist.broadcast, (it, 0)),
            ("reduce", dist.reduce, (it, 0)),
            ("all_gather", group.allgather, ([[torch.ones(4) for _ in range(n)]], [it])),
            ("all_gather_into_tensor", group._allgather_base, (torch.ones(4 * n), it)),
            ("all_gather_into_tensor.*", group.allgather_into_tensor_coalesced, ([torch.ones(4 * n)], [it])),
            ("gather", group.gather, ([several] if rank == 0 else [], [it])),
            ("scatter", group.scatter, ([it], [several] if rank == 0 else [])),
            ("reduce_scatter", group.reduce_scatter, ([it], [several])),
            ("reduce_scatter_tensor", group._reduce_scatter_base, (it, torch.ones(4 * n))),
            ("reduce_scatter_tensor.*", group.reduce_scatter_tensor_coalesced, ([it], [torch.ones(4 * n)])),
            ("all_to_all", group.alltoall, (several, several)),
            ("all_to_all_single", group.alltoall_base, (it, it)),
            ("send", dist.send, (it, (rank + 1) % n)),
            ("recv", dist.recv, (it, (rank + 1) % n)),
            ("recv", dist.recv, (it,)),
        ]
        for op, function, args in calls:
            expect(TypeError, f"^mccl {op}: .*{words}", function, *args)
        after = torch.tensor([rank + 1.0])
        dist.all_reduce(after)
        assert after.item() == n * (n + 1) / 2, name

    expect(TypeError, "expected a tensor, got ndarray", group.allreduce, [np.ones(3)])
    sparse = torch.eye(3).to_sparse()
    for op, function, *args in [
        ("broadcast", dist.broadcast, sparse, 0),
        ("send", dist.send, sparse, 1 - rank),
    ]:
        expect(TypeError, f"mccl {op}: sparse_coo tensors", function, *args)
    expect(
        TypeError,
        "AVG of sparse tensors is not supported for dtype int64",
        dist.all_reduce,
        sparse.long(),
        AVG,
    )
    expect(TypeError, "SUM and AVG only", dist.all_reduce, sparse, MAX)
    expect(TypeError, "dtype float8_e5m2", dist.all_reduce, sparse.to(torch.float8_e5m2))
    expect(
        TypeError, "mccl all_reduce: .* has no memory", lambda: torch.vmap(reduced_inside)(torch.ones(3, 2))
    )
    dist.barrier()


def reduced_inside(column: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(column)
    return column


def test_fr_008_what_cannot_be_sent_is_refused_in_one_line(pool: Pool) -> None:
    pool.run(2, check_unsupported)


def check_sparse(rank: int, n: int) -> None:
    def entries(r: int, dtype: torch.dtype) -> torch.Tensor:
        """r + 1 entries, so rank 0 has one."""
        rows = torch.tensor([[(3 * i + r) % 7 for i in range(r + 1)]])
        return torch.sparse_coo_tensor(rows, noise(r, 0, r + 1, torch.float32).to(dtype), (7,))

    for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64]:
        dense = torch.stack([entries(r, dtype).to_dense() for r in range(n)])
        got = entries(rank, dtype)
        dist.all_reduce(got)
        wide = dense.float() if dtype in (torch.float16, torch.bfloat16) else dense
        assert_same(got.to_dense(), functools.reduce(torch.add, wide).to(dtype), dtype)


def test_sparse_sums_are_rounded_as_dense_ones(pool: Pool) -> None:
    pool.run(3, check_sparse)


def check_homes(rank: int, n: int) -> None:
    """Tensors whose memory, owner or autograd state is special."""
    expected = reduced("sum", n, 6, torch.float32)

    def give(home: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return home.copy_(tensor(rank, 6, torch.float32))

    homes = {
        "Parameter": torch.nn.Parameter(torch.empty(6)),
        "Buffer": torch.nn.Buffer(torch.empty(6)) if hasattr(torch.nn, "Buffer") else torch.empty(6),
        "leaf": torch.empty(6, requires_grad=True),
        "strided leaf": torch.empty(6, 2)[:, 0].requires_grad_(),
        "shared memory": torch.empty(6).share_memory_(),
        "pinned by numpy": torch.from_numpy(np.empty(7, np.float32)[1:]),
        "bytearray": torch.frombuffer(bytearray(25), dtype=torch.float32, offset=0, count=6),
        "unaligned": torch.frombuffer(bytearray(25), dtype=torch.uint8, offset=1).numpy().view(np.float32),
    }
    homes["unaligned"] = torch.from_numpy(homes["unaligned"])
    with torch.inference_mode():
        homes["inference"] = torch.empty(6)
        homes["strided inference"] = torch.empty(6, 2)[:, 1]
    with tempfile.NamedTemporaryFile() as file:
        homes["mapped file"] = torch.from_file(file.name, shared=True, size=6, dtype=torch.float32)
        for name, home in homes.items():
            with torch.inference_mode() if "inference" in name else torch.no_grad():
                home.copy_(tensor(rank, 6, torch.float32))
            dist.all_reduce(home)
            assert_same(home, expected, name)
        assert np.fromfile(file.name, np.float32).tolist() == expected.tolist(), "the file itself"

    # Memory that can only be read is fine to send.
    with tempfile.TemporaryFile() as file:
        file.write(tensor(rank, 6, torch.float32).numpy().tobytes())
        file.flush()
        warnings.simplefilter("ignore")
        mapped = mmap.mmap(file.fileno(), 24, access=mmap.ACCESS_READ)
        locked = torch.frombuffer(mapped, dtype=torch.float32)
        outputs = [torch.empty(6) for _ in range(n)]
        dist.all_gather(outputs, locked)
        for r, output in enumerate(outputs):
            assert_same(output, tensor(r, 6, torch.float32), "read-only input")
        dist.reduce(locked if rank else homes["leaf"].data.copy_(locked), 0)

    class Named(torch.Tensor):
        pass

    named = tensor(rank, 6, torch.float32).as_subclass(Named)
    dist.all_reduce(named)
    assert type(named) is Named and named.tolist() == expected.tolist()

    negated = tensor(rank, 6, torch.complex64).conj().imag
    assert negated.is_neg()
    dist.all_reduce(negated)
    assert_same(negated.resolve_neg(), -reduced("sum", n, 6, torch.complex64).imag, "negative view")


def test_fr_008_tensors_in_any_home_are_taken(pool: Pool) -> None:
    pool.run(2, check_homes)


def check_every_dtype(rank: int, n: int) -> None:
    for dtype in MOVABLE:
        everything.move(rank, n, lambda r, salt: tensor(r, 3, dtype, salt=salt))  # noqa: B023
    for dtype in REDUCIBLE:
        for op in ops_for(dtype):
            if op == "premul" or (dtype in COMPLEX and op == "product"):
                continue  # torch's functions refuse them in part; tests/python has them
            everything.reduce(
                rank,
                n,
                lambda r, salt: tensor(r, 3, dtype, op, salt),  # noqa: B023
                lambda salt: reduced(op, n, 3, dtype, salt),  # noqa: B023
                torch_op(op, rank),
            )


@pytest.mark.parametrize("n", [2, 3])
def test_fr_001_every_dtype_in_every_form_of_every_collective(pool: Pool, n: int) -> None:
    pool.run(n, check_every_dtype, timeout=100)
