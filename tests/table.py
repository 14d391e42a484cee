"""The shapes of parameters and the links of chains that tests of several folders share.

`contract/entries.py` has the transforms with the settings of every contract.
"""

from collections.abc import Callable
from typing import Any

from torchzero_clip import (
    SGD,
    AdaGC,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    GradientStabilizer,
    Normalize,
    NormalizeByEMA,
    SkipStep,
    SpikeAwareClip,
    ZClip,
)

SHAPES = [(4, 3), (3,), (2, 3, 2), ()]
EVERY_RANK = [(), (3,), (1,), (0,), (4, 3), (0, 2), (2, 3, 2), (2, 3, 2, 2), (2, 1, 2, 1, 3)]
"""With tensors that have no element, or one."""
MATRICES = [(4, 3), (3, 5), (8, 8), (1, 6)]
"""High, wide, square, and a row."""
PIECES = [(3, 5), (7,), (), (2, 3, 4, 5), (1,), (70001,), (300, 301)]
"""Among them tensors that the fast way cuts into pieces, and one of an odd size."""

LINKS: dict[str, Callable[[], Any]] = {
    "ClipNorm": lambda: ClipNorm(1.0),
    "ClipNorm global": lambda: ClipNorm(1.0, dim="global"),
    "ClipNorm global, of 2": lambda: ClipNorm(2.0, dim="global"),
    "ClipNorm l1 global": lambda: ClipNorm(1.0, 1, dim="global"),
    "ClipNorm linf": lambda: ClipNorm(1.0, "linf"),
    "ClipNorm of slices": lambda: ClipNorm(1.0, dim=0),
    "ClipNorm mad": lambda: ClipNorm(1.0, "mad"),
    "ClipNorm std": lambda: ClipNorm(1.0, "std"),
    "ClipNorm std global": lambda: ClipNorm(1.0, "std", dim="global"),
    "ClipNorm var global": lambda: ClipNorm(1.0, "var", dim="global"),
    "ClipRMS": lambda: ClipRMS(),
    "Normalize": lambda: Normalize(),
    "Centralize": lambda: Centralize(),
    "Centralize global": lambda: Centralize("global"),
    "ClipValue": lambda: ClipValue(1e-3),
    "ClipNormGrowth": lambda: ClipNormGrowth(),
    "ClipNormByEMA": lambda: ClipNormByEMA(),
    "ClipNormByEMA joint": lambda: ClipNormByEMA(tensorwise=False),
    "NormalizeByEMA": lambda: NormalizeByEMA(),
    "ClipValueByEMA": lambda: ClipValueByEMA(),
    "ClipValueGrowth": lambda: ClipValueGrowth(),
    "ClipValueGrowth by add": lambda: ClipValueGrowth(add=0.1),
    "ClipByMaxEMA": lambda: ClipByMaxEMA(),
    "SpikeAwareClip": lambda: SpikeAwareClip(warmup_steps=2),
    "AdaptiveGradientClip": lambda: AdaptiveGradientClip(),
    "AdaGC": lambda: AdaGC(warmup_steps=2),
    "GradientStabilizer": lambda: GradientStabilizer(),
    "ZClip": lambda: ZClip(),
    "SkipStep": lambda: SkipStep(1e9),
    "Adam": lambda: Adam(),
    "AdamW": lambda: AdamW(),
    "SGD": lambda: SGD(0.1, momentum=0.9),
}


def chain(names: str) -> list[Any]:
    """New transforms, from their names with ``" + "`` between them."""
    return [LINKS[name]() for name in names.split(" + ")]
