"""Functions that run modules again in their backward are right or refused, and the errors name a way out that works."""

from functools import partial

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    losses_of,
    weight,
    with_low_memory,
)
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:it is not checked whether samples mix")


class Adjoint(Function):
    """Three steps of Euler's method, and gradients from the steps backward, as in an adjoint method."""

    @staticmethod
    def forward(ctx, f, x, *params):
        ctx.f = f
        with torch.no_grad():
            for _ in range(3):
                x = x + 0.1 * f(x)
        ctx.save_for_backward(x, *params)
        return x

    @staticmethod
    def backward(ctx, grad):
        y, *params = ctx.saved_tensors
        sums = [torch.zeros_like(param) for param in params]
        for _ in range(3):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                change = ctx.f(y)
                of_y, *found = torch.autograd.grad(change, [y, *params], 0.1 * grad, allow_unused=True)
            y, grad = y - 0.1 * change, grad + of_y
            sums = [a if b is None else a + b for a, b in zip(sums, found, strict=True)]
        return None, grad, *sums


class ByHand(Function):
    """A checkpoint."""

    @staticmethod
    def forward(ctx, f, x):
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.f(x).backward(grad)
        return None, x.grad


class Reversible(Function):
    """y = x + f(z), w = z + g(y), and the inputs again from the outputs in the backward."""

    @staticmethod
    def forward(ctx, f, g, x, z):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            y = x + f(z)
            w = z + g(y)
        ctx.save_for_backward(y, w)
        return y, w

    @staticmethod
    def backward(ctx, of_y, of_w):
        y, w = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            added = ctx.g(y)
            added.backward(of_w)
            z, of_y = (w - added).detach().requires_grad_(), of_y + y.grad
            ctx.f(z).backward(of_y)
        return None, None, of_y, of_w + z.grad


def mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


class Block(Net):
    pass


def reversed_by(f, g, x):
    return torch.cat(Reversible.apply(f, g, *x.chunk(2, -1)), -1)


RERUN = {
    "adjoint": lambda: Block(lambda m, x: Adjoint.apply(m.f, x, *m.f.parameters()), f=mlp()),
    "reversible": lambda: Block(
        lambda m, x: reversed_by(m.f, m.g, m.up(x))[..., :3], up=nn.Linear(3, 6), f=nn.Linear(3, 3), g=nn.Linear(3, 3)
    ),
    "by hand": lambda: Block(lambda m, x: ByHand.apply(m.f, m.up(x)), up=nn.Linear(3, 3), f=mlp()),
    "own parameter": lambda: Block(lambda m, x: ByHand.apply(lambda y: (y @ m.w).tanh(), x), w=weight(3, 3)),
}
WAYS = {
    "backward": by_backward,
    "unverified": partial(by_backward, verify="never"),
    "low memory": with_low_memory,
    "classic": by_classic_form,
    "two passes": by_two_passes,
}


def model_of(block):
    return Net(
        lambda m, x: m.last(m.block(m.first(x))), first=nn.Linear(3, 3), block=block, last=nn.Linear(3, 2)
    ).double()


def norms_by_backward(model, x):
    """From one backward per sample, which functions that call ``backward`` need."""
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        losses_of(model(x))[i].backward()
        rows.append(torch.stack([param.grad.norm() for param in model.parameters()]).norm())
    model.zero_grad()
    return torch.stack(rows)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RERUN)
def test_modules_that_run_again_are_right_or_refused_without_a_line(kind, way, count):
    model, x = model_of(RERUN[kind]()), torch.randn(count, 3, dtype=torch.float64)
    expected, refusal, norms = norms_by_backward(model, x), "", None
    try:
        norms, _ = WAYS[way](model)(lambda model: losses_of(model(x)))
    except (RuntimeError, ValueError) as error:
        refusal = str(error)
    if norms is not None:
        assert_close(norms, expected)
    else:
        assert "use_reentrant=False" in refusal
        assert "whole=" not in refusal


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [("block",), (Net,), (Block,), ("",)])
@pytest.mark.parametrize("kind", RERUN)
def test_they_are_refused_in_modules_that_are_run_whole(kind, whole, way, count):
    model, x = model_of(RERUN[kind]()), torch.randn(count, 3, dtype=torch.float64)
    name = (
        "'block.w' gets a gradient from modules that a backward runs"
        if kind == "own parameter"
        else r"a function runs 'block\.[fg]'"
    )
    outer = "Net" if whole in ((Net,), ("",)) else r"'block' \(Block\)"
    with pytest.raises(
        RuntimeError, match=rf"^{outer} runs sample by sample, but {name}.*let autograd differ"
    ) as error:
        WAYS[way](model, whole=whole)(lambda model: losses_of(model(x)))
    assert "whole=" not in str(error.value)


class AfterAWhile(nn.Module):
    """A checkpoint by hand, only in training, whose output may leave by an attribute."""

    def __init__(self, *, by_attribute):
        super().__init__()
        self.up, self.f, self.by_attribute, self.aside = nn.Linear(3, 3), mlp(), by_attribute, None

    def forward(self, x):
        x = self.up(x)
        if not self.training:
            return self.f(x)
        self.aside = ByHand.apply(self.f, x)
        return x if self.by_attribute else self.aside


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_attribute", [False, True])
def test_they_are_refused_whenever_they_come_and_wherever_their_output_goes(by_attribute, way, count):
    model, x = AfterAWhile(by_attribute=by_attribute).double().eval(), torch.randn(count, 3, dtype=torch.float64)
    expected = norms_by_backward(model, x)
    step = WAYS[way](model, whole=("",))
    norms, _ = step(lambda model: losses_of(model(x)))
    assert_close(norms, expected)
    model.train()
    with pytest.raises(RuntimeError, match="a function runs 'f' again in its backward"):
        step(lambda model: losses_of(model(x) + (model.aside if by_attribute else 0)))


def test_the_refused_step_leaves_gradients_and_the_next_step_may_be_right():
    model, x = model_of(RERUN["by hand"]()), torch.randn(4, 3, dtype=torch.float64)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with clip(model, whole=("block",)) as clipper:
        with pytest.raises(RuntimeError, match=r"runs 'block\.f' again"):
            clipper.backward(losses_of(model(x)))
        assert all((param.grad == 1).all() for param in model.parameters())
        with clipper.paused():
            losses_of(model(x)).sum().backward()
        model.block.call = lambda m, x: m.f(m.up(x))
        expected = norms_by_backward(model_like(model), x)
        assert_close(clipper.backward(losses_of(model(x))).norms, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def model_like(model):
    twin = model_of(RERUN["by hand"]())
    twin.block.call = model.block.call
    twin.load_state_dict(model.state_dict())
    return twin


class Twice(Function):
    """It runs no module."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


CHECKPOINTED = {
    "checkpoint": lambda m, x: checkpoint(m.f, m.up(x), use_reentrant=False),
    "nested": lambda m, x: checkpoint(lambda y: checkpoint(m.f, m.up(y), use_reentrant=False), x, use_reentrant=False),
    "function": lambda m, x: m.f(Twice.apply(m.up(x))),
    "function of nested": lambda m, x: Twice.apply(
        checkpoint(lambda y: checkpoint(m.f, m.up(y), use_reentrant=False), x, use_reentrant=False)
    ),
    "function in a checkpoint": lambda m, x: checkpoint(lambda y: m.f(Twice.apply(m.up(y))), x, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_checkpoints_of_torch_and_other_functions_stay_right(kind, way):
    model, x = model_of(Block(CHECKPOINTED[kind], up=nn.Linear(3, 3), f=mlp())), torch.randn(4, 3, dtype=torch.float64)
    expected = norms_by_backward(model, x)
    step = WAYS[way](model, whole=("block",))
    for _ in range(2):
        norms, _ = step(lambda model: losses_of(model(x)))
        assert_close(norms, expected)
