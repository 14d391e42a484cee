"""The optimizer: a chain of transforms between the gradients and the parameters."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from torchzero_clip.checkpoints.saving import complete
from torchzero_clip.checks import boolean
from torchzero_clip.core.chain import Chain, Transforms, as_written
from torchzero_clip.core.learning_rate import with_learning_rate
from torchzero_clip.core.transform import Transform
from torchzero_clip.engine.nonfinite import Nonfinite
from torchzero_clip.functional.bad import BadGradients
from torchzero_clip.hints import Explained
from torchzero_clip.modular import validation
from torchzero_clip.modular.classes import ClassMaker, configured
from torchzero_clip.modular.described import repr_lines
from torchzero_clip.modular.origin import Origin
from torchzero_clip.modular.param_groups import as_groups
from torchzero_clip.modular.runner import Runner
from torchzero_clip.private_losses import refuse_loss
from torchzero_clip.types import Closure, Group, Setting, StateDict

T = TypeVar("T")


class _Option:
    """An argument of `Modular` that may be changed between steps, and belongs to the runner."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: "Modular | None", owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.runner, self._name)

    def __set__(self, optimizer: "Modular", value: bool) -> None:
        boolean(self._name, value)
        setattr(optimizer.runner, self._name, value)


class Modular(Explained, ClassMaker, Optimizer):
    """Chains transforms into an optimizer, which subtracts the result of the last one from the parameters.

        p ← p - (tₙ ∘ … ∘ t₁)(g)

    It is a `torch.optim.Optimizer`: torch's schedulers, GradScaler, hooks and checkpoints work with it as with torch's
    own. Settings such as ``max_norm`` and ``betas`` are in the param groups, where they may differ and be scheduled. If
    several transforms have the same setting, the first stores it under the bare key ``"max_norm"``, the next one under
    ``"clip_norm_2/max_norm"``.

    Each param group has exactly one learning rate, ``param_groups[i]["lr"]``. Without an `LR` in the chain, updates are
    multiplied by it after the last transform. Its initial value is that of the chain's optimizer (``Adam(lr=...)``, or
    the default of that optimizer in torch), and 1 in a chain without an optimizer. If several optimizers name rates,
    param groups are split so that each parameter has the rate of its optimizer.

    A step skips parameters that have no gradient or are frozen. After a step ``.grad`` holds the gradient, except that
    norm clips directly before an optimizer scale ``.grad`` in place, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        params: Parameters, param groups, named parameters, or a module, whose named parameters are taken.
        *transforms: What to do with the gradients, in this order; nested lists are accepted.
        maximize: Go up the gradient instead of down.
        keep_grads: Leave ``.grad`` bitwise unchanged, except by transforms with ``target="grad"`` or ``"closure"``.
            Norm clips before an optimizer then work on a copy.
        nonfinite: What happens if a gradient has an inf or a NaN: "propagate" passes it on, "skip" skips the step and
            counts it, "raise" raises a RuntimeError that names the parameters. The last two leave parameters and all
            state unchanged, and `bad_gradients` then has the names. They decide equally on all ranks of a mesh and of
            the ``process_group``. They synchronize with a GPU once a step, if `host_decides` is not empty.
        max_consecutive_skips: Raise if more steps than this in a row were skipped; None for any number. On a GPU, the
            error may come 16 steps late.
        fast: Combine transforms into few passes over memory. Pass False to check a result: each transform is then
            applied in its turn by the method that its author wrote. The results differ by rounding, and a step takes
            four to ten times as long.
        process_group: The processes that hold *other* parameters of the model, such as the stages of a pipeline:
            ``mesh["pp"].get_group()``. Joint norms, joint statistics, gates, ``nonfinite`` and metrics then cover the
            parameters of all of them. All processes need the same chain, which is checked here; settings and the
            patterns of scopes may differ. All processes take every step together. The group may be changed between
            steps. It is not part of checkpoints; copies share it.

    Raises:
        ValueError: If there are no transforms or no parameters, for an unknown or invalid setting in a group, or for a
            parameter that has two learning rates or is in two groups; for a ``process_group`` that this process is not
            in, that contains another process of a parameter's mesh, or in which a process has a different chain.
        TypeError: If an argument of ``transforms`` is not a transform, ``params`` is a single tensor, or
            ``process_group`` is no process group.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Modular(model.parameters(), ClipNorm(1), Adam(lr=0.01))
        >>> optimizer
        Modular(
            <2 tensors, 4 elements>,
            ClipNorm(1),
            Adam(lr=0.01),
        )
        >>> optimizer.param_groups[0]["max_norm"] = 0.5  # settings may change at any time
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> round(optimizer.metrics()["clip_norm/norm"].item(), 4)
        2.0
    """

    maximize, keep_grads, fast = _Option(), _Option(), _Option()
    _origin: Origin | None = None  # the module that ``params`` was. Copies and pickles have none

    def __init__(
        self,
        params: ParamsT | nn.Module,
        *transforms: Transforms,
        maximize: bool = False,
        keep_grads: bool = False,
        nonfinite: Nonfinite = "propagate",
        max_consecutive_skips: int | None = None,
        fast: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        listed = validation.listed_transforms(params, transforms)
        self._written = list(as_written(transforms))
        self.runner = Runner(
            configured(Chain(*with_learning_rate(listed)), self.replaced_settings),
            maximize=maximize,
            keep_grads=keep_grads,
            nonfinite=nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            fast=fast,
            process_group=process_group,
        )
        """What takes the steps."""
        super().__init__(as_groups(params, may_be_empty=process_group is not None), self.runner.nodes.defaults())
        self.runner.complete(self.param_groups, listed if isinstance(params, nn.Module) else None)
        self._origin = Origin(params) if isinstance(params, nn.Module) else None

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transforms by name, in the order of the chain."""
        return self.runner.transforms

    @property
    def nonfinite(self) -> Nonfinite:
        """What happens if a gradient has an inf or a NaN."""
        return self.runner.policy.nonfinite

    @property
    def steps_taken(self) -> int:
        """How many steps this object has taken. Steps that were refused or had no gradients do not count."""
        self.runner.read_decisions(self.param_groups)
        return self.runner.steps_taken

    @property
    def skipped_by(self) -> tuple[str, ...]:
        """Who refused the last call of `step`: names of gates, and "nonfinite". Empty if the step was not refused."""
        self.runner.read_decisions(self.param_groups)
        return self.runner.skipped_by

    @property
    def bad_gradients(self) -> BadGradients | None:
        """The gradients of the last step that ``nonfinite="skip"`` or ``"raise"`` refused; None before the first.

        They are those of all processes of the meshes and of the ``process_group``, and equal on all of them.
        """
        self.runner.read_decisions(self.param_groups)
        return self.runner.policy.bad_gradients

    @property
    def host_decides(self) -> tuple[str, ...]:
        """Why the host decides whether a step is taken, which synchronizes with a GPU; empty if the GPU decides.

        These are the reasons of the last step, or of the plan that the next one will follow.
        """
        return self.runner.host_decides()

    @property
    def process_group(self) -> ProcessGroup | None:
        """The processes that hold other parameters. Set it between steps, on all processes, if they change.

        Raises:
            ValueError: As in `Modular`.
            TypeError: As in `Modular`.
        """
        return self.runner.shared.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        self.runner.set_process_group(group, self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`torch.amp.GradScaler` asks for it before each step. Trainers must not find it, so it does not exist else."""
        if self.runner.parts is None:
            raise AttributeError("_step_supports_amp_scaling")
        self.runner.parts.refuse_scaler()

    def metrics(self) -> dict[str, Tensor]:
        """Return what the transforms measured, as 0-d tensors on the device. Reading a value synchronizes with the GPU.

        The metrics are those of the last step. After a refused one, only gates and `skipped_steps` have any.

        Returns:
            For example ``"clip_norm/norm"`` (before clipping), ``"clip_norm/factor"`` (mean over tensors or slices) and
                ``"clip_norm/clipped"`` (the share of elements that were clipped, or of tensors or slices that were
                clipped by more than a millionth); and ``"skipped_steps"``, if steps may be skipped.

        Examples:
            >>> import torch
            >>> from torchzero_clip import ClipNorm, Modular
            >>> weight = torch.nn.Parameter(torch.zeros(2))
            >>> optimizer = Modular([weight], ClipNorm(1.0))
            >>> weight.grad = torch.tensor([3.0, 4.0])
            >>> optimizer.step()
            >>> {name: round(value.item(), 4) for name, value in optimizer.metrics().items()}
            {'clip_norm/norm': 5.0, 'clip_norm/factor': 0.2, 'clip_norm/clipped': 1.0}
        """
        return self.runner.metrics(self.param_groups)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss and its gradients, and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned; None without a closure.

        Raises:
            ValueError: If a setting in a param group is out of range, or a transform has ``target="closure"`` and there
                is no closure.
            RuntimeError: If a gradient is sparse, the shape of a gradient or of state does not fit its parameter, or a
                parameter is on the meta device; if a gradient is not finite and ``nonfinite="raise"``; if more than
                ``max_consecutive_skips`` steps in a row were skipped; if the optimizer was unpickled and had a
                ``process_group``, which has to be set again.

        These errors leave parameters, gradients and state unchanged, except that skipped steps are counted.
        """
        runner = self.runner
        try:
            if self._origin is not None and runner.fast_way.plan is None and not torch.compiler.is_compiling():
                self._origin.warn_of_lost(self.param_groups)
            if runner.schedules.of_groups:
                self._check_schedulers()
            return runner.step(self.param_groups, self.state, closure)
        finally:
            if runner.untold is not None:
                runner.tell()

    def checked_settings(self) -> dict[str, list[Setting]]:
        """Check everything before the first update of a step, and return the settings by transform."""
        self._check_schedulers()
        return self.runner.checked_settings(self.param_groups)

    def _check_schedulers(self) -> None:
        """Raise if an lr has two schedules."""
        # torch has no public mark: `initial_lr` is in checkpoints too
        if "lr" in self.runner.schedules and hasattr(self.step, "_wrapped_by_lr_sched"):
            raise ValueError("lr is a function of the step and has a scheduler as well: keep one of them")

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the loss of this step, for transforms that judge it, such as `SkipStep` with ``sigma``.

        Call it once for each part of a batch whose gradients are accumulated. The loss of the step is their mean. With
        several processes, each may report its own loss or none. Every `step` forgets what was reported. A closure that
        returns a loss needs no report.

        Args:
            loss: A number, or a tensor of one number, before a gradient scaler multiplies it.

        Raises:
            TypeError: If it is neither a number nor a tensor.
            ValueError: If it is a tensor of more than one number.
            RuntimeError: If a `PrivateGradientClipper` trains one of the parameters, because the loss is private.
        """
        refuse_loss(self.param_groups, "report_loss")
        self.runner.reported.add(loss)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zeros, as `torch.optim.Optimizer.zero_grad` does.

        Losses that were reported before do not belong to the next step.
        """
        self.runner.reported.zeroed()
        if self._origin is not None:  # planned steps do not look
            self._origin.warn_of_lost(self.param_groups)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with settings of their own, for example layers that are unfrozen later.

        Args:
            param_group: ``"params"`` and any settings of the chain. Missing settings get the values of the chain.
                Keys of other packages are stored with the group.

        Raises:
            ValueError: For an argument of another optimizer or transform, which the steps would ignore, a value out of
                range, or a parameter that is in a group already. Then no group is added.
            TypeError: If ``param_group`` is not a dict.
        """
        if not isinstance(param_group, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        module = self._origin and self._origin.module()
        self.runner.add(param_group, self.param_groups, self._append, module=module)

    def _append(self, group: Group) -> None:
        """Add a group as torch does. While the optimizer is made, torch compares it with the last group only.

        It compares each group with all others, which takes quadratic time. `check_disjoint` has compared them by then.
        """
        groups = self.param_groups
        self.param_groups = groups if self.runner.is_complete else groups[-1:]
        super().add_param_group(group)
        groups += [] if self.runner.is_complete else self.param_groups[-1:]
        self.param_groups = groups

    def state_dict(self) -> StateDict:
        """Return settings and state. As in torch, the tensors are the optimizer's own, and later steps change them."""
        self.runner.read_decisions(self.param_groups)
        # a hook, so that hooks of users get the complete checkpoint
        hook = self.register_state_dict_post_hook(
            lambda _, saved: complete(saved, self.param_groups, self.runner.chain_state), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(
        self, state_dict: StateDict, *, new: str | Iterable[str] = (), dropped: str | Iterable[str] = ()
    ) -> None:
        """Load a checkpoint. It is checked completely before the first change.

        A checkpoint belongs to its chain: it loads into the same transforms in the same order. State that was saved in
        another floating point dtype, such as before ``model.double()``, is converted to the dtype that it has in this
        optimizer, as in torch. Keys that schedulers added to the groups stay if the checkpoint lacks them.

        Args:
            state_dict: What `state_dict` returned, for the same parameters.
            new: Names of transforms of this chain that the saved chain lacks. They start with the settings of this
                optimizer and fresh state. The other transforms are matched with the saved ones in order.
            dropped: Names of transforms of the saved chain that this chain lacks. ``new`` and ``dropped`` have no
                effect on a checkpoint of this chain, so a script may keep them.

        Raises:
            ValueError: If the checkpoint belongs to another chain: the message names the difference and the arguments
                that resolve it. If a key, shape, dtype or setting does not fit: the message names it. If loading fails
                on another rank of a mesh or of the ``process_group``, or a hook fails there: all ranks raise.
            RuntimeError: If the optimizer was unpickled and had a ``process_group``, which has to be set again.
        """
        if self.runner.shared.is_lost:
            self.runner.shared.refuse()
        self.runner.read_decisions(self.param_groups)
        with self.runner.new_load(new, dropped).hooked(self):
            super().load_state_dict(state_dict)
        if self._origin is not None:
            self._origin.calls = 0

    def __getstate__(self) -> dict[str, Any]:
        self.runner.read_decisions(self.param_groups)
        # a shallow copy of the optimizer has a runner of its own
        return super().__getstate__() | {"runner": copy.copy(self.runner), "_written": self._written}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and each group that is added later would get it

    def __repr__(self) -> str:
        runner = self.runner
        lines = repr_lines(self._written, runner.nodes, self.param_groups)
        lines += [f"{flag}=True" for flag in ("maximize", "keep_grads") if getattr(runner, flag)]
        lines += [*([] if runner.fast else ["fast=False"]), *runner.policy.described()]
        return "\n    ".join([f"{type(self).__name__}(", *(f"{line}," for line in lines)]) + "\n)"
