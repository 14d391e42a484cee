"""The base class of transforms."""

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from torchzero_clip.checks import Check, learning_rate, one_of, plain, setting_name
from torchzero_clip.core.entering import Entering
from torchzero_clip.core.scope import Member, Scope, Where
from torchzero_clip.core.settings import at, override_groups
from torchzero_clip.core.target import TARGETS
from torchzero_clip.types import Schedule, Setting, State, Target


class Transform(ABC):
    """Maps the updates of all parameters to new updates.

    A transform holds settings, never tensors: what it remembers between steps is in the optimizer's state, so one
    instance may serve several optimizers of a thread. Subclasses implement `apply_tensors`; one that treats each tensor
    on its own is shorter as a `TensorwiseTransform`.

    Args:
        defaults: The settings: numbers, tuples of numbers or None, which param groups and schedules may change, or
            functions that say them after a number of steps. Everything else (``ord``, ``dim``) is structure and belongs
            in attributes.
        lr: For optimizers, the learning rate that the user gave; it becomes the chain's.
        target: What the transform acts on: ``"update"`` (what flows down the chain), ``"grad"`` (the ``.grad``
            itself), ``"closure"`` (the gradients that a closure leaves), ``"params_direct"``, ``"params_difference"``
            or ``"update_difference"`` (what the transform removed).
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For an unknown target, or a default that fails its check.

    Examples:
        A joint transform, with one number of state for the whole chain:

        >>> import torch
        >>> from torchzero_clip import Modular, Transform, get_total_norm
        >>> class ScaleByFirstNorm(Transform):
        ...     def __init__(self) -> None:
        ...         super().__init__({})
        ...     def init_global_state(self):
        ...         return {"first": torch.zeros(())}
        ...     def apply_tensors(self, tensors, params, grads, loss, states, settings):
        ...         norm = get_total_norm(tensors)
        ...         first = self.global_state["first"]
        ...         first.copy_(torch.where(first == 0, norm, first))
        ...         return [tensor / first for tensor in tensors]
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> optimizer = Modular([weight], ScaleByFirstNorm())
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.4000, 0.2000])
    """

    checks: ClassVar[Mapping[str, Check]] = {}
    """The check of each setting; it runs at construction, on every param group, on load and before every step."""

    scaling: ClassVar[bool] = False
    """The output is the update times factors: before an optimizer it may be written over ``.grad``."""

    pure: ClassVar[bool] = False
    """`apply_tensors` never writes to ``tensors``."""

    makes_own_state: ClassVar[bool] = False
    """`apply_tensors` makes the state of a parameter when it first needs it; `init_state` says of what kind it is."""

    keeps_statistics: bool = False
    """Remembers sizes of gradients, and so has to ask `entering` which of them are finite, and whether any is not 0."""

    gate: ClassVar[bool] = False
    """Decides by `refuses`, before anything changes, whether a step is taken."""

    orthogonalizes: ClassVar[bool] = False
    """The norm of the output goes by its shape alone, so that limits after it mean something else."""

    finishes: ClassVar[bool] = False
    """Can do the rest of the chain as well, down to the parameters: see `finish`."""

    must_finish: ClassVar[bool] = False
    """Has no other way: it has to stand at the end of the chain, and applies the learning rate itself."""

    default_lr: float | None = None
    """For optimizers, the learning rate of a chain in which nobody names one."""

    global_state: State
    """State of the whole chain; set while `apply_tensors` runs."""

    metrics: MutableMapping[str, Tensor]
    """What `Modular.metrics` will show under this transform's name, 0-d tensors; set while `apply_tensors` runs."""

    members: list[Member]
    """The parameters with their names; set while `apply_tensors` runs."""

    entering: Entering
    """What the gradients were before any transform; set while `apply_tensors` runs."""

    def __init__(
        self,
        defaults: Setting,
        *,
        lr: float | Tensor | Schedule | None = None,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        one_of("target", target, TARGETS)
        for key in defaults:
            setting_name(key)
        if lr is not None:
            learning_rate("lr", at(lr, 0))
        self.lr = lr
        self.schedules: dict[str, Schedule] = {key: value for key, value in defaults.items() if callable(value)}
        self.defaults = {key: plain(at(value, 0)) for key, value in defaults.items()}
        self.target: Target = target
        self.name = name or snake_case(type(self).__name__)
        self.overrides: list[dict[str, Any]] = []
        self.scope = Scope()
        self.check(self.defaults)

    def check(self, settings: Setting) -> None:
        """Raise if a setting is out of range."""
        for key, check in self.checks.items():
            if key in settings:
                check(key, settings[key])

    def check_parameter(self, name: str, param: Tensor) -> None:  # noqa: B027  most can act on any
        """Raise if this transform cannot act on a parameter; asked when it is added."""

    def check_groups(self, groups: Sequence[Setting]) -> None:
        """Raise if a setting is out of range in some group, or groups differ where they must not."""
        for settings in groups:
            self.check(settings)

    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Give some parameters settings of their own, before `Modular` takes this transform.

        A param group of the optimizer that holds parameters of several kinds is split. The new groups stand where the
        old one stood, in the order of their first parameters: schedulers that take a list need to know.

        Args:
            param_groups: Mappings with ``"params"`` (a tensor or an iterable of tensors) and settings of this
                transform.

        Returns:
            The transform itself.

        Raises:
            ValueError: For a key that is no setting of this transform, or a value out of range.

        Examples:
            >>> import torch
            >>> from torchzero_clip import ClipNorm, Modular
            >>> body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
            >>> clip = ClipNorm(1.0).set_param_groups([{"params": head.parameters(), "max_norm": 0.1}])
            >>> optimizer = Modular([*body.parameters(), *head.parameters()], clip)
            >>> [group["max_norm"] for group in optimizer.param_groups]
            [1.0, 0.1]
        """
        overrides: list[dict[str, Any]] = []
        for params, settings in override_groups(param_groups):
            for key in settings:
                if key not in self.defaults:
                    known = ", ".join(self.defaults) or "none"
                    hint = ". The learning rate of parameters is the lr of their param group" if key == "lr" else ""
                    raise ValueError(f"{type(self).__name__} has no setting {key!r}; its settings: {known}{hint}")
            self.check({key: at(value, 0) for key, value in settings.items()})
            overrides.append({"params": params, **settings})
        self.overrides = overrides
        return self

    def only(self, *where: Where, groups: str | Iterable[str] = ()) -> Self:
        """Let this transform act on some parameters only; for the others it is as if it were not there.

        Called again, it narrows the choice further.

        Args:
            *where: What is meant, any of these: names of parameters or of modules they are in, patterns for names such
                as ``"*.bias"``, or functions of a parameter such as ``lambda p: p.ndim >= 2``. Names need a module or
                named parameters in `Modular`.
            groups: Also the parameters of the param groups whose ``"name"`` is one of these.

        Returns:
            The transform itself.

        Raises:
            ValueError: If nothing is given.
            TypeError: If something is neither a string nor callable.

        Examples:
            >>> import torch
            >>> from torchzero_clip import Adam, ClipNorm, Modular
            >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 1))
            >>> clip = ClipNorm(1.0, dim="global").only("1")  # the linear layer
            >>> optimizer = Modular(model, clip, Adam())
            >>> optimizer.transforms["clip_norm"]
            ClipNorm(1.0, dim='global').only('1')
        """
        self.scope = self.scope.narrowed(True, where, groups)
        return self

    def without(self, *where: Where, groups: str | Iterable[str] = ()) -> Self:
        """Let this transform act on all parameters but some.

        Args:
            *where: What is left out, as in `only`.
            groups: Param groups that are left out, as in `only`.

        Returns:
            The transform itself.

        Raises:
            ValueError: If nothing is given.
            TypeError: If something is neither a string nor callable.
        """
        self.scope = self.scope.narrowed(False, where, groups)
        return self

    def walk(self) -> Iterator["Transform"]:
        """This transform, and all that it is made of."""
        yield self

    def out_of_scope(self, member: Member) -> list[str]:
        """Prefixes of the state that a parameter does not have, because transforms in this one do not act on it."""
        return []

    def changes_grads(self) -> bool:
        """Whether a step writes to ``.grad`` on purpose."""
        return any(transform.target == "grad" for transform in self.walk())

    def sees_all_gradients(self) -> bool:
        """Whether the first transform of a chain, if it is this one, is given the gradients of all parameters."""
        return self.target in ("update", "update_difference", "grad") and not self.scope.limited

    def optional_state(self) -> list[str]:
        """Prefixes of the state that a parameter may or may not have."""
        return [""] if self.makes_own_state else []

    def all_overrides(self) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
        """The parameters and settings of `set_param_groups`, here and in the transforms of a chain."""
        for override in self.overrides:
            yield override["params"], {key: value for key, value in override.items() if key != "params"}

    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """Return the state of one parameter before its first step.

        Args:
            param: The parameter; buffers of its shape are ``torch.zeros_like(param)``, scalars
                ``torch.zeros((), device=param.device)``, so that both are right under FSDP2.
            setting: The settings of this parameter.
        """
        return {}

    def possible_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """All that the state of one parameter may be, where that depends on settings that may have been different."""
        return self.init_state(param, setting)

    def init_global_state(self) -> dict[str, Any]:
        """Return the state of the whole chain before its first step: 0-d tensors and numbers."""
        return {}

    def can_finish(
        self,
        tensors: Sequence[Tensor],
        params: Sequence[Tensor],
        states: Sequence[State],
        later: Sequence["Transform"],
    ) -> bool:
        """Whether `finish` does the work of this transform and of all ``later`` ones on these updates."""
        return False

    def finish(
        self, tensors: list[Tensor], params: list[Tensor], states: Sequence[State], settings: Sequence[Setting]
    ) -> None:
        """Change the parameters as this transform and all later ones would, in one go. Asked of one that `finishes`.

        Args:
            tensors: The updates, not to be modified where they are the gradients themselves.
            params: The parameters.
            states: The state of each parameter.
            settings: The settings of each parameter, those of the later transforms among them.
        """
        raise NotImplementedError

    def refuses(self, norm: Tensor, state: State, setting: Setting) -> Tensor:
        """Return whether the step is to be skipped: a 0-d tensor of a boolean. Only a `gate` is asked.

        Args:
            norm: The L2 norm of the gradients that this transform acts on, before any transform: 0-d, float64.
            state: The state of the whole chain.
            setting: The settings of the first param group.
        """
        raise NotImplementedError

    def accept(self, norm: Tensor, state: State, setting: Setting) -> None:
        """Remember a norm that no gate refused. Only a `gate` is told; the arguments are as in `refuses`."""
        raise NotImplementedError

    @abstractmethod
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Return the new tensors, of the same shapes and dtypes. All lists have one entry per parameter.

        Args:
            tensors: The updates (or what ``target`` says); they may be modified in place.
            params: The parameters, not to be modified.
            grads: Their gradients, not to be modified; a norm clip before an optimizer may have scaled them.
            loss: What the closure returned; None without a closure.
            states: The state of each parameter.
            settings: The settings of each parameter; parameters of one group share one object.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())}){self.scope}"

    def _arguments(self) -> Iterator[str]:
        """The constructor's arguments that are not its defaults, as they would be written."""
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = self.schedules.get(name) or self.defaults.get(name, getattr(self, name, parameter.default))
            if parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
                yield repr(value)
            elif value is not parameter.default and value != parameter.default:
                yield f"{name}={value!r}"


def snake_case(name: str) -> str:
    """``ClipNormByEMA`` becomes ``clip_norm_by_ema``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
