"""The promises of ClipNorm, over shapes, dtypes and magnitudes."""

import math

import pytest
import torch
from clipping.updates import ORDERS, SLICINGS, slack, transformed, updates
from contract.training import stepped
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.clipping import as_double, clip_norm, norm_of_all
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Normalize

pytestmark = pytest.mark.filterwarnings("ignore:a max_norm of 0")


@given(updates(), st.floats(0.1, 10), ORDERS)
def test_clipped_norm_never_exceeds_max_norm(tensors, max_norm, order):
    for result in transformed(tensors, ClipNorm(max_norm, order)):
        if result.numel() > (order == "std"):
            bound = max_norm * (1 + slack(tensors)) + 1e-6 * result.numel() * (tensors[0].dtype == torch.float16)
            assert norm_of_all([result.double()], order) <= bound


@given(updates(), st.floats(0.1, 10), ORDERS)
def test_joint_norm_never_exceeds_max_norm(tensors, max_norm, order):
    results = as_double(transformed(tensors, ClipNorm(max_norm, order, dim="global")))
    count = sum(result.numel() for result in results)
    if count > (order == "std"):
        bound = max_norm * (1 + slack(tensors)) + 1e-6 * count * (tensors[0].dtype == torch.float16)
        assert norm_of_all(results, order) <= bound


@given(updates(), ORDERS, st.sampled_from([None, 0, "global"]))
def test_updates_within_the_limit_pass_bitwise(tensors, order, dim):
    whole = [tensor.reshape(-1) for tensor in tensors]
    limit = sum(norm_of_all([t], 1) for t in as_double(whole)) * 1.001
    for result, tensor in zip(transformed(tensors, ClipNorm(limit, order, dim)), tensors, strict=True):
        assert torch.equal(result, tensor)


@given(updates(), st.floats(0.1, 10))
def test_direction_is_kept(tensors, max_norm):
    for result, tensor in zip(transformed(tensors, ClipNorm(max_norm)), tensors, strict=True):
        assert ((result == 0) | (result.sign() == tensor.sign())).all()
        a, b = result.double().flatten(), tensor.double().flatten()
        if b.any() and a.any():
            cosine = (a / a.norm()) @ (b / b.norm())
            assert cosine.item() == pytest.approx(1, abs=1e-4)


@given(updates(), st.floats(0, 10), ORDERS, st.sampled_from([None, 0, "global"]))
def test_zero_stays_zero(tensors, max_norm, order, dim):
    zeros = [torch.zeros_like(tensor) for tensor in tensors]
    assert not any(
        result.any() or result.isnan().any() for result in transformed(zeros, ClipNorm(max_norm, order, dim))
    )


def test_the_smallest_float64_norms_give_finite_factors():
    tiny = torch.full((4,), 1e-310, dtype=torch.float64)
    for dim in (None, "global"):
        (clipped,) = transformed([tiny], ClipNorm(0.0, dim=dim))
        assert torch.equal(clipped, torch.zeros_like(tiny))
        (clipped,) = transformed([tiny], ClipNorm(1e-311, dim=dim))
        torch.testing.assert_close(clipped, torch.full_like(tiny, 5e-312), rtol=1e-6, atol=0)


@given(updates(), st.floats(0.1, 10), st.randoms())
def test_tensors_do_not_depend_on_each_other_or_on_order(tensors, max_norm, random):
    together = transformed(tensors, ClipNorm(max_norm))
    order = list(range(len(tensors)))
    random.shuffle(order)
    shuffled = transformed([tensors[i] for i in order], ClipNorm(max_norm))
    for position, i in enumerate(order):
        assert torch.equal(shuffled[position], together[i])
        assert torch.equal(transformed([tensors[i]], ClipNorm(max_norm))[0], together[i])


@given(updates((torch.float32, torch.float64)), st.floats(0.1, 10), st.integers(-20, 20))
def test_scale_equivariance(tensors, max_norm, exponent):
    """Powers of two scale exactly."""
    scale = 2.0**exponent
    plain = transformed(tensors, ClipNorm(max_norm))
    scaled = transformed([tensor * scale for tensor in tensors], ClipNorm(max_norm * scale))
    for a, b in zip(scaled, plain, strict=True):
        torch.testing.assert_close(a, b * scale, rtol=1e-6, atol=0)


@pytest.mark.slow
@settings(max_examples=60)
@given(tensors=updates((torch.float64,)), **SLICINGS)
def test_equals_a_loop(tensors, order, dim, inverse_dims, min_size):
    results = transformed(tensors, ClipNorm(0.7, order, dim, inverse_dims, min_size))
    expected = clip_norm(tensors, 0.7, order, dim, inverse_dims, min_size)
    torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-13)


def test_each_group_has_its_own_limit_also_under_one_joint_norm():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": first}, {"params": second, "max_norm": 0.5}]
    optimizer = Modular(groups, ClipNorm(1.0, dim="global"))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert first.item() == pytest.approx(-3 / 5)
    assert second.item() == pytest.approx(-4 / 10)


def test_max_norm_zero_gives_zeros_and_inf_changes_nothing():
    tensors = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    assert not any(result.any() for result in transformed(tensors, ClipNorm(0)))
    assert all(torch.equal(a, b) for a, b in zip(transformed(tensors, ClipNorm(math.inf)), tensors, strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1e300)], ids=str)
def test_factors_beyond_float32_serve_scalars_too(dtype, size, shape):
    (result,) = transformed([torch.full(shape, size, dtype=dtype)], ClipNorm(1e-3, "linf"))
    torch.testing.assert_close(result, torch.full_like(result, 1e-3))


def test_float16_of_300s_is_clipped_not_zeroed():
    (result,) = transformed([torch.full((1000,), 300.0, dtype=torch.float16)], ClipNorm(1.0))
    assert result.double().norm().item() == pytest.approx(1, rel=5e-4)


def test_metrics_are_the_norm_before_the_mean_factor_and_the_share():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))]
    optimizer = Modular(params, ClipNorm(1.0, dim=-1))
    params[0].grad = torch.tensor([3.0, 4.0])
    params[1].grad = torch.tensor([[0.0, 2.0], [0.5, 0.0]])
    optimizer.step()
    metrics = {name: value.item() for name, value in optimizer.metrics().items()}
    assert metrics["clip_norm/norm"] == pytest.approx(math.sqrt(25 + 4 + 0.25))
    assert metrics["clip_norm/factor"] == pytest.approx((0.2 + 0.5 + 1) / 3)
    assert metrics["clip_norm/clipped"] == pytest.approx(2 / 3)


def test_metrics_without_any_slice():
    param = nn.Parameter(torch.zeros(0, 3))
    optimizer = Modular([param], ClipNorm(1.0, dim=1))
    param.grad = torch.zeros(0, 3)
    optimizer.step()
    assert optimizer.metrics()["clip_norm/factor"].item() == 1


def test_metrics_of_a_chain_that_clips_nothing():
    _, optimizer = stepped([ClipNorm(1.0, dim=1), SGD()], [3.0, 4.0])
    assert {name: value.item() for name, value in optimizer.metrics().items()} == {
        "clip_norm/norm": 5, "clip_norm/factor": 1, "clip_norm/clipped": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("fast", "steps"), [(True, 1), (True, 5), (False, 1)], ids=["fast", "planned", "readable"])
@pytest.mark.parametrize("dim", [None, "global", 0])
@pytest.mark.parametrize(
    ("first", "limit", "share"), [(3.0, 5 - 15e-6, 1), (3.0, 5 - 15e-7, 0), (3.0, 5.0, 0), (math.nan, 5.0, 1)]
)
def test_what_counts_as_clipped(first, limit, share, dim, fast, steps):
    """A slice shortened by 3e-6 of its norm counts, one shortened by 3e-7 does not, and NaN counts."""
    for dtype in (torch.float32, torch.float64):
        for transform in (ClipNorm(limit, dim=dim), Normalize(limit, dim=dim)):
            param = nn.Parameter(torch.zeros(2, dtype=dtype))
            optimizer = Modular([param], transform, SGD(), fast=fast)
            for _ in range(steps):  # after three steps alike, the next ones follow a plan
                param.grad = torch.tensor([first, 4.0], dtype=dtype)
                optimizer.step()
            (shown,) = (value.item() for key, value in optimizer.metrics().items() if key.endswith("clipped"))
            assert shown == share


def test_shortening_and_lengthening_both_count():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = Modular(params, Normalize(1.0))
    for param, size in zip(params, (0.5, 1.0, 2.0), strict=True):
        param.grad = torch.tensor([size])
    optimizer.step()
    assert optimizer.metrics()["normalize/clipped"].item() == pytest.approx(2 / 3)
