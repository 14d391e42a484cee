"""The optimizer: a chain of transforms between the gradients and the parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from torchzero_clip.checkpoints.saving import Load, complete, new_chain_state
from torchzero_clip.checks import boolean
from torchzero_clip.compat import any_distributed
from torchzero_clip.core.chain import Chain, Transforms, as_written
from torchzero_clip.core.chain_state import SCHEDULE_STEP, SKIPPED
from torchzero_clip.core.learning_rate import with_learning_rate
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.schedules import Schedules
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.core.transform import Transform
from torchzero_clip.core.undo import Undo
from torchzero_clip.engine.company import Part
from torchzero_clip.engine.end import Deliver, Subtract
from torchzero_clip.engine.judged import Judged, Judging
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.nonfinite import Nonfinite, StepPolicy
from torchzero_clip.engine.others import Others
from torchzero_clip.engine.parts import Parts
from torchzero_clip.engine.readable import Readable
from torchzero_clip.engine.reported_loss import Loss, ReportedLoss
from torchzero_clip.engine.run import run
from torchzero_clip.engine.table import Table, refuse_unusable
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk
from torchzero_clip.fast.door import FastWay
from torchzero_clip.functional.bad import BadGradients
from torchzero_clip.functional.gradients import own_gradients
from torchzero_clip.functional.processes import SharedGroup, check_group, device_of
from torchzero_clip.hints import Explained, Named
from torchzero_clip.modular import validation
from torchzero_clip.modular.classes import ClassMaker, configured
from torchzero_clip.modular.described import described
from torchzero_clip.modular.missing import Missing
from torchzero_clip.modular.origin import Origin
from torchzero_clip.modular.param_groups import accepted, all_or_none, as_groups, check_disjoint, split
from torchzero_clip.private_losses import refuse_loss
from torchzero_clip.types import Group, Setting

T = TypeVar("T")


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
            state unchanged, and `bad_gradients` then has the names. They wait for the device once a step, and decide
            equally on all ranks of a mesh and of the ``process_group``.
        max_consecutive_skips: Raise if more steps than this in a row were skipped; None for any number.
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

    listener: Listener | None = None
    """What sees every step, such as a `Recorder`. Copies and pickles of an optimizer have none."""

    parts: Parts | None = None
    """What the backward has updated since the last step, after `step_in_backward`. Copies and pickles have none."""

    skipped_by: tuple[str, ...] = ()
    """Who refused the last call of `step`: the names of gates, and "nonfinite". Empty if the step was not refused."""

    steps_taken: int = 0
    """How many steps this object has taken. Steps that were refused or had no gradients do not count."""

    _undo: Undo | None = None  # notes state before it changes, if another optimizer takes the step
    _delivery: Deliver | None = None  # the end of a step; None to subtract the updates from the parameters
    _has_meshes = False  # if a parameter is distributed
    _origin: Origin | None = None  # the module that ``params`` was. Copies and pickles have none
    _lengths: Sequence[int] = ()  # how many keys each param group had in the last step

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
        for name, flag in (("maximize", maximize), ("fast", fast), ("keep_grads", keep_grads)):
            boolean(name, flag)
        listed = validation.listed_transforms(params, transforms)
        self.maximize, self.keep_grads, self.fast = maximize, keep_grads, fast
        self._fast_way = FastWay()
        self.chain = configured(Chain(*(with_learning_rate(listed) if self._delivery is None else listed)), self.given)
        self._written = list(as_written(transforms))
        self.nodes: Nodes = self.chain.nodes()
        self._judging = Judging(self.nodes)
        self.storage_keys = self.nodes.storage_keys
        self._policy = StepPolicy(nonfinite, max_consecutive_skips, self.transforms)
        self._chain_state = new_chain_state(self.nodes, self._policy.counts())
        self._schedules = Schedules(self.nodes.schedules(), self.storage_keys.values(), self._chain_state)
        self._metrics: dict[str, Tensor] = {}
        self._unread: Callable[[], dict[str, Tensor]] | None = None  # computes the metrics of a planned step, once
        self._reported = ReportedLoss()
        self._fitting: set[object] = set()  # see `check_tensors`
        check_group(process_group, [])
        self._shared, self._is_complete = SharedGroup(process_group), False
        super().__init__(as_groups(params, may_be_empty=process_group is not None), self.nodes.defaults())
        check_disjoint(self.param_groups)
        self.nodes.checked_settings(self.param_groups)
        self._chain_state.move(self.param_groups)
        self._chain_state.start(self.param_groups, has_schedules=self._schedules.any)
        named = self._named_params()
        validation.check_places(self.chain, self.nodes, named)
        idle, self._has_joint_schedules = validation.agree(
            self.nodes, self._policy, named, self._schedules.any, process_group
        )
        validation.warn_of_slips(self.nodes, named, idle, listed if isinstance(params, nn.Module) else None)
        self._origin = Origin(params) if isinstance(params, nn.Module) else None
        self._is_complete = True

    def _named_params(self, first: int = 0) -> list[NamedParam]:
        return [named for group in self.param_groups[first:] for named in named_params(group)]

    @property
    def nonfinite(self) -> Nonfinite:
        """What happens if a gradient has an inf or a NaN."""
        return self._policy.nonfinite

    @property
    def bad_gradients(self) -> BadGradients | None:
        """The gradients of the last step that ``nonfinite="skip"`` or ``"raise"`` refused; None before the first.

        They are those of all processes of the meshes and of the ``process_group``, and equal on all of them.
        """
        return self._policy.bad_gradients

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`torch.amp.GradScaler` asks for it before each step. Trainers must not find it, so it does not exist else."""
        if self.parts is None:
            raise AttributeError("_step_supports_amp_scaling")
        self.parts.refuse_scaler()

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transforms by name, in the order of the chain."""
        return self.chain.transforms

    @property
    def process_group(self) -> ProcessGroup | None:
        """The processes that hold other parameters. Set it between steps, on all processes, if they change.

        Raises:
            ValueError: As in `Modular`.
            TypeError: As in `Modular`.
        """
        return self._shared.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        named = self._named_params()
        check_group(group, [param for param, *_ in named])
        _, self._has_joint_schedules = validation.agree(self.nodes, self._policy, named, self._schedules.any, group)
        self._shared = SharedGroup(group)

    def is_scheduled(self, key: str) -> bool:
        """Return True if a setting, by its key in the param groups, is a function of the step in some group."""
        return key in self._schedules

    def metrics(self) -> dict[str, Tensor]:
        """Return what the transforms measured, as 0-d tensors on the device. Reading a value waits for the device.

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
        self._chain_state.take_counters(self.param_groups)
        skipped = torch.tensor(self._chain_state.values[SKIPPED], device="cpu") if self._policy.may_skip else None
        return Named(self._known_metrics() | ({} if skipped is None else {"skipped_steps": skipped}))

    def _known_metrics(self) -> dict[str, Tensor]:
        """The metrics of the last step, computed once."""
        if self._unread is not None:
            with torch.inference_mode(False), torch.no_grad():  # whatever the mode of the caller
                self._metrics, self._unread = self._unread(), None
        return self._metrics

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
        try:
            self.skipped_by = ()
            if self._shared.is_lost:
                self._shared.refuse()
            if closure is None and self._fast_way.plan is not None and self._repeat(self._reported.loss):
                return None
            if closure is None and "closure" in self.nodes.targets:
                raise ValueError("a transform with target='closure' needs a closure: call step(closure)")
            settings = self.begin()

            result, walk, loss = None, None, self._reported.loss
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
                loss = loss if result is None else partial(Loss, result, 1)
                if self._fast_way.plan is not None and self._repeat(loss):
                    return result
                # the closure may have changed them, or added groups
                settings = self.nodes.checked_settings(self.param_groups)

            absent = Missing(self.nodes, self.param_groups, self.state) if self._has_meshes and not self.parts else None
            try:
                walk = self._walk(self.param_groups, self._fast_way, settings, loss())
                if self.parts is not None:
                    self.parts.refuse_second(walk.table.params)
                self._take(walk)
            finally:
                if absent is not None:
                    absent.put_back(walk)
            return result
        finally:
            if self._reported.count:
                self._reported.clear()

    def _take(self, walk: Walk | None, go: Callable[[], object] | None = None) -> None:
        """Take a step, or skip it. A planned one passes ``go``, and no walk if nobody sees it and it is allowed."""
        state, parts = self._chain_state.values, self.parts
        is_taken = walk is None
        try:
            if walk is not None:
                has_updated = parts is not None and len(parts.updated) > 0
                takes_part = len(walk.table.params) > 0 or self._shared.group is not None or has_updated
                is_taken = takes_part and (not self._policy.decides or self._policy.allows(walk, state))
            if is_taken and go is not None:
                go()
            elif is_taken and walk is not None:
                is_taken = run(walk, self.chain, states=self.state, listener=self.listener, parts=parts)
            if is_taken:
                if not torch.compiler.is_compiling():  # which would compile the step anew for each number
                    self.steps_taken += 1
                if walk is not None and walk.are_zero:
                    self._policy.idle.zeros(self.steps_taken)
                if go is None and walk is not None and not isinstance(walk.executor, Readable):
                    self._fast_way.learn(walk, (self.maximize, self.keep_grads, parts, self._shared.group))
                if SCHEDULE_STEP in state:
                    self._schedules.advance(self.param_groups)
            elif walk is not None:
                self._policy.idle.not_taken(walk, self.steps_taken)
        finally:
            if walk is not None and "error" not in walk.refused_by:
                self.skipped_by = tuple(walk.refused_by)
                # a skipped step has the numbers of gates, and none of an earlier step
                if (go is None or not is_taken) and self._policy.raising.isdisjoint(walk.refused_by):
                    self._metrics.clear()  # torch.compile loses a dict that is assigned
                    found = walk.metrics if parts is None or not is_taken else parts.end(self.nodes, self.param_groups)
                    self._metrics.update(found)
                    self._unread = None
            if state:
                self._chain_state.show(self.param_groups)
            if walk is not None and self.listener is not None:
                self._tell(self.listener, walk)

    def _tell(self, listener: Listener, walk: Walk) -> None:
        listener.end(walk)

    def _repeat(self, loss: Callable[[], Loss]) -> bool:
        """Take a step by the plan. Return False if it does not fit; then nothing has changed."""
        if not self._may_be_fast():
            return False
        state = self._chain_state.values
        if state:
            self._schedules.catch_up(self.param_groups, self.step)
        options, policy = (self.maximize, self.keep_grads, self.parts, self._shared.group), self._policy
        step = self._fast_way.begin(self.param_groups, self.state, options, state, loss, self.listener, self._undo)
        if step is None:
            return False
        if self.listener is not None or policy.has_gates or (policy.decides and step.total is None):
            self._take(step.walk, step.take)
        else:
            if policy.decides and step.total is not None:
                policy.passes(step.total, state)
            self._take(None, partial(step.plan.take, step))
        self._unread = step.metrics or self._unread
        key, idle = self._judging.norm_metric, policy.idle  # if ``step.total`` is set, it is not 0
        if step.total is None and key and (step.plan.needs_total or idle.looks(self.steps_taken)):
            idle.look(self._known_metrics().get(key), self.steps_taken)
        return True

    def begin(self) -> dict[str, list[Setting]]:
        """Take over what was written to the param groups since the last step, and return the settings by transform."""
        if self._chain_state.values:  # also if there are schedules
            self._schedules.catch_up(self.param_groups, self.step)
        if self._origin is not None and not torch.compiler.is_compiling():
            self._origin.look(self.param_groups)
        lengths = list(map(len, self.param_groups))
        if lengths != self._lengths and not torch.compiler.is_compiling():  # difflib breaks graphs
            self._lengths = lengths
            validation.warn_of_unread_keys(self.param_groups, self.nodes, self._chain_state.keys)
        return self.nodes.checked_settings(self.param_groups)

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
        refuse_loss(self, "report_loss")
        self._reported.add(loss)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zeros, as `torch.optim.Optimizer.zero_grad` does.

        Losses that were reported before do not belong to the next step.
        """
        self._reported.zeroed()
        if self._origin is not None:  # planned steps do not look
            self._origin.look(self.param_groups)
        super().zero_grad(set_to_none)

    def _walk(self, groups: list[Group], fast_way: FastWay, settings: dict[str, list[Setting]], loss: Loss) -> Walk:
        """Start a walk with the parameters that have a gradient. Raise before any change if a parameter is unusable."""
        table, state = Table.of(groups, self.state), self._chain_state.values
        is_fast = self._may_be_fast()
        columns = fast_way.columns(table) if is_fast else None
        if columns is None:  # else the fast way has checked these tensors already
            refuse_unusable(groups)
            validation.check_tensors(self.nodes, table, self._fitting)
            table.grads = own_gradients(table.params)
        if state:
            self._chain_state.move(self.param_groups)
        is_repeated = columns is None and len(set(map(id, table.params))) < len(table.params)
        end = self._delivery or Subtract(self.keep_grads or "grad" in self.nodes.targets or is_repeated)
        updates = Updates(table, state, maximize=self.maximize, over_grads=end.over_grads)
        executor = fast_way.executor(updates, columns) if is_fast and not is_repeated else Readable(updates)
        judged = Judged(self._judging, table.grads, executor, listens=self.listener is not None)
        walk = Walk(self.nodes, settings, table, state, executor, judged, end, loss, self._undo)
        walk.company = None if self.parts is None else Part()
        if (group := self._shared.group) is not None:
            Others(group, device_of(table.all_params(), group), has_schedules=self._has_joint_schedules).join(walk)
        return walk

    def _may_be_fast(self) -> bool:
        """True if operations may wait and be combined."""
        # The compiler combines operations itself. Memory that is made in inference mode cannot be used outside of it. A
        # transform with target="grad" would change gradients that waiting operations still have to read.
        usable = not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled())
        return self.fast and usable and "grad" not in self.nodes.targets

    @torch.no_grad()
    def take_part(self, groups: list[dict[str, Any]], settings: dict[str, list[Setting]], first: int) -> None:
        """Take the step of the parameters in these groups, for `step_in_backward`; `step` ends it."""
        # parameters that come together are the same in most steps, so the id of the first one names them
        walk = self._walk(groups, self._fast_way.beside(first), settings, self._reported.loss())
        run(walk, self.chain, states=self.state, listener=self.listener, parts=self.parts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
        own, keys, module = self.param_groups, self._chain_state.keys, self._origin and self._origin.module()
        group = accepted(param_group, self.nodes, own, module=module, ignored=keys, is_complete=self._is_complete)
        before, was_at = len(own), param_group.get(SCHEDULE_STEP)
        with all_or_none(own, self._schedules):
            for part in split(group, self.nodes):
                valued, functions = self._schedules.split(part, was_at)
                # tensors are copied, so that a scheduler that fills an lr does not change other groups or optimizers
                usual = {k: value.clone() if isinstance(value, Tensor) else value for k, value in self.defaults.items()}
                self._append({**usual, **valued})
                self._schedules.add(self.param_groups[-1], functions)
                added = self._named_params(before)
                validation.check_added(self.nodes, added, self._shared.group)
                self._has_meshes = self._has_meshes or any_distributed([named.param for named in added])
            if self._is_complete:
                self.nodes.checked_settings(self.param_groups)
                validation.check_places(self.chain, self.nodes, self._named_params())
                self._chain_state.start(self.param_groups, has_schedules=self._schedules.any)
            if self.parts is not None:
                self.parts.attach()

    def _append(self, group: dict[str, Any]) -> None:
        """Add a group as torch does. While the optimizer is made, torch compares it with the last group only."""
        own = self.param_groups
        self.param_groups = own if self._is_complete else own[-1:]  # see `check_disjoint`
        super().add_param_group(group)
        own += [] if self._is_complete else self.param_groups[-1:]
        self.param_groups = own

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state. As in torch, the tensors are the optimizer's own, and later steps change them."""
        hook = self.register_state_dict_post_hook(
            lambda _, saved: complete(saved, self.param_groups, self._chain_state), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(
        self, state_dict: dict[str, Any], *, new: str | Iterable[str] = (), dropped: str | Iterable[str] = ()
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
        if self._shared.is_lost:
            self._shared.refuse()
        with self.new_load(new, dropped).hooked(self):
            super().load_state_dict(state_dict)
        if self._origin is not None:
            self._origin.looks = 0

    def new_load(self, new: str | Iterable[str], dropped: str | Iterable[str]) -> Load:
        """A load of one checkpoint, with the arguments of `load_state_dict`."""
        return Load(self.nodes, self._schedules, self._chain_state, self._shared.group, new, dropped)

    def __getstate__(self) -> dict[str, Any]:
        names = "maximize keep_grads fast chain storage_keys _written nodes _judging _policy _schedules _chain_state "
        names += "_reported _fitting _is_complete _has_meshes _has_joint_schedules _shared skipped_by steps_taken"
        metrics = {"_metrics": self._known_metrics(), "_unread": None}
        return super().__getstate__() | {name: getattr(self, name) for name in names.split()} | metrics

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and each group that is added later would get it
        self._fast_way = FastWay()

    def __repr__(self) -> str:
        lines = described(self._written, self.nodes, self.param_groups)
        lines += [f"{flag}=True" for flag in ("maximize", "keep_grads") if getattr(self, flag)]
        lines += [*([] if self.fast else ["fast=False"]), *self._policy.described()]
        return "\n    ".join([f"{type(self).__name__}(", *(f"{line}," for line in lines)]) + "\n)"
