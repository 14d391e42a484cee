"""GradSampleModuleFastGradientClipping: its numbers, in one pass and in two, and what it shows of the model."""

import copy
import pickle

import pytest
import torch
from per_sample.harness import assert_close, assert_grads, loop, losses_of, norms_of, total_of
from torch import nn

from torchzero_clip import GradSampleModuleFastGradientClipping, create_norm_sample

KINDS = [(ghost, functorch) for ghost in (True, False) for functorch in (False, True)]
kinds = pytest.mark.parametrize(("ghost", "functorch"), KINDS)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def wrap(model, ghost=True, functorch=False, **kwargs):
    return GradSampleModuleFastGradientClipping(model, use_ghost_clipping=ghost, force_functorch=functorch, **kwargs)


def batch():
    return torch.randn(5, 6, 3, dtype=torch.float64) * torch.arange(1, 6)[:, None, None]


@kinds
@reductions
def test_one_pass_and_two_equal_one_backward_per_sample(ghost, functorch, reduction):
    model, x = small(), batch()
    each = loop(copy.deepcopy(model), [x])
    norms = total_of(norms_of(each))
    limit = norms.median().item()
    coefs = (limit / (norms + 1e-6)).clamp(max=1)
    expected = [torch.tensordot(coefs, g, 1) / (5 if reduction == "mean" else 1) for g in each.values()]
    reduce = torch.mean if reduction == "mean" else torch.sum
    module = wrap(model, ghost, functorch, loss_reduction=reduction, max_grad_norm=limit)

    result = module.backward(losses_of(module(x)))
    assert_close(result.norms, norms)
    assert_close(module.get_norm_sample(), norms)
    assert_grads(model, expected)

    model.zero_grad()
    losses = losses_of(module(x))
    reduce(losses).backward(retain_graph=True)
    assert all(param.grad is None for param in model.parameters())
    assert_close(module.get_norm_sample(), norms)
    coef = module.get_clipping_coef()
    assert_close(coef, coefs)
    module.disable_hooks()
    reduce(coef * losses).backward()
    module.enable_hooks()
    assert_grads(model, expected)
    module(x)


@kinds
@pytest.mark.parametrize("one_pass", [False, True])
def test_norm_samples_are_those_of_single_parameters_until_the_next_forward(ghost, functorch, one_pass):
    model, x = small(), batch()
    expected = norms_of(loop(model, [x]))
    module = wrap(model, ghost, functorch)
    losses = losses_of(module(x))
    module.backward(losses) if one_pass else losses.mean().backward()
    for name, param in model.named_parameters():
        assert_close(param.norm_sample, expected[name])
        assert param._norm_sample is param.norm_sample
    module.get_norm_sample()
    model[0].requires_grad_(False)
    module(x)
    assert not any(hasattr(param, "norm_sample") for param in model.parameters())


@pytest.mark.parametrize("part", [False, True], ids=["model", "part"])
def test_a_backward_that_nobody_consumed_is_forgotten_at_the_next_forward(part):
    model, x, y = nn.Linear(3, 2).double(), batch(), batch()[:3]
    expected = norms_of(loop(copy.deepcopy(model), [y]))
    module = wrap(model)
    losses_of(module(x)).mean().backward()
    losses = losses_of(model(y) if part else module(y))
    assert not hasattr(model.weight, "norm_sample")
    losses.mean().backward()
    for name, param in model.named_parameters():
        assert_close(param.norm_sample, expected[name])


def test_a_forward_without_hooks_is_that_of_the_model_and_forgets_norms():
    model, x = small(), batch()[:2]
    expected = torch.autograd.grad(losses_of(model(x)).sum(), list(model.parameters()))
    module = wrap(model)
    losses_of(module(batch())).mean().backward()
    module.get_norm_sample()
    module.disable_hooks()
    losses_of(module(x)).sum().backward()
    assert_grads(model, expected)
    module.enable_hooks()
    with pytest.raises(RuntimeError, match="there are no norms"):
        module.get_norm_sample()
    assert not any(hasattr(param, "norm_sample") for param in module.parameters())


def test_hooks_of_parameters_see_the_gradient_of_the_second_pass_once():
    layer = nn.Linear(3, 3).double()
    model, x, seen = nn.Sequential(layer, nn.Tanh(), layer), batch(), []
    layer.weight.register_hook(seen.append)
    module = wrap(model)
    losses = losses_of(module(x))
    losses.mean().backward(retain_graph=True)
    module.get_norm_sample()
    module.disable_hooks()
    losses.mean().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], layer.weight.grad)


@reductions
def test_output_gradients_can_be_given_by_hand(reduction):
    model, x, grad = nn.Linear(3, 2).double(), batch(), torch.randn(5, 6, 2, dtype=torch.float64)
    module = wrap(model, loss_reduction=reduction)
    scaled = grad / 5 if reduction == "mean" else grad
    module.capture_backprops_hook(model, (x,), (scaled,), reduction, True)
    weight, bias = torch.einsum("btp,btd->bpd", grad, x), grad.sum(1)
    assert_close(module.get_norm_sample(), (weight.square().sum((1, 2)) + bias.square().sum(1)).sqrt())
    assert_close(model.weight.norm_sample, weight.flatten(1).norm(dim=1))
    other = "sum" if reduction == "mean" else "mean"
    module(x)
    module.capture_backprops_hook(model, (x,), (grad if other == "sum" else grad / 5,), other, True)
    assert_close(model.bias.norm_sample, bias.norm(dim=1))
    with pytest.raises(ValueError, match="batch_first must be True"):
        module.capture_backprops_hook(model, (x,), (grad,), reduction, False)


class WithState(nn.Linear):
    flag = False
    state = 0

    def get_extra_state(self):
        return {"state": self.state}

    def set_extra_state(self, state):
        self.state = state["state"]

    def forward(self, x):
        return -super().forward(x) if self.flag else super().forward(x)


@pytest.mark.parametrize("nested", [False, True])
def test_states_of_its_own_are_saved_and_loaded(nested):
    model = WithState(3, 2)
    model.state = 7
    saved, loaded = wrap(model), wrap(WithState(3, 2))
    if nested:
        saved, loaded = nn.ModuleDict({"inner": saved}), nn.ModuleDict({"inner": loaded})
    loaded.load_state_dict(saved.state_dict())
    assert (loaded["inner"] if nested else loaded).state == 7


def test_attributes_set_on_it_are_those_of_the_model():
    model, x = WithState(3, 2).double(), batch()
    expected = -model(x)
    module = wrap(model)
    module.flag, module.note = True, "new"
    assert (model.flag, model.note) == (True, "new")
    assert_close(module(x), expected)
    module.max_grad_norm = 3.0
    assert not hasattr(model, "max_grad_norm")
    module.weight = nn.Parameter(torch.zeros_like(model.weight))
    assert not model.weight.any()


def test_it_shows_the_model_as_its_own():
    model = small()
    model.note = "mine"
    module = wrap(model)
    assert module.note == "mine"
    assert list(module.state_dict()) == list(model.state_dict())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    module.eval()
    assert not model.training
    assert not model[0].training
    module.load_state_dict(small().state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_wrappers_of_their_own(copied):
    model, x = small(), batch()
    module = wrap(model, max_grad_norm=0.5)
    twin = copied(module)
    module.backward(losses_of(module(x)))
    assert all(param.grad is None for param in twin.parameters())
    twin.backward(losses_of(twin(x)))
    for param, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert param is not other
        assert_close(param.grad, other.grad)


def test_strict_refuses_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[1].register_buffer("count", torch.zeros(1))
    with pytest.raises(NotImplementedError, match=r"'1' \(Tanh\) includes a buffer"):
        wrap(model)
    wrap(model, strict=False)
    with pytest.raises(NotImplementedError, match="BatchNorm1d"):
        wrap(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="mixes the samples"):
        wrap(nn.BatchNorm1d(3), strict=False)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"loss_reduction": "none"}, ValueError),
        ({"max_grad_norm": -1.0}, ValueError),
        ({"max_grad_norm": "1"}, TypeError),
        ({"strict": None}, TypeError),
        ({"force_functorch": 1}, TypeError),
        ({"use_ghost_clipping": 0}, TypeError),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        GradSampleModuleFastGradientClipping(small(), **arguments)


def test_detach_leaves_the_model_as_it_was():
    model = small()
    before = [set(vars(m)) for m in model.modules()]
    module = wrap(model)
    losses_of(module(batch())).mean().backward()
    module.detach()
    assert [set(vars(m)) for m in model.modules()] == before
    assert not any(vars(param) for param in model.parameters())


# create_norm_sample


def test_create_norm_sample_pads_with_zeros():
    param = nn.Parameter(torch.zeros(2, 2))
    create_norm_sample(param=param, grad_sample=torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), max_batch_len=3)
    assert param.norm_sample.tolist() == [5.0, 0.0, 0.0]
    assert param._norm_sample is param.norm_sample


def test_create_norm_sample_leaves_frozen_parameters_alone():
    param = nn.Parameter(torch.zeros(2), requires_grad=False)
    create_norm_sample(param=param, grad_sample=torch.ones(3, 2), max_batch_len=3)
    assert not hasattr(param, "norm_sample")


def test_create_norm_sample_refuses_what_does_not_fit():
    param = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"grad_sample must have shape \('B', 2\)"):
        create_norm_sample(param=param, grad_sample=torch.ones(3, 1), max_batch_len=3)
    with pytest.raises(ValueError, match="max_batch_len must be at least the 3 samples"):
        create_norm_sample(param=param, grad_sample=torch.ones(3, 2), max_batch_len=2)


def test_a_second_backward_with_hooks_enabled_is_noticed_in_the_next_forward():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    module = GradSampleModuleFastGradientClipping(model)
    losses = module(x).squeeze(1)
    losses.mean().backward(retain_graph=True)
    (module.get_clipping_coef() * losses).mean().backward()
    with pytest.raises(RuntimeError, match=r"call disable_hooks\(\) before it"):
        module(x)
    module(x).mean().backward()
    assert module.get_norm_sample().shape == (4,)


def test_two_forwards_may_be_under_way():
    module, batches = GradSampleModuleFastGradientClipping(nn.Linear(3, 1)), torch.randn(2, 4, 3)
    losses = [module(x).squeeze(1) for x in batches]
    for x, one in zip(batches, losses, strict=True):
        one.mean().backward()
        torch.testing.assert_close(module.get_norm_sample(), (x.square().sum(1) + 1).sqrt())
