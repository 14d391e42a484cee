"""What two processes check about steps in the backward; `test_in_backward` starts them."""

import pytest
import torch
import torch.distributed as dist
from contract.training import assert_equal_to_rounding
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchzero_clip import (
    SGD,
    AdamW,
    AdaptiveGradientClip,
    ClipNorm,
    ClipNormGrowth,
    ClipValueByEMA,
    Modular,
    step_in_backward,
)

CHAINS = {
    "clip": lambda: [ClipNorm(0.01), AdamW(0.01)],
    "rows": lambda: [ClipNorm(0.01, dim=0, inverse_dims=True), AdamW(0.01)],
    "columns": lambda: [ClipNorm(0.01, dim=0), SGD(0.1, 0.9)],
    "statistics": lambda: [ClipNormGrowth(), ClipValueByEMA(0.5), AdamW(0.01)],
    "units": lambda: [AdaptiveGradientClip(0.01), SGD(0.1, 0.9)],
}


def sharded() -> nn.Module:
    """Layers that are sharded one by one; shards are uneven, and the last bias is empty on the second rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def trained(chain: list, bucket: int | None, fast: bool) -> tuple[list, dict, list]:
    model = sharded()
    optimizer = Modular(model, chain, fast=fast)
    if bucket is not None:
        step_in_backward(optimizer, bucket_bytes=bucket)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    metrics = []
    for k in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * k + dist.get_rank())  # each rank has other samples
        model(torch.randn(3, 6, generator=generator)).square().mean().backward()
        if bucket is not None:
            assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        scheduler.step()
        metrics.append(optimizer.metrics())
    return [p.full_tensor() for p in model.parameters()], local_state(optimizer), metrics


def local_state(optimizer: Modular) -> dict:
    state = optimizer.state_dict()["state"]
    return {
        i: {k: v.to_local() if isinstance(v, DTensor) else v for k, v in of_param.items()}
        for i, of_param in state.items()
    }


def fsdp2_equals_the_ordinary_step() -> None:
    for make in CHAINS.values():
        for fast in (True, False):
            params, state, metrics = trained(make(), None, fast)
            for bucket in (0, 100, 10**9):
                own_params, own_state, own_metrics = trained(make(), bucket, fast)
                assert_equal_to_rounding(own_params, params)
                assert_equal_to_rounding(own_state, state)
                assert_equal_to_rounding(own_metrics, metrics)


def plain_parameters_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = Modular(model, SGD(0.1))
    with pytest.raises(ValueError, match=r"plain parameters .*pipeline without DDP"):
        step_in_backward(optimizer)
    model = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match="DDP"):
        step_in_backward(Modular(model, SGD(0.1)))


CHECKS = {
    "fsdp2 equals the ordinary step": fsdp2_equals_the_ordinary_step,
    "plain parameters are refused": plain_parameters_are_refused,
}
