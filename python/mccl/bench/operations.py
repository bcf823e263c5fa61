"""The operations: what a size means, and what an optimal algorithm moves. bench/data.c has the same table."""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """One collective. Its bytes are those of nccl-tests: of the whole where all ranks hold it, of all ranks'
    blocks together where they do not. The root is rank 0."""

    name: str
    is_split: bool = False  # each rank's share is a block of 1/n
    reduces: bool = False
    has_root: bool = False

    def bus_factor(self, n: int) -> float:
        """Bus bandwidth over algorithm bandwidth: what each rank's link has to carry (nccl-tests)."""
        if self.name == "all_reduce":
            return 2 * (n - 1) / n
        return (n - 1) / n if self.is_split else 1.0

    def actual_bytes(self, wanted: int, n: int, element: int) -> int:
        """The nearest size below that cuts into equal blocks of whole elements; at least one each."""
        if self.name == "barrier":
            return 0
        unit = element * n if self.is_split else element
        return max(wanted // unit, 1) * unit


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", reduces=True),
        Operation("reduce", reduces=True, has_root=True),
        Operation("broadcast", has_root=True),
        Operation("all_gather", is_split=True),
        Operation("reduce_scatter", is_split=True, reduces=True),
        Operation("gather", is_split=True, has_root=True),
        Operation("scatter", is_split=True, has_root=True),
        Operation("all_to_all", is_split=True),
        Operation("send_recv"),
        Operation("barrier"),
    )
}

ELEMENT_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
