"""Any optimizer of torch.optim at the end of a chain."""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from typing_extensions import override

from torchzero_clip.checks import is_numeric, plain
from torchzero_clip.core.settings import at, runs
from torchzero_clip.core.transform import Transform
from torchzero_clip.types import Setting, State


class Wrap(Transform):
    """Hands the updates to an optimizer of `torch.optim`, as the gradients of its step.

    It ends the chain: nothing but the chain's `LR` may follow for its parameters. Numbers among the arguments
    (``betas``, ``weight_decay``) become settings of the param groups; the learning rate is that of the groups, and the
    state of the optimizer is in checkpoints under ``"wrap/<key>"``. What is here as a transform (`Adam`, `SGD`,
    `RMSprop`, `Muon`) can stand anywhere and is part of compiled steps; this is for the others.

    Args:
        optimizer_class: A subclass of `torch.optim.Optimizer` that steps on dense gradients without a closure.
        **kwargs: Its arguments, but for the parameters; its defaults otherwise.

    Raises:
        TypeError: If ``optimizer_class`` is no such class, or does not take an argument.
        ValueError: If it refuses an argument, needs a closure (``LBFGS``) or sparse gradients (``SparseAdam``).

    ``.grad`` is as it was after a step. The hooks of `torch.optim.Optimizer.step` run once, those of `Modular`.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular, Wrap
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipNorm(1), Wrap(torch.optim.Adagrad, lr=0.1))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.1000, -0.1000])
        >>> optimizer.state[weight]["wrap/sum"]
        tensor([0.3600, 0.6400])
    """

    makes_own_state = True
    finishes = True
    must_finish = True

    def __init__(self, optimizer_class: type[Optimizer], **kwargs: Any) -> None:
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"optimizer_class must be a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
        name = optimizer_class.__name__
        if optimizer_class is SparseAdam:
            raise ValueError("Wrap takes no SparseAdam, which steps on sparse gradients only: Modular takes dense ones")
        if inspect.signature(optimizer_class.step).parameters["closure"].default is inspect.Parameter.empty:
            raise ValueError(f"Wrap takes no {name}, which evaluates the closure itself, several times a step")
        self.optimizer_class = optimizer_class
        usual = {key: argument.default for key, argument in inspect.signature(optimizer_class).parameters.items()}
        schedules = {key: value for key, value in kwargs.items() if callable(value) and is_numeric(usual.get(key))}
        self.kwargs = {key: plain(at(value, 0) if key in schedules else value) for key, value in kwargs.items()}
        schedules.pop("lr", None)  # the chain's
        defaults = dict(self._template.defaults)
        self.default_lr = defaults.pop("lr", None)
        self._settings = {key: plain(value) for key, value in defaults.items() if is_numeric(value)}
        super().__init__({**self._settings, **schedules}, lr=kwargs.get("lr"))

    def structure(self, key: str) -> Any:
        """An argument of the optimizer that is not a setting."""
        return self._template.param_groups[0].get(key)

    @property
    def _template(self) -> Optimizer:
        return _constructed(self.optimizer_class, tuple(self.kwargs.items()))

    def _with(self, settings: Setting) -> dict[str, Any]:
        """The arguments, with settings that are not those of the constructor."""
        given = {key: plain(settings[key]) for key in self._settings if key in settings}
        return self.kwargs | {key: value for key, value in given.items() if value != self._settings[key]}

    @override
    def check(self, settings: Setting) -> None:
        """Raise if the optimizer refuses a setting."""
        _constructed(self.optimizer_class, tuple(self._with(settings).items()))

    @override
    def check_parameter(self, name: str, param: Tensor) -> None:
        """Raise if the optimizer refuses the parameter."""
        try:
            self._on(param, {})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.optimizer_class.__name__} cannot take {name}: {error}") from error

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """What the optimizer keeps after a step on a gradient of zeros."""
        twin = nn.Parameter(param.detach().clone())
        optimizer = self._on(twin, setting)
        twin.grad = torch.zeros_like(twin)
        _step(optimizer)
        return dict(optimizer.state[twin])

    @override
    def can_finish(self, tensors: Sequence[Tensor], params: Sequence[Tensor], later: Sequence[Transform]) -> bool:
        return True

    @override
    @torch.compiler.disable
    def finish(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensors: list[Tensor], params: list[Tensor], states: Sequence[State], settings: Sequence[Setting]
    ) -> None:
        """Take a step of the optimizer."""
        template = self._template
        optimizer = object.__new__(self.optimizer_class)
        optimizer.__dict__.update(template.__dict__)
        keys = ("lr", *self._settings)
        optimizer.param_groups = [
            {**template.param_groups[0], **{key: setting[key] for key in keys}, "params": params[own]}
            for setting, own in runs(settings)
        ]
        optimizer.state = defaultdict(dict)
        for param, state, setting in zip(params, states, settings, strict=True):
            if template.state and not state:  # Adagrad begins with some
                state.update(self._on(param, setting).state[param])
            optimizer.state[param] = state  # pyright: ignore[reportArgumentType]

        kept = [param.grad for param in params]
        try:
            for param, tensor, grad in zip(params, tensors, kept, strict=True):
                param.grad = tensor.clone() if tensor is grad else tensor  # some optimizers write to it
            _step(optimizer)
        finally:
            for param, grad in zip(params, kept, strict=True):
                param.grad = grad
        for param, state in zip(params, states, strict=True):
            if (kept_there := optimizer.state[param]) is not state:  # some optimizers replace it
                state.update(kept_there)

    @override
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> NoReturn:
        """Raise: an optimizer does not say what it would subtract."""
        raise RuntimeError(f"{self!r} takes the step by itself: it has to stand at the end of the chain of Modular")

    def _on(self, param: Tensor, setting: Setting) -> Optimizer:
        return self.optimizer_class([param], **self._with(setting))

    @override
    def _arguments(self) -> Iterator[str]:
        yield self.optimizer_class.__name__
        for key, value in self.kwargs.items():
            yield f"{key}={self.lr if key == 'lr' else self.schedules.get(key, value)!r}"


@lru_cache(maxsize=64)
def _constructed(optimizer_class: type[Optimizer], kwargs: tuple[tuple[str, Any], ...]) -> Optimizer:
    """The optimizer on a parameter of its own; raises if it refuses the arguments."""
    try:
        return optimizer_class([nn.Parameter(torch.zeros(1, 1))], **dict(kwargs))
    except (TypeError, ValueError) as error:
        raise type(error)(f"Wrap({optimizer_class.__name__}, ...): {error}") from error


def _step(optimizer: Optimizer) -> None:
    """Take a step without the hooks, which run around the step of `Modular`."""
    step = type(optimizer).step
    unhooked = step.__wrapped__ if getattr(step, "hooked", False) else step  # pyright: ignore[reportFunctionMemberAccess]
    unhooked(optimizer)
