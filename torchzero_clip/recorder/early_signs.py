"""Updates that are unusually large relative to the weights. They may grow before the loss and the gradients do."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.recorder.series import SPREAD, TWICE

FEWEST = 8  # with five earlier ratios, one of 28 steps of noise was an early sign; with eight, one of 150
LATEST = 20
JUST_BEFORE = 3


class EarlySign(NamedTuple):
    """The norm of an update divided by that of the weights, if it is large, and the median of those before."""

    step: int
    layer: str
    ratio: float
    usual: float


def early_signs(steps: Sequence[int], layers: Sequence[str], ratios: Tensor) -> list[EarlySign]:
    """Find the ratios of update to weight norms (a row for each step, NaN if unknown) that stand out."""
    found: list[EarlySign] = []
    logs = torch.where(ratios > 0, ratios, torch.nan).log()
    for row in range(FEWEST, len(logs)):
        before = logs[max(0, row - LATEST) : row]
        known = before.isfinite().sum(dim=0) >= FEWEST
        median = before.nanmedian(dim=0).values
        spread = (before - median).abs().nanmedian(dim=0).values
        spread = torch.fmax(spread, spread[known].median())  # of hundreds of layers, some have a small one by chance
        border = median + (SPREAD * spread).clamp(min=TWICE)
        highest = before[-JUST_BEFORE:].nan_to_num(nan=-torch.inf).amax(dim=0)
        # more than twice each of the last ones, so that a learning rate that rises smoothly gives no sign
        above = known & (logs[row] > torch.maximum(border, highest + TWICE))
        signs: list[int] = above.nonzero().flatten().tolist()
        new = [EarlySign(steps[row], layers[k], float(ratios[row, k]), float(median[k].exp())) for k in signs]
        found += sorted(new, key=lambda sign: -sign.ratio / sign.usual)
    return found
