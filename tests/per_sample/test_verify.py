"""check_per_sample finds what is wrong, and says where."""

import copy
import re

import pytest
import torch
from per_sample.harness import weight
from per_sample.mixers import (
    MIXERS,
    NAMED,
    RIGHT,
    TOLD_APART,
    Layer,
    Scale,
    Shift,
    Wrong,
    added_next,
    centered,
    contrastive,
    linear,
    squares,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper, check_per_sample, register_rule
from torchzero_clip.per_sample.verify import _gradients as gradients_of_one


def batch(count=5):
    return torch.randn(count, 4), torch.randint(0, 3, (count,))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def reduced(how):
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction=how)


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def test_norms_of_a_right_model_are_returned_and_nothing_is_changed():
    model, data = small(), batch()
    before = copy.deepcopy(model.state_dict())
    norms = check_per_sample(model, data, losses)
    result = PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).backward(losses(model, data))
    for name, norm in result.param_norms.items():
        torch.testing.assert_close(norm.double(), norms[name], rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_a_single_loss_is_checked_as_declared(how):
    model, data = small(), batch()
    norms = check_per_sample(model, data, reduced(how), loss_reduction=how)
    for name, expected in check_per_sample(model, data, losses).items():
        torch.testing.assert_close(norms[name], expected)


@pytest.mark.parametrize(("declared", "actual"), [("mean", "sum"), ("sum", "mean")])
def test_a_wrong_reduction_is_named(declared, actual):
    with pytest.raises(ValueError, match=f"the loss is the {actual} over samples, but loss_reduction='{declared}'"):
        check_per_sample(small(), batch(), reduced(actual), loss_reduction=declared)


def test_a_loss_that_divides_by_something_of_the_batch_is_found():
    def loss_fn(model, batch):
        each = losses(model, batch) * batch[1]
        return each / batch[1].sum()

    with pytest.raises(
        ValueError, match=r"layer .0. .Linear. is the first .* or the loss of a sample depends on others"
    ):
        check_per_sample(small(), (torch.randn(5, 4), torch.tensor([1, 2, 1, 2, 1])), loss_fn)


@pytest.mark.parametrize("name", MIXERS)
def test_the_layer_that_gets_gradients_of_several_samples_is_named(name):
    model, data = MIXERS[name]()
    with pytest.raises((ValueError, RuntimeError)) as error:
        check_per_sample(model, data, squares)
    layer = re.escape(NAMED[name]) if name in NAMED else r"Layer|'' \(Layer\)"
    assert re.search(f"change the gradient of one row of ({layer}),|^layer ({layer}) is the first", str(error.value))


@pytest.mark.parametrize("name", MIXERS)
def test_a_module_that_is_run_whole_and_mixes_samples_is_named(name):
    model, data = MIXERS[name]()
    with pytest.raises(
        ValueError, match=f"^{type(model).__name__} gives another output for a batch .*: it mixes samples"
    ):
        check_per_sample(model, data, squares, whole=[type(model)])


@pytest.mark.parametrize("size", [3, 2])
def test_batch_norm_in_training_mode_is_named_also_if_it_refuses_a_single_sample(size):
    model, data = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)), torch.randn(4, 2, size, size)
    with pytest.raises(
        ValueError, match=r"^'1' \(BatchNorm2d\) cannot be clipped .* mixes the samples .*: call its eval"
    ):
        check_per_sample(model, data, squares)
    check_per_sample(model.eval(), data, squares)


def test_an_error_for_a_single_sample_is_explained():
    def loss_fn(model, x):
        if len(x) < 2:
            raise ValueError("two samples, please")
        return model(x).square().sum(1)

    with pytest.raises(RuntimeError, match=r"loss_fn raised for one sample alone.*: two samples, please"):
        check_per_sample(linear(), torch.randn(4, 3), loss_fn)


def test_what_a_model_stores_of_its_last_forward_may_have_a_graph():
    def forward(m, x):
        m.last = m.head(x)
        m.all = {"outputs": [m.last, (m.last * 2,)]}
        return m.last

    model, x = Layer(forward, head=linear()), torch.randn(4, 3)
    last = model(x)
    check_per_sample(model, x, squares)
    assert model.last is last
    assert last.grad_fn is not None


@pytest.mark.parametrize("whole", [(), (Layer,)])
def test_a_model_may_run_modules_under_vmap(whole):
    model = Layer(lambda m, x: m.head(torch.vmap(m.act)(m.first(x))), first=linear(), act=nn.Tanh(), head=linear())
    check_per_sample(model, torch.randn(4, 3), squares, whole=whole)


def test_a_loss_that_mixes_samples_is_found():
    pairs = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(RuntimeError, match=r"the model or the loss mixes .* gradient of one row of Linear"):
        check_per_sample(nn.Linear(3, 2), pairs, contrastive)
    with pytest.raises(RuntimeError, match=r"the model or the loss mixes .* gradient of one row of Linear"):
        check_per_sample(nn.Linear(3, 2), torch.randn(4, 3), lambda m, x: centered(m, m(x)).square().sum(1).squeeze())
    with pytest.raises(
        ValueError, match="gradients of 2 calls of the model have arrived, and not all of them are connected"
    ):
        check_per_sample(nn.Linear(3, 2), pairs, lambda model, batch: contrastive(model, batch).mean())


@pytest.mark.parametrize("name", TOLD_APART)
def test_positions_are_not_taken_for_samples(name):
    check_per_sample(TOLD_APART[name](), torch.randn(4, 4, 3), squares)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_pass(name):
    model, data, *loss = RIGHT[name]()
    state = torch.get_rng_state()
    check_per_sample(model, data, *loss or (squares,), whole=(Layer,) if name.endswith("whole") else ())
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_without_a_gradient_are_the_same_in_all_runs():
    model = Layer(lambda m, x: m.head(x) + torch.rand(()), head=linear())
    check_per_sample(model, torch.randn(4, 3), lambda m, x: m(x).sum(1))


@pytest.mark.parametrize("target", [torch.full((4, 3), 0.999), torch.tensor([[True, False, True]] * 4)])
def test_mixing_behind_a_closed_gate_is_found_by_noise_on_parameters(target):
    model = Layer(lambda m, x: m.head(added_next(m, x)).sigmoid(), gate=weight(3, value=0.0), head=linear())

    def loss_fn(model, batch):
        return F.binary_cross_entropy(model(batch[0]), batch[1].to(batch[0].dtype), reduction="none").sum(1)

    with pytest.raises(ValueError, match=r"^Layer gives another output for a batch .*: it mixes samples"):
        check_per_sample(model, (torch.randn(4, 3), target), loss_fn, whole=(Layer,))
    with pytest.raises(ValueError, match=r"layer '' \(Layer\) is the first that differs .* its 'gate'"):
        check_per_sample(model, (torch.randn(4, 3), target), loss_fn)


def test_a_registered_rule_is_used_by_subclasses_too_and_is_right():
    calls = []

    def gradients(module, grad_output, x):
        calls.append(type(module).__name__)
        return {"weight": grad_output * x}

    register_rule(Scale, gradients)
    check_per_sample(nn.Sequential(nn.Linear(4, 4), Scale(4), Shift(4), nn.Linear(4, 3)), batch(), losses)
    assert set(calls) == {"Scale", "Shift"}


def test_a_wrong_rule_is_named():
    register_rule(Wrong, lambda module, grad_output, x: {"weight": grad_output * x * 2})
    with pytest.raises(ValueError, match=r"layer '1' \(Wrong\) is the first that differs"):
        check_per_sample(nn.Sequential(nn.Linear(4, 4), Wrong(4), nn.Linear(4, 3)), batch(), losses)


@pytest.mark.parametrize(
    ("gradients", "match"),
    [
        (lambda module, grad_output, x: {}, r"must return gradients for \['weight'\], got some for \[\]"),
        (lambda module, grad_output, x: {"weight": grad_output.sum(0)}, r"must return a tensor of shape \('B', 4\)"),
    ],
)
def test_a_rule_that_returns_something_else_is_named(gradients, match):
    register_rule(Wrong, gradients)
    with pytest.raises(ValueError, match=rf"the rule of '1' \(Wrong\) {match}"):
        check_per_sample(nn.Sequential(nn.Linear(4, 4), Wrong(4), nn.Linear(4, 3)), batch(), losses)


def test_rules_that_are_none_are_refused():
    with pytest.raises(TypeError, match="module_class"):
        register_rule(Wrong(3), print)
    with pytest.raises(TypeError, match="module_class must be a class of modules"):
        register_rule(int, print)
    with pytest.raises(TypeError, match="per_sample_gradients"):
        register_rule(Wrong, None)


def test_a_reentrant_checkpoint_is_refused_with_its_way_out():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    reentrant = True
    with pytest.raises(RuntimeError, match=r"checkpoint with use_reentrant=True .* with use_reentrant=False"):
        check_per_sample(model, batch(), losses)
    reentrant = False
    assert len(check_per_sample(model, batch(), losses)) == 6


def test_random_numbers_are_named():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        check_per_sample(model, batch(), losses)
    check_per_sample(model.eval(), batch(), losses)


def test_an_attached_model_can_be_checked():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    norms = check_per_sample(model, batch(), losses)
    found = clipper.backward(losses(model, batch())).param_norms  # it is attached as before
    assert found.keys() == norms.keys()


def test_sequences_first():
    def loss_fn(model, x):
        return model(x)[0].square().sum((0, 2))

    check_per_sample(nn.LSTM(4, 3), torch.randn(7, 5, 4), loss_fn, batch_first=False)
    with pytest.raises(ValueError, match="samples"):
        check_per_sample(nn.Linear(4, 3), torch.randn(7, 5, 4), lambda m, x: m(x).square().sum((0, 2)))


def test_what_mixes_between_two_modules_is_not_blamed_on_the_next_one():
    model = Layer(lambda m, x: m.second((h := m.first(x)) - h.mean(0)), first=linear(), second=linear())
    with pytest.raises(RuntimeError, match=r"one row of 'first' \(Linear\), so they are mixed in this layer or later"):
        check_per_sample(model, torch.randn(4, 3), squares)


def test_values_without_a_gradient_are_found_by_the_comparison():
    model = Layer(lambda m, x: m.second((h := m.first(x)) - h.detach().mean(0)), first=linear(), second=linear())
    with pytest.raises(ValueError, match=r"layer 'first' \(Linear\) is the first that differs"):
        check_per_sample(model, torch.randn(4, 3), squares)


def single(model, batch):
    return model(batch).squeeze(1)


@pytest.mark.parametrize(
    ("model", "count", "loss", "message"),
    [
        (linear(3, 1), 0, single, "batch must hold at least one sample"),
        (linear(3, 1).requires_grad_(False), 2, single, "no parameters that train"),
        (linear(3, 1), 2, lambda m, x: m(x), r"one loss for each sample, \(B,\), .* got \(2, 1\)"),
    ],
)
def test_checks_of_nothing_are_refused(model, count, loss, message):
    with pytest.raises(ValueError, match=message):
        check_per_sample(model, torch.randn(count, 3), loss)


@pytest.mark.parametrize("before", [None, 2.0])
def test_gradients_of_tensors_outside_of_the_model_stay_as_they_are(before):
    scale = torch.ones(3, requires_grad=True)
    scale.grad = None if before is None else torch.full((3,), before)
    check_per_sample(nn.Linear(4, 3), batch(), lambda model, batch: losses(lambda x: model(x) * scale, batch))
    assert scale.grad is None if before is None else scale.grad.tolist() == [before] * 3


def test_a_check_that_raises_leaves_gradients_of_tensors_outside_as_they_are():
    scale = torch.ones(3, requires_grad=True)

    def centered_losses(model, batch):
        output = model(batch[0])
        return losses(lambda x: (output - output.mean(0)) * scale, batch)

    with pytest.raises(RuntimeError, match="mixes samples"):
        check_per_sample(nn.Linear(4, 3), batch(), centered_losses)
    assert scale.grad is None


def test_the_backward_of_one_sample_leaves_other_gradients_as_they_are():
    model, head, other = small(), nn.Linear(3, 2), nn.Linear(3, 2)
    other.weight.grad = torch.ones(2, 3)
    output = model(torch.randn(1, 4))
    params = dict(model.named_parameters())
    expected = torch.autograd.grad((head(output) + other(output)).sum(), list(params.values()), retain_graph=True)
    torch.testing.assert_close(gradients_of_one((head(output) + other(output)).sum(), params), list(expected))
    assert head.weight.grad is None
    assert torch.equal(other.weight.grad, torch.ones(2, 3))
