"""Move a run from torch.optim.AdamW into a chain and back, and look whether it still takes the same steps.

The chain clips, but at a limit that is not reached for a while: until then every parameter is the same to the last bit.
The old run takes torch's default, its loop, and the chain does the same because of ``fused=False``.
"""

import argparse
import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay, from_torch_optim, to_torch_optim


class Result(NamedTuple):
    """Whether the parameters agreed at three points, and how many steps the chain clipped."""

    after_moving: bool
    after_moving_back: bool
    after_clipping: bool
    clipped: int


def take_steps(model: nn.Module, optimizer: Any, steps: int, seed: int, scale: float = 1.0) -> int:
    """Train for some steps; return how many of them were clipped."""
    generator = torch.Generator().manual_seed(seed)
    clipped = 0
    for _ in range(steps):
        x = torch.rand(64, 4, generator=generator)
        optimizer.zero_grad()
        (scale * nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())).backward()
        optimizer.step()
        if isinstance(optimizer, Modular):
            clipped += int(optimizer.metrics()["clip_norm/clipped"].item() > 0)
    return clipped


def same(first: nn.Module, second: nn.Module) -> bool:
    """Whether all parameters are the same to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def move(steps: int) -> Result:
    """Train two copies of a model, one of which changes its optimizer twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    take_steps(model, adamw, steps, seed=1)

    moved = copy.deepcopy(model)
    # the checkpoint has the numbers
    chain = [ClipNorm(10.0, dim="global"), Adam(fused=False), WeightDecay(0.0), LR(0.0)]
    optimizer = Modular(moved, *chain)
    optimizer.load_state_dict(from_torch_optim(adamw.state_dict(), optimizer))
    take_steps(model, adamw, steps, seed=2)
    clipped = take_steps(moved, optimizer, steps, seed=2)
    after_moving = same(model, moved)

    back = torch.optim.AdamW(moved.parameters())
    back.load_state_dict(to_torch_optim(optimizer, back))
    take_steps(model, adamw, steps, seed=3)
    take_steps(moved, back, steps, seed=3)
    after_moving_back = same(model, moved)

    optimizer.load_state_dict(from_torch_optim(back.state_dict(), optimizer))
    take_steps(model, adamw, steps, seed=4, scale=1000.0)
    clipped += take_steps(moved, optimizer, steps, seed=4, scale=1000.0)
    return Result(after_moving, after_moving_back, same(model, moved), clipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    result = move(parser.parse_args().steps)
    print("parameters are those of the run that stayed with torch.optim.AdamW, to the last bit:")
    print(f"  after steps in the chain       {result.after_moving}")
    print(f"  after steps back in AdamW      {result.after_moving_back}")
    print(f"  once {result.clipped:4} steps were clipped  {result.after_clipping}")


if __name__ == "__main__":
    main()
