"""Give each layer a limit of its own, found in a short run without limits.

One limit on the joint norm shrinks all layers if one of them has a spike. Here the norms of 100 steps give each tensor
a limit: 1.5 times its 90th percentile. Then the inputs of one batch in twenty are 30 times too large.
"""

import argparse

import torch
from torch import Tensor, nn

from torchzero_clip import SGD, ClipNorm, Modular, Transform


def target(x: Tensor) -> Tensor:
    """What is to be learned."""
    return torch.sin(3 * x[:, :1]) * x[:, 1:]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def limits(steps: int) -> tuple[dict[str, float], float]:
    """A limit for each tensor, and one for the joint norm, from a run on clean data."""
    model = network()
    optimizer = Modular(model, SGD(0.1, momentum=0.9))
    rows: list[Tensor] = []
    for _ in range(steps):
        x = torch.rand(64, 2) * 2 - 1
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target(x)).backward()
        rows.append(torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]))
        optimizer.step()
    norms = torch.stack(rows)
    names = [name for name, _ in model.named_parameters()]
    own = dict(zip(names, (1.5 * norms.quantile(0.9, dim=0)).tolist(), strict=True))
    return own, 1.5 * norms.norm(dim=1).quantile(0.9).item()


def train(model: nn.Module, transforms: list[Transform], steps: int) -> float:
    """Return the loss on clean data at the end of a run with corrupted batches."""
    optimizer = Modular(model, transforms, SGD(0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.rand(64, 2, generator=generator) * 2 - 1
        y = target(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x * 30 if step % 20 == 19 else x), y).backward()
        optimizer.step()
        schedule.step()
    x = torch.rand(1000, 2, generator=generator) * 2 - 1
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), target(x)).item()


def run(steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """The limits of the tensors, and the losses."""
    own, joint = limits(100)
    losses = {"no limit": train(network(), [], steps)}
    losses[f'ClipNorm({joint:.3f}, dim="global")'] = train(network(), [ClipNorm(joint, dim="global")], steps)
    model = network()
    groups = [{"params": [param], "max_norm": own[name]} for name, param in model.named_parameters()]
    losses["a limit for each tensor"] = train(model, [ClipNorm(1.0).set_param_groups(groups)], steps)
    return own, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    own, losses = run(steps)
    for name, limit in own.items():
        print(f"limit of {name:10} {limit:.4f}")
    for name, loss in losses.items():
        print(f"{name:32} loss on clean data {loss:.4f}")


if __name__ == "__main__":
    main()
