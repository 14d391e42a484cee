"""Fit a function to data of which some targets are wildly wrong, with the gradient of every example clipped.

A limit on the gradient of the whole batch cannot tell good examples from bad ones: the bad ones are in every batch and
give it its direction. A limit on the gradient of each example bounds what a bad one can do.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from torchzero_clip import Adam, ClipNorm, Modular, per_example_global_norm_clip, per_example_layer_norm_clip

LIMIT = 1.0


def made(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points and their targets; five in a hundred targets are far off, all to the same side."""
    x = torch.rand(count, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2
    wrong = torch.rand(count, 1, generator=generator) < 0.05
    return x, torch.where(wrong, y + 50, y)


def train(method: str, steps: int) -> tuple[float, float]:
    """Return the loss on clean data at the end, and the share of examples that were clipped (in the mean layer)."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Modular(model, [ClipNorm(LIMIT, dim="global")] if method == "batch" else [], Adam(lr=0.01))

    def loss_of_one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, params, x) - y).square().mean()

    gradients_of_examples = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
    clipped = 0.0
    for _ in range(steps):
        x, y = made(128, generator)
        optimizer.zero_grad()
        if method in ("none", "batch"):
            nn.functional.mse_loss(model(x), y).backward()
        else:
            params = {name: param.detach() for name, param in model.named_parameters()}
            clip = per_example_global_norm_clip if method == "example" else per_example_layer_norm_clip
            sums, counts = clip(gradients_of_examples(params, x, y), LIMIT)
            for name, param in model.named_parameters():
                param.grad = sums[name] / len(x)
            shares = counts.values() if method == "layer" else [counts]
            clipped += sum(count.item() for count in shares) / len(shares) / len(x) / steps
        optimizer.step()

    x = torch.rand(1000, 2, generator=generator) * 2 - 1
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2).item(), clipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    print(f"{'clipped':28} {'loss on clean data':>19} {'examples clipped':>17}")
    for method, name in (
        ("none", "nothing"),
        ("batch", "the batch, ClipNorm"),
        ("example", "each example"),
        ("layer", "each example, by layer"),
    ):
        loss, share = train(method, args.steps)
        print(f"  {name:26} {loss:19.3f} {share:17.0%}")


if __name__ == "__main__":
    main()
