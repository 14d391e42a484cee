"""Checkpoints of released versions load, and the run goes on as it did then.

`python tests/checkpoints/test_released.py` writes the file of this version. The file of a release never changes. As
long as this version is not released, write its file anew if the format changes.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchzero_clip
from torchzero_clip import (
    LR,
    AdaGC,
    Adam,
    AutoClip,
    ClipByMaxEMA,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueGrowth,
    GradientStabilizer,
    Modular,
    SkipStep,
    SpikeAwareClip,
    WeightDecay,
    ZClip,
)

FOLDER = Path(__file__).parent / "released"
FILES = sorted(FOLDER.glob("*.pt"))
SHAPES = {"matrix": (3, 2), "vector": (3,)}


def decay(step):
    return 0.1 / (1 + step)


def make(weights):
    """An optimizer of each kind of state."""
    params = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    transforms = [
        SkipStep(sigma=6.0, window=8),
        SkipStep(max_ratio=100.0, name="skip_by_ratio"),
        ClipNormGrowth(parameterwise=False),
        AutoClip(window=8),
        ZClip(warmup_steps=3),
        AdaGC(warmup_steps=3),
        ClipNormByEMA(0.9),
        ClipValueGrowth(),
        SpikeAwareClip(warmup_steps=2),
        ClipByMaxEMA(),
        GradientStabilizer(),
        Adam(amsgrad=True),
        WeightDecay(decay),
        LR(0.01),
    ]
    return params, Modular(list(params.items()), transforms)


def train(params, optimizer, gradients):
    for step in gradients:
        for name, gradient in step.items():
            params[name].grad = gradient.clone()
        optimizer.step()


def write():
    """Write the file of this version."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        for _ in range(13)
    ]
    params, optimizer = make(drawn[0])
    train(params, optimizer, drawn[1:9])
    saved = {"weights": {name: param.detach().clone() for name, param in params.items()}, "gradients": drawn[9:]}
    saved["state"] = optimizer.state_dict()
    FOLDER.mkdir(exist_ok=True)
    torch.save(saved, FOLDER / f"{torchzero_clip.__version__}.pt")
    train(params, optimizer, drawn[9:])
    saved["after"] = {name: param.detach() for name, param in params.items()}
    reread = torch.load(FOLDER / f"{torchzero_clip.__version__}.pt", weights_only=True)
    torch.save({**reread, "after": saved["after"]}, FOLDER / f"{torchzero_clip.__version__}.pt")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_checkpoint_of_a_released_version_loads(path):
    saved = torch.load(path, weights_only=True)
    params, optimizer = make(saved["weights"])
    optimizer.load_state_dict(saved["state"])
    train(params, optimizer, saved["gradients"])
    for name, after in saved["after"].items():
        assert not torch.equal(after, saved["weights"][name])
        torch.testing.assert_close(params[name].detach(), after, rtol=1e-9, atol=1e-12)


def test_this_version_has_a_file():
    assert (FOLDER / f"{torchzero_clip.__version__}.pt").exists(), "run this file as a program"


if __name__ == "__main__":
    write()
