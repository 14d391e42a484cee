"""Records made of numbers."""

import json
import math

import torch

from torchzero_clip import Record
from torchzero_clip.recorder.precision import FLOAT32_ROUNDING
from torchzero_clip.recorder.series import jumps


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
    found = (
        jumps(options["layer_norms"], FLOAT32_ROUNDING, torch.zeros(len(layers), dtype=torch.bool)).nonzero().tolist()
    )
    jumped = [(options["layer_steps"][row], layers[k]) for row, k in found]
    joint = [name.removesuffix("/limit") for name in options.get("metrics", {}) if name.endswith("/limit")]
    return Record(
        steps=list(range(count)), norm=norm, layers=list(layers), **({"joint": joint, "jumps": jumped} | options)
    )


def column(values):
    return torch.tensor(values, dtype=torch.float64)


EXTREME = {
    "one step": made([2.0]),
    "all NaN": made([math.nan] * 30),
    "no gradient": made([math.nan] * 30, layer_norms=torch.full((30, 1), -1.0, dtype=torch.float64)),
    "all 0": made([0.0] * 30),
    "no layers": made([1.0, 2.0, 3.0] * 10 + [90.0], layers=()),
    "largest": made([1e300, 1.7e308, 1e-300] * 10),
}


def run_line(name, start=0, parent=None, layers=("a", "b")):
    """The line of a file before the steps of a run."""
    own = {"id": name, "parent": parent, "start": start, "layers": list(layers)}
    return json.dumps({"kind": "run", "version": 1, "by": "parameter", "joint": []} | own)


def step_line(step, **changes):
    """The line of a step in a file."""
    row = {"kind": "step", "step": step, "norm": 1.0, "loss": None, "reason": "", "metrics": {}}
    return json.dumps(row | changes)
