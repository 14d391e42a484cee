"""Medians are those of Python's statistics module."""

import math
import statistics

import torch

from torchzero_clip.recorder.numbers import medians_before


def test_medians_of_the_rows_before_are_those_of_the_statistics_module():
    generator = torch.Generator().manual_seed(0)
    norms = torch.randint(0, 6, (40, 7), generator=generator).double()
    odd = torch.rand(40, 7, generator=generator)
    norms[odd < 0.1], norms[(odd > 0.1) & (odd < 0.2)], norms[(odd > 0.2) & (odd < 0.3)] = -1.0, math.nan, math.inf
    norms[:, 6] = math.nan
    rows = [17, 0, 1, 2, 40, 3]
    for row, found in zip(rows, medians_before(norms, rows).tolist(), strict=True):
        for column, median in enumerate(found):
            known = [x for x in norms[:row, column].tolist() if math.isfinite(x) and x >= 0]
            assert median == statistics.median(known) if known else math.isnan(median)


def test_medians_of_no_rows_are_unknown():
    assert medians_before(torch.zeros(0, 2).double(), [0, 0]).isnan().tolist() == [[True, True]] * 2
    assert medians_before(torch.ones(3, 0).double(), [2]).shape == (1, 0)
