"""The norm clippers: what they refuse, and what they return at the edges."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchzero_clip import ConstantFlatClipper, ConstantPerLayerClipper, NormClipper, PerSampleGradientClipper


def test_flat_factors_are_endless_and_the_same():
    norms = torch.tensor([0.0, 0.5, 4.0, math.inf])
    first, *others = itertools.islice(ConstantFlatClipper(1.0).calc_clipping_factors([norms]), 100)
    assert first.tolist() == pytest.approx([1.0, 1.0, 1 / (4 + 1e-6), 0.0])
    assert all(other is first for other in others)


@given(st.floats(0, 1e6), st.floats(0, 1e30))
def test_what_is_clipped_never_exceeds_the_limit(limit, norm):
    (factor,) = ConstantPerLayerClipper([limit]).calc_clipping_factors([torch.tensor([norm])])
    assert 0 <= factor.item() <= 1
    assert factor.item() * norm <= limit * (1 + 1e-6)


def test_flat_takes_exactly_one_vector():
    clipper, norms = ConstantFlatClipper(1.0), torch.ones(3)
    for wrong in ([], [norms, norms], [torch.ones(3, 1)]):
        with pytest.raises(ValueError, match=r"shape \(B,\)"):
            clipper.calc_clipping_factors(wrong)


def test_per_layer_needs_as_many_limits_as_norms():
    with pytest.raises(ValueError, match="for each of 3 norms, got 2"):
        ConstantPerLayerClipper([1.0, 2.0]).calc_clipping_factors([torch.ones(2)] * 3)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_limits_below_0_are_refused(value):
    with pytest.raises(ValueError, match="flat_value must be >= 0"):
        ConstantFlatClipper(value)
    with pytest.raises(ValueError, match=r"flat_values\[1\] must be >= 0"):
        ConstantPerLayerClipper([1.0, value])


def test_limits_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match="flat_value must be a number"):
        ConstantFlatClipper("1")
    with pytest.raises(ValueError, match="at least one"):
        ConstantPerLayerClipper([])


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        NormClipper()


def test_a_single_limit_goes_on_to_another_model_and_to_frozen_layers():
    limits = ConstantPerLayerClipper([1.0])
    for model in (nn.Linear(3, 2), nn.Linear(3, 2, bias=False)):
        with PerSampleGradientClipper(model, limits) as clipper:
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))
        assert limits.thresholds.tolist() == [1.0] * len(list(model.parameters()))
        assert limits.flat_values == [1.0]
