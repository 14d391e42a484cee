"""Time to make an optimizer of many param groups, and to load the state of many tensors, against torch's AdamW.

python -m benchmarks.making
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.timing import Timed, interleaved
from torchzero_clip import AdamW, ClipNorm, Modular


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(8)) for _ in range(count)]


def making(count: int) -> dict[str, Timed]:
    """Make an optimizer in which each parameter has a group of its own."""
    params = parameters(count)

    def groups() -> list[dict[str, object]]:
        return [{"params": [param], "lr": 1e-3} for param in params]

    return {
        "torch": Timed(lambda: torch.optim.AdamW(groups())),
        "ours": Timed(lambda: Modular(groups(), ClipNorm(1, dim="global"), AdamW())),
    }


def loading(count: int) -> dict[str, Timed]:
    """Load the state after one step."""
    params = parameters(count)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizers = {
        "torch": torch.optim.AdamW(params, fused=True),
        "ours": Modular(params, ClipNorm(1, dim="global"), AdamW()),
    }
    runs: dict[str, Timed] = {}
    for name, optimizer in optimizers.items():
        optimizer.step()
        runs[name] = Timed(partial(optimizer.load_state_dict, optimizer.state_dict()))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    work: list[tuple[str, list[int], Callable[[int], dict[str, Timed]]]] = [
        ("groups", args.groups, making),
        ("tensors", args.tensors, loading),
    ]
    for what, counts, make in work:
        for count in counts:
            best = {name: min(taken) for name, taken in interleaved(make(count), args.rounds, warm_up=1).items()}
            print(f"{count} {what}: torch {best['torch']:.3f} s, ours {best['ours']:.3f} s")


if __name__ == "__main__":
    main()
