"""The promises of ClipNormGrowth and ClipValueGrowth."""

import itertools
import math

import pytest
import torch
from clipping.statistics import ORDERS, WITH_BAD, assert_follows, outputs, runs
from hypothesis import given
from hypothesis import strategies as st
from oracles.statistics import NormGrowth, ValueGrowth
from torch import nn

from torchzero_clip import ClipNormGrowth, ClipValueGrowth, Modular, TensorwiseTransform

SETTINGS = st.tuples(
    st.sampled_from([None, 0.0, 0.5, 10.0]),
    st.sampled_from([None, 0.5, 1.5, 3.0]),
    st.sampled_from([None, 1e-4, 2.0]),
    st.sampled_from([None, 1.0, 2.0, 10.0]),
)


@given(runs(), SETTINGS, ORDERS, st.booleans())
def test_norm_equals_a_loop(steps, settings, order, parameterwise):
    reference = NormGrowth(*settings, order, not parameterwise)
    assert_follows(ClipNormGrowth(*settings, order, parameterwise), reference, steps)


@given(runs(WITH_BAD), SETTINGS, st.booleans())
def test_norm_equals_a_loop_beside_non_finite_gradients(steps, settings, parameterwise):
    reference = NormGrowth(*settings, 2, not parameterwise)
    assert_follows(ClipNormGrowth(*settings, parameterwise=parameterwise), reference, steps)


@given(runs(WITH_BAD), SETTINGS, st.booleans())
def test_value_equals_a_loop(steps, settings, fast):
    assert_follows(ClipValueGrowth(*settings), ValueGrowth(*settings), steps, fast=fast)


def test_the_documented_numbers():
    steps = [[[5.0]], [[50.0]], [[50.0]], [[0.05]], [[5.0]]]
    results, _ = outputs(ClipNormGrowth(), steps)
    torch.testing.assert_close(results, [[[5.0]], [[7.5]], [[11.25]], [[0.05]], [[5.0]]])
    results, _ = outputs(ClipNormGrowth(max_decay=None), steps)
    assert results[-1][0][0] == pytest.approx(0.075)


def test_a_norm_of_1e_15_is_a_statistic():
    results, _ = outputs(ClipNormGrowth(min_value=None), [[[1e-15]], [[1.0]]])
    assert results == [[[1e-15]], [[pytest.approx(1.5e-15)]]]


def test_a_change_of_sign_is_no_growth():
    assert issubclass(ClipValueGrowth, TensorwiseTransform)
    results, _ = outputs(ClipValueGrowth(), [[[1.0]], [[-1.0]], [[-3.0]]])
    assert results == [[[1.0]], [[-1.0]], [[-1.5]]]


@given(runs(), st.floats(1.0, 4.0))
def test_the_norm_never_grows_faster_than_allowed(steps, mul):
    """But for rounding, which is a relative 1e-12 in float64."""
    results, _ = outputs(ClipNormGrowth(mul=mul, max_decay=None), steps)
    for i in range(len(steps[0])):
        norms = [math.sqrt(sum(x * x for x in result[i])) for result in results]
        while norms and norms[0] == 0:
            norms.pop(0)  # the statistic starts at the first gradient that is not 0
        for prev, norm in itertools.pairwise(norms):
            assert norm <= max(prev, 1e-4) * mul * (1 + 1e-12)


@given(runs())
def test_a_steady_or_falling_gradient_passes_bitwise(steps):
    for transform in (ClipNormGrowth(), ClipValueGrowth()):
        falling = [[[x / 2**k for x in row] for row in steps[0]] for k in range(4)]
        results, _ = outputs(transform, [steps[0], *falling])
        assert results == [steps[0], *falling]


@pytest.mark.parametrize("transform", [ClipNormGrowth, ClipValueGrowth])
def test_neither_limit_is_an_identity_without_state(transform):
    results, optimizer = outputs(transform(add=None, mul=None), [[[1.0, -2.0]], [[1e6, math.inf]], [[0.0, 3.0]]])
    assert results == [[[1.0, -2.0]], [[1e6, math.inf]], [[0.0, 3.0]]]
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("transform", [ClipNormGrowth, ClipValueGrowth, lambda: ClipNormGrowth(parameterwise=False)])
def test_a_limit_that_is_taken_off_and_put_back_starts_anew(transform):
    param = nn.Parameter(torch.zeros(1))
    optimizer = Modular([param], transform())
    results = []
    for gradient, mul in ((1.0, 1.5), (100.0, None), (50.0, 1.5), (100.0, 1.5)):
        param.data.zero_()
        param.grad = torch.tensor([gradient])
        optimizer.param_groups[0]["mul"] = mul
        optimizer.step()
        results.append(-param.item())
        resumed = Modular([param], transform())
        resumed.load_state_dict(optimizer.state_dict())  # with and without state
    assert results == [1.0, 100.0, 50.0, 75.0]


@pytest.mark.slow
def test_squares_beyond_float64_do_not_lift_the_limit():
    results, _ = outputs(ClipNormGrowth(ord="var"), [[[1e200, -1e200]]] + [[[1.0, -1.0]]] * 3000 + [[[5.0, -5.0]]])
    assert abs(results[-1][0][0]) < 2


def test_updates_whose_squares_underflow_pass_unchanged():
    results, _ = outputs(ClipNormGrowth(ord="var"), [[[1e-170, -1e-170]]] * 3)
    assert results[-1][0] == [1e-170, -1e-170]


def test_groups_have_limits_of_their_own_and_some_none():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": params[0]}, {"params": params[1], "mul": None}, {"params": params[2], "mul": 3.0}]
    for transform in (ClipNormGrowth, ClipValueGrowth):
        optimizer = Modular(groups, transform())
        for gradient in (1.0, 10.0):
            for param in params:
                param.data.zero_()
                param.grad = torch.tensor([gradient])
            optimizer.step()
        assert [-param.item() for param in params] == [1.5, 10.0, 3.0]
        assert {param for param, state in optimizer.state.items() if state} == {params[0], params[2]}


def test_one_norm_for_all_needs_one_value_of_every_setting():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[0]}, {"params": params[1], "max_decay": 3.0}]
    with pytest.raises(ValueError, match="max_decay must be the same in every param group"):
        Modular(groups, ClipNormGrowth(parameterwise=False))


def test_metrics():
    _, optimizer = outputs(ClipNormGrowth(), [[[3.0, 4.0], [1.0]], [[6.0, 8.0], [1.0]]])
    metrics = {key: value.item() for key, value in optimizer.metrics().items()}
    assert metrics["clip_norm_growth/norm"] == pytest.approx(math.sqrt(101))
    assert metrics["clip_norm_growth/factor"] == pytest.approx((0.75 + 1) / 2)
    assert metrics["clip_norm_growth/clipped"] == 0.5
    _, optimizer = outputs(ClipValueGrowth(), [[[3.0, 4.0], [1.0]], [[6.0, 4.0], [1.0]]])
    assert optimizer.metrics()["clip_value_growth/clipped"].item() == pytest.approx(1 / 3)
