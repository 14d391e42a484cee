"""Any optimizer of torch.optim at the end of a chain."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam
from typing_extensions import override

from torchzero_clip.checks import as_builtin, is_numeric
from torchzero_clip.compat import cpu_by_default, never_compiled
from torchzero_clip.core.kinds import FinalRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.schedules import at
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, as_text
from torchzero_clip.types import Setting

REMEMBERED = 16  # settings that the optimizer has accepted


class Wrap(FinalRule):
    """Takes the step with an optimizer of `torch.optim`, which gets the updates as its gradients.

    It ends the chain: for its parameters only the chain's `LR` may follow. Numbers among the arguments (``betas``,
    ``weight_decay``) become settings of the param groups. The learning rate is that of the groups. Checkpoints have the
    state of the optimizer under ``"wrap/<key>"``. `Adam`, `SGD`, `RMSprop` and `Muon` are transforms, which can stand
    anywhere and are part of compiled steps. ``Wrap`` is for all other optimizers.

    Args:
        optimizer_class: A subclass of `torch.optim.Optimizer` that steps on dense gradients without a closure.
        name: The name in the chain and in checkpoints; the class name in snake case if None.
        **kwargs: The arguments of the optimizer except the parameters. Missing ones get the defaults of the optimizer.

    Raises:
        TypeError: If ``optimizer_class`` is not such a class, or does not take an argument.
        ValueError: If the optimizer raises for an argument, needs a closure (``LBFGS``) or sparse gradients
            (``SparseAdam``), or changes anything in a step besides parameters and their state.

    A step leaves ``.grad`` unchanged. Step hooks run once, around the step of `Modular`.

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

    each_alone = False

    def __init__(self, optimizer_class: type[Optimizer], *, name: str | None = None, **kwargs: Any) -> None:
        if isinstance(optimizer_class, Optimizer):
            advice = f"write Wrap(torch.optim.{type(optimizer_class).__name__}, ...)"
            raise TypeError(f"optimizer_class must be the class, not an optimizer: {advice}")
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"optimizer_class must be a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
        class_name = optimizer_class.__name__
        if optimizer_class is SparseAdam:
            raise ValueError("Wrap takes no SparseAdam, which steps on sparse gradients only: Modular takes dense ones")
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"Wrap takes no {class_name}, which evaluates the closure itself, several times a step")
        if kwargs.get("maximize") or kwargs.get("differentiable"):
            raise ValueError("maximize is an argument of Modular, and differentiable steps are not possible in a chain")
        usual = {key: argument.default for key, argument in inspect.signature(optimizer_class).parameters.items()}
        schedules = {key: value for key, value in kwargs.items() if _is_schedule(value, usual.get(key))}
        self.optimizer_class = optimizer_class
        self.each_alone = optimizer_class.__module__.startswith("torch.optim.")  # what other optimizers do is not known
        self.kwargs = {key: as_builtin(at(value, 0) if key in schedules else value) for key, value in kwargs.items()}
        template = constructed(optimizer_class, self.kwargs)
        if elsewhere := _state_elsewhere(constructed(optimizer_class, self.kwargs)):
            raise ValueError(
                f"Wrap takes no {class_name}, which keeps {', '.join(elsewhere)} outside of the state of its "
                "parameters, where checkpoints would lose it"
            )
        defaults = dict(template.defaults)
        self.default_lr = defaults.pop("lr", None)
        self._settings = {key: as_builtin(value) for key, value in defaults.items() if is_numeric(value)}
        self._checked: list[Setting] = []
        self._built: Optimizer | None = template
        schedules.pop("lr", None)  # the chain's
        super().__init__({**self._settings, **schedules}, lr=kwargs.get("lr"), name=name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None, "_checked": []}  # torch's own copying loses attributes of subclasses

    @property
    def template(self) -> Optimizer:
        """An optimizer of the class, on a parameter of its own."""
        if self._built is None:
            self._built = constructed(self.optimizer_class, self.kwargs)
        return self._built

    def _with(self, settings: Setting) -> dict[str, Any]:
        """The arguments of the constructor, with the settings that differ from them."""
        given = {key: as_builtin(settings[key]) for key in self._settings if key in settings}
        return self.kwargs | {key: value for key, value in given.items() if value != self._settings[key]}

    @override
    def check(self, setting: Setting) -> None:
        """Raise if the optimizer raises for a setting."""
        for key in self._settings:
            if isinstance(setting.get(key), Tensor):
                raise TypeError(f"{key} must be a number, got a tensor")
        arguments = self._with(setting)
        if arguments not in self._checked:  # every group is checked in every step
            constructed(self.optimizer_class, arguments)
            self._checked = [*self._checked[1 - REMEMBERED :], arguments]

    @override
    def check_parameter(self, name: str, param: Tensor) -> None:
        """Raise if the optimizer raises for the parameter."""
        try:
            self._on(param, {})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.optimizer_class.__name__} cannot take {name}: {error}") from error

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """The state of the optimizer after a step on a gradient of zeros."""
        twin = nn.Parameter(param.detach().clone())
        optimizer = self._on(twin, setting)
        twin.grad = torch.zeros_like(twin)
        _step(optimizer)
        return dict(optimizer.state[twin])

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """The state with and without momentum, which may have been used before it was set to 0."""
        ever = {**setting, "momentum": 0.5} if setting.get("momentum") == 0 else setting
        return self.init_state(param, setting) | self.init_state(param, ever)

    @override
    def check_chain(self, before: Sequence[Transform], after: Sequence[Transform]) -> None:
        """Raise if a transform other than `LR` comes after it, or if an `LR` comes before it."""
        late = [other for other in after if not isinstance(other, LR)]
        early = [other for other in before if isinstance(other, LR)]
        if late or early:
            lr_advice = "leave it out, and name the lr in the optimizer"
            advice = "put it before, or give the optimizer an argument for it" if late else lr_advice
            other = [*late, *early][0]
            raise ValueError(f"{self!r} takes the step by itself, so {other!r} would have no meaning: {advice}")

    @override
    @never_compiled
    def take_step(self, updates: list[Tensor], step: Step) -> None:
        """Take a step of the optimizer on the parameters, with the updates as their gradients."""
        template = self.template
        optimizer = object.__new__(self.optimizer_class)
        optimizer.__dict__.update(template.__dict__)
        # detached tensors share the memory of the parameters; setting their .grad leaves that of the parameters alone
        params = [param.detach() for param in step.params]
        keys = ("lr", *self._settings)
        optimizer.param_groups = [
            {**template.param_groups[0], **{key: setting[key] for key in keys}, "params": params[own]}
            for setting, own in step.by_setting()
        ]
        optimizer.state = defaultdict(dict)
        for param, state, setting in zip(params, step.states, step.settings, strict=True):
            if template.state and not state:  # Adagrad has state before its first step
                state.update(self._on(param, setting).state[param])
            optimizer.state[param] = state  # pyright: ignore[reportArgumentType]
        for param, update in zip(params, updates, strict=True):
            param.grad = update.to(param.dtype)
        _step(optimizer)
        for param, state in zip(params, step.states, strict=True):
            if (kept := optimizer.state[param]) is not state:  # some optimizers replace it
                state.update(kept)

    def _on(self, param: Tensor, setting: Setting) -> Optimizer:
        with cpu_by_default():
            return self.optimizer_class([param], **self._with(setting))

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


def constructed(optimizer_class: type[Optimizer], kwargs: Mapping[str, Any]) -> Optimizer:
    """An optimizer on a parameter of its own. Raises if the optimizer raises for the arguments."""
    try:
        with cpu_by_default():
            return optimizer_class([nn.Parameter(torch.zeros(1, 1, dtype=torch.float32))], **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Wrap({optimizer_class.__name__}, ...): {error}") from error
    except (LookupError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"Wrap({optimizer_class.__name__}, ...): {type(error).__name__}: {error}") from error


def _state_elsewhere(optimizer: Optimizer) -> list[str]:
    """The keys that a step changes besides the state of parameters: counters in groups, attributes."""
    before = [copy.deepcopy(kept) for kept in _kept(optimizer)]
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    try:
        with torch.no_grad():
            _step(optimizer)
    except Exception:  # it may need a device, for example
        return []
    pairs = zip(before, _kept(optimizer), strict=True)
    return sorted(key for old, new in pairs for key in new if repr(old.get(key)) != repr(new[key]))


def _kept(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The values of the param group, and the attributes that only this kind of optimizer has."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    base = {"state", "param_groups", "defaults", *vars(SGD([torch.zeros(1, device="cpu")]))}
    own = {key: value for key, value in vars(optimizer).items() if key not in base}
    return [{k: v for k, v in kept.items() if isinstance(v, (int, float, str, list, dict))} for kept in (group, own)]


def _is_schedule(value: Any, usual: Any) -> bool:
    """True if an argument is a function where a number may be expected."""
    expected = usual is None or usual is inspect.Parameter.empty or is_numeric(usual)
    return callable(value) and not isinstance(value, type) and expected


def _step(optimizer: Optimizer) -> None:
    """Take a step without the hooks, which run around the step of `Modular`."""
    step = type(optimizer).step
    unhooked = step.__wrapped__ if getattr(step, "hooked", False) else step  # pyright: ignore[reportFunctionMemberAccess]
    with cpu_by_default():
        unhooked(optimizer)
