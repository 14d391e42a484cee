"""Train a small network with captured steps: on a CUDA device they are replays of a graph, on a CPU ordinary steps.

One batch in twenty is corrupted. A gate skips it, a scheduler lowers the rate, and the run resumes in the middle.
"""

import argparse
import copy

import torch
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular, SkipStep, captured

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def started(model: nn.Module, steps: int) -> tuple[Modular, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer and the scheduler of a run."""
    optimizer = Modular(model, SkipStep(max_ratio=10.0), ClipNorm(1, dim="global"), AdamW(0.01), nonfinite="skip")
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of learning a sine."""
    return nn.functional.mse_loss(model(x), torch.sin(3 * x))


def train(steps: int, *, replayed: bool = True) -> tuple[float, int]:
    """Return the loss at the end, and how many steps were skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    optimizer, scheduler = started(model, steps)
    step = captured(optimizer) if replayed else optimizer.step
    for k in range(steps):
        if k == steps // 2:  # resume, as another process would
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            optimizer, scheduler = started(model, steps)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
            step = captured(optimizer) if replayed else optimizer.step
        x = (torch.rand(64, 1) * 2 - 1).to(DEVICE)
        optimizer.zero_grad(set_to_none=False)
        (loss_of(model, x) * (1000 if k % 20 == 19 else 1)).backward()
        step()
        scheduler.step()
    with torch.no_grad():
        loss = loss_of(model, torch.linspace(-1, 1, 200, device=DEVICE).unsqueeze(1))
    return loss.item(), int(optimizer.metrics()["skipped_steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    for replayed in (True, False):
        loss, skipped = train(args.steps, replayed=replayed)
        print(f"{'captured' if replayed else 'ordinary'} steps on {DEVICE}: loss {loss:.6f}, {skipped} skipped")


if __name__ == "__main__":
    main()
