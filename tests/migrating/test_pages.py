"""The numbers that the pages about migrating state, against torch, hand computation, optax, Opacus and trainers."""

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import utils

import torchzero_clip
from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    Modular,
    Normalize,
    NormalizeByEMA,
    PerSampleGradientClipper,
    WeightDecay,
    clip_grad_norm_,
    get_total_norm,
    integrations,
)

PAGES = Path(__file__).parents[2] / "docs" / "migrating"
HALF = torch.full((50_000,), 300.0, dtype=torch.float16)


def compares(test):
    """Mark a test that runs another tool, whose warnings are not ours."""
    return pytest.mark.peers(pytest.mark.filterwarnings("ignore")(test))


def with_grads(*grads):
    """One parameter of zeros for each gradient; None is no gradient."""
    params = [nn.Parameter(torch.zeros_like(torch.as_tensor(grad))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.as_tensor(grad).clone()
    return params


def grads_after(clip, *grads):
    params = with_grads(*grads)
    clip(params)
    return [param.grad for param in params]


def updates(transforms, *steps, dtype=torch.float32):
    """What a chain subtracts in each step, of parameters that are zeros before it."""
    params = [nn.Parameter(torch.zeros_like(torch.tensor(grad, dtype=dtype))) for grad in steps[-1]]
    optimizer, results = Modular(params, *transforms), []
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.data.zero_()
            param.grad = None if grad is None else torch.tensor(grad, dtype=dtype)
        optimizer.step()
        results.append([(-param.detach().double()).tolist() for param in params])
    return results


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


# from torch


def test_torch_adds_to_the_norm_and_clip_norm_does_not():
    (theirs,) = grads_after(lambda params: utils.clip_grad_norm_(params, 1e-5), [3e-5, 4e-5])
    (ours,) = grads_after(lambda params: clip_grad_norm_(params, 1e-5, dim="global"), [3e-5, 4e-5])
    assert theirs.norm().item() == pytest.approx(0.98039e-5, rel=1e-4)
    assert ours.norm().item() == pytest.approx(1e-5, rel=1e-6)
    ((update,),) = updates([ClipNorm(1e-5, dim="global")], [[3e-5, 4e-5]])
    assert update == pytest.approx([0.6e-5, 0.8e-5], rel=1e-6)


def test_norms_are_per_tensor_and_joint_on_request():
    grads = [3.0, 4.0], [6.0, 8.0]
    joint = [pytest.approx([0.26833, 0.35777], rel=1e-4), pytest.approx([0.53666, 0.71554], rel=1e-4)]
    alone = [pytest.approx([0.6, 0.8])] * 2
    assert [g.tolist() for g in grads_after(lambda params: clip_grad_norm_(params, 1), *grads)] == alone
    assert [g.tolist() for g in grads_after(lambda params: utils.clip_grad_norm_(params, 1), *grads)] == joint
    assert [g.tolist() for g in grads_after(lambda params: clip_grad_norm_(params, 1, dim="global"), *grads)] == joint
    assert updates([ClipNorm(1)], grads) == [alone]
    assert updates([ClipNorm(1, dim="global")], grads) == [joint]


def test_the_function_leaves_gradients_of_one_element_and_the_transform_does_not():
    assert grads_after(lambda params: clip_grad_norm_(params, 1), [5.0])[0].item() == 5
    assert grads_after(lambda params: clip_grad_norm_(params, 1, min_size=1), [5.0])[0].item() == 1
    assert updates([ClipNorm(1)], [[5.0]]) == [[[1.0]]]


@pytest.mark.parametrize(("grad", "norm"), [(HALF, 67082.04), (torch.tensor([1e20, 1e20]), 1.41421e20)])
def test_norms_of_torch_overflow(grad, norm):
    (param,) = with_grads(grad)
    assert utils.clip_grad_norm_([param], 1).item() == math.inf
    assert not param.grad.any()
    (param,) = with_grads(grad)
    assert clip_grad_norm_([param], 1, dim="global").item() == pytest.approx(norm, rel=1e-5)
    assert param.grad.double().norm().item() == pytest.approx(1, rel=5e-4)


def test_norms_of_half_precision_are_float32():
    grad = torch.randn(1000).bfloat16()
    assert utils.get_total_norm([grad]).dtype == torch.bfloat16
    assert get_total_norm([grad]).dtype == torch.float32
    assert get_total_norm([grad]).item() == pytest.approx(grad.double().norm().item(), rel=1e-6)


def test_other_differences_of_the_function():
    (turned,) = grads_after(lambda params: utils.clip_grad_norm_(params, -1), [3.0, 4.0])
    assert turned.tolist() == pytest.approx([-0.6, -0.8])
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        clip_grad_norm_(with_grads([3.0, 4.0]), -1)
    (twice,) = grads_after(lambda params: utils.clip_grad_norm_(params * 2, 1), [3.0, 4.0])
    assert twice.norm().item() == pytest.approx(5 / 50, rel=1e-5)  # the norm is sqrt(50), and the factor applied twice
    (once,) = grads_after(lambda params: clip_grad_norm_(params * 2, 1), [3.0, 4.0])
    assert once.norm().item() == pytest.approx(1)
    with pytest.raises(TypeError, match=r"dim must be None, .* got True"):
        clip_grad_norm_(with_grads([3.0, 4.0]), 1.0, 2.0, True)


def test_norms_that_are_not_finite_raise_on_request_and_nothing_changes():
    for function, given in ((utils.clip_grad_norm_, {}), (clip_grad_norm_, {"dim": "global"})):
        (param,) = with_grads([1.0, math.inf])
        with pytest.raises(RuntimeError, match="finite"):
            function([param], 1, error_if_nonfinite=True, **given)
        assert param.grad.tolist() == [1, math.inf]
    (param,) = with_grads([1.0, math.inf])
    with pytest.raises(RuntimeError, match="gradients are not finite"):
        Modular([param], ClipNorm(1, dim="global"), AdamW(), nonfinite="raise").step()
    assert param.grad.tolist() == [1, math.inf]
    assert param.tolist() == [0, 0]


# from torchzero: its numbers are in the comments, and on the page


@pytest.mark.parametrize(
    ("transforms", "steps", "expected"),
    [
        ([Adam(), LR(1)], [[1e-8]], [[0.5]]),  # 0.031
        ([SGD(1, momentum=0.9)], [[3.0, 4.0]], [[3.0, 4.0]]),  # HeavyBall: (5.7, 7.6)
        ([ClipNormGrowth()], [[1.0], [math.nan], [100.0]], [[1.0], [math.nan], [1.5]]),  # 100 at the end
        ([ClipNormGrowth()], [[0.0], [1.0], [1.0]], [[0.0], [1.0], [1.0]]),  # 0, 0, 1.5e-4
        ([ClipNormGrowth()], [[1e-6], [1e-5]], [[1e-6], [1e-5]]),  # 1e-6, 1.5e-6
        ([ClipNormByEMA()], [[1.0], [math.nan], [1.0], [1.0]], [[0.01], [math.nan], [0.015], [0.0225]]),  # NaN for ever
        ([ClipNormByEMA()], [[0.0], [1.0], [1.0]], [[0.0], [0.01], [0.015]]),  # 0, 1e-6, 1.5e-6
        ([ClipNormByEMA()], [[1e-9]], [[1e-9]]),  # 1e-11
        ([ClipNormByEMA(eps=0)], [[1e-9]], [[1e-11]]),
        ([NormalizeByEMA()], [[1.0], [1e-9]], [[0.01], [0.001]]),  # 0.01, 0.0099
        ([NormalizeByEMA(eps=0)], [[1.0], [1e-9]], [[0.01], [0.0099]]),
        ([ClipNorm(1)], [[3e20, 4e20]], [[0.6, 0.8]]),  # zeros
        ([Normalize(dim="global")], [[0.0, 0.0]], [[0.0, 0.0]]),  # NaN
    ],
)
def test_numbers_of_the_page_on_torchzero(transforms, steps, expected):
    found = [update for (update,) in updates(transforms, *([grad] for grad in steps))]
    for update, numbers in zip(found, expected, strict=True):
        assert update == pytest.approx(numbers, rel=1e-5, abs=1e-20, nan_ok=True)


@pytest.mark.parametrize(
    ("whole", "by_column", "expected_whole", "expected_by_column"),
    [
        (ClipNorm(1), ClipNorm(1, dim=0), [[0.557086, 0.0], [0.742781, 0.371391]], [[0.6, 0.0], [0.8, 1.0]]),
        (Normalize(), Normalize(dim=0), [[0.557086, 0.0], [0.742781, 0.371391]], [[0.6, 0.0], [0.8, 1.0]]),
        (Centralize(), Centralize(dim=0), [[0.75, -2.25], [1.75, -0.25]], [[-0.5, -1.0], [0.5, 1.0]]),
    ],
)
def test_a_matrix_after_a_vector_has_one_norm(whole, by_column, expected_whole, expected_by_column):
    grads = [[3.0, 4.0], [[3.0, 0.0], [4.0, 2.0]]]
    for transform, expected in ((whole, expected_whole), (by_column, expected_by_column)):
        ((_, matrix),) = updates([transform], grads)
        torch.testing.assert_close(torch.tensor(matrix), torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_adam_counts_the_steps_of_each_parameter_and_takes_no_gradient_for_none():
    first, second = updates([Adam(), LR(1)], [[3.0, 4.0], None], [[3.0, 4.0], [3.0, 4.0]])
    assert first[1] == [0, 0]
    assert second[1] == pytest.approx([1, 1])
    _, second = updates([Adam(), LR(1)], [[3.0, 4.0], [0.0, 0.0]], [[3.0, 4.0], [3.0, 4.0]])
    by_hand = 0.1 / (1 - 0.9**2) / math.sqrt(0.001 / (1 - 0.999**2))  # torchzero's
    assert by_hand == pytest.approx(0.74414, rel=1e-5)
    assert second[1] == pytest.approx([by_hand] * 2, rel=1e-6)


def test_eps_as_a_function_of_the_step_is_added_before_the_bias_correction():
    def eps(step):
        return 1e-8 / (1 - 0.999 ** (step + 1)) ** 0.5

    grads = [1e-8, 3e-8, 2e-8]
    found = updates([Adam(eps=eps), LR(1)], *([[grad]] for grad in grads), dtype=torch.float64)
    mean, square = 0.0, 0.0
    for step, (((update,),), grad) in enumerate(zip(found, grads, strict=True), 1):
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        scale = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        assert update == pytest.approx(scale * mean / (math.sqrt(square) + 1e-8), rel=1e-9)
        if step == 1:
            assert update == pytest.approx(0.030653, rel=1e-4)


def test_a_checkpoint_of_torchzero_is_refused():
    optimizer = Modular(with_grads([3.0, 4.0]), ClipNorm(1), Adam())
    with pytest.raises(ValueError, match="a checkpoint is a dict with the keys 'state' and 'param_groups'"):
        optimizer.load_state_dict({"idx_to_id": {}, "params": [], "groups": [], "defaults": {}, "modules": {}})


# from Opacus


def imported_opacus():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("opacus", reason="opacus is not installed")
        import opacus.grad_sample
        import opacus.optimizers
    return opacus


def samples():
    torch.manual_seed(1)
    return torch.randn(16, 4), torch.randn(16, 1)


def after_opacus(kind, limit, inputs, targets, expected, parts=(16,)):
    opacus, model = imported_opacus(), net()
    wrapped = opacus.GradSampleModule(model)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = getattr(opacus.optimizers, kind)(
        sgd, noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=expected
    )
    for x, y in zip(inputs.split(list(parts)), targets.split(list(parts)), strict=True):
        F.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def after_clipper(norm_clipper, inputs, targets, parts=None, divide=1.0, **given):
    model = net()
    clipper = PerSampleGradientClipper(model, norm_clipper, **given)
    if parts is None:
        clipper.backward(F.mse_loss(model(inputs), targets, reduction="none").squeeze(1))
    else:
        for x, y in zip(inputs.split(list(parts)), targets.split(list(parts)), strict=True):
            F.mse_loss(model(x), y).backward()
            clipper.clip_and_accumulate()
        clipper.pre_step()
    for param in model.parameters():
        param.grad /= divide
    torch.optim.SGD(model.parameters(), 0.1).step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@compares
def test_opacus_without_noise_gives_the_same_gradients():
    x, y = samples()
    flat = after_opacus("DPOptimizer", 0.5, x, y, 16)
    close(after_clipper(ConstantFlatClipper(0.5), x, y), flat)
    limits = [0.1, 0.2, 0.3, 0.4]
    close(after_clipper(ConstantPerLayerClipper(limits), x, y), after_opacus("DPPerLayerOptimizer", limits, x, y, 16))
    accumulated = after_opacus("DPOptimizer", 0.5, x, y, 8, parts=(10, 6))
    close(after_clipper(ConstantFlatClipper(0.5), x, y, parts=(10, 6)), accumulated)
    close(accumulated, flat)


@compares
def test_opacus_divides_by_the_expected_batch_size():
    x, y = samples()
    start = nn.utils.parameters_to_vector(net().parameters()).detach()
    theirs = after_opacus("DPOptimizer", 0.5, x, y, 20)
    close((after_clipper(ConstantFlatClipper(0.5), x, y) - start) * 0.8, theirs - start)
    close(after_clipper(ConstantFlatClipper(0.5), x, y, loss_reduction="sum", divide=20), theirs)


@compares
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_sample_that_is_not_finite_is_left_out(bad):
    x, y = samples()
    x[3] = bad
    assert after_opacus("DPOptimizer", 0.5, x, y, 16).isnan().all()
    others = [i for i in range(16) if i != 3]
    ours = after_clipper(ConstantFlatClipper(0.5), x, y)
    alone = after_clipper(ConstantFlatClipper(0.5), x[others], y[others], loss_reduction="sum", divide=16)
    close(ours, alone)  # it still counts in the mean


@compares
@pytest.mark.parametrize(("dtype", "size", "value"), [(torch.float16, 50_000, 300.0), (torch.float32, 25, 1e30)])
def test_norms_of_samples_of_opacus_overflow(dtype, size, value):
    opacus = imported_opacus()
    x = torch.full((2, size), value, dtype=dtype)
    model, twin = (nn.Linear(size, 1, bias=False, dtype=dtype) for _ in range(2))
    for module in (model, twin):
        nn.init.zeros_(module.weight)
    wrapped = opacus.GradSampleModule(model)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2
    )
    wrapped(x).mean().backward()
    optimizer.pre_step()
    assert not model.weight.grad.any()
    result = PerSampleGradientClipper(twin, ConstantFlatClipper(1.0)).backward(twin(x).squeeze(1))
    assert result.norms.tolist() == pytest.approx([value * math.sqrt(size)] * 2, rel=1e-6)
    assert twin.weight.grad.double().norm().item() == pytest.approx(1, rel=1e-3)


@compares
def test_the_two_wrappers_differ_in_modes_names_and_layers_called_twice():
    opacus = imported_opacus()
    theirs, ours = (m.GradSampleModuleFastGradientClipping for m in (opacus.grad_sample, torchzero_clip))
    assert next(iter(theirs(net()).state_dict())) == "_module.0.weight"
    assert list(ours(net()).state_dict()) == list(net().state_dict())
    for cls, leaves_grad in ((theirs, True), (ours, False)):
        model = net()
        module = cls(model)
        module(torch.ones(2, 4)).mean().backward(retain_graph=True)
        assert (model[0].weight.grad is not None) == leaves_grad

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("ids", torch.arange(3))

        def forward(self, x):
            return self.layer(self.layer(x))

    with pytest.raises(NotImplementedError, match="Parameter tying"):
        theirs(Twice())(torch.ones(2, 4))
    with pytest.raises(NotImplementedError, match="includes a buffer"):
        ours(Twice())
    model = Twice()
    model(torch.ones(1, 4)).sum().backward()
    norm = get_total_norm([param.grad for param in model.parameters()])
    model.zero_grad()
    model.eval()
    module = ours(model, strict=False)
    assert module.backward(module(torch.ones(2, 4)).sum(1)).norms.tolist() == pytest.approx([norm.item()] * 2)
    with pytest.raises(ValueError, match="No activations detected"):
        opacus.GradSampleModule(net().eval())(torch.ones(2, 4)).sum().backward()


# from optax


def after_optax(make, *steps, params=None):
    """The parameters after each step of optax, from zeros unless given."""
    optax = pytest.importorskip("optax", reason="optax is not installed")
    numpy = pytest.importorskip("jax.numpy", reason="jax is not installed")
    values = [numpy.asarray(p) for p in params or [[0.0] * len(grad) for grad in steps[0]]]
    transform = make(optax)
    state, results = transform.init(values), []
    for grads in steps:
        found, state = transform.update([numpy.asarray(grad) for grad in grads], state, values)
        values = optax.apply_updates(values, found)
        results.append([value.tolist() for value in values])
    return results


def after_chain(make, *steps, params=None):
    model = nn.ParameterList([nn.Parameter(torch.tensor(p)) for p in params or [[0.0] * len(g) for g in steps[0]]])
    optimizer, results = make(model), []
    for grads in steps:
        for param, grad in zip(model, grads, strict=True):
            param.grad = torch.tensor(grad)
        optimizer.step()
        results.append([param.tolist() for param in model])
    return results


PAIRS = {
    "clip_by_global_norm": (
        lambda optax: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)),
        lambda model: Modular(model, ClipNorm(1.0, dim="global"), AdamW(1e-2, weight_decay=0.1)),
    ),
    "adamw's default": (lambda optax: optax.adamw(1e-2), lambda model: Modular(model, AdamW(1e-2, weight_decay=1e-4))),
    "clip": (
        lambda optax: optax.chain(optax.clip(0.5), optax.sgd(0.1, momentum=0.9)),
        lambda model: Modular(model, ClipValue(0.5), SGD(0.1, momentum=0.9)),
    ),
    "parts": (
        lambda optax: optax.chain(
            optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-2)
        ),
        lambda model: Modular(model, Adam(), WeightDecay(0.1), LR(1e-2)),
    ),
    "a clip of steps": (
        lambda optax: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.005)),
        lambda model: Modular(model, Adam(), LR(1e-2), ClipNorm(0.005, dim="global")),
    ),
    "masked": (
        lambda optax: optax.chain(optax.masked(optax.clip_by_global_norm(1.0), [True, False]), optax.sgd(0.1)),
        lambda model: Modular(model, ClipNorm(1.0, dim="global").only("0"), SGD(0.1)),
    ),
    "multi_transform": (
        lambda optax: optax.multi_transform({"a": optax.adam(1e-2), "s": optax.sgd(0.1)}, ["a", "s"]),
        lambda model: Modular(model, Adam(1e-2).only("0"), SGD(0.1).without("0")),
    ),
    "schedule": (
        lambda optax: optax.sgd(lambda step: 0.1 / (step + 1)),
        lambda model: Modular(model, SGD(lambda step: 0.1 / (step + 1))),
    ),
}


@pytest.mark.slow
@compares
@pytest.mark.parametrize("name", PAIRS)
def test_chains_of_optax_give_the_same_numbers(name):
    theirs, ours = PAIRS[name]
    steps = [[torch.randn(3).tolist(), torch.randn(2).tolist()] for _ in range(8)]
    params = [[1.0, 2.0, 3.0], [1.0, -1.0]]
    found, expected = after_chain(ours, *steps, params=params), after_optax(theirs, *steps, params=params)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@compares
@pytest.mark.parametrize(
    ("grad", "limit", "theirs", "ours"),
    [
        ([3e-5, 4e-5], 1e-5, [0.6e-5, 0.8e-5], [0.6e-5, 0.8e-5]),  # nothing is added on either side
        ([1e20, 1e20], 1.0, [0.0, 0.0], [0.707107, 0.707107]),
        ([3e-25, 4e-25], 1e-25, [3e-25, 4e-25], [0.6e-25, 0.8e-25]),
        ([0.0, 0.0], 0.0, [math.nan, math.nan], [0.0, 0.0]),
    ],
)
def test_edges_of_clip_by_global_norm(grad, limit, theirs, ours):
    def clipped(optax):
        return optax.chain(optax.clip_by_global_norm(limit), optax.scale(-1.0))

    ((found,),) = after_optax(clipped, [grad])
    assert [-x for x in found] == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    ((found,),) = after_chain(lambda model: Modular(model, ClipNorm(limit, dim="global")), [grad])
    assert [-x for x in found] == pytest.approx(ours, rel=1e-5, abs=0)


@pytest.mark.slow
@compares
def test_half_precision_and_negative_limits_of_optax():
    optax = pytest.importorskip("optax", reason="optax is not installed")
    half = optax.clip_by_global_norm(1.0).update(HALF.numpy(), optax.EmptyState())[0]
    assert not half.any()
    ((turned,),) = after_optax(lambda optax: optax.clip_by_global_norm(-1.0), [[3.0, 4.0]])
    assert turned == pytest.approx([-0.6, -0.8])


@pytest.mark.slow
@compares
def test_apply_if_finite_goes_on_where_a_chain_raises():
    steps = [[[1.0]], [[math.nan]], [[math.nan]], [[1.0]], [[math.nan]], [[math.nan]]]

    def guarded(optax):
        return optax.apply_if_finite(optax.sgd(1.0), 2)

    def chain(model):
        return Modular(model, SGD(1.0), nonfinite="skip", max_consecutive_skips=2)

    expected = [[[value]] for value in (-1.0, -1.0, -1.0, -2.0, -2.0, -2.0)]
    assert after_optax(guarded, *steps) == after_chain(chain, *steps) == expected
    assert math.isnan(after_optax(guarded, *steps, [[math.nan]])[-1][0][0])
    with pytest.raises(RuntimeError, match="3 steps in a row were skipped"):
        after_chain(chain, *steps, [[math.nan]])


@pytest.mark.slow
@pytest.mark.peers
def test_parameters_outside_of_a_masked_optimizer():
    grads = [[3.0], [4.0]]
    assert after_optax(lambda optax: optax.masked(optax.sgd(0.5), [True, False]), grads) == [[[-1.5], [4.0]]]
    with pytest.warns(UserWarning, match="no optimizer acts on 1"):
        assert after_chain(lambda model: Modular(model, SGD(0.5).only("0")), grads) == [[[-1.5], [-2.0]]]


# from trainers


@compares
@pytest.mark.slow
def test_a_clip_that_stays_in_a_loop_of_accelerate_shows_in_the_metrics():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    norms = {}
    for stays in (False, True):
        accelerator, model = accelerate.Accelerator(cpu=True), net()
        model, optimizer = accelerator.prepare(model, Modular(model, ClipNorm(5.0, dim="global"), AdamW()))
        assert not hasattr(optimizer, "metrics")
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        before = get_total_norm([param.grad for param in model.parameters()]).item()
        if stays:
            assert accelerator.clip_grad_norm_(model.parameters(), 1e-5).item() == pytest.approx(before, rel=1e-6)
        optimizer.step()
        norms[stays] = integrations.metrics(optimizer)["clip_norm/norm"].item()
    assert norms[False] == pytest.approx(before, rel=1e-6)
    assert norms[True] == pytest.approx(before * 1e-5 / (before + 1e-6), rel=1e-5)


@compares
@pytest.mark.slow
def test_settings_and_logs_of_the_trainer_of_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            return {"loss": F.mse_loss(self.net(x).squeeze(-1), labels)}

    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(32)]
    results, logs = [], []
    for chain in (False, True):
        model = Net()
        given = {"max_grad_norm": 0, "learning_rate": 1.0} if chain else {"max_grad_norm": 0.05, "learning_rate": 1e-2}
        optimizer = Modular(model, ClipNorm(0.05, dim="global"), AdamW(1e-2, weight_decay=0.0)) if chain else None
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **given
        )
        callbacks = [integrations.TrainerCallback()] if chain else []
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=callbacks
        )
        trainer.train()
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        logs.append([log for log in trainer.state.log_history if "loss" in log])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    for old, new in zip(*logs, strict=True):
        assert new["learning_rate"] == old["learning_rate"]  # the scheduler is the Trainer's; its rate is the chain's
        assert new["clip_norm/norm"] == pytest.approx(old["grad_norm"], rel=1e-4)
        assert new["grad_norm"] == pytest.approx(new["clip_norm/norm"], rel=1e-5)
    assert transformers.TrainingArguments(str(tmp_path), use_cpu=True).max_grad_norm == 1.0


@compares
@pytest.mark.slow
def test_lightning_does_not_notice_a_clip_by_hand(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class ByHand(lightning.LightningModule):
        def __init__(self, limit):
            super().__init__()
            self.net, self.limit, self.automatic_optimization = net(), limit, False

        def configure_optimizers(self):
            return Modular(self, ClipNorm(5.0, dim="global"), AdamW())

        def training_step(self, batch, index):
            self.optimizers().zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            if self.limit is not None:
                self.clip_gradients(self.optimizers(), self.limit, "norm")
            self.optimizers().step()

    norms = {}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for limit in (None, 1e-5):
        trainer = lightning.Trainer(
            default_root_dir=tmp_path,
            max_epochs=1,
            accelerator="cpu",
            callbacks=[integrations.LightningCallback()],
            enable_checkpointing=False,
            **quiet,
        )
        trainer.fit(ByHand(limit), torch.utils.data.DataLoader(torch.ones(2, 4), 2))
        norms[limit] = trainer.callback_metrics["clip_norm/norm"].item()
    assert norms[1e-5] == pytest.approx(norms[None] * 1e-5 / (norms[None] + 1e-6), rel=1e-5)


# the blocks of the pages that need the other tool


@pytest.mark.slow
@compares
@pytest.mark.parametrize("name", ["opacus", "optax"])
def test_all_blocks_run_with_the_other_tool(name):
    imported_opacus() if name == "opacus" else pytest.importorskip("optax", reason="optax is not installed")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    names = {"model": model, "torch": torch, "F": F, "inputs": torch.randn(16, 4), "targets": torch.randn(16, 1)}
    if name == "optax":
        jax = pytest.importorskip("jax", reason="jax is not installed")
        params = {"embedding": jax.numpy.ones((3, 2)), "head": jax.numpy.ones(2)}
        names |= {"jax": jax, "params": params, "grads": params}
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", (PAGES / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        if "torchzero_clip.private" not in block:  # tests/test_private.py runs it
            exec(compile(block, name, "exec"), {} if "PrivacyEngine" in block else names)
    assert len(blocks) >= 3
