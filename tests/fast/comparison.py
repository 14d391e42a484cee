"""Two runs side by side, one of them in the fast way: what happens to both, what is compared, and how closely."""

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from contract.training import through_file
from torch import Tensor, nn

from torchzero_clip import Modular

Params = Any
"""A list of parameters, which become two groups, or a dict with their names."""
Grads = Sequence[Tensor | None]

ROUNDING = {torch.float64: 1e-6, torch.float32: 4e-6, torch.bfloat16: 0.03}
"""Units in the last place of the largest element; numbers of float64 runs are compared as float32 would be."""

short_pieces = mock.patch.multiple("torchzero_clip.fast.pieces", ALONE_ON_CPU=2**11, ON_CPU=2**12, IN_ONE_PASS=2**13)
"""Decorates a function in which pieces have at most 4,096 elements, and tensors above 2,048 get their own."""


class Run:
    """One optimizer and its parameters, to which the same things happen as to another.

    Args:
        make: Makes the transforms of the chain.
        params: The parameters.
        fast: Operations may wait.
        options: Arguments of `Modular`.
    """

    def __init__(self, make: Callable[[], Sequence[Any]], params: Params, *, fast: bool, **options: Any) -> None:
        self.fast = fast
        if isinstance(params, Mapping):
            self.params = list(params.values())
            self.optimizer = Modular(list(params.items()), *make(), fast=fast, **options)
        else:
            self.params, half = params, len(params) // 2
            groups = [{"params": params[:half]}, {"params": params[half:]}]
            self.optimizer = Modular(groups, *make(), fast=fast, **options)
        self.saved: Any = None

    def step(self, grads: Grads, event: str = "none", other: "Run | None" = None) -> None:
        """Let an event happen, and take a step."""
        if event in EVENTS:
            EVENTS[event](self, other)
        if event == "reload other":
            self.saved = copy.deepcopy(self.optimizer.state_dict())
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else _laid_out(grad, param)
        if event == "shared":
            for param in self.params:
                if param.shape == self.params[0].shape:
                    param.grad = self.params[0].grad
        self.optimizer.step()


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient in the dtype and the layout of its parameter, unless it is expanded."""
    if 0 in grad.stride():
        return grad[(0,) * grad.ndim].to(param.dtype).expand(param.shape)
    return torch.empty_like(param, requires_grad=False).copy_(grad)


def _load_the_other(run: Run, other: Run | None) -> None:
    """A checkpoint of the fast run goes on in the readable one."""
    if other is not None and other.fast:
        run.optimizer.load_state_dict(through_file(other.saved))


def _pickle(run: Run, other: Run | None) -> None:
    run.params, run.optimizer = pickle.loads(pickle.dumps((run.params, run.optimizer)))


def _replace_memory(run: Run, other: Run | None) -> None:
    for state in run.optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def _double(run: Run, other: Run | None) -> None:
    for param in run.params:
        param.data = param.data.double()


def _channels_last(run: Run, other: Run | None) -> None:
    for param in run.params:
        if param.ndim == 4:
            param.data = param.data.to(memory_format=torch.channels_last)


def _take_limits_off(run: Run, other: Run | None) -> None:
    for group in run.optimizer.param_groups:
        group.update({key: None for key in ("mul", "add") if key in group})


EVENTS: dict[str, Callable[[Run, Run | None], None]] = {
    "reload": lambda run, other: run.optimizer.load_state_dict(through_file(run.optimizer.state_dict())),
    "reload other": _load_the_other,
    "pickle": _pickle,
    "data": _replace_memory,
    "double": _double,
    "channels_last": _channels_last,
    "limit None": _take_limits_off,
    "lr": lambda run, other: run.optimizer.param_groups[0].update(lr=0.03),
}
"""What may happen to an optimizer before a step."""


def _with_last(value: float) -> Callable[[Tensor], Tensor]:
    def change(grad: Tensor) -> Tensor:
        if grad.numel():
            grad[(-1,) * grad.ndim] = value
        return grad

    return change


UNUSUAL: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda grad: None,
    "zero": torch.zeros_like,
    "inf": _with_last(torch.inf),
    "nan": _with_last(torch.nan),
    "expanded": lambda grad: torch.ones((), dtype=grad.dtype).expand(grad.shape),
    "huge": lambda grad: grad * 1e25,
    "tiny": lambda grad: grad * 1e-25,
}
"""What may be unusual about the gradient of one parameter."""


def noise(shapes: Iterable[Sequence[int]], step: int, event: str = "none") -> list[Tensor | None]:
    """Random gradients of one step, one of them unusual if the event says so."""
    generator = torch.Generator().manual_seed(step)
    scale = 1.5 ** (step % 3)
    grads = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
    chosen = step % len(grads)
    changed = UNUSUAL[event](grads[chosen]) if event in UNUSUAL else grads[chosen]
    return [*grads[:chosen], changed, *grads[chosen + 1 :]]


def both(
    make: Callable[[], Sequence[Any]], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Iterator[Run]:
    """A fast and a readable run of equal parameters."""
    for fast in (True, False):
        torch.manual_seed(0)
        values = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
        yield Run(make, [nn.Parameter(value) for value in values], fast=fast)


def assert_close(a: Any, b: Any, what: str, rtol: float, atol: float | None) -> None:
    """Equal up to rounding; without ``atol`` up to that of the largest element."""
    a, b = (torch.as_tensor(x).detach().double() for x in (a, b))
    assert torch.equal(a.isfinite(), b.isfinite()), what
    a, b = a[a.isfinite()], b[b.isfinite()]
    if atol is None:
        atol = rtol * float(b.abs().max()) + 1e-30 if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda message: f"{what}: {message}")


def assert_same(fast: Run, readable: Run, rtol: float, atol: float | None = None, what: str = "") -> None:
    """Parameters, gradients, state and metrics are equal up to rounding."""
    for i, (p, q) in enumerate(zip(fast.params, readable.params, strict=True)):
        assert_close(p, q, f"{what}parameter {i}", rtol, atol)
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert_close(p.grad, q.grad, f"{what}gradient {i}", rtol, atol)
    one, two = (run.optimizer.state_dict()["state"] for run in (fast, readable))
    assert one.keys() == two.keys(), what
    for i in one:
        assert one[i].keys() == two[i].keys(), what
        for key, value in one[i].items():
            assert value.dtype == two[i][key].dtype, f"{what}dtype of {key} of {i}"
            assert_close(value, two[i][key], f"{what}state {key} of {i}", rtol, atol)
    mine, theirs = fast.optimizer.metrics(), readable.optimizer.metrics()
    assert mine.keys() == theirs.keys(), what
    for key in mine:
        if not key.endswith("/clipped") or key.replace("clipped", "factor") in mine:
            assert_close(mine[key], theirs[key], f"{what}metric {key}", rtol, atol)
        else:  # an element at its limit counts or not, by its rounding
            assert float(mine[key]) == pytest.approx(float(theirs[key]), abs=0.02), f"{what}metric {key}"
