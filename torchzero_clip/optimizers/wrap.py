"""Any optimizer of torch.optim at the end of a chain."""

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.checks import as_builtin, is_numeric, needs_closure
from torchzero_clip.compat import cpu_by_default, never_compiled
from torchzero_clip.core.kinds import FinalRule
from torchzero_clip.core.schedules import at
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import as_text
from torchzero_clip.functional.gradients import laid_out_like
from torchzero_clip.types import NewState, Setting

INSTEAD = "before_step(optimizer, ClipNorm(1)) puts transforms before the step of an optimizer that you have built"
# what torch or a step sets in an optimizer, without an effect on later steps
NO_STATE = {"state", "param_groups", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"}


class Wrap(FinalRule):
    """Takes the step with an optimizer of `torch.optim`, which gets the updates as its gradients.

    It ends the chain: for its parameters only the chain's `LR` may follow. Numbers among the arguments (``betas``,
    ``weight_decay``) become settings of the param groups. The learning rate is that of the groups. Checkpoints have the
    state of the optimizer under ``"wrap/<key>"``. A step leaves ``.grad`` unchanged. Step hooks run once, around the
    step of `Modular`. `before_step` takes most optimizers that ``Wrap`` refuses.

    Args:
        optimizer_class: A subclass of `torch.optim.Optimizer`. Its step is tried on a small parameter.
        name: The name in the chain and in checkpoints; the class name in snake case if None.
        **kwargs: The arguments of the optimizer except the parameters. Missing ones get the defaults of the optimizer.

    Raises:
        TypeError: If ``optimizer_class`` is not such a class, or does not take an argument.
        ValueError: If the optimizer raises for an argument, if its step needs a closure (``LBFGS``) or sparse gradients
            (``SparseAdam``), or if its step changes anything besides parameters and their state.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular, Wrap
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipNorm(1), Wrap(torch.optim.Adagrad, lr=0.1))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.1000, -0.1000])
    """

    def __init__(self, optimizer_class: type[Optimizer], *, name: str | None = None, **kwargs: Any) -> None:
        if isinstance(optimizer_class, Optimizer):
            raise TypeError(f"optimizer_class must be the class, not an optimizer. {INSTEAD}")
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"optimizer_class must be a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
        if kwargs.get("maximize") or kwargs.get("differentiable"):
            raise ValueError("maximize is an argument of Modular, and differentiable steps are not possible in a chain")
        usual = {key: argument.default for key, argument in inspect.signature(optimizer_class).parameters.items()}
        schedules = {key: value for key, value in kwargs.items() if _is_schedule(value, usual.get(key))}
        self.optimizer_class = optimizer_class
        self.kwargs = {
            key: as_builtin(at(value, 0, key) if key in schedules else value) for key, value in kwargs.items()
        }
        if problem := _problem(optimizer_class, self.kwargs):
            instead = "Call clip_grad_norm_ in its closure" if needs_closure(optimizer_class) else INSTEAD
            raise ValueError(f"Wrap takes no {optimizer_class.__name__}, whose step {problem}. {instead}")
        self.each_alone = _steps_each_alone(optimizer_class, self.kwargs)
        defaults = dict(self.template.defaults)
        self.default_lr = defaults.pop("lr", None)
        self._settings = {key: as_builtin(value) for key, value in defaults.items() if is_numeric(value)}
        self._checked: list[Setting] = []
        schedules.pop("lr", None)  # the chain's
        super().__init__({**self._settings, **schedules}, lr=kwargs.get("lr"), name=name)

    def __getstate__(self) -> dict[str, object]:
        # torch's own copying loses attributes of subclasses; `_checked` is a cache
        return {**{key: value for key, value in vars(self).items() if key != "template"}, "_checked": []}

    @cached_property
    def template(self) -> Optimizer:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An optimizer of the class, on a small parameter."""
        return constructed(self.optimizer_class, self.kwargs)

    def _with(self, settings: Setting) -> dict[str, object]:
        """The arguments of the constructor, with the settings that differ from them."""
        values = {key: as_builtin(settings[key]) for key in self._settings if key in settings}
        return self.kwargs | {key: value for key, value in values.items() if value != self._settings[key]}

    @override
    def check(self, setting: Setting) -> None:
        if tensors := [key for key in self._settings if isinstance(setting.get(key), Tensor)]:
            raise TypeError(f"{tensors[0]} must be a number, got a tensor")
        arguments = self._with(setting)
        if arguments not in self._checked:  # every group is checked in every step
            constructed(self.optimizer_class, arguments)
            self._checked = [*self._checked[-15:], arguments]

    @override
    def check_parameter(self, name: str, param: Tensor) -> None:
        try:
            constructed(self.optimizer_class, self.kwargs, param)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} does not fit: {error}") from error

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        """The state of the optimizer after a step on a gradient of zeros."""
        twin = nn.Parameter(param.detach().clone())
        optimizer = constructed(self.optimizer_class, self._with(setting), twin)
        optimizer.param_groups[0].update(setting)
        twin.grad = torch.zeros_like(twin)
        _step(optimizer)
        return dict(optimizer.state[twin])

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        """The state with and without momentum, because momentum may have been above 0 earlier."""
        ever = {**setting, "momentum": 0.5} if setting.get("momentum") == 0 else setting
        return self.init_state(param, setting) | self.init_state(param, ever)

    @override
    @never_compiled
    def take_step(self, updates: list[Tensor], step: Step) -> None:
        # without the constructor, whose other arguments are not known
        optimizer = object.__new__(self.optimizer_class)
        optimizer.__dict__.update(self.template.__dict__)
        # detached tensors share the memory of the parameters; setting their .grad leaves that of the parameters alone
        params = [param.detach() for param in step.params]
        group = self.template.param_groups[0]
        optimizer.param_groups = [{**group, **setting, "params": params[span]} for setting, span in step.by_setting()]
        optimizer.state = defaultdict(dict)
        for param, update, state, setting in zip(params, updates, step.states, step.settings, strict=True):
            if self.template.state and not state:  # Adagrad has state before its first step
                state.update(constructed(self.optimizer_class, self._with(setting), param).state[param])
            optimizer.state[param] = state  # pyright: ignore[reportArgumentType]
            param.grad = laid_out_like(update.to(param.dtype), param)
        new = [i for i, state in enumerate(step.states) if not state]
        try:
            _step(optimizer)
        except BaseException:
            for i in new:  # with incomplete state, the next step and loading a checkpoint would raise
                if step.states[i].keys() != self.init_state(step.params[i], step.settings[i]).keys():
                    step.states[i].clear()
            raise
        for param, state in zip(params, step.states, strict=True):
            state.update(optimizer.state[param])  # some optimizers replace it

    @override
    def structure(self) -> dict[str, str]:
        usual = inspect.signature(self.optimizer_class).parameters
        left_out = {*self._settings, "lr", "foreach", "fused", "maximize", "differentiable"}
        texts = {key: as_text(value) for key, value in self.kwargs.items() if key not in left_out}
        others = {k: text for k, text in texts.items() if k not in usual or text != as_text(usual[k].default)}
        return {"optimizer_class": self.optimizer_class.__name__, **others}

    @override
    def _arguments(self) -> Iterator[str]:
        yield self.optimizer_class.__name__
        for key, value in self.kwargs.items():
            yield f"{key}={self.lr if key == 'lr' else self.schedules.get(key, self.defaults.get(key, value))!r}"


def constructed(optimizer_class: type[Optimizer], kwargs: Mapping[str, Any], param: Tensor | None = None) -> Optimizer:
    """An optimizer on one parameter. Raises if the optimizer raises for it or for the arguments."""
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.float32, device="cpu")) if param is None else param
    try:
        with cpu_by_default():
            return optimizer_class([param], **kwargs)
    except Exception as error:
        text = str(error) if isinstance(error, TypeError | ValueError) else f"{error!r}. {INSTEAD}"
        with suppress(Exception):
            optimizer_class([("weight", param)], **kwargs)
            text = f"it needs named parameters, which Wrap does not have. {INSTEAD}"
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Wrap({optimizer_class.__name__}, ...): {text}") from error


def _problem(optimizer_class: type[Optimizer], kwargs: Mapping[str, Any], device: torch.device | str = "cpu") -> str:
    """Why Wrap cannot take an optimizer: a step raises, or changes more than parameters and their state; else empty."""
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.float32, device=device))
    optimizer = constructed(optimizer_class, kwargs, param)
    contents = [_content(optimizer, param)]
    try:
        for _ in range(2):
            param.grad = torch.ones_like(param)
            _step(optimizer)
            contents.append(_content(optimizer, param))
    except Exception as error:
        if device == "cpu" and (other := torch.accelerator.current_accelerator(check_available=True)):
            return _problem(optimizer_class, kwargs, other)
        return f"on a dense gradient, without a closure, raises {error!r}"
    before = contents[0]
    changed = sorted({k for after in contents for k in before | after if before.get(k) != after.get(k)})
    return f"changes {', '.join(changed)}, which checkpoints of a chain do not have" if changed else ""


def _steps_each_alone(optimizer_class: type[Optimizer], kwargs: Mapping[str, Any]) -> bool:
    """True if two small parameters move together as each does alone, for small and for large gradients."""

    def moved(*factors: float) -> list[nn.Parameter]:
        params = [nn.Parameter(torch.full((4, 4), factor, dtype=torch.float32, device="cpu")) for factor in factors]
        with cpu_by_default():
            optimizer = optimizer_class(params, **kwargs)
        for size in (1e-3, 1.0, 1e6):  # the last one exceeds the usual limits of a joint norm
            for param, factor in zip(params, factors, strict=True):
                param.grad = torch.full_like(param, size * factor)
            _step(optimizer)
        return params

    try:
        together, alone = moved(1.0, 3.0), moved(1.0) + moved(3.0)
    except Exception:  # such as that of an optimizer for accelerators only
        return False
    return all(map(torch.equal, together, alone))


def _content(optimizer: Optimizer, param: Tensor) -> dict[str, object]:
    """What an optimizer holds besides a parameter and its state."""
    content = {f"optimizer.{key}": value for key, value in vars(optimizer).items() if key not in NO_STATE}
    content |= {f"optimizer.state[{key!r}]": value for key, value in optimizer.state.items() if key is not param}
    groups = enumerate(optimizer.param_groups)
    content |= {f"optimizer.param_groups[{i}][{key!r}]": value for i, group in groups for key, value in group.items()}
    around = frozenset(map(id, (optimizer, optimizer.state, param)))
    return {key: _comparable(value, around) for key, value in content.items()}


def _comparable(value: object, around: frozenset[int]) -> object:
    """The contents of an object as nested lists of text. Objects whose ids are in ``around`` are left out."""
    if value is None or isinstance(value, int | float | complex | str | bytes | type | FunctionType):
        return repr(value)
    if id(value) in around:
        return ""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.shape} {value.tolist()}"
    try:  # what a pickle would have of an object that is no collection
        content = value if isinstance(value, Collection) else value.__reduce_ex__(4)[1:3]
    except Exception:
        return id(value)
    content = value.items() if isinstance(value, Mapping) else content
    return [_comparable(item, around | {id(value)}) for item in content]


def _is_schedule(value: object, usual: object) -> bool:
    """True if an argument is a function where a number may be expected."""
    expected = usual is None or usual is inspect.Parameter.empty or is_numeric(usual)
    return callable(value) and not isinstance(value, type) and expected


def _step(optimizer: Optimizer) -> None:
    """Take a step without the hooks, which run around the step of `Modular`."""
    step = type(optimizer).step  # torch marks a step that it has wrapped by ``hooked``
    unhooked = step.__wrapped__ if getattr(step, "hooked", False) else step  # pyright: ignore[reportFunctionMemberAccess]
    with cpu_by_default(), torch.no_grad():
        unhooked(optimizer)
