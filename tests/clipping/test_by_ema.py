"""The promises of ClipNormByEMA, NormalizeByEMA and ClipValueByEMA."""

import math

import pytest
import torch
from clipping.statistics import ORDERS, WITH_BAD, assert_follows, outputs, runs
from contract.entries import EMA, Mul
from contract.training import assert_equal, train
from hypothesis import given
from hypothesis import strategies as st
from oracles.statistics import NormByEMA, ValueByEMA
from torch import nn
from versions import needs_grad_dtype

from torchzero_clip import (
    LR,
    SGD,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    RMSprop,
)

BETAS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


@given(
    runs(), st.booleans(), BETAS, ORDERS, st.sampled_from([1e-6, 0.5]), st.booleans(),
    st.sampled_from([None, 1.1, 1.5, 3.0]), st.sampled_from(["zeros", "update"]),
)  # fmt: skip
def test_norm_equals_a_loop(steps, normalize, beta, order, eps, tensorwise, growth, init):
    cls = NormalizeByEMA if normalize else ClipNormByEMA
    reference = NormByEMA(beta, order, eps, not tensorwise, growth, init, normalize)
    assert_follows(cls(beta, order, eps, tensorwise, growth, init), reference, steps)


@given(runs(WITH_BAD), BETAS, st.booleans(), st.sampled_from(["zeros", "update"]))
def test_norm_equals_a_loop_beside_non_finite_gradients(steps, beta, tensorwise, init):
    reference = NormByEMA(beta, 2, 1e-6, not tensorwise, 1.5, init, False)
    assert_follows(ClipNormByEMA(beta, tensorwise=tensorwise, ema_init=init), reference, steps)


@given(runs(WITH_BAD), BETAS, st.sampled_from(["zeros", "update"]), st.booleans())
def test_value_equals_a_loop(steps, beta, init, fast):
    assert_follows(ClipValueByEMA(beta, init), ValueByEMA(beta, init), steps, fast=fast)


def test_the_documented_numbers():
    results, _ = outputs(ClipNormByEMA(0.5), [[[3.0, 4.0]]] * 4)
    torch.testing.assert_close(results, [[[1.5, 2.0]], [[2.25, 3.0]], [[2.625, 3.5]], [[2.8125, 3.75]]])
    results, _ = outputs(NormalizeByEMA(), [[[3.0, 4.0]]] * 4)
    expected = [[[0.03, 0.04]], [[0.045, 0.06]], [[0.0675, 0.09]], [[0.0968, 0.1291]]]
    torch.testing.assert_close(results, expected, rtol=1e-3, atol=0)


def test_a_joint_average_grows_out_of_a_tiny_first_gradient():
    results, _ = outputs(ClipNormByEMA(0.5, tensorwise=False), [[[1e-9, 0.0]], *[[[3.0, 4.0]]] * 60])
    assert math.hypot(*results[-1][0]) > 4.9


def test_normalize_is_the_clip_with_another_class_attribute():
    assert issubclass(NormalizeByEMA, ClipNormByEMA)
    assert (ClipNormByEMA.NORMALIZE, NormalizeByEMA.NORMALIZE) == (False, True)


@given(runs(), st.booleans())
def test_no_norm_is_ever_above_that_of_the_average(steps, tensorwise):
    """But for rounding, which is a relative 1e-12 in float64."""
    results, _ = outputs(ClipNormByEMA(0.5, tensorwise=tensorwise, max_ema_growth=None), steps)
    emas = [torch.zeros(len(row), dtype=torch.float64) for row in steps[0]]
    for rows, result in zip(steps, results, strict=True):
        updates = [torch.tensor(row, dtype=torch.float64) for row in rows]
        emas = [ema + 0.5 * (u - ema) for ema, u in zip(emas, updates, strict=True)]
        units = (
            zip(result, emas, strict=True) if tensorwise else [([x for row in result for x in row], torch.cat(emas))]
        )
        for out, ema in units:
            limit = max(ema.norm().item(), 1e-6)
            assert torch.tensor(out, dtype=torch.float64).norm().item() <= limit * (1 + 1e-12)


@given(runs(), st.integers(-10, 10))
def test_scaling_all_gradients_scales_all_updates(steps, exponent):
    scale = 2.0**exponent
    plain, _ = outputs(ClipNormByEMA(0.5, eps=0, max_ema_growth=None), steps)
    scaled, _ = outputs(
        ClipNormByEMA(0.5, eps=0, max_ema_growth=None), [[[x * scale for x in row] for row in rows] for rows in steps]
    )
    for a, b in zip(scaled, plain, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, [v * scale for v in y], rtol=1e-12, atol=0)


SPIKES = {
    torch.float64: (1e150, 1.4e154, 1e160, 1.7e308),
    torch.float32: (1e18, 1.9e19, 3e33, 3e38),
    torch.bfloat16: (1e18, 1.9e19, 3e33, 3e38),
    torch.float16: (256.0, 65504.0),
}


@pytest.mark.parametrize(("dtype", "spike"), [(dtype, spike) for dtype in SPIKES for spike in SPIKES[dtype]], ids=str)
@pytest.mark.parametrize("init", ["zeros", "update"])
@pytest.mark.parametrize("tensorwise", [True, False])
@pytest.mark.parametrize("transform", [ClipNormByEMA, NormalizeByEMA])
def test_a_spike_of_any_finite_size_is_one_large_gradient(transform, tensorwise, init, dtype, spike):
    """The average of 1 grows to 1.5 in the step of the spike, for tensors of any number of dimensions."""
    shapes = [(), (1,), (4,), (2, 2)]
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    optimizer = Modular(params, transform(0.5, "linf", tensorwise=tensorwise, ema_init=init))
    for size in (*[1.0] * 20, spike, 1.0):
        for param in params:
            param.data.zero_()
            param.grad = torch.full_like(param, size)
        optimizer.step()
        if size == spike:
            for param in params:
                torch.testing.assert_close(-param.data, torch.full_like(param, 1.5), rtol=1e-2, atol=0)
    for param in params:  # 1.25 is the next average, to which NormalizeByEMA scales up
        expected = 1.25 if transform is NormalizeByEMA else 1.0
        torch.testing.assert_close(-param.data, torch.full_like(param, expected), rtol=1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", [ClipNormByEMA, NormalizeByEMA, ClipValueByEMA])
def test_averages_of_half_precision_do_not_stall(transform, dtype):
    results, optimizer = outputs(transform(0.99), [[[1.0]]] * 600, dtype)
    (state,) = optimizer.state.values()
    ema = next(value for key, value in state.items() if key.endswith("/ema"))
    assert ema.dtype == torch.float32
    assert ema.item() == pytest.approx(1 - 0.99**600, rel=1e-4)
    assert results[-1][0][0] == pytest.approx(1, rel=1e-2)


def test_groups_may_differ_in_settings_unless_there_is_one_statistic():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": first}, {"params": second, "max_ema_growth": 2.0}]
    Modular(groups, ClipNormByEMA())
    with pytest.raises(ValueError, match=r"max_ema_growth must be the same in every param group .* got 1.5 and 2.0"):
        Modular(groups, ClipNormByEMA(tensorwise=False))
    optimizer = Modular([{"params": first}, {"params": second, "beta": 0.5}], ClipNormByEMA(tensorwise=False))
    optimizer.param_groups[1]["eps"] = 1.0
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    with pytest.raises(ValueError, match="eps must be the same in every param group"):
        optimizer.step()
    assert (first.item(), second.item()) == (0, 0)


def test_a_group_with_one_more_statistic_is_not_added():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = Modular(params[:1], ClipNormByEMA(tensorwise=False))
    with pytest.raises(ValueError, match="eps must be the same"):
        optimizer.add_param_group({"params": params[1:], "eps": 1.0})
    assert len(optimizer.param_groups) == 1


def test_ema_tfm_makes_limits_of_a_copy():
    transform = ClipValueByEMA(0.5, "update", ema_tfm=[Mul(-2.0), EMA(0.5)])
    results, optimizer = outputs(transform, [[[1.0, -4.0]], [[9.0, 0.5]]])
    # averages 1, 4 and 5, 2.25; doubled; averaged from 0: bounds 1, 4 and 5.5, 4.25
    assert results == [[[1.0, -4.0]], [[5.5, 0.5]]]
    (state,) = optimizer.state.values()
    assert set(state) == {
        "clip_value_by_ema/ema", "clip_value_by_ema/started", "clip_value_by_ema/ema_tfm/ema/average",
    }  # fmt: skip
    assert state["clip_value_by_ema/ema"].tolist() == [5.0, 2.25]
    assert optimizer.param_groups[0]["clip_value_by_ema/ema_tfm/mul/other"] == -2.0
    assert repr(transform) == "ClipValueByEMA(beta=0.5, ema_init='update', ema_tfm=[Mul(-2.0), EMA()])"


def test_ema_tfm_has_settings_that_are_checked_and_differ_by_group():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    tfm = ClipNorm(1.0).set_param_groups([{"params": second, "max_norm": 0.5}])
    optimizer = Modular([first, second], ClipValueByEMA(0.0, ema_tfm=tfm))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(first.data, torch.tensor([-0.6, -0.8]))
    torch.testing.assert_close(second.data, torch.tensor([-0.3, -0.4]))
    key = "clip_value_by_ema/ema_tfm/clip_norm/max_norm"
    assert [group[key] for group in optimizer.param_groups] == [1.0, 0.5]
    optimizer.param_groups[1][key] = -1.0
    with pytest.raises(ValueError, match="max_norm must be >= 0"):
        optimizer.step()


@pytest.mark.parametrize("target", ["grad", "params_direct"])
def test_ema_tfm_cannot_act_on_something_else(target):
    for tfm in (Mul(2.0, target=target), Chain(Mul(2.0, target=target), target="update_difference")):
        with pytest.raises(ValueError, match="ema_tfm acts on the average"):
            ClipValueByEMA(ema_tfm=tfm)


@pytest.mark.parametrize("tfm", [LR(2.0), SGD(0.5), Chain(LR(2.0), target="update_difference")])
def test_ema_tfm_has_no_learning_rate(tfm):
    with pytest.raises(ValueError, match="ema_tfm has no learning rate, which is the chain's"):
        ClipValueByEMA(ema_tfm=tfm)


def test_an_optimizer_in_ema_tfm_says_nothing_about_the_learning_rate_of_the_chain():
    params = [nn.Parameter(torch.zeros(1))]
    assert Modular(params, ClipValueByEMA(ema_tfm=SGD(momentum=0.9))).param_groups[0]["lr"] == 1
    assert Modular(params, ClipValueByEMA(ema_tfm=SGD()), RMSprop()).param_groups[0]["lr"] == 1e-2


def test_settings_of_ema_tfm_take_no_bare_key():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    chain = Chain(ClipValueByEMA(ema_tfm=ClipNorm(1.0)), ClipNorm(2.0))
    optimizer = Modular(params, chain.set_param_groups([{"params": params[1], "max_norm": 7.0}]))
    assert [group["max_norm"] for group in optimizer.param_groups] == [2.0, 7.0]


@pytest.mark.parametrize("transform", [ClipValueByEMA, ClipValueGrowth, ClipNormByEMA, ClipNormGrowth])
def test_an_inf_that_an_earlier_transform_made_is_no_statistic(transform):
    param, plain = nn.Parameter(torch.zeros(2).half()), nn.Parameter(torch.zeros(2).half())
    optimizer = Modular([param], Normalize(1.0, "linf"), transform())
    reference = Modular([plain], Normalize(1.0, "linf"), transform())
    for value in (1.0, 1e6, 1.0, 1.0):
        optimizer.param_groups[0]["norm_value"] = value
        for p, o in ((param, optimizer), (plain, reference)):
            p.data.zero_()
            p.grad = torch.tensor([3.0, 4.0]).half()
            if value == 1.0 or o is optimizer:
                o.step()
    assert torch.equal(param, plain)
    assert all(v.isfinite().all() for v in optimizer.state[param].values())


@needs_grad_dtype
def test_gradients_of_another_dtype_than_the_parameter():
    param = nn.Parameter(torch.zeros(2))
    param.grad_dtype = None
    for transform in (ClipNormByEMA(), ClipValueByEMA(), ClipNormGrowth(), ClipValueGrowth()):
        optimizer = Modular([param], transform)
        for dtype in (torch.float32, torch.float64):
            param.grad = torch.tensor([3.0, 4.0], dtype=dtype)
            optimizer.step()
        assert all(v.dtype in (torch.float32, torch.float64) for v in optimizer.state[param].values())


def test_metrics():
    _, optimizer = outputs(ClipNormByEMA(0.5), [[[3.0, 4.0], [0.0]]])
    metrics = {key: value.item() for key, value in optimizer.metrics().items()}
    assert metrics == {"clip_norm_by_ema/norm": 5, "clip_norm_by_ema/factor": 0.75, "clip_norm_by_ema/clipped": 0.5}
    _, optimizer = outputs(ClipValueByEMA(0.5), [[[3.0, 4.0], [0.0]]])
    assert optimizer.metrics()["clip_value_by_ema/clipped"].item() == pytest.approx(2 / 3)


def test_nothing_but_empty_tensors_is_no_error():
    for transform in (ClipNormByEMA(), ClipNormByEMA(tensorwise=False), ClipValueByEMA()):
        (empty,), optimizer = outputs(transform, [[[]]])
        assert empty == [[]]
        assert all(value.isfinite() for value in optimizer.metrics().values())


def test_the_first_update_of_mixed_dtypes_passes_unchanged():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    optimizer = Modular(params, NormalizeByEMA(ema_init="update"), SGD(1.0))
    grads = [torch.tensor([1.0, 0.3, 0.7]), torch.tensor([0.1, 0.7], dtype=torch.bfloat16)]
    train(optimizer, params, [grads])
    assert_equal([p.grad for p in params], grads)
    assert float(optimizer.metrics()["normalize_by_ema/clipped"]) == 0


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("tensorwise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_factor_of_1_but_for_rounding_does_not_count_as_clipped(dtype, tensorwise, fast):
    """The average equals the first update. In bfloat16 it is float32, and its norms round in another way."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1000,), (30, 40), (70_000,), (3, 3), ()]
    for transform in (ClipNormByEMA, NormalizeByEMA):
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        optimizer = Modular(params, transform(ema_init="update", tensorwise=tensorwise), SGD(), fast=fast)
        train(optimizer, params, [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes]])
        (shown,) = (value for key, value in optimizer.metrics().items() if key.endswith("clipped"))
        assert shown.item() == 0
