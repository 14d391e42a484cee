"""Time and memory of `step_in_backward`, against the ordinary step in the same run.

    python -m benchmarks.in_backward --threads 1 --rounds 11

*tensors* has 400 small parameters and a backward that only hands out their gradients, which shows what the hooks cost.
*gpt* is a training step of a small transformer. The times are medians of the ratios of rounds, in which both take
turns. The memory is what is allocated at once, at most, beyond what there is before the training step.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.memory import peak_of
from benchmarks.sets import resnet_like
from benchmarks.timing import Timed, interleaved, ratios
from torchzero_clip import AdamW, ClipNorm, Modular, step_in_backward

Ways = dict[str, int | None]
WAYS: Ways = {"ordinary": None, "in the backward": 2**23, "each at once": 0}
"""The bytes of a bucket; None for ordinary steps."""


def optimizer_of(params: list[nn.Parameter], bucket: int | None) -> Modular:
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    if bucket is not None:
        step_in_backward(optimizer, bucket_bytes=bucket)
    return optimizer


def tensors(bucket: int | None) -> Callable[[], None]:
    """A step of 400 small parameters."""
    params = [nn.Parameter(torch.randn(shape) * 0.02) for shape in resnet_like()]
    grads = [torch.randn_like(param) for param in params]
    optimizer = optimizer_of(params, bucket)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(params, grads)
        optimizer.step()

    return step


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def gpt(bucket: int | None) -> Callable[[], None]:
    """A training step of 29M parameters on 16 tokens, so that activations take little memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 512), *(Block(512) for _ in range(8)), nn.Linear(512, 4096))
    tokens = torch.randint(0, 4096, (1, 16))
    optimizer = optimizer_of(list(model.parameters()), bucket)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for make, ways in ((tensors, list(WAYS)[:2]), (gpt, list(WAYS))):
        steps = {way: make(WAYS[way]) for way in ways}
        seconds = interleaved({way: Timed(step) for way, step in steps.items()}, args.rounds, warm_up=3)
        for way, step in steps.items():
            time = statistics.median(ratios(seconds[way], seconds["ordinary"]))
            print(f"{make.__name__:8} {way:16} time {time:.2f}   peak {peak_of(step, 'cpu') / 2**20:7.1f} MiB")


if __name__ == "__main__":
    main()
