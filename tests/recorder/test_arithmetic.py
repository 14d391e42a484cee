"""Medians are those of Python's statistics module."""

import math
import statistics

import torch

from torchzero_clip.recorder.arithmetic import medians


def test_medians_are_those_of_the_statistics_module():
    generator = torch.Generator().manual_seed(0)
    norms = torch.randint(0, 6, (40, 7), generator=generator).double()
    odd = torch.rand(40, 7, generator=generator)
    norms[odd < 0.1], norms[(odd > 0.1) & (odd < 0.2)], norms[(odd > 0.2) & (odd < 0.3)] = -1.0, math.nan, math.inf
    norms[:, 6] = math.nan
    for row in (17, 0, 1, 2, 40, 3):
        for column, median in enumerate(medians(norms[:row]).tolist()):
            known = [x for x in norms[:row, column].tolist() if math.isfinite(x) and x >= 0]
            assert median == statistics.median(known) if known else math.isnan(median)


def test_medians_of_no_rows_are_unknown():
    assert medians(torch.zeros(0, 2).double()).isnan().tolist() == [True, True]
    assert medians(torch.ones(3, 0).double()).shape == (0,)
