"""Kinds of transforms that the optimizer treats in a way of its own: scalings, update rules and gates."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import learning_rate
from torchzero_clip.core.settings import at
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional.measure import Measured, Slicing
from torchzero_clip.types import Dim, Ord, Schedule, Setting, Target

TakeStep: TypeAlias = Callable[[], None]
"""Changes the parameters as the rest of a chain would."""


class Scaling(Transform):
    """Multiplies the slices of updates by factors that it finds in their norms: subclasses implement `factors`.

    The optimizer measures the slices, multiplies them, and reports the joint norm before, the mean factor and the share
    of slices that changed as the metrics ``norm``, ``factor`` and ``clipped``.

    Args:
        defaults: As in `Transform`.
        ord: The metric, as in `ClipNorm`.
        dim: The dimensions that one slice spans, as in `ClipNorm`.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left alone.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        ValueError: For an unknown ``ord``, ``dim`` or ``target``.
        TypeError: For an argument of the wrong type, or a subclass that overrides ``apply_tensors``.

    Examples:
        A limit that grows with the root of the number of elements:

        >>> import torch
        >>> from torchzero_clip import Modular, Scaling
        >>> class ClipBySize(Scaling):
        ...     def __init__(self, max_rms: float) -> None:
        ...         super().__init__({"max_rms": max_rms})
        ...     def factors(self, measured, updates, step):
        ...         limits = [s["max_rms"] * u.numel() ** 0.5 for s, u in zip(step.settings, updates)]
        ...         pairs = zip(measured.indices, measured.norms)
        ...         return measured.joined([(limits[i] / norm).clamp(max=1) for i, norm in pairs])
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> optimizer = Modular([weight], ClipBySize(0.5))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.5000, -0.5000, -0.5000, -0.5000])
    """

    def __init__(
        self,
        defaults: Setting,
        *,
        ord: Ord = 2,
        dim: Dim = None,
        inverse_dims: bool = False,
        min_size: int = 1,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        super().__init__(defaults, target=target, name=name)
        self.ord = ord
        self.dim: Dim = dim
        self.inverse_dims = inverse_dims
        self.min_size = min_size
        self.slicing = Slicing.checked(ord, dim, inverse_dims, min_size)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_apply_tensors(cls, "factors")

    @abstractmethod
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        """Return one factor per slice that was measured: a vector, made by `Measured.by_setting` or `Measured.joined`.

        Args:
            measured: The norms of the slices.
            updates: The updates, not to be modified.
            step: As in `Transform.apply_tensors`. State may be changed.
        """

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> NoReturn:
        """Raise: the optimizer calls `factors` instead, and multiplies."""
        raise RuntimeError(f"{self!r} only returns factors: apply it in a chain of Modular")


class UpdateRule(Transform):
    """Turns gradients into steps, as the optimizers of torch do, and names the learning rate of the chain.

    A rule only reads its updates, which may be the gradients themselves, and returns new tensors. The learning rate is
    not its business: the chain applies it at the end.

    Args:
        defaults: As in `Transform`.
        lr: The learning rate that the user gave; it becomes that of the chain. None for ``default_lr``.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        ValueError: For a setting or a learning rate out of range.
        TypeError: For an argument of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, UpdateRule
        >>> class SignSGD(UpdateRule):
        ...     default_lr = 1e-3
        ...     def __init__(self, lr=None) -> None:
        ...         super().__init__({}, lr=lr)
        ...     def apply_tensors(self, updates, step):
        ...         return [update.sign() for update in updates]
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], SignSGD(lr=0.5))
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.5000,  0.5000])
    """

    default_lr: float | None = None
    """The learning rate of a chain in which nobody names one."""

    def __init__(
        self,
        defaults: Setting,
        *,
        lr: float | Tensor | Schedule | None = None,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        if lr is not None:
            learning_rate("lr", at(lr, 0))
        self.lr = lr
        super().__init__(defaults, target=target, name=name)

    def fuse(self, rest: Sequence[Transform], updates: list[Tensor], step: Step) -> TakeStep | None:
        """Return a function that does the work of this rule and of the rest of the chain at once; None if it cannot.

        Args:
            rest: The transforms after this one that act on these parameters. Their settings are in ``step.settings``.
            updates: The updates, not to be modified where they are the gradients themselves.
            step: As in `Transform.apply_tensors`.
        """
        return None


class FinalRule(UpdateRule):
    """An update rule that changes the parameters itself, and so has to stand at the end of the chain.

    It makes the state of a parameter in its first step; `init_state` returns what that will be.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_apply_tensors(cls, "fuse")

    @abstractmethod
    @override
    def fuse(self, rest: Sequence[Transform], updates: list[Tensor], step: Step) -> TakeStep: ...

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> NoReturn:
        """Raise: what it would subtract is not known."""
        raise RuntimeError(f"{self!r} takes the step by itself: it has to stand at the end of the chain of Modular")


class Gate(Transform):
    """Decides, before anything changes, whether a step is taken: subclasses implement `refuses` and `accept`.

    It stands anywhere in a chain, and does nothing there. Its settings have only qualified names in param groups.

    Args:
        defaults: As in `Transform`.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        TypeError: For a subclass that overrides ``apply_tensors``.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Gate, Modular
        >>> class SkipLarge(Gate):
        ...     def __init__(self) -> None:
        ...         super().__init__({"limit": 10.0})
        ...     def refuses(self, norm, step):
        ...         return norm > step.settings[0]["limit"]
        ...     def accept(self, norm, step):
        ...         step.metrics["norm"] = norm
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], SkipLarge())
        >>> for gradient in (1.0, 100.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> weight.data
        tensor([-1.])
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_apply_tensors(cls, "refuses")

    @abstractmethod
    def refuses(self, norm: Tensor, step: Step) -> Tensor:
        """Return whether the step is to be skipped: a 0-d tensor of a boolean. Nothing may be changed.

        Args:
            norm: The L2 norm of the gradients that this transform acts on, before any transform: 0-d, float64.
            step: As in `Transform.apply_tensors`.
        """

    @abstractmethod
    def accept(self, norm: Tensor, step: Step) -> None:
        """Learn from a step that no gate refused: change ``step.global_state``, set ``step.metrics``.

        Args:
            norm: As in `refuses`.
            step: As in `refuses`.
        """

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> NoReturn:
        """Raise: the optimizer calls `refuses` and `accept` instead."""
        raise RuntimeError(f"{self!r} only decides about steps: put it into a chain of Modular")


def _refuse_apply_tensors(cls: type[Transform], hook: str) -> None:
    """Raise for a class whose ``apply_tensors`` would never be called."""
    if "apply_tensors" in vars(cls) and cls.__module__ != __name__:
        kind = next(base.__name__ for base in cls.__mro__ if base.__module__ == __name__)
        raise TypeError(
            f"{cls.__name__}.apply_tensors would never be called, since {cls.__name__} is a {kind}: implement {hook}, "
            "or derive from Transform"
        )
