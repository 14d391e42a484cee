"""Train with NAdam of torch, which this package does not have, while one batch in forty is corrupted.

Two lines put ZClip and SkipStep before each step of the optimizer. The loop, the optimizer, its scheduler and its
checkpoint stay as they are. The state of the transforms is in the checkpoint, so a run that was stopped ends with the
same bits as one that was not.
"""

import argparse
import tempfile
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from torchzero_clip import SkipStep, ZClip, before_step

CONTEXT, BATCH, EVERY = 8, 64, 40


class Run(NamedTuple):
    """What a checkpoint saves."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler


class Result(NamedTuple):
    """The loss on held-out text, and how many steps were skipped."""

    loss: float
    skipped: int


def text() -> Tensor:
    """The reference manual of Python, as numbers of its bytes."""
    whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(whole.encode()))


def made(steps: int, limited: bool) -> Run:
    """A network that predicts the next byte, its optimizer, and a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 256), nn.ReLU(), nn.Linear(256, 256)
    )
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
    if limited:
        before_step(optimizer, SkipStep(max_ratio=10.0), ZClip(max_norm=None))
    return Run(model, optimizer, CosineAnnealingLR(optimizer, steps))


def loss_of(model: nn.Module, data: Tensor, step: int) -> Tensor:
    """The loss of one batch. One in ``EVERY`` has shuffled targets, and their losses are added, not averaged."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) // 10 * 9 - CONTEXT, (BATCH, 1), generator=generator)
    x, y = data[starts + torch.arange(CONTEXT)], data[starts.squeeze(1) + CONTEXT]
    if step % EVERY != EVERY - 1:
        return F.cross_entropy(model(x), y)
    return F.cross_entropy(model(x), y[torch.randperm(BATCH, generator=generator)], reduction="sum")


def train(run: Run, data: Tensor, first: int, end: int) -> None:
    """Take the steps from ``first`` to before ``end``: an ordinary loop."""
    for step in range(first, end):
        run.optimizer.zero_grad()
        loss_of(run.model, data, step).backward()
        run.optimizer.step()
        run.scheduler.step()


def result(run: Run, data: Tensor, steps: int) -> Result:
    """Measure the loss on the last tenth of the text."""
    held_out = data[len(data) // 10 * 9 :].unfold(0, CONTEXT + 1, 7)
    with torch.no_grad():
        loss = F.cross_entropy(run.model(held_out[:, :-1]), held_out[:, -1]).item()
    taken = {int(state["step"].item()) for state in run.optimizer.state.values()}
    return Result(loss, steps - max(taken))


def run(steps: int) -> tuple[dict[str, Result], bool]:
    """The results without and with the transforms, and whether an interrupted run ends with the same bits."""
    data = text()
    results: dict[str, Result] = {}
    for name, limited in (("NAdam", False), ("the same, after before_step(...)", True)):
        whole = made(steps, limited)
        train(whole, data, 0, steps)
        results[name] = result(whole, data, steps)
    half = made(steps, True)
    train(half, data, 0, steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint.pt")
        torch.save([part.state_dict() for part in half], file)
        saved = torch.load(file, weights_only=True)
    resumed = made(steps, True)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train(resumed, data, steps // 2, steps)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    return results, all(torch.equal(a, b) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 100)
    torch.set_num_threads(1)
    results, same = run(steps)
    print(f"{'':34} {'held-out loss':>13} {'steps skipped':>14}")
    for name, found in results.items():
        print(f"  {name:32} {found.loss:13.3f} {found.skipped:14}")
    bits = "the same bits" if same else "DIFFERENT"
    print(f"\nStopped at step {steps // 2} and resumed: the parameters are {bits}.")


if __name__ == "__main__":
    main()
