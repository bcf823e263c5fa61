"""Test classes out of torch's wheel on backend "mccl": FSDPTest, which compares FSDP with DDP.

(DistributedTest._DistTestBase is run by dist_suite.py. The wheel's other classes for FSDP, DTensor, sharded
tensors, state dicts and checkpoints carry no tests; DdpUnderDistAutogradTest is about RPC and is not run.)
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy
from torch.testing._internal import common_fsdp

from ranks import Pool


def check_parity(rank: int, n: int, model: str, strategy: str, original: bool) -> None:
    assert dist.get_backend() == "mccl" and common_fsdp.DEVICE_TYPE == "cpu"
    test = common_fsdp.FSDPTest("run", "run")  # any method's name will do
    test.rank = rank
    test._test_fsdp_parity(
        getattr(common_fsdp, model),
        common_fsdp.FSDPInitMode.RECURSIVE,
        common_fsdp.DEVICEInitMode.DEVICE_BEFORE,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize(
    "model", ["TransformerWithSharedParams", "NestedWrappedModule", "AlwaysWrapNestedWrappedModule"]
)
def test_fsdp_trains_like_ddp(pool: Pool, model: str, strategy: str) -> None:
    pool.run(2, check_parity, model, strategy, False)


def test_fsdp_trains_like_ddp_where_some_parameters_are_frozen(pool: Pool) -> None:
    pool.run(3, check_parity, "NonUniformReqGradNWM", "FULL_SHARD", True)
