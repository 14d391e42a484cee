"""Watch a run while it lives: a recorder sends numbers to a function, which prints them and draws a picture.

The optimizer is torch's own AdamW. Every 150 steps, a batch is 100 times too large, as if it was not normalized. The
picture is drawn again with each point, so an image viewer that reloads it shows the run. In place of the function,
``log=`` takes a run of Weights & Biases or a TensorBoard writer.
"""

import argparse
import math

import torch
from matplotlib.figure import Figure
from torch import nn

from torchzero_clip import Recorder

BATCH = 64


class Watch:
    """Prints each point, and draws all points so far."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._points: dict[int, dict[str, float]] = {}

    def __call__(self, step: int, values: dict[str, float]) -> None:
        """Take a point."""
        self._points[step] = values
        layers = {name.split("/")[1]: x for name, x in values.items() if name.endswith("/norm") and "layers/" in name}
        shown = ", ".join(f"{name} {norm:.3g}" for name, norm in layers.items()) or "none stood out yet"
        largest = values["gradients/largest_norm"]
        print(f"step {step:4}: norm {values['gradients/norm']:.3f}, largest {largest:8.3f}, layers: {shown}")
        self._draw()

    def _draw(self) -> None:
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(name for values in self._points.values() for name in values):
            if name == "gradients/largest_norm" or (name.startswith("layers/") and name.endswith("/norm")):
                numbers = [values.get(name, math.nan) for values in self._points.values()]
                axes.plot(list(self._points), numbers, label=name, lw=2 if name.startswith("gradients") else 1)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.legend(fontsize="small")
        figure.savefig(self._path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = Recorder(optimizer, model=model, log=Watch("watch_a_run.png"), flush_every=50, log_every=25)
    for step in range(steps):
        inputs = torch.randn(BATCH, 16) * (100 if step % 150 == 149 else 1)
        target = inputs[:, :4].sum(dim=1, keepdim=True) + torch.randn(BATCH, 1)
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        recorder.report_loss(loss)
        optimizer.step()
    recorder.close()
    print(f"spikes: {recorder.spikes()}")
    print("The picture is watch_a_run.png.")


if __name__ == "__main__":
    main()
