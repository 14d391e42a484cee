"""Train a small network with Muon for its matrices and Adam for the rest, in one optimizer, and with Adam alone.

Projects clip with Muon in two ways: one joint norm of all gradients, or one of Adam's gradients only. Muon removes the
size of gradients. In a joint norm, its large matrices shrink the gradients of Adam's parameters for no reason.
"""

import argparse

import torch
from torch import Tensor, nn

from torchzero_clip import Adam, ClipNorm, Modular, Muon, Transform

LIMIT = 0.1


def hidden(p: Tensor) -> bool:
    """Whether a parameter is the matrix of a hidden layer."""
    return p.ndim == 2 and min(p.shape) > 8


def target(x: Tensor) -> Tensor:
    """What is to be learned."""
    return torch.sin(3 * x).prod(dim=1, keepdim=True)


def train(lr: float, transforms: list[Transform], steps: int) -> list[float]:
    """Return the loss at four points of the run."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers)
    optimizer = Modular(model, transforms)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    held_out = torch.rand(2000, 4) * 2 - 1
    losses: list[float] = []
    for step in range(1, steps + 1):
        x = torch.rand(256, 4) * 2 - 1
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target(x)).backward()
        optimizer.step()
        scheduler.step()
        if step % (steps // 4) == 0:
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(model(held_out), target(held_out)).item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clip = ClipNorm(LIMIT, dim="global")
    own_clip = ClipNorm(LIMIT, dim="global").without(hidden)
    both: list[Transform] = [Muon(adjust_lr_fn="match_rms_adamw").only(hidden), Adam().without(hidden)]
    chains: dict[str, tuple[float, list[Transform]]] = {
        "Adam": (0.005, [clip, Adam()]),
        "Muon and Adam": (0.01, both),
        "  all are clipped": (0.01, [clip, *both]),
        "  Adam's are clipped": (0.01, [own_clip, *both]),
    }
    print(f"{'loss on held-out points':26}" + "".join(f"{part:>9}" for part in ("1/4", "1/2", "3/4", "end")))
    for name, (lr, chain) in chains.items():
        print(f"  {name:24}" + "".join(f"{loss:9.5f}" for loss in train(lr, chain, args.steps)))


if __name__ == "__main__":
    main()
