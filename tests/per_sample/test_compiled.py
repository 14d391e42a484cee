"""Models that torch.compile compiles, before or after a clipper is attached: captured layers run outside of it."""

import copy
from functools import partial

import pytest
import torch
from per_sample.harness import Net, assert_close, clip, losses_of
from torch import nn
from torch.nn import functional as F
from versions import needs_compiler

from torchzero_clip import SGD, ConstantFlatClipper, Modular, PerSampleGradientClipper, PrivateGradientClipper

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute"),  # torch.compile's own
    pytest.mark.usefixtures("fresh_compiler"),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made():
    """A model with a module for the generic rule, which has one with a rule inside."""
    scale, inner = nn.Parameter(torch.linspace(0.5, 2, 8)), nn.Linear(8, 8)
    return Net(
        lambda m, x: m.last(m.norm(F.gelu(m.scaled(torch.relu(m.first(x)))))),
        first=nn.Linear(4, 8),
        scaled=Net(lambda m, x: m.inner(x * m.scale).tanh(), scale=scale, inner=inner),
        norm=nn.LayerNorm(8),
        last=nn.Linear(8, 3),
    ).double()


def clipped(model, called, x):
    """Norms and gradients of two steps."""
    found = []
    with clip(model, 0.5) as clipper:
        for _ in range(2):
            model.zero_grad()
            found += [clipper.backward(losses_of(called(x))).norms, *[p.grad.clone() for p in model.parameters()]]
    model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["method", "wrapper", "wrapper given", "submodule"])
def test_compiled_models_are_clipped_as_they_are(how):
    model, x = made(), torch.randn(5, 4, dtype=torch.float64)
    twin = copy.deepcopy(model)
    expected = clipped(twin, twin, x)
    attached, called = model, model
    if how == "method":
        model.compile(backend="aot_eager")
    elif how == "submodule":
        model.scaled.inner.compile(backend="aot_eager")
    else:
        called = torch.compile(model, backend="aot_eager")
        attached = called if how == "wrapper given" else model
    called(x).sum().backward()  # compiled before anything is attached
    plain = [p.grad.clone() for p in model.parameters()]
    for actual, wanted in zip(clipped(attached, called, x), expected, strict=True):
        assert_close(actual, wanted)
    called(x).sum().backward()
    for param, grad in zip(model.parameters(), plain, strict=True):
        assert_close(param.grad, grad)


@pytest.mark.slow
def test_a_model_may_be_compiled_while_a_clipper_is_attached():
    model, x = made(), torch.randn(5, 4, dtype=torch.float64)
    with clip(model, 0.5) as clipper:
        expected = clipper.backward(losses_of(model(x))).norms
        compiled = torch.compile(model, backend="aot_eager")
        assert_close(clipper.backward(losses_of(compiled(x))).norms, expected)


@pytest.mark.slow
def test_a_compiled_step_raises_while_gradients_wait():
    model, x = made(), torch.randn(5, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with clip(model) as clipper:
        clipper.backward(losses_of(model(x)))
        step()
        losses_of(model(x)).mean().backward()
        with pytest.raises(RuntimeError, match="wait to be clipped"):
            step()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("private", [False, True])
def test_a_step_in_one_graph_is_checked_too(private):
    model, x = made(), torch.randn(5, 4, dtype=torch.float64)
    optimizer = Modular(model, SGD(0.1))
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    limit = ConstantFlatClipper(1.0)
    private_clipper = partial(PrivateGradientClipper, noise_multiplier=0.0, expected_batch_size=5)
    with (private_clipper if private else PerSampleGradientClipper)(model, limit) as clipper:
        for k in range(4):
            with torch._dynamo.config.patch(error_on_recompile=k > 1):
                clipper.backward(losses_of(model(x)))
                clipper.pre_step() if private else None
                before = model.last.bias.detach().clone()
                step()
                assert_close(model.last.bias.detach(), before - 0.1 * model.last.bias.grad)
        clipper.backward(losses_of(model(x))) if private else losses_of(model(x)).mean().backward()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call (clipper.pre_step\(\)|either clipper.backward)"):
            step()
    clipper.discard()
    step()
