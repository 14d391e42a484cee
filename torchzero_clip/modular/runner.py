"""Takes the steps of a chain, for an optimizer or before the steps of one."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchzero_clip.checkpoints.saving import Load, new_chain_state
from torchzero_clip.checks import boolean
from torchzero_clip.compat import any_distributed, is_capturing
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.chain_state import CONSECUTIVE, SCHEDULE_STEP, SKIPPED
from torchzero_clip.core.schedules import Schedules
from torchzero_clip.core.scope import NamedParam, all_named_params
from torchzero_clip.core.transform import Transform
from torchzero_clip.core.undo import Undo
from torchzero_clip.engine.company import OtherParts
from torchzero_clip.engine.device_decisions import DeviceDecisions
from torchzero_clip.engine.end import Deliver, Subtract
from torchzero_clip.engine.gradient_norms import GradientNorms, NormNeeds
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.nonfinite import Nonfinite, StepPolicy
from torchzero_clip.engine.ordinary_step import AnyStep, OrdinaryStep, StepOptions
from torchzero_clip.engine.other_processes import OtherProcesses
from torchzero_clip.engine.parts import Parts
from torchzero_clip.engine.readable import ReadableExecutor
from torchzero_clip.engine.reported_loss import Loss, ReportedLoss
from torchzero_clip.engine.table import Table, refuse_unusable
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk
from torchzero_clip.fast.door import FastWay
from torchzero_clip.functional.gradients import own_gradients
from torchzero_clip.functional.processes import SharedGroup, check_group, device_of
from torchzero_clip.hints import Named
from torchzero_clip.modular import validation
from torchzero_clip.modular.missing import Missing
from torchzero_clip.modular.param_groups import accepted, all_or_none, check_disjoint, split, with_own_tensors
from torchzero_clip.modular.step_metrics import StepMetrics
from torchzero_clip.types import Closure, Group, Setting, StateByParam


class Runner:
    """Takes the steps of a chain. Its owner has the param groups and the state of parameters, and passes them on.

    The owners are `Modular` and `BeforeStep`. Copies and pickles of a runner have no listener, parts or fast way.
    """

    listener: Listener | None = None
    """What sees every step, such as a `Recorder`."""

    parts: Parts | None = None
    """What the backward has updated since the last step, after `step_in_backward`."""

    untold: Walk | None = None
    """The last step, if the listener was not told yet that it has ended: see `tell`."""

    undo: Undo | None = None
    """Notes state before it changes, if another optimizer takes the step."""

    decisions: DeviceDecisions | None = None
    """What the device has decided, once it has decided about a step."""

    found_inf: Tensor | None = None
    """1 on the device if it refuses the step that runs; None if the host has decided."""

    skipped_by: tuple[str, ...] = ()
    steps_taken: int = 0
    _step_reasons: Sequence[str] = ("no step was taken yet",)  # why the host has decided about the last step
    _posting = 0  # how many steps the host has left to the device
    has_meshes = False  # if a parameter is distributed
    _lengths: Sequence[int] = ()  # how many keys each param group had in the last step
    is_complete = False  # False until the first groups were added
    _has_joint_schedules = False  # if any process has schedules

    def __init__(
        self,
        chain: Chain,
        *,
        delivery: Deliver | None = None,
        maximize: bool = False,
        keep_grads: bool = False,
        nonfinite: Nonfinite = "propagate",
        max_consecutive_skips: int | None = None,
        fast: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        for name, flag in (("maximize", maximize), ("fast", fast), ("keep_grads", keep_grads)):
            boolean(name, flag)
        self.maximize, self.keep_grads, self.fast = maximize, keep_grads, fast
        self.chain, self.nodes = chain, chain.nodes()
        self.policy = StepPolicy(nonfinite, max_consecutive_skips, self.transforms)
        self.chain_state = new_chain_state(self.nodes, self.policy.counts())
        self.schedules = Schedules(self.nodes.schedules(), self.nodes.storage_keys.values(), self.chain_state)
        check_group(process_group, [])
        self.shared = SharedGroup(process_group)
        self.delivery = delivery  # the end of a step; None to subtract the updates from the parameters
        self._norm_needs = NormNeeds(self.nodes)
        self.fast_way = FastWay()
        self.step_metrics = StepMetrics({})
        self.reported = ReportedLoss()
        self._fitting: set[object] = set()  # the tensors that `validation.check_tensors` has accepted

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transforms by name, in the order of the chain."""
        return self.chain.transforms

    def complete(self, groups: Sequence[Group], listed: Sequence[Transform] | None) -> None:
        """Check the first param groups, which were added. ``listed`` is as in `warn_of_slips`."""
        check_disjoint(groups)
        self.nodes.checked_settings(groups)
        self.chain_state.move(groups)
        self.chain_state.start(groups, has_schedules=self.schedules.any)
        named = all_named_params(groups)
        validation.check_places(self.chain, self.nodes, named)
        idle = self._agree(named, self.shared.group)
        validation.warn_of_slips(self.nodes, named, idle, listed)
        self.is_complete = True

    def _agree(self, named: Sequence[NamedParam], group: ProcessGroup | None) -> dict[str, bool]:
        idle, self._has_joint_schedules = validation.agree(self.nodes, self.policy, named, self.schedules.any, group)
        return idle

    def set_process_group(self, group: ProcessGroup | None, groups: Sequence[Group]) -> None:
        """Take the steps together with other processes from now on."""
        named = all_named_params(groups)
        check_group(group, [named.param for named in named])
        self._agree(named, group)
        self.shared = SharedGroup(group)

    def add(
        self, group: Group, groups: list[Group], append: Callable[[Group], object], *, module: nn.Module | None
    ) -> None:
        """Add a group of parameters, with the settings of the chain where it has none. It may become several groups.

        ``append`` puts a complete group at the end of ``groups``. If something does not fit, no group is added.
        """
        keys, before = self.chain_state.keys, len(groups)
        was_at = group.get(SCHEDULE_STEP)
        added = accepted(group, self.nodes, groups, module=module, ignored=keys, is_complete=self.is_complete)
        with all_or_none(groups, self.schedules):
            for part in split(added, self.nodes):
                valued, functions = self.schedules.split(part, was_at)
                append({**with_own_tensors(self.nodes.defaults()), **valued})
                self.schedules.add(groups[-1], functions)
                self.check_added(all_named_params(groups[before:]))
            if self.is_complete:
                self.nodes.checked_settings(groups)
                validation.check_places(self.chain, self.nodes, all_named_params(groups))
                self.chain_state.start(groups, has_schedules=self.schedules.any)
            if self.parts is not None:
                self.parts.attach()

    def check_added(self, added: Sequence[NamedParam]) -> None:
        """Raise if the chain cannot act on parameters that are added."""
        validation.check_added(self.nodes, added, self.shared.group)
        self.has_meshes = self.has_meshes or any_distributed([named.param for named in added])

    def metrics(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """As `Modular.metrics`."""
        self.chain_state.adopt_counters(groups)  # those that a user has written to a param group
        skipped, decisions = None, self.decisions
        if self.policy.may_skip:
            known = self.chain_state.values[SKIPPED]
            skipped = torch.tensor(known, device="cpu") if decisions is None else decisions.skipped_steps(known)
        return Named(self.step_metrics.read() | ({} if skipped is None else {"skipped_steps": skipped}))

    def read_decisions(self, groups: Sequence[Group]) -> None:
        """Count the steps about which the device has decided. It synchronizes once, if there were any."""
        decisions, values = self.decisions, self.chain_state.values
        answers = None if decisions is None else decisions.answers()
        if decisions is None or answers is None:
            return
        self.steps_taken += answers.taken
        self.skipped_by = answers.refused_by
        self.chain_state.adopt_counters(groups)
        values[SKIPPED] += answers.skipped
        values[CONSECUTIVE] = answers.in_a_row
        self.chain_state.show(groups)
        norms = decisions.bad_norms() if answers.skipped and self.policy.nonfinite == "skip" else None
        if norms is not None:
            self.policy.note_bad(norms, decisions.bad_params, groups)

    def host_decides(self) -> tuple[str, ...]:
        """As `Modular.host_decides`."""
        if not self.policy.decides:
            return ()
        plan = self.fast_way.plan
        of_step = self._step_reasons if plan is None else plan.course.host_reasons()
        return (*self._host_reasons(), *of_step)

    def _host_reasons(self) -> list[str]:
        """Why the host has to decide, whatever the plan is; empty if the device may."""
        reasons = [*self.policy.host_reasons(), *(self.delivery.host_reasons() if self.delivery is not None else ())]
        if SCHEDULE_STEP in self.chain_state.values:
            reasons.append("settings are functions of the step")
        if is_capturing():
            if self.decisions is None:
                reasons.append("a graph is captured before a first step about which the device decides")
            if self.listener is not None:
                reasons.append("a Recorder sees no replays")
        return reasons

    def leave_out(self, refused_by: tuple[str, ...] = ()) -> None:
        """Note a step without transforms: it has no metrics and, if it is refused, the reported loss is forgotten."""
        self.skipped_by = refused_by
        self.step_metrics.forget()
        if refused_by:
            self.reported.clear()

    def step(self, groups: list[Group], states: StateByParam, closure: Closure | None = None) -> Any:
        """Take one step, as `Modular.step`. Call it in `torch.no_grad`, and afterwards `tell` if a step has ended."""
        result, loss, step, absent = None, self.reported.loss, None, None
        try:
            self.skipped_by, self.found_inf = (), None
            if self.shared.is_lost:
                self.shared.refuse()
            if closure is not None:
                self.checked_settings(groups)  # raises before the closure is called
                with torch.enable_grad():
                    result = closure()
                loss = loss if result is None else partial(Loss, result, 1)
            elif "closure" in self.nodes.targets:
                raise ValueError("a transform with target='closure' needs a closure: call step(closure)")
            if self.fast_way.plan is not None:
                step = self._planned(groups, states, loss)
            if step is None:
                settings = self.checked_settings(groups)  # again, because a closure may change settings, or add groups
                # this gives zeros to gradients that only other processes have, so it comes before the step is made
                absent = Missing(self.nodes, groups, states) if self.has_meshes and not self.parts else None
                step = self._ordinary(groups, states, self.fast_way, settings, loss())
            if self.policy.decides:
                self._step_reasons = step.host_reasons()
            if self.policy.may_skip and not (self._step_reasons or self._host_reasons()):
                self._let_device_decide(groups, step)
            else:
                self._let_host_decide(groups, step)
            return result
        finally:
            if absent is not None:
                absent.put_back(None if step is None else step.walk)
            if self.reported.count:
                self.reported.clear()

    def _planned(self, groups: list[Group], states: StateByParam, loss: Callable[[], Loss]) -> AnyStep | None:
        """A step by the plan. None, before any change, if the plan does not fit."""
        options, values = self._options(), self.chain_state.values
        if options is None:
            return None
        if values:
            self.schedules.catch_up(groups)
        needs_walk = self.listener is not None or self.policy.has_gates
        return self.fast_way.planned(groups, states, options, values, loss, self.listener, self.undo, needs_walk)

    def _let_host_decide(self, groups: list[Group], step: AnyStep) -> None:
        """Take a step, or skip it, as the host decides."""
        if self.decisions is not None and not is_capturing():
            self.read_decisions(groups)
            self.skipped_by = ()
        policy, values, is_taken = self.policy, self.chain_state.values, False
        try:
            is_allowed = step.takes_part and (not policy.decides or step.is_allowed(policy, values))
            is_taken = is_allowed and step.run()
            if is_taken:
                self._count_taken(groups)
                if step.may_be_zero:
                    step.note_zeros(policy.idle, self.steps_taken)
            else:
                policy.idle.not_taken(step.walk, self.steps_taken)
        finally:
            if step.needs_walk:
                self._show(step, groups, is_taken=is_taken)
            # a step that has raised an error keeps the metrics of the one before
            self.step_metrics.compute = step.metrics or self.step_metrics.compute
            if values:
                self.chain_state.show(groups)

    def _show(self, step: AnyStep, groups: list[Group], *, is_taken: bool) -> None:
        """Store what the user may read after a step with a walk: `skipped_by` and the metrics."""
        walk, parts, metrics = step.walk, self.parts, self.step_metrics
        if self.listener is not None:
            self.untold = walk
        if "error" in walk.refused_by:
            return
        self.skipped_by = tuple(walk.refused_by)
        if step.metrics is None and self.policy.raising.isdisjoint(walk.refused_by):
            # a skipped step has the numbers of gates, and none of an earlier step
            values = walk.metrics if parts is None or not is_taken else parts.end(self.nodes, groups)
            metrics.values.clear()
            metrics.values.update(values)
            metrics.compute = None

    def _let_device_decide(self, groups: list[Group], step: AnyStep) -> None:
        """Take a step, or skip it, as the device decides."""
        policy, params, decisions, is_captured = self.policy, step.params, self.decisions, is_capturing()
        try:
            if decisions is None or not decisions.may_note_norms_of(params):
                self.read_decisions(groups)  # before the norms of the last bad gradients are lost
                self.skipped_by = ()
            if decisions is None or decisions.found_inf.device != params[0].device:
                decisions = self.decisions = DeviceDecisions(policy.names, params[0].device)
            if is_captured:
                decisions.is_captured = True
            else:
                self._exchange_counts(decisions)
            if self.undo is not None:
                self.undo.tensors([decisions.counts])
            self.found_inf = decisions.found_inf
            walk = step.walk if step.needs_walk else None
            policy.let_device_decide(step.gradient_norms, walk, params, decisions)
            step.decisions = decisions
            try:
                step.run()
            except BaseException:
                decisions.uncount()
                raise
        finally:
            if self.listener is not None:
                self.untold = step.walk
        self.step_metrics.compute = step.metrics
        if step.needs_walk and step.walk.asked:
            self._step_reasons = [step.walk.asked]
        self.chain_state.show(groups)
        if not is_captured:
            self._post(decisions)

    def _count_taken(self, groups: list[Group]) -> None:
        """Count a step that was taken, and let schedules write the settings of the next one."""
        if not torch.compiler.is_compiling():  # which would compile the step anew for each number
            self.steps_taken += 1
        if SCHEDULE_STEP in self.chain_state.values:
            self.schedules.advance(groups)

    def _exchange_counts(self, decisions: DeviceDecisions) -> None:
        """Give the device the count of the host. If its own counts have arrived, raise or warn of skipped steps."""
        values = self.chain_state.values
        decisions.continue_from(values[CONSECUTIVE])
        if (counts := decisions.arrived()) is not None:
            try:
                self.policy.judge_skips(int(counts[2]), decisions.step_at(counts, self.steps_taken + values[SKIPPED]))
            except RuntimeError:
                decisions.forget_sent()
                raise

    def _post(self, decisions: DeviceDecisions) -> None:
        self._posting += 1
        if self.policy.posts(self._posting):
            decisions.post()

    def begin_replay(self) -> None:
        """Call it before a captured step is replayed, after which `end_replay` counts it."""
        self.skipped_by, self.found_inf = (), None
        if self.policy.may_skip and self.decisions is not None:
            self._exchange_counts(self.decisions)

    def end_replay(self, groups: list[Group]) -> None:
        """Count a step that was replayed, unless the device does."""
        if self.reported.count:
            self.reported.clear()
        if self.policy.may_skip and self.decisions is not None:
            self._post(self.decisions)
            return
        self._count_taken(groups)
        if self.chain_state.values:
            self.chain_state.show(groups)

    def counts_put_back(self) -> Callable[[], None]:
        """What puts counts back that a step changes on the host."""
        values, steps_taken, is_behind = self.chain_state.values, self.steps_taken, self.schedules.is_behind
        numbers = {key: value for key, value in values.items() if not isinstance(value, Tensor)}

        def put_back() -> None:
            values.update(numbers)
            self.steps_taken, self.schedules.is_behind = steps_taken, is_behind

        return put_back

    def tell(self) -> None:
        """Tell the listener that the step has ended, also if it was refused or raised an error."""
        untold, self.untold = self.untold, None
        if untold is not None and self.listener is not None:
            self.listener.end(untold)

    def checked_settings(self, groups: list[Group]) -> dict[str, list[Setting]]:
        """Take over what was written to the param groups since the last step, and return the settings by transform."""
        if self.chain_state.values:  # also if there are schedules
            self.schedules.catch_up(groups)
        lengths = list(map(len, groups))
        if lengths != self._lengths and not torch.compiler.is_compiling():  # difflib breaks graphs
            self._lengths = lengths
            validation.warn_of_unread_keys(groups, self.nodes, self.chain_state.keys)
        return self.nodes.checked_settings(groups)

    def _ordinary(
        self,
        groups: list[Group],
        states: StateByParam,
        fast_way: FastWay,
        settings: dict[str, list[Setting]],
        loss: Loss,
    ) -> OrdinaryStep:
        """A step of the parameters that have a gradient. Raise before any change if a parameter is unusable."""
        table, values, parts = Table.of(groups, states), self.chain_state.values, self.parts
        options = self._options() if self.fast else None
        columns = None if options is None else fast_way.columns(table)
        if columns is None:  # else the fast way has checked these tensors already
            refuse_unusable(groups)
            validation.check_tensors(self.nodes, table, self._fitting)
            table.grads = own_gradients(table.params)  # some may be replaced, in .grad too
        if values:
            self.chain_state.move(groups)
        # a parameter that is listed twice would have its gradient scaled twice
        is_repeated = columns is None and len(set(map(id, table.params))) < len(table.params)
        end = self.delivery or Subtract(self.keep_grads or "grad" in self.nodes.targets or is_repeated)
        updates = Updates(table, values, maximize=self.maximize, over_grads=end.over_grads)
        options = None if is_repeated else options
        executor = ReadableExecutor(updates) if options is None else fast_way.executor(updates, columns)
        gradient_norms = GradientNorms(self._norm_needs, table.grads, executor, listens=self.listener is not None)
        walk = Walk(self.nodes, settings, table, values, executor, gradient_norms, end, loss, self.undo)
        takes_part = len(table.params) > 0
        if parts is not None:
            parts.refuse_second(table.params)
            walk.company, takes_part = OtherParts(), takes_part or len(parts.updated) > 0
        if (group := self.shared.group) is not None:
            OtherProcesses(group, device_of(table.all_params(), group), has_schedules=self._has_joint_schedules).join(
                walk
            )
            takes_part = True
        return OrdinaryStep(
            self.chain,
            states,
            parts=parts,
            learn=fast_way.learn,
            options=options,
            listener=self.listener,
            takes_part=takes_part,
            walk=walk,
            gradient_norms=gradient_norms,
            params=table.params,
        )

    def _options(self) -> StepOptions | None:
        """The options of a step. None if operations may not wait for each other."""
        # The compiler combines operations itself. Memory that is made in inference mode cannot be used outside of it. A
        # transform with target="grad" would change gradients that waiting operations still have to read.
        usable = not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled())
        if not (self.fast and usable and "grad" not in self.nodes.targets):
            return None
        return StepOptions(self.maximize, self.keep_grads, self.parts, self.shared.group)

    @torch.no_grad()
    def step_part(
        self, groups: list[Group], states: StateByParam, settings: dict[str, list[Setting]], first: int
    ) -> None:
        """Take the step of the parameters in these groups, for `step_in_backward`; `step` ends it."""
        # parameters that come together are the same in most steps, so the id of the first one names them
        self._ordinary(groups, states, self.fast_way.of_part(first), settings, self.reported.loss()).run()

    def new_load(self, new: str | Iterable[str], dropped: str | Iterable[str]) -> Load:
        """A load of one checkpoint, with the arguments of `Modular.load_state_dict`."""
        return Load(self.nodes, self.schedules, self.chain_state, self.shared.group, new, dropped)

    def __getstate__(self) -> dict[str, object]:
        left_out = ("decisions", "found_inf", "listener", "parts", "untold", "undo", "fast_way", "_lengths")
        return {key: value for key, value in vars(self).items() if key not in left_out}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.fast_way = FastWay()
