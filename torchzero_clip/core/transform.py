"""The base classes of transforms."""

import copy
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Self, TypeVar, get_args

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import Check, as_builtin, one_of, setting_name, transform_name
from torchzero_clip.core.schedules import at
from torchzero_clip.core.scope import Scope, Where
from torchzero_clip.core.step import Step
from torchzero_clip.hints import Explained, check_override, did_you_mean, explained
from torchzero_clip.types import Group, NewState, Schedule, Setting, State, Target

CALLED = {
    *("apply_tensors", "apply_tensor", "factors", "formula", "start", "change", "refuses", "accept", "refused", "why"),
    *("take_step", "shifts", "record", "keeps_refused", "slice_dims"),
    *("init_state", "possible_state", "init_global_state"),
}
"""Methods that the optimizer calls with positional arguments."""

_SEE_ALL_TENSORS = ("apply_tensors", "factors", "limit", "flags", "rows_of", "shifts", "take_step", "kernel")
_PROMISES = {
    "each_alone": _SEE_ALL_TENSORS,
    "pure": (*_SEE_ALL_TENSORS, *sorted(CALLED), "factor", "variant", "checks", "check", "check_groups"),
}
"""What a class promises, and the methods whose overriding ends the promise."""


def latest(kind: type, *names: str) -> str:
    """The first of ``names`` that the most derived class defines, among the classes that define one of them."""
    # a class is asked once, when it is made: what it inherits may not fit what it overrides
    return next(name for base in kind.__mro__ for name in names if name in vars(base))


class Transform(Explained, ABC):
    """Maps the updates of all parameters to new updates.

    Subclasses implement `apply_tensors`; one that treats each tensor on its own is shorter as a `TensorwiseTransform`.
    Three kinds of transforms have base classes of their own: a `Scaling` multiplies updates by factors, an `UpdateRule`
    turns gradients into steps, and a `Gate` decides whether a step is taken.

    The attributes of a transform are settings and structure, never tensors or data of a step. The optimizer stores its
    state between steps, so one instance may serve several optimizers, also in several threads. A transform does not
    change after its constructor: `only`, `without` and `set_param_groups` return a copy.

    Args:
        defaults: The settings, which param groups and schedulers may change: numbers, tuples of numbers, None, or
            functions that return these for a number of steps. All other arguments (``ord``, ``dim``) are structure,
            and are stored in attributes.
        target: What the transform acts on: ``"update"`` (what flows down the chain), ``"grad"`` (the ``.grad``
            itself), ``"closure"`` (the gradients that a closure leaves), ``"params_direct"``, ``"params_difference"``
            or ``"update_difference"`` (what the transform removed).
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For an unknown target, a default that fails its check, or a check of an unknown setting.
        TypeError: If ``defaults`` is not a dict, or a check returns a bool.

    Examples:
        A joint transform, with one number of state for the whole chain:

        >>> import torch
        >>> from torchzero_clip import Modular, Transform, get_total_norm
        >>> class ScaleByFirstNorm(Transform):
        ...     def __init__(self) -> None:
        ...         super().__init__({})
        ...     def init_global_state(self):
        ...         return {"first": torch.zeros(())}
        ...     def apply_tensors(self, updates, step):
        ...         norm = get_total_norm(updates)
        ...         first = step.global_state["first"]
        ...         first.copy_(torch.where(first == 0, norm, first))
        ...         return [update / first for update in updates]
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> optimizer = Modular([weight], ScaleByFirstNorm())
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.4000, 0.2000])
    """

    checks: ClassVar[Mapping[str, Check]] = {}
    """The check of each setting. It runs at construction, on every param group, on load and once in every step."""

    keeps_statistics: ClassVar[bool] = False
    """If True, the optimizer measures the gradients, which `Step.finite`, `Step.nonzero` and `Step.usable` need."""

    limit_setting: ClassVar[str | None] = None
    """The setting that is the limit of a clip, which a `Recorder` shows; None if its limit is no setting."""

    each_alone: bool = False
    """True if the result for a tensor depends only on this tensor, its parameter, its state and settings.

    `step_in_backward` takes only such transforms. A subclass that overrides ``apply_tensors``, ``factors`` or a similar
    method has to set it again. With ``dim="global"`` it has no effect.
    """

    pure: bool = False
    """True if the result of each method depends only on its arguments and on the attributes of the transform.

    The methods of a pure transform change only updates, state and metrics. They do not read ``step.grads``, and return
    no views of state. They get None as the loss, except a `Gate` that declares ``needs_loss``. A transform that reads
    the loss is not pure. Its checks do nothing but raise. `UpdateRule.kernel` returns the same function for the same
    settings. The optimizer then needs fewer copies, and may plan its steps.

    A subclass that overrides a method has to set it again. The first step of a parameter raises an error if it sees
    that the promise does not hold.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in CALLED & vars(cls).keys():
            check_override(cls, name)
        for promise, methods in _PROMISES.items():
            if latest(cls, promise, *methods) != promise:
                setattr(cls, promise, False)

    @explained
    def __init__(self, defaults: Setting, *, target: Target = "update", name: str | None = None) -> None:
        one_of("target", target, get_args(Target))
        if not isinstance(defaults, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"defaults must be a dict of settings, got {defaults!r}: write super().__init__({{...}})")
        if name is not None:
            transform_name("name", name)
        for key in defaults:
            setting_name(key)
        self.schedules: dict[str, Schedule] = {key: value for key, value in defaults.items() if callable(value)}
        self.defaults = {key: as_builtin(at(value, 0, key)) for key, value in defaults.items()}
        self.target: Target = target
        self.name = name or snake_case(type(self).__name__)
        self.overrides: list[Group] = []
        self.scope = Scope()
        if unknown := [key for key in self.checks if key not in self.defaults]:
            raise ValueError(f"checks of {type(self).__name__} has {unknown[0]!r}, which is none of its settings")
        self.check(self.defaults)

    @abstractmethod
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        """Return the new updates, of the same shapes and dtypes.

        Args:
            updates: The updates (or the tensors that ``target`` names). They may be modified in place and returned.
            step: The parameters, gradients, states and settings that belong to them.
        """

    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        """Return the state of one parameter before its first step.

        Args:
            param: The parameter. Create buffers of its shape by ``torch.zeros_like(param)``, and scalars by
                ``torch.zeros((), device=param.device)``: both are right under FSDP2.
            setting: The settings of this parameter.
        """
        return {}

    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        """Return every entry that the state of one parameter may ever have. Checkpoints are compared with it.

        Override this method if the transform adds state later, or if its state depends on settings. A checkpoint may
        then lack its state of a parameter, and the next gradient of that parameter creates it.
        """
        return self.init_state(param, setting)

    def has_state(self) -> bool:
        """Return True if parameters may have state: by default, if a class says what it is."""
        kind = type(self)
        return kind.init_state is not Transform.init_state or kind.possible_state is not Transform.possible_state

    def init_global_state(self) -> NewState:
        """Return the state of the whole chain before its first step: tensors and numbers."""
        return {}

    def keeps_refused(self, settings: Sequence[Setting]) -> bool:
        """Return True if a step changes no state when all norms in ``step.gradient_norms`` are NaN.

        Optional, for pure transforms with state. With True, a GPU may refuse a step while the host goes on. The
        transform acts in such a step too, and all norms are NaN then. A transform without state is not asked.

        Args:
            settings: The settings of each group.
        """
        return False

    def structure(self) -> dict[str, str]:
        """Return the arguments that are neither settings nor defaults, as text. Checkpoints depend on them."""
        arguments: dict[str, str] = {}
        for key, parameter in inspect.signature(type(self)).parameters.items():
            varying = key in self.defaults or key in ("lr", "name", "fused")
            if not varying and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                text = as_text(getattr(self, key, parameter.default))
                if text != as_text(parameter.default):
                    arguments[key] = text
        return arguments

    def check(self, setting: Setting) -> None:
        """Raise if a setting is out of range."""
        for key, check in self.checks.items():
            if key in setting and isinstance(check(key, setting[key]), bool):  # pyright: ignore
                raise TypeError(
                    f"the check of {key!r} in {type(self).__name__} returned a bool, and has to raise an error for a "
                    "value out of range: take one of torchzero_clip.checks, such as positive"
                )

    def check_groups(self, settings: Sequence[Setting]) -> None:
        """Raise if a setting is out of range, or differs between groups where it must be the same."""
        for setting in settings:
            self.check(setting)

    def check_parameter(self, name: str, param: Tensor) -> None:
        """Raise if this transform cannot act on a parameter. It is called when the parameter is added."""

    def check_chain(self, before: Sequence["Transform"], after: Sequence["Transform"]) -> None:
        """Raise or warn if this transform does not fit with those before and after it in the chain.

        It is called with the transforms that act on some of the same parameters, when the optimizer is made and when
        param groups are added.
        """

    def set_param_groups(self, param_groups: Iterable[Setting]) -> Self:
        """Return a copy of this transform that gives some parameters settings of their own.

        `Modular` splits a param group if its parameters get different settings. The new groups take the place of the
        old one, in the order of their first parameters; a scheduler that takes a list needs one entry for each of them.
        A call on the copy replaces its settings.

        Args:
            param_groups: Mappings with ``"params"`` (a tensor or an iterable of tensors) and settings of this
                transform.

        Raises:
            ValueError: For a key that is not a setting of this transform, or a value out of range.

        Examples:
            >>> import torch
            >>> from torchzero_clip import ClipNorm, Modular
            >>> body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
            >>> clip = ClipNorm(1.0).set_param_groups([{"params": head.parameters(), "max_norm": 0.1}])
            >>> optimizer = Modular([*body.parameters(), *head.parameters()], clip)
            >>> [group["max_norm"] for group in optimizer.param_groups]
            [1.0, 0.1]
        """
        overrides: list[Group] = []
        for params, settings in override_groups(param_groups):
            for key in settings:
                if key not in self.defaults:
                    hints = {
                        "lr": ". The learning rate of parameters is the lr of their param group",
                        "name": ". A name belongs to a param group that Modular gets",
                    }
                    hint = hints.get(key) or did_you_mean(key, self.defaults)
                    raise ValueError(f"{type(self).__name__} has no setting {key!r}{hint}")
            self.check({key: at(value, 0, key) for key, value in settings.items()})
            overrides.append({"params": params, **settings})
        return altered(self, overrides=overrides)

    def only(self, *where: Where, groups: str | Iterable[str] = ()) -> Self:
        """Return a copy of this transform that acts on selected parameters only. The updates of the others skip it.

        A call on the copy narrows the selection further. Optimizers that already have this transform do not change.

        Args:
            *where: Any of these select parameters: names of parameters or of modules that hold them, patterns for
                names such as ``"*.bias"``, or functions of a parameter such as ``lambda p: p.ndim >= 2``. Names need
                a module or named parameters in `Modular`.
            groups: Param groups by their ``"name"``. Their parameters are selected too.

        Raises:
            ValueError: Without an argument.
            TypeError: If an argument is neither a string nor callable.

        Examples:
            >>> import torch
            >>> from torchzero_clip import Adam, ClipNorm, Modular
            >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 1))
            >>> clip = ClipNorm(1.0, dim="global").only("1")  # the linear layer
            >>> optimizer = Modular(model, clip, Adam())
            >>> optimizer.transforms["clip_norm"]
            ClipNorm(1.0, dim='global').only('1')
        """
        return altered(self, scope=self.scope.narrowed(True, where, groups))

    def without(self, *where: Where, groups: str | Iterable[str] = ()) -> Self:
        """Return a copy of this transform that acts on all parameters except selected ones.

        Args:
            *where: The parameters to leave out, selected as in `only`. It raises as `only` does.
            groups: The param groups to leave out, as in `only`.
        """
        return altered(self, scope=self.scope.narrowed(False, where, groups))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())}){self.scope}"

    def _arguments(self) -> Iterator[str]:
        """The arguments of the constructor that differ from their defaults, as in a call."""
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = self.schedules.get(name) or self.defaults.get(name, getattr(self, name, parameter.default))
            is_shown = name != "name" or self.name != snake_case(type(self).__name__)
            if not is_shown or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if value is parameter.empty:
                continue  # the class stores this argument under another name
            if parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
                yield repr(value)
            elif as_text(value) != as_text(parameter.default):
                yield f"{name}={value!r}"


class TensorwiseTransform(Transform):
    """A transform that treats each tensor on its own: subclasses implement `apply_tensor`.

    Args:
        defaults: As in `Transform`.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        ValueError: As in `Transform`.
        TypeError: As in `Transform`.

    Examples:
        A complete transform. Its setting is validated, may differ between param groups, can be scheduled, and is part
        of checkpoints; `rms` is safe from overflow and right under FSDP2.

        >>> import torch
        >>> from torchzero_clip import Modular, TensorwiseTransform, rms
        >>> from torchzero_clip.checks import positive
        >>> class ClipRMS(TensorwiseTransform):
        ...     checks = {"max_rms": positive}
        ...     def __init__(self, max_rms: float, *, target="update") -> None:
        ...         super().__init__({"max_rms": max_rms}, target=target)
        ...     def apply_tensor(self, tensor, param, grad, loss, state, setting):
        ...         return tensor.mul_((setting["max_rms"] / rms(tensor)).clamp(max=1.0))
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipRMS(0.5))
        >>> weight.grad = torch.tensor([3.0, 3.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.5000, -0.5000])
        >>> ClipRMS(-1.0)
        Traceback (most recent call last):
        ...
        ValueError: max_rms must be > 0, got -1.0
    """

    each_alone = True
    """True, as in `Transform.each_alone`. Set it to False in a subclass that reads ``loss``."""

    @abstractmethod
    def apply_tensor(
        self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Tensor | float | None, state: State, setting: Setting
    ) -> Tensor:
        """Return the new tensor.

        Args:
            tensor: The update of one parameter. It may be modified in place and returned.
            param: The parameter, not to be modified.
            grad: Its gradient, not to be modified.
            loss: What the closure returned, or what was reported; None without either, or if the class is ``pure``.
            state: The state of this parameter.
            setting: The settings of this parameter.
        """

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        """Apply `apply_tensor` to every tensor. Override this method to use other parts of the `Step`."""
        of_each = zip(updates, step.params, step.grads, step.states, step.settings, strict=True)
        return [self.apply_tensor(u, p, g, step.loss, state, setting) for u, p, g, state, setting in of_each]


T = TypeVar("T", bound=Transform)


def altered(transform: T, **attributes: object) -> T:
    """A shallow copy with other attributes."""
    new = copy.copy(transform)
    if new is transform:
        raise TypeError(f"{type(transform).__name__}.__copy__ returns the transform itself, and has to return a copy")
    # an author's class may copy itself by its constructor, which sets neither the scope nor the overrides
    new.scope, new.overrides = transform.scope, transform.overrides
    vars(new).update(attributes)
    return new


def storable(transform: Transform, values: State) -> State:
    """The given state. Raises if it has a value that checkpoints of several processes cannot hold."""
    if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{transform!r} returned {type(values).__name__} as its state: return a dict, {{}} for none")
    for key, value in values.items():
        if not isinstance(value, Tensor | int | float):
            raise TypeError(
                f"{transform!r} has {type(value).__name__} as state {key!r}: state consists of tensors and numbers. A "
                "window of past numbers is a tensor, such as torch.zeros(100, device=param.device)"
            )
    return dict(values)


def snake_case(name: str) -> str:
    """``ClipNormByEMA`` becomes ``clip_norm_by_ema``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def treats_each_alone(transform: Transform) -> bool:
    """True if a transform says that it treats each tensor alone, and its tensors do not have one joint norm."""
    return transform.each_alone and getattr(transform, "dim", None) != "global"


def is_pure(transform: Transform) -> bool:
    """True if the class is pure, and no method of this object was replaced."""
    return transform.pure and CALLED.isdisjoint(vars(transform))


def override_groups(param_groups: Iterable[Setting]) -> Iterator[tuple[list[Tensor], Group]]:
    """The parameters and the settings of each group given to `set_param_groups`."""
    if isinstance(param_groups, Mapping):
        raise TypeError("param_groups must be a list of dicts, got one dict: write [{...}]")
    for group in param_groups:
        if not isinstance(group, Mapping) or "params" not in group:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"each of param_groups must be a dict with 'params', got {group!r}")
        params = group["params"]
        settings = {key: as_builtin(value) for key, value in group.items() if key != "params"}
        listed = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        yield listed, settings


def as_text(value: object) -> str:
    """The text of a value in code, the same in every process."""
    value = as_builtin(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 2.0 and 2 have the same text
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(as_text, value)))}}}"  # pyright: ignore[reportUnknownArgumentType]
    text = repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__) if " at 0x" in text or callable(value) else text
