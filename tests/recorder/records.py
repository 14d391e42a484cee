"""Records made of numbers."""

import math

import torch

from torchzero_clip import Record


def made(norms, layers=("weight",), **options):
    """A record with these joint norms, and equal norms of all layers unless others are given."""
    norm = torch.tensor(norms, dtype=torch.float64)
    count = len(norm)
    options = {
        "reasons": [""] * count,
        "loss": torch.full((count,), math.nan, dtype=torch.float64),
        "metrics": {},
        "layer_steps": list(range(count)),
        "layer_norms": norm[:, None].expand(count, len(layers)).clone(),
    } | options
    joint = [name.removesuffix("/limit") for name in options.get("metrics", {}) if name.endswith("/limit")]
    return Record(steps=list(range(count)), norm=norm, layers=list(layers), **({"joint": joint} | options))


def column(values):
    return torch.tensor(values, dtype=torch.float64)
