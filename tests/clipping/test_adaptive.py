"""Adaptive limits where their references fail, as with a zero or what comes late; and the rules of each."""

import copy
import math

import pytest
import torch
from clipping.statistics import outputs
from clipping.updates import transformed
from torch import nn

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    AdaptiveGradientClip,
    AutoClip,
    Chain,
    ClipByMaxEMA,
    ClipRMS,
    GradientStabilizer,
    Modular,
    Muon,
    SkipStep,
    SoftSpectralClip,
    SpikeAwareClip,
    ZClip,
)


def passed(transform, gradients, shape=(1,), **kwargs):
    """What leaves a transform, for one parameter that gets one gradient after the other."""
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = Modular([param], transform, LR(1.0), **kwargs)
    updates = []
    for gradient in gradients:
        param.data = torch.zeros(shape, dtype=torch.float64)
        param.grad = torch.as_tensor(gradient, dtype=torch.float64).expand(shape).clone()
        optimizer.step()
        updates.append((-param.detach()).clone())
    return torch.stack(updates).squeeze()


FOLLOWING = {
    "AutoClip": lambda: AutoClip(50.0, window=4),
    "ZClip": lambda: ZClip(max_norm=None, warmup_steps=3),
    "AdaGC": lambda: AdaGC(warmup_steps=3),
    "GradientStabilizer": lambda: GradientStabilizer(),
    "SpikeAwareClip": lambda: SpikeAwareClip(4.0, 0.5, warmup_steps=3),
    "ClipByMaxEMA": lambda: ClipByMaxEMA(0.5),
}


def test_adagc_does_not_remember_a_zero():
    """The reference freezes a tensor with one gradient of 0 in the warm-up, such as the first matrix of LoRA."""
    updates = passed(AdaGC(warmup_steps=3), [0.5, 0.0, 0.4, 0.4, 0.4])
    torch.testing.assert_close(updates, torch.tensor([0.5, 0.0, 0.4, 0.4, 0.4], dtype=torch.float64))
    assert passed(AdaGC(warmup_steps=2), [0.0] * 4 + [0.3] * 3)[-3:].tolist() == pytest.approx([0.3] * 3)


def test_adagc_counts_steps_of_the_warm_up_that_all_tensors_took():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Modular([a, b], AdaGC(warmup_steps=2), LR(1.0))
    for first, second in ((3.0, 4.0), (math.nan, 4.0), (0.3, 0.4)):
        a.grad, b.grad = torch.tensor([first]), torch.tensor([second])
        before = b.item()
        optimizer.step()
        expected = {3.0: 0.8, 0.3: 0.4}.get(first, 4.0)  # the second step passes whole, and does not count
        assert before - b.item() == pytest.approx(expected)
    a.grad, b.grad = torch.tensor([30.0]), torch.tensor([0.2])
    before = b.item()
    optimizer.step()
    assert before - b.item() == pytest.approx(0.2)  # each tensor by itself now


def test_elements_that_are_first_seen_late_pass():
    """SPAM's reference holds an element that is first seen after step 20 at 0 for ever."""
    gradients = [[1.0, 0.0]] * 30 + [[1.0, 2.0]] * 3
    updates = passed(SpikeAwareClip(), gradients, (2,))
    assert updates[-3:, 1].tolist() == [2.0] * 3


@pytest.mark.parametrize("fast", [True, False])
def test_elements_that_spike_are_cut_in_both_ways_to_run(fast):
    torch.manual_seed(0)
    gradients = torch.randn(30, 70_000)
    gradients[25, ::1000] = 500.0
    updates = passed(SpikeAwareClip(4.0, 0.9), gradients, (70_000,), fast=fast)
    assert torch.equal(updates[:19], gradients[:19].double())
    assert (updates[25, ::1000] < 5).all()
    square = torch.zeros(70_000, dtype=torch.float64)
    for t, gradient in enumerate(gradients.double()):
        limit = (4 * square).sqrt()
        cut = (gradient.abs() > limit) & (limit > 0) if t >= 19 else torch.zeros_like(gradient, dtype=torch.bool)
        expected = torch.where(cut, torch.copysign(limit, gradient), gradient)
        torch.testing.assert_close(updates[t], expected)
        square = 0.9 * square + 0.1 * expected.square()


@pytest.mark.slow
def test_a_spike_right_after_another_is_cut_as_far():
    """Stable-SPAM's reference sets back its count every 1000 steps: ten steps later, a spike leaves at 72.6."""
    updates = passed(ClipByMaxEMA(), [1.0] * 1010 + [100.0])
    assert updates[-1].item() == pytest.approx(1.16, abs=0.02)


def test_constant_norms_of_zclip():
    updates = passed(ZClip(max_norm=None, warmup_steps=3), [1.0] * 5 + [1.5])
    assert updates[-1].item() == pytest.approx(1.0)
    assert passed(ZClip(max_norm=None, warmup_steps=3), [1.0] * 5 + [1 + 1e-6])[-1].item() == 1 + 1e-6


def test_autoclip_takes_the_percentile_of_a_full_window():
    norms = [float(x) for x in torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1]
    updates = passed(AutoClip(80.0, window=10), norms)
    for t, norm in enumerate(norms):
        window = torch.tensor(norms[max(0, t - 9) : t + 1], dtype=torch.float64)
        assert updates[t].item() == pytest.approx(min(norm, window.quantile(0.8).item()))


@pytest.mark.parametrize(("shape", "unit_dim"), [((3, 4), 0), ((3, 4), 1), ((2, 3, 4), -1), ((5,), 0), ((), 0)])
def test_units_of_agc(shape, unit_dim):
    torch.manual_seed(0)
    weight, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    param = nn.Parameter(weight.clone())
    optimizer = Modular([param], AdaptiveGradientClip(0.1, unit_dim=unit_dim), LR(1.0))
    param.grad = gradient.clone()
    optimizer.step()
    w, g = (x.movedim(unit_dim, 0).flatten(1) if x.ndim > 1 else x.view(1, -1) for x in (weight, gradient))
    limit = 0.1 * w.norm(dim=1, keepdim=True).clamp(min=1e-3)
    expected = g * (limit / g.norm(dim=1, keepdim=True)).clamp(max=1)
    updates = weight - param.detach()
    updates = updates.movedim(unit_dim, 0).flatten(1) if updates.ndim > 1 else updates.view(1, -1)
    torch.testing.assert_close(updates, expected)


def test_agc_leaves_a_tensor_with_one_bad_unit_alone():
    (result,) = transformed([torch.tensor([[3.0, 4.0], [math.inf, 0.0]])], AdaptiveGradientClip())
    assert result[0].tolist() == [3.0, 4.0]


def test_agc_without_the_dimension_is_refused_by_name():
    with pytest.raises(ValueError, match=r"unit_dim=2 is no dimension of a tensor of shape \(2, 2\)"):
        transformed([torch.ones(2, 2)], AdaptiveGradientClip(unit_dim=2))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 2, 5)])
def test_singular_values_are_limited_softly(shape):
    torch.manual_seed(0)
    gradient = 5 * torch.randn(shape, dtype=torch.float64)
    (result,) = transformed([gradient], SoftSpectralClip(2.0, steps=20))
    u, sizes, v = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    expected = u @ (sizes / (1 + (sizes / 2) ** 2).sqrt()).diag() @ v
    torch.testing.assert_close(result.flatten(1), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_spectral_clip_of_very_large_and_of_no_values(dtype):
    for scale in (0.0, 1e-20, 1e20):
        (result,) = transformed([(scale * torch.eye(8)).to(dtype)], SoftSpectralClip(1.0))
        expected = scale / math.sqrt(1 + scale**2)
        torch.testing.assert_close(result, (expected * torch.eye(8)).to(dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: SoftSpectralClip(1.0), Muon])
def test_products_of_matrices_are_not_rounded_by_autocast(make, dtype):
    gradient = torch.randn((8, 6), generator=torch.Generator().manual_seed(0))
    expected = transformed([gradient], make())
    with torch.autocast("cpu", dtype):
        assert torch.equal(*transformed([gradient], make()), *expected)


def test_rms_of_tensors_of_any_size():
    tensors = [torch.full((3, 5), 2.0), torch.full((7,), 0.1), torch.tensor(-3.0)]
    results = transformed(tensors, ClipRMS(0.5))
    assert [result.flatten()[0].item() for result in results] == pytest.approx([0.5, 0.1, -0.5])


@pytest.mark.parametrize("fast", [True, False])
def test_rms_of_complex_numbers_is_that_of_their_parts(fast):
    small, large = (nn.Parameter(torch.zeros(shape, dtype=torch.complex64)) for shape in ((1,), (2, 1)))
    optimizer = Modular([small, large], ClipRMS(0.5), LR(1.0), fast=fast)
    small.grad = torch.tensor([0.4 - 0.5j])  # the root of (0.16 + 0.25) / 2 is 0.45, below the limit
    large.grad = torch.tensor([[3 + 4j], [-5j]])  # the root of (9 + 16 + 25) / 4 is 3.54, and 0.5 / 3.54 = 0.1414
    optimizer.step()
    torch.testing.assert_close(-small.data, torch.tensor([0.4 - 0.5j]), rtol=0, atol=0)
    expected = torch.tensor([[0.4243 + 0.5657j], [-0.7071j]])
    torch.testing.assert_close(-large.data, expected, rtol=0, atol=1e-4)
    assert optimizer.metrics()["clip_rms/clipped"].item() == 0.5


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: AutoClip(101), ValueError, r"percentile must be in \[0, 100\], got 101"),
        (lambda: AutoClip(window=None), TypeError, "window must be an int, got None"),
        (lambda: AutoClip(window=0), ValueError, "window must be at least 1, got 0"),
        (lambda: ZClip(z_thresh=0), ValueError, "z_thresh must be > 0"),
        (lambda: ZClip(warmup_steps=0), ValueError, "warmup_steps must be at least 1"),
        (lambda: ZClip(clip_option="median"), ValueError, "clip_option"),
        (lambda: AdaGC(ratio=0), ValueError, "ratio must be > 0"),
        (lambda: AdaGC(warmup_steps=-1), ValueError, "warmup_steps must be >= 0, got -1"),
        (lambda: GradientStabilizer(beta1=2), ValueError, r"beta1 must be in \[0, 1\]"),
        (lambda: GradientStabilizer(beta1=1.0), ValueError, "must be below 1"),
        (lambda: GradientStabilizer(beta2=1.0), ValueError, "must be below 1"),
        (lambda: ClipByMaxEMA(1.0), ValueError, "must be below 1"),
        (lambda: SpikeAwareClip(threshold=-1), ValueError, "threshold must be > 0"),
        (lambda: ClipByMaxEMA(math.nan), ValueError, r"beta must be in \[0, 1\]"),
        (lambda: ClipRMS(-1), ValueError, "max_rms must be >= 0"),
        (lambda: AdaptiveGradientClip(0), ValueError, "clip_factor must be > 0"),
        (lambda: AdaptiveGradientClip(unit_dim=0.5), TypeError, "unit_dim must be an int"),
        (lambda: SoftSpectralClip(0), ValueError, "limit must be > 0"),
        (lambda: SoftSpectralClip(1.0, steps=0), ValueError, "steps must be at least 1"),
        (lambda: SkipStep(sigma=0), ValueError, "sigma must be > 0"),
        (lambda: SkipStep(sigma=6, window=2), ValueError, "window must be at least 4"),
    ],
)
def test_wrong_arguments_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_groups_with_other_limits():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "percentile": 10.0}]
    with pytest.raises(ValueError, match="percentile must be the same in every param group"):
        Modular(groups, AutoClip())
    with pytest.raises(ValueError, match="max_norm must be the same in every param group"):
        Modular([{"params": params[:1]}, {"params": params[1:], "max_norm": 2.0}], AdaGC())
    optimizer = Modular([{"params": params[:1]}, {"params": params[1:], "ratio": 3.0}], AdaGC(warmup_steps=0), LR(1.0))
    for size in (1.0, 10.0):
        for param in params:
            param.data, param.grad = torch.zeros(1), torch.tensor([size])
        optimizer.step()
    assert [-p.item() for p in params] == pytest.approx([1.04, 3.0])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [*FOLLOWING, "SkipStep"])
def test_a_checkpoint_in_the_middle_of_a_warm_up_and_of_a_full_window_goes_on_bit_for_bit(name):
    make = {**FOLLOWING, "SkipStep": lambda: SkipStep(sigma=3.0, window=6)}[name]
    torch.manual_seed(0)
    sizes = (0.5 + 0.1 * torch.randn(24)).tolist()
    sizes[15] = 40.0
    for stop in (2, 12, 16):
        params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizers = [Modular([param], make(), SGD(0.1, 0.9)) for param in params]
        for t, size in enumerate(sizes):
            if t == stop:
                saved = copy.deepcopy(optimizers[0].state_dict())
                optimizers[1].load_state_dict(saved)
                params[1].data = params[0].data.clone()
            for param, optimizer in zip(params, optimizers, strict=True):
                param.grad = torch.tensor([size, -size, 0.5])
                if t >= stop or param is params[0]:
                    optimizer.report_loss(size)
                    optimizer.step()
        assert torch.equal(*params)


def test_a_ring_with_a_nan_is_refused_on_load():
    param = nn.Parameter(torch.zeros(1))
    optimizer = Modular([param], AutoClip(window=4))
    param.grad = torch.ones(1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["auto_clip/ring"][2] = math.nan
    with pytest.raises(ValueError, match="'auto_clip/ring' of the chain is not finite"):
        optimizer.load_state_dict(saved)


def test_a_zero_outside_of_the_scope_of_a_composite_does_not_start_its_statistic():
    results = []
    for fast in (True, False):
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        chain = Chain(AutoClip(0.0, 4), target="update_difference").only("a")
        optimizer = Modular([("a", a), ("b", b)], chain, LR(1.0), nonfinite="skip", fast=fast)
        for size in (0.0, 1.0, 1.0):
            a.grad, b.grad = torch.full((1,), size), torch.ones(1)
            optimizer.step()
        results.append(a.item())
    assert results == [0.0, 0.0]


@pytest.mark.parametrize("fast", [True, False])
def test_agc_of_tensors_without_elements(fast):
    """They stay empty, and the others are clipped as without them."""
    grads = [torch.zeros(0), torch.ones(3)]
    empty, other = transformed(grads, AdaptiveGradientClip(), fast=fast)
    assert empty.shape == (0,)
    assert torch.equal(other, transformed(grads[1:], AdaptiveGradientClip(), fast=fast)[0])


def test_a_large_vector_of_half_precision_keeps_the_factor_of_a_soft_spectral_clip():
    (result,) = transformed([torch.full((4096,), 30000.0, dtype=torch.float16)], SoftSpectralClip(0.1))
    torch.testing.assert_close(result, torch.full_like(result, 0.1 / 64))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "make", [AdaGC, GradientStabilizer, lambda: ZClip(max_norm=None), lambda: SoftSpectralClip(1.0)]
)
def test_a_huge_finite_gradient_is_forgotten(make):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Modular([weight], make())
    for size in (1.0, 1e200, *[1.0] * 300):
        weight.data.zero_()
        weight.grad = torch.tensor([size, size], dtype=torch.float64)
        optimizer.step()
        assert weight.isfinite().all()
    assert weight.abs().max() > 0
    state = [v for values in optimizer.state.values() for v in values.values()] + list(
        optimizer.runner.chain_state.values.values()
    )
    assert all(v.isfinite().all() for v in state if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("fast", [True, False])
def test_squares_of_an_element_stay_finite(fast):
    weight = nn.Parameter(torch.zeros(100_000))
    optimizer = Modular([weight], SpikeAwareClip(warmup_steps=1), SGD(0.1), fast=fast)
    for size in (1e30, 1.0, 1.0):
        weight.grad = torch.full((100_000,), size)
        optimizer.step()
    assert optimizer.state[weight]["spike_aware_clip/square"].isfinite().all()


def test_parts_of_complex_numbers_are_elements_of_the_largest():
    results, _ = outputs(ClipByMaxEMA(beta=0.5), [[[3 + 4j]], [[25 + 40j]]], torch.complex64)
    limit = (0.25 * 4 + 0.5 * 40) / 0.75
    torch.testing.assert_close(results[-1], [[25 + limit * 1j]], rtol=1e-6, atol=0)
