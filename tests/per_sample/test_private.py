"""PrivateGradientClipper: the numbers of a release, its order of calls, what it refuses, and its state."""

import copy
import gc
import importlib
import math
import pickle
import sys
import weakref
from itertools import repeat

import pytest
import torch
from defaults import DEFAULTS
from per_sample.harness import Net, assert_close, assert_grads, batch, grads, losses_of, reference, small, weight
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchzero_clip import (
    SGD,
    AutomaticClipper,
    ClipNorm,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    Modular,
    NormClipper,
    PrivateGradientClipper,
    Recorder,
    SkipStep,
)


def private(model, limit=1.0, noise_multiplier=0.0, expected_batch_size=1.0, **settings):
    norm_clipper = limit if isinstance(limit, NormClipper) else ConstantFlatClipper(limit)
    given = {"noise_multiplier": noise_multiplier, "expected_batch_size": expected_batch_size, **settings}
    return PrivateGradientClipper(model, norm_clipper, **given)


def flat(model):
    return torch.cat([grad.flatten() for grad in grads(model)])


def normals(model, seed, std):
    """What a generator of this seed draws for each parameter, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.normal(0.0, std, p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]


# numbers


def test_the_release_is_the_noisy_sum_over_the_expected_size():
    model, x = small(), batch()
    expected = reference(model, x, 0.5)[1]
    clipper = private(model, 0.5, 3.0, 7.0, generator=torch.Generator().manual_seed(2))
    for param in model.parameters():
        param.grad = torch.full_like(param, 5.0)
    old = [grad.clone() for grad in grads(model)]
    clipper.backward(losses_of(model(x)))
    assert_grads(model, old, rtol=0, atol=0)  # backward leaves them alone
    max_norms, count = clipper.pre_step()
    assert max_norms.tolist() == [0.5] * 4
    assert count == 5
    noise = normals(model, 2, 1.5)
    assert_grads(model, [(a + b) / 7 for a, b in zip(expected, noise, strict=True)])


def test_parts_of_a_batch_add_up_to_the_batch():
    model, x = small(), batch(6)
    clipper = private(model)
    for part in x.split([1, 0, 3, 2]):
        clipper.backward(losses_of(model(part)))
    assert clipper.pre_step()[1] == 6
    assert_grads(model, reference(model, x)[1])


def test_a_step_without_samples_releases_noise_over_what_was_there():
    for losses in (None, lambda model: losses_of(model(batch(0))), lambda model: torch.zeros(0)):
        model = small()
        clipper = private(model, ConstantPerLayerClipper([2.0]), 1.0, 4.0, generator=torch.Generator().manual_seed(0))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if losses is not None:
            result = clipper.backward(losses(model))
            assert [factors.shape for factors in result.factors] == [(0,)] * 4
        max_norms, count = clipper.pre_step()
        assert max_norms.tolist() == [4.0] * 4  # known before the first sample
        assert count == 0
        assert_grads(model, [noise / 4 for noise in normals(model, 0, 4.0)])
        assert clipper.releases == {1.0: 1}


def test_limits_per_layer_have_a_joint_norm():
    model, x = small(), batch()
    limits = [0.3, 0.4, 1.2, 0.0]
    clipper = private(model, ConstantPerLayerClipper(limits), 2.0, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(model)
    clipper.backward(losses_of(model(x)))
    assert clipper.pre_step()[0].tolist() == pytest.approx([1.3] * 4)
    exact = private(twin, ConstantPerLayerClipper(limits))
    exact.backward(losses_of(twin(x)))
    exact.pre_step()
    assert_grads(model, [a + b for a, b in zip(grads(twin), normals(model, 0, 2.6), strict=True)])


def test_a_layer_that_was_not_used_gets_noise_too():
    model = Net(lambda m, x: m.first(x), first=nn.Linear(3, 2), second=nn.Linear(3, 2))
    clipper = private(model, noise_multiplier=1.0)
    clipper.backward(losses_of(model(torch.randn(4, 3))))
    clipper.pre_step()
    assert model.second.weight.grad.all()


def test_noise_has_its_variance_and_two_releases_are_independent():
    model = nn.Linear(300, 200)
    clipper = private(model, 0.5, 4.0, 8.0)
    found = []
    for _ in range(2):
        clipper.pre_step()
        found.append(flat(model))
    for noise in found:
        assert abs(noise.mean()) < 6 * 0.25 / math.sqrt(len(noise))
        assert noise.var().item() == pytest.approx(0.25**2, rel=6 * math.sqrt(2 / len(noise)))
    assert abs(torch.corrcoef(torch.stack(found))[0, 1]) < 6 / math.sqrt(len(found[0]))


def test_the_noise_multiplier_and_the_limit_may_change_between_steps():
    model, generator = small(), torch.Generator().manual_seed(1)
    clipper = private(model, noise_multiplier=1.0, generator=generator)
    for noise_multiplier, limit in ((1.0, 1.0), (0.5, 1.0), (0.5, 3.0)):
        clipper.noise_multiplier = noise_multiplier
        clipper.norm_clipper = ConstantFlatClipper(limit)
        generator.manual_seed(1)
        clipper.pre_step()
        assert_grads(model, normals(model, 1, noise_multiplier * limit))
    assert clipper.releases == {1.0: 1, 0.5: 2}


def test_a_second_release_in_each_step_shares_the_noise_and_counts():
    model, generator = small(), torch.Generator()
    clipper = private(model, noise_multiplier=1.2, generator=generator)
    for second, alone in ((2.0, 1.5), (1.25, 30 / 7), (math.inf, 1.2)):  # 1 / alone**2 + 1 / second**2 = 1 / 1.2**2
        clipper.second_noise_multiplier = second
        generator.manual_seed(1)
        clipper.pre_step()
        assert_grads(model, normals(model, 1, alone))
    assert clipper.releases == {1.2: 3}


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("second_noise_multiplier", 1.0, ValueError, "must be above noise_multiplier, 1.0, got 1.0"),
        ("second_noise_multiplier", math.nan, ValueError, "must be above noise_multiplier, 1.0, got nan"),
        ("second_noise_multiplier", None, TypeError, "second_noise_multiplier must be a number, got None"),
        ("noise_multiplier", 2.0, ValueError, "must be above noise_multiplier, 2.0, got 2.0"),
    ],
)
def test_a_second_release_has_more_noise_than_both_together(name, value, error, match):
    clipper = private(small(), noise_multiplier=1.0)
    clipper.second_noise_multiplier = 2.0
    with pytest.raises(error, match=match):
        setattr(clipper, name, value)
    assert (clipper.noise_multiplier, clipper.second_noise_multiplier) == (1.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_float32_and_rounded_after_the_noise(dtype):
    model = nn.Linear(64, 1, bias=False).to(dtype)
    x = torch.randn(4096, 64).to(dtype)
    clipper = private(model, 1.0, 1e-3, 1.0, generator=torch.Generator().manual_seed(0))
    for part in x.split(1000):
        clipper.backward(model(part).squeeze(1))
    clipper.pre_step()
    rows = x.double()
    exact = (rows * (1 / (rows.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)).sum(0)
    noise = torch.normal(0.0, 1e-3, (1, 64), generator=torch.Generator().manual_seed(0))
    assert model.weight.grad.dtype == dtype
    expected = exact + noise[0].double()
    assert ((model.weight.grad[0].double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-4).all()


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_process_do_not_matter(name):
    model, x = small().float(), batch().float()
    clipper = private(model, noise_multiplier=1.0, generator=torch.Generator("cpu").manual_seed(0))
    expected = [a + b for a, b in zip(reference(model, x)[1], normals(model, 0, 1.0), strict=True)]
    with DEFAULTS[name]():
        clipper.backward(losses_of(model(x)))
        clipper.pre_step()
    assert_grads(model, expected, rtol=1e-5, atol=1e-6)


def test_automatic_clipping_brings_each_sample_near_the_limit():
    model, x = small(), batch()
    clipper = private(model, AutomaticClipper(2.0))
    result = clipper.backward(losses_of(model(x)))
    assert_close(result.factors, 2 / (reference(model, x)[0] + 0.01))
    assert (result.factors * result.norms < 2).all()


def test_a_sample_that_is_not_finite_adds_zeros():
    model, x = small(), batch()
    twin = copy.deepcopy(model)
    x[2] = math.nan
    for each, data in ((model, x), (twin, x[[0, 1, 3, 4]])):
        clipper = private(each)
        result = clipper.backward(losses_of(each(data)))
        clipper.pre_step()
    assert not result.nonfinite.any()
    assert_grads(model, grads(twin))


# the order of calls


def test_a_step_before_the_release_raises_and_changes_nothing():
    model = small()
    optimizers = torch.optim.SGD(model.parameters(), lr=1.0), Modular(model, SGD(lr=1.0))
    clipper = private(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(model.state_dict())
    clipper.backward(losses_of(model(batch())))
    for optimizer in optimizers:
        with pytest.raises(RuntimeError, match=r"call clipper.pre_step\(\) before the step"):
            optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.optim.SGD(small().parameters()).step()  # other parameters
    clipper.pre_step()
    optimizers[0].step()
    clipper.backward(losses_of(model(batch())))
    clipper.discard()
    optimizers[0].step()
    assert clipper.pre_step()[1] == 0


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("make", [lambda m: torch.optim.SGD(m.parameters()), lambda m: Modular(m, SGD(lr=1.0))])
def test_closures_are_refused(make, by_keyword):
    model = small()
    optimizer, clipper = make(model), private(model)
    clipper.pre_step()
    with pytest.raises(RuntimeError, match="a closure brings a loss, which is private"):
        optimizer.step(closure=lambda: 1.0) if by_keyword else optimizer.step(lambda: 1.0)
    clipper.detach()
    optimizer.step(lambda: torch.tensor(1.0))


def test_reported_losses_are_refused():
    model = small()
    optimizer = Modular(model, SkipStep(sigma=3.0), SGD(lr=1.0))
    recorder, other = Recorder(optimizer), Recorder(torch.optim.SGD(model.parameters()))
    optimizer.report_loss(1.0)
    clipper = private(model)
    for reports in (optimizer, recorder, other):
        with pytest.raises(RuntimeError, match="report_loss brings a loss, which is private"):
            reports.report_loss(1.0)
    Modular(small(), SGD(lr=1.0)).report_loss(1.0)  # of other parameters
    del clipper
    gc.collect()
    recorder.report_loss(1.0)


def test_the_classic_form_is_refused():
    model = small()
    with pytest.raises(RuntimeError, match=r"call backward\(losses\) with one loss for each sample"):
        private(model).clip_and_accumulate()


def test_limits_that_change_within_a_step_raise_and_change_nothing():
    model, x = small(), batch()
    clipper = private(model)
    clipper.backward(losses_of(model(x)))
    clipper.norm_clipper.flat_value = 2.0
    with pytest.raises(RuntimeError, match=r"was 1\.0 in an earlier backward of this step, and is 2.0 now"):
        clipper.pre_step()
    with pytest.raises(RuntimeError, match="change limits between"):
        clipper.backward(losses_of(model(x)))
    assert clipper.releases == {}
    clipper.discard()
    clipper.norm_clipper.flat_value = 1.0
    clipper.backward(losses_of(model(x)))
    clipper.pre_step()
    assert_grads(model, reference(model, x)[1])


def test_a_hook_that_raises_leaves_grad_and_sums_but_counts_because_it_has_seen_the_release():
    model, x = small(), batch()
    clipper = private(model)
    clipper.backward(losses_of(model(x)))
    handle = model[2].bias.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clipper.pre_step()
    assert grads(model) == [None] * 4
    handle.remove()
    assert clipper.pre_step()[1] == 5
    assert_grads(model, reference(model, x)[1])
    assert clipper.releases == {0.0: 2}


def test_hooks_of_parameters_see_the_noisy_mean_only():
    model, seen = small(), []
    clipper = private(model, noise_multiplier=1.0)
    model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    clipper.backward(losses_of(model(batch())))
    assert seen == []
    clipper.pre_step()
    assert [torch.equal(x, model[0].weight.grad) for x in seen] == [True, True]


def test_parameters_frozen_in_a_step_raise_and_between_steps_get_no_noise():
    model = small()
    clipper = private(model, noise_multiplier=1.0)
    clipper.backward(losses_of(model(batch())))
    model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen"):
        clipper.pre_step()
    clipper.discard()
    clipper.pre_step()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


def test_a_deleted_clipper_leaves_nothing():
    model = small()
    before = len(model._forward_pre_hooks), "forward" in vars(model[0])
    clipper = private(model)
    clipper.backward(losses_of(model(batch())))
    alive = weakref.ref(clipper)
    del clipper
    gc.collect()
    assert alive() is None
    assert (len(model._forward_pre_hooks), "forward" in vars(model[0])) == before
    torch.optim.SGD(model.parameters()).step()


def test_sums_of_a_detached_clipper_can_be_released():
    model, x = small(), batch()
    with private(model) as clipper:
        clipper.backward(losses_of(model(x)))
    with pytest.raises(RuntimeError, match="pre_step"):
        torch.optim.SGD(model.parameters()).step()
    assert clipper.pre_step()[1] == 5
    assert_grads(model, reference(model, x)[1])
    assert not model._forward_pre_hooks


# refusals


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"verify": "never"}, ValueError, "verify must not be 'never'"),
        ({"nonfinite": "raise"}, ValueError, "nonfinite must be one of 'zero', got 'raise'"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": math.inf}, ValueError, "noise_multiplier must be finite"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier must be a number"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size must be > 0"),
        ({"expected_batch_size": math.inf}, ValueError, "expected_batch_size must be finite"),
        ({"generator": 5}, TypeError, "generator must be of class Generator"),
        ({"limit": 1}, TypeError, "norm_clipper must be of class NormClipper"),
    ],
)
def test_arguments_that_void_the_guarantee_are_refused(arguments, error, match):
    if "limit" in arguments:
        arguments = {"norm_clipper": 1.0}
    model = small()
    with pytest.raises(error, match=match):
        PrivateGradientClipper(
            **{
                "module": model,
                "norm_clipper": ConstantFlatClipper(1.0),
                "noise_multiplier": 1.0,
                "expected_batch_size": 1.0,
                **arguments,
            }
        )
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        (ConstantFlatClipper(math.inf), "must be between 0 and 1e\\+30"),
        (ConstantFlatClipper(1e31), "must be between 0 and 1e\\+30"),
        (ConstantPerLayerClipper([1.0, math.inf, 1.0, 1.0]), "must be between 0 and 1e\\+30"),
    ],
)
def test_limits_without_a_sensitivity_are_refused(limit, match):
    model = small()
    clipper = private(model, limit)
    with pytest.raises(ValueError, match=match):
        clipper.backward(losses_of(model(batch())))
    with pytest.raises(ValueError, match=match):
        clipper.pre_step()
    assert grads(model) == [None] * 4


def test_a_wrong_number_of_limits_is_refused_when_the_clipper_is_made():
    model = small()
    with pytest.raises(ValueError, match="one for each of 4 norms, got 2"):
        private(model, ConstantPerLayerClipper([1.0, 1.0]))
    assert not model._forward_pre_hooks


class Broken(NormClipper):
    """Factors of the user's own."""

    is_per_layer = False
    thresholds = torch.ones(1)

    def __init__(self, factor):
        self.factor = factor

    def calc_clipping_factors(self, norms):
        return self.factor(norms[0])


@pytest.mark.parametrize(
    ("factor", "is_right"),
    [
        (lambda norms: repeat(1 / norms), True),
        (lambda norms: repeat(-1 / norms), True),
        (lambda norms: repeat(1.001 / norms), False),
        (lambda norms: repeat(-1.001 / norms), False),
        (lambda norms: repeat(norms * math.nan), False),
        (lambda norms: [1 / norms, 1 / norms, 1 / norms, 0 / norms], True),
        (lambda norms: [1 / norms, 1 / norms, 1 / norms, 2 / norms], False),
    ],
)
def test_a_norm_clipper_that_breaks_its_own_limit_is_refused(factor, is_right):
    model = small()
    clipper = private(model, Broken(factor))
    losses = losses_of(model(batch()))
    if is_right:
        clipper.backward(losses)
    else:
        with pytest.raises(RuntimeError, match="breaks its own limit"):
            clipper.backward(losses)
    assert clipper.pre_step()[1] == 5 * is_right
    assert flat(model).any() == is_right


@pytest.mark.parametrize("outside", ["head", "input", "head in a checkpoint"])
def test_leaves_outside_that_would_get_a_gradient_are_refused(outside):
    model, head, x = small(), nn.Linear(2, 2).double(), batch()
    clipper = private(model)
    if outside == "input":
        output = model(x.requires_grad_())
    else:
        head_of = head if outside == "head" else lambda h: checkpoint(head, h, use_reentrant=False)
        output = head_of(model(x))
    with pytest.raises(RuntimeError, match="outside of the module would get a gradient"):
        clipper.backward(losses_of(output))
    assert x.grad is None
    assert grads(head) == [None, None]
    head.requires_grad_(False)
    clipper.backward(losses_of(head(model(x.detach()))))  # a frozen head is fine
    clipper.pre_step()


def test_a_parameter_that_cannot_be_used_so_is_named():
    def forward(m, x):
        x = m.last(x)[:, None]
        return F.multi_head_attention_forward(x, x, x, 2, 1, m.a, None, None, None, False, 0.0, m.b, None)[0][:, 0]

    model = Net(forward, last=small(), a=weight(6, 2), b=weight(2, 2)).double()
    with pytest.raises(RuntimeError, match=r"^Net uses a parameter in 'multi_head.*whole=\(Net,\)"):
        private(model).backward(losses_of(model(batch())))


def test_reentrant_checkpoints_are_refused():
    model = Net(lambda m, x: checkpoint(m.last, m.first(x), use_reentrant=True), first=nn.Linear(3, 3), last=small())
    clipper = private(model.double())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        clipper.backward(losses_of(model(batch())))
    assert all(grad is None for grad in grads(model))


class ReadsOnce(torch.autograd.Function):
    """A loss whose backward runs only once."""

    @staticmethod
    def forward(ctx, x):
        ctx.is_new = True
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not ctx.is_new:
            raise RuntimeError("once only")
        ctx.is_new = False
        return grad


def test_losses_that_cannot_be_checked_for_mixing_are_refused():
    model = small()
    clipper = private(model)
    with pytest.raises(
        RuntimeError, match="cannot be checked whether samples mix, because the graph cannot run backward twice"
    ):
        clipper.backward(ReadsOnce.apply(losses_of(model(batch()))))
    assert clipper.pre_step()[1] == 0


def test_samples_that_mix_are_refused_and_change_nothing():
    model = small()
    clipper = private(model)
    with pytest.raises(RuntimeError, match="mixes samples"):
        clipper.backward(losses_of(model(batch()) - model(batch()).mean(0)))
    assert clipper.pre_step()[1] == 0
    assert not flat(model).any()


class Running(nn.Module):
    """Adds a running mean of the batch to a buffer, and counts in another."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = small(), kind
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        if self.kind == "in place":
            self.mean.add_(x.detach().mean(0))
        elif self.kind == "replaced":
            self.mean = x.detach().mean(0)
        elif self.kind == "new":
            self.register_buffer("other", x.detach())
        return self.inner(x)


@pytest.mark.parametrize("without_gradients", [False, True])
@pytest.mark.parametrize("kind", ["in place", "replaced", "new"])
def test_buffers_that_change_are_refused(kind, without_gradients):
    model = Running(kind)
    clipper = private(model)
    with torch.no_grad() if without_gradients else torch.enable_grad():
        losses = losses_of(model(batch()))
    if not without_gradients:
        with pytest.raises(RuntimeError, match=r"'(mean|other)' has changed since the step began"):
            clipper.backward(losses)
    with pytest.raises(RuntimeError, match=r"'(mean|other)' has changed since the step began"):
        clipper.pre_step()
    assert grads(model) == [None] * 4


def test_buffers_that_count_or_that_the_user_changes_between_steps_are_allowed():
    model = Running("none")
    clipper = private(model)
    for _ in range(3):
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        clipper.backward(losses_of(model(batch())))
        clipper.backward(losses_of(model(batch())))
        clipper.pre_step()
    assert model.steps == 6


def test_batch_norm_in_training_mode_is_refused_and_in_eval_mode_allowed():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    with pytest.raises(ValueError, match="BatchNorm1d"):
        private(model)
    clipper = private(model.eval())
    clipper.backward(losses_of(model(batch())))
    clipper.pre_step()


# state


def test_the_state_has_the_counts_only():
    model = small()
    clipper = private(model, noise_multiplier=1.5, generator=torch.Generator())
    clipper.pre_step()
    clipper.backward(losses_of(model(batch())))
    state = clipper.state_dict()
    assert state == {"releases": {1.5: 1}}
    other = private(small(), noise_multiplier=2)
    other.load_state_dict(state)
    other.pre_step()
    assert other.releases == {1.5: 1, 2.0: 1}
    assert state == {"releases": {1.5: 1}}


def test_the_state_survives_a_safe_load(tmp_path):
    clipper = private(small(), noise_multiplier=1.5)
    clipper.pre_step()
    torch.save(clipper.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"releases": {1.5: 1}}


@pytest.mark.parametrize("state", [{}, {"releases": 3}, {"releases": {-1.0: 2}}, {"releases": {1.0: -2}}, {"noise": 1}])
def test_states_of_other_things_are_refused(state):
    clipper = private(small(), noise_multiplier=1.5)
    clipper.pre_step()
    with pytest.raises(ValueError, match="must"):
        clipper.load_state_dict(state)
    assert clipper.releases == {1.5: 1}


def test_neither_pickles_nor_copies():
    clipper = private(small(), generator=torch.Generator())
    for call in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            call(clipper)


def test_copies_of_the_model_are_free():
    model = small()
    clipper = private(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    losses_of(twin(batch())).sum().backward()
    torch.optim.SGD(twin.parameters()).step(lambda: 1.0)
    assert clipper.releases == {}


def test_an_import_without_the_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.delitem(sys.modules, "torchzero_clip.private", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'needs the extra private: pip install "\.\[private\]"') as caught:
        importlib.import_module("torchzero_clip.private")
    assert caught.value.name == "dp_accounting"


def test_any_optimizer_takes_the_release():
    model, x = small(), batch()
    expected = reference(model, x)[1]
    clipper = private(model, expected_batch_size=5)
    optimizer = Modular(model, ClipNorm(0.01, dim="global"), SGD(lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    clipper.backward(losses_of(model(x)))
    clipper.pre_step()
    optimizer.step()
    norm = torch.cat([value.flatten() / 5 for value in expected]).norm()
    for param, old, value in zip(model.parameters(), before, expected, strict=True):
        assert_close(param.detach(), old - 0.01 / norm * value / 5, rtol=1e-6)
    assert repr(clipper) == (
        "PrivateGradientClipper(ConstantFlatClipper(1.0), noise_multiplier=0.0, expected_batch_size=5.0)"
    )
