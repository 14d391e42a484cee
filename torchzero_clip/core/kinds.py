"""Kinds of transforms on which the optimizer calls special methods: scalings, update rules and gates."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.checks import as_number, same_in_all_groups, scalar
from torchzero_clip.core.schedules import at
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, latest
from torchzero_clip.functional.measure import Measured, Slicing
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.hints import explained
from torchzero_clip.types import Columns, Dim, Ord, Schedule, Setting, Target


class NeverApplied(Transform):
    """A transform on which the optimizer calls other methods than ``apply_tensors``."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "apply_tensors" in vars(cls):
            # the kind, such as Scaling, is the base that derives from this class directly
            kind = next(base.__name__ for base in cls.__mro__ if NeverApplied in base.__bases__)
            raise TypeError(
                f"{cls.__name__}.apply_tensors would never be called, because {cls.__name__} is a {kind}: implement "
                f"what {kind} asks for, or derive from Transform"
            )

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> NoReturn:
        raise RuntimeError(f"{self!r} cannot be applied alone: pass it to Modular(params, ...)")


class Scaling(NeverApplied):
    """Multiplies each slice of the updates by a factor computed from its norm: subclasses implement `factors`.

    The optimizer measures the slices, multiplies them, and reports three metrics: ``norm`` (of all slices together,
    before scaling), ``factor`` (the mean) and ``clipped`` (the share of slices that changed).

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

    has_factor: ClassVar[bool] = False
    """True if `factor` says what the scaling does. False if a subclass overrides only `factors`."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_factor = cls.factor is not Scaling.factor and latest(cls, "factor", "factors") == "factor"

    @explained
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
        self.ord, self.dim, self.inverse_dims, self.min_size = ord, dim, inverse_dims, min_size
        self.slicing = Slicing.checked(ord, dim, inverse_dims, min_size)

    def slice_dims(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the dimensions that one slice of a tensor spans; an empty tuple to leave the tensor alone.

        By default they are those of ``dim`` and ``inverse_dims``. Override this method if they depend on the tensor. It
        is not called with ``dim="global"``.

        Args:
            tensor: The update of one parameter. A scalar counts as a vector of one element.
        """
        return self.slicing.reduced_dims(tensor)

    @abstractmethod
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        """Return one factor per slice that was measured: a vector, made by `Measured.by_setting` or `Measured.joined`.

        It is not called if all tensors are left alone.

        Args:
            measured: The norms of the slices.
            updates: The updates, not to be modified.
            step: As in `Transform.apply_tensors`. State may be changed.
        """

    def factor(self, norm: float, setting: Setting) -> float:
        """Return the factor of one joint norm, as `factors` does, for a scaling that has no state and no metrics.

        Optional. Planned steps with a joint norm call it, because arithmetic on numbers takes less time than on
        tensors. The first of them compares it with `factors`, and raises if they differ.

        Args:
            norm: The joint norm, between 1e-12 and 1e30.
            setting: The settings, which are equal for all parameters.
        """
        raise NotImplementedError


class Shifting(Transform):
    """Subtracts numbers from updates, as `Centralize` does; `shifts` returns them if there is one for each update."""

    @abstractmethod
    def shifts(self, updates: list[Tensor], scratch: Scratch) -> Tensor | None:
        """Return the number to subtract from each update, a float64 vector; None if an update needs more than one."""
        # updates are plain real tensors of one dtype on one device, not to be modified


Kernel: TypeAlias = Callable[[list[Tensor], list[Tensor], Columns, Setting, Any], None]
"""Takes the rest of a chain's step in place: divides updates by a scale, and then changes parameters and state.

It gets parameters or parts of them, updates, state, a setting and the scale. State is a list of tensors shaped like the
parameters for each key, and after them lists of 0-d tensors. The scale is a 0-d float32 tensor, or None for 1.
"""


class Fused(NamedTuple):
    """The rest of a chain as one call for lists of tensors of one dtype."""

    state: Sequence[str]
    """The keys of state shaped like the parameters, which the calls change."""
    kernel: Kernel | None
    """For plain real tensors that are laid out alike for each parameter: one pass over memory."""
    loop: Kernel | None = None
    """For all other tensors on CPU. It is never given a ``scale``."""
    counters: Sequence[str] = ()
    """The keys of numbers that count the steps, this one included."""
    takes_found_inf: bool = False
    """The kernel has a keyword ``found_inf``, a 0-d float32 tensor, and changes nothing if it is 1."""


class UpdateRule(Transform):
    """Turns gradients into steps, as the optimizers of torch do, and names the learning rate of the chain.

    A rule must not write to its updates, which may be the gradients themselves. It does not multiply by the learning
    rate, because the chain does so at the end, or where an `LR` stands.

    Args:
        defaults: As in `Transform`.
        lr: The learning rate that the user gave, which the chain takes over. None for ``default_lr``.
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
    """The learning rate of a chain if neither the rule nor an `LR` sets one."""

    @explained
    def __init__(
        self,
        defaults: Setting,
        *,
        lr: float | Tensor | Schedule | None = None,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        if lr is not None:
            scalar("lr", as_number(at(lr, 0, "lr")))
        self.lr = as_number(lr)
        super().__init__(defaults, target=target, name=name)

    has_kernel: ClassVar[bool] = True
    """False if a subclass overrides ``apply_tensors`` and not `kernel`, which would bypass it."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_kernel = latest(cls, "kernel", "apply_tensors") == "kernel"

    def variant(self, setting: Setting) -> Hashable:
        """Return a key. One call of `kernel` gets only parameters whose keys are equal."""
        return None

    def kernel(self, rest: Sequence[Transform], step: Step) -> Fused | None:
        """Return one call that equals the rule and the rest of the chain up to rounding; None if there is none."""
        # called only for steps that may be fast; ``step.settings`` has the settings of the rest too
        return None


class FinalRule(NeverApplied, UpdateRule):
    """An update rule that changes the parameters itself, and so has to stand at the end of the chain."""

    # `take_step` creates the state of a parameter; `init_state` returns such a state for the checks of checkpoints

    @property
    def template(self) -> Optimizer | None:
        """An optimizer like the one whose code takes the step; None if the rule has code of its own."""
        return None

    @abstractmethod
    def take_step(self, updates: list[Tensor], step: Step) -> None:
        """Change parameters and state by updates, which may be modified.

        Settings include those of later transforms, and the keys of other packages in the param group.
        """


class Retraction(FinalRule):
    """A final rule that takes the step of the optimizers before it on a surface, as `Hyperball` does on a sphere.

    It names no rate of its own: see `learning_rate.update_rules`.
    """


class Gate(NeverApplied):
    """Decides, before anything changes, whether a step is taken: subclasses implement `refuses` and `accept`.

    Its place in the chain has no effect, because gates decide before the first transform. In param groups its settings
    always have qualified names, such as ``"skip_step/max_norm"``.

    Args:
        defaults: As in `Transform`.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        ValueError: As in `Transform`.
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

    needs_loss: bool = False
    """True if the gate reads ``step.loss``, which is then the mean over all processes. For other gates it is None."""

    @override
    def check_groups(self, settings: Sequence[Setting]) -> None:
        """Raise if a setting is out of range, or differs between groups, because one norm judges all of them."""
        super().check_groups(settings)
        same_in_all_groups(self, settings, self.defaults)

    @abstractmethod
    def refuses(self, norm: Tensor, step: Step) -> Tensor:
        """Return a 0-d boolean tensor: True to skip the step. This method must not change anything.

        All processes have to decide equally, so the result may depend only on ``norm``, ``step.loss``, the settings and
        ``step.global_state``, which are equal on all of them.

        Args:
            norm: The L2 norm of the gradients that this transform acts on, before any transform: 0-d, float64.
            step: As in `Transform.apply_tensors`.
        """

    @abstractmethod
    def accept(self, norm: Tensor, step: Step) -> None:
        """Record a step that no gate refused: change ``step.global_state``, set ``step.metrics``."""

    def refused(self, norm: Tensor, step: Step) -> None:
        """Record a step that this gate or another one refused: change ``step.global_state``, set ``step.metrics``."""

    def record(self, norm: Tensor, step: Step, taken: Tensor) -> None:
        """Record a step of which only the device knows whether it is taken, as `accept` and `refused` do.

        Optional. With it, a gate without a loss does not wait for a CUDA device. Change the tensors in
        ``step.global_state`` in place. A metric may be one of them.

        Args:
            norm: As in `refuses`. It may not be finite.
            step: As in `Transform.apply_tensors`.
            taken: A 0-d boolean tensor on the device.
        """
        raise NotImplementedError

    def why(self, norm: Tensor, step: Step) -> str:
        """Return why this gate refuses a step: what was judged, and its limit, for a warning after many such steps.

        It is called before `refused`. It may read tensors, because it is called only now and then.
        """
        return f"the norm of the gradients was {norm.item():.4g}"


def implements_record(kind: type[Gate]) -> bool:
    """True if `Gate.record` says what a gate stores. False if a subclass overrides only the other methods."""
    return kind.record is not Gate.record and latest(kind, "record", "refuses", "accept", "refused") == "record"
