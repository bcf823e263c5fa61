# SPDX-License-Identifier: MIT
"""What torch asks for and this package leaves out on purpose, with the reason why it is not missed.

A row that no version needs any more is a failure, so the tables stay short.
"""

from __future__ import annotations

from uses import BACKEND, GROUP, OPTIONS, WORK

# Folders of torch whose groups are never of this package.
OTHER_CODE = {
    "torch/distributed/_local_tensor/": "simulates ranks in one process, with groups of its own",
    "torch/distributed/_nccl4py/": "is a backend itself",
    "torch/distributed/_symmetric_memory/": "needs memory that GPUs share",
    "torch/distributed/_transport/": "moves tensors without groups; its Works are its own",
    "torch/distributed/debug/": "serves web pages",
    "torch/distributed/elastic/": "launches processes, before there are groups",
    "torch/distributed/flight_recorder/": "reads dumps",
    "torch/distributed/rpc/": "calls functions elsewhere, without groups",
}

_STOCK = "called on the group that torch makes first, and drops for ours"
_NCCL = "after a check that the backend is NCCL's"
_NO_SPLIT = "only where supports_splitting is true; ours says False"
_NO_SHRINK = "only where supports_shrinking is true; ours says False"
_NO_ESTIMATE = "only where _supports_time_estimate is true; ours says False"
_NCCL_OPTIONS = "on ProcessGroupNCCL.Options, in the creator of NCCL's groups"

# By kind and name; an assignment has a = after the name.
LEFT_OUT: dict[tuple[str, str], str] = {
    (GROUP, "WORLD"): "of the class `group`, which holds the default group",
    (GROUP, "_register_backend"): _STOCK,
    (GROUP, "_set_default_backend"): _STOCK,
    (GROUP, "get_group_store"): "after split_group, which ours does not reach",
    (GROUP, "get_reconfigure_handle"): "only where supports_reconfigure is true; ours says False",
    (GROUP, "new_group"): "optional hook: without it torch calls the backend's creator",
    (GROUP, "new_window"): "only where supports_window is true; ours says False",
    (GROUP, "reconfigure"): "only where supports_reconfigure is true; ours says False",
    (GROUP, "split_group"): _NO_SPLIT,
    (BACKEND, "_add_ephemeral_timeout"): _NCCL,
    (BACKEND, "_end_time_estimate"): _NO_ESTIMATE,
    (BACKEND, "_set_sequence_number_for_group"): "after split_group, which ours does not reach",
    (BACKEND, "_shutdown"): _NCCL,
    (BACKEND, "_start_time_estimate"): _NO_ESTIMATE,
    (BACKEND, "_group_end"): _NCCL,
    (BACKEND, "_group_start"): _NCCL,
    (BACKEND, "abort"): _NCCL,
    (BACKEND, "comm_split_count"): _NO_SPLIT,
    (BACKEND, "eager_connect_single_device"): _NO_SPLIT,
    (BACKEND, "get_comm"): "after a check that the backend is torchcomms'",
    (BACKEND, "perform_nocolor_split"): _NO_SPLIT,
    (BACKEND, "shrink"): _NO_SHRINK,
    (BACKEND, "uid"): _NCCL,
    (BACKEND, "wrapped_pg"): "after a check that it is torch's wrapper for debugging",
    (OPTIONS, "_timeout="): "on options of torch's own classes, in the creators of their groups",
    (OPTIONS, "config"): _NCCL_OPTIONS,
    (OPTIONS, "enable_reconfigure="): _NCCL_OPTIONS,
    (OPTIONS, "init_method"): "of the options of RPC",
    (OPTIONS, "is_high_priority_stream="): _NCCL_OPTIONS,
    (OPTIONS, "lazy_init"): "optional hook, for splitting",
    (OPTIONS, "split_color="): _NCCL_OPTIONS,
    (OPTIONS, "split_from="): _NCCL_OPTIONS,
    (WORK, "boxed"): "of Works that torch makes for tracing",
    (WORK, "seq_id="): "of Works that torch makes for tracing",
}

# What the base class answers by itself, from what its constructor was given.
OF_BASE_CLASS = {(GROUP, "rank"), (GROUP, "size")}

# What C++ looks for in a Python group, and goes on without.
NOT_OVERRIDDEN = {
    "get_reconfigure_handle": "only where supports_reconfigure is true",
    "mergeRemoteGroup": "no call of torch.distributed leads here",
    "reconfigure": "only where supports_reconfigure is true",
    "splitGroup": "only where supports_splitting is true",
}

# Operators of _c10d_functional and _dtensor: the method that C++ calls on the group, under its oldest name.
OPERATORS = {
    "all_gather_into_tensor": "allgather_into_tensor_coalesced",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "all_gather_into_tensor_out": "_allgather_base",
    "all_reduce": "allreduce",
    "all_reduce_": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_reduce_coalesced_": "allreduce_coalesced",
    "all_to_all_single": "alltoall_base",
    "batch_p2p_ops": "_start_coalescing",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "irecv": "recv",
    "isend": "send",
    "reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor_coalesced",
    "shard_dim_alltoall": "alltoall",
}
RENAMED = {
    "_allgather_base": "all_gather_single",
    "_start_coalescing": "start_coalescing",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
UNREACHED_OPERATORS = {
    "shard_dim_alltoall": "DTensor gathers instead on cpu; on mps it needs torch 2.14, which calls alltoall",
}

# Names that no file of torch defines: they are made when the program runs.
MADE_LATER = {
    "torch.__spec__": "every module has one",
    "torch.ops._c10d_functional": "unreached_operators() looks into the schemas",
}

# Names that this package uses behind a look whether they are there.
GUARDED: set[str] = {"torch.distributed.ProcessGroup.unbox"}

# Operators of symmetric memory, which is memory that GPUs share.
SYMMETRIC = (
    "_rendezvous", "all_to_all_vdev", "memcpy_to_multicast_", "multi_root_tile_reduce", "multimem_", "nccl_",
    "nvshmem_", "one_shot_", "reduce_scatter_out", "rendezvous", "tile_reduce", "two_shot_",
)  # fmt: skip
