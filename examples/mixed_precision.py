"""Train in float16 with a GradScaler, four micro-batches to a step, and an average of the parameters beside it.

Clipping is part of the optimizer's step, so it comes after unscaling and after the last micro-batch by itself. The same
run in float32 with whole batches shows what that changes: next to nothing.
"""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchzero_clip import AdamW, ClipNorm, Modular


class Result(NamedTuple):
    """Losses on held-out data, and what clipping and the scaler did."""

    loss: float
    averaged_loss: float
    clipped: float
    skipped: int


def data(count: int) -> tuple[Tensor, Tensor]:
    """Points, and what is to be learned of them, with noise."""
    x = torch.rand(count, 2) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:] + 0.3 * torch.randn(count, 1)


def train(steps: int, dtype: torch.dtype, micro_batches: int) -> Result:
    """Train, and say how it went."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    held_out = torch.rand(2000, 2) * 2 - 1
    truth = torch.sin(3 * held_out[:, :1]) * held_out[:, 1:]
    optimizer = Modular(model, ClipNorm(0.5, dim="global"), AdamW(lr=0.01, weight_decay=0.01))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**20, growth_interval=200)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    clipped, skipped = 0.0, 0
    for _ in range(steps):
        x, y = data(64)
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = nn.functional.mse_loss(model(part_x), part_y) / micro_batches  # the mean over the whole batch
            scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)  # unscales the gradients; then the chain clips them and steps
        scaler.update()
        if scaler.get_scale() < scale:  # the scaler met an inf and left the step out: nothing to count or to average
            skipped += 1
            continue
        clipped += optimizer.metrics()["clip_norm/clipped"].item()
        average.update_parameters(model)
    with torch.no_grad():
        losses = [nn.functional.mse_loss(m(held_out), truth).item() for m in (model, average)]
    return Result(losses[0], losses[1], clipped / (steps - skipped), skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print(f"{'':34} {'loss':>8} {'averaged':>9} {'clipped':>8} {'skipped':>8}")
    for name, dtype, parts in [
        ("float32, whole batches", torch.float32, 1),
        ("float16, four micro-batches", torch.float16, 4),
        ("bfloat16, four micro-batches", torch.bfloat16, 4),
    ]:
        result = train(args.steps, dtype, parts)
        print(f"  {name:32} {result.loss:8.4f} {result.averaged_loss:9.4f} {result.clipped:8.0%} {result.skipped:8}")


if __name__ == "__main__":
    main()
