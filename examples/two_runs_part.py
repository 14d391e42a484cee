"""Where two runs part: the norm that a trainer logs in two processes is larger than that of one process.

The layers of a transformer are split over two processes, but the biases of some are on both. The trainer adds up the
squares of all processes, so that it counts these biases twice. Both runs record, and `compare` says which layers they
are. Nothing runs in parallel here: the second run computes the norm as such a trainer would.
"""

import argparse

import torch
from torch import Tensor, nn

from torchzero_clip import Record, Recorder

WORDS, WIDTH, BATCH, LENGTH = 50, 32, 16, 12


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), encoder, nn.Linear(WIDTH, WORDS))


def logged_norm(net: nn.Module, *, copies: int) -> Tensor:
    """The norm of all gradients, in which the biases count so many times."""
    squares = [
        param.grad.square().sum() * (copies if name.endswith("bias") else 1)
        for name, param in net.named_parameters()
        if param.grad is not None
    ]
    return torch.stack(squares).sum().sqrt()


def run(steps: int, *, copies: int) -> Record:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    recorder = Recorder(optimizer, model=net)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
        loss = nn.functional.cross_entropy(net(words).flatten(0, 1), words.roll(1, dims=1).flatten())
        optimizer.zero_grad()
        loss.backward()
        recorder.report_norm(logged_norm(net, copies=copies))
        optimizer.step()
    return recorder.record()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    print(run(steps, copies=1).compare(run(steps, copies=2)))


if __name__ == "__main__":
    main()
