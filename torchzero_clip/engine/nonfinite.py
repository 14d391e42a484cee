"""The decision to take a step, to skip it, or to raise. It is made before anything changes."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.checks import count, one_of
from torchzero_clip.compat import is_capturing, never_compiled, warn_user
from torchzero_clip.core.chain_state import CONSECUTIVE, SKIPPED
from torchzero_clip.core.kinds import Gate, implements_record
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.scope import named_params
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, is_pure
from torchzero_clip.engine.checked import ask_gate, reason_of_gate, tell_gate
from torchzero_clip.engine.device_decisions import MOST_LATE, DeviceDecisions
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.engine.idle import Idle
from torchzero_clip.engine.walk import Walk
from torchzero_clip.functional.bad import BadGradients, bad_gradients, labels
from torchzero_clip.functional.dtypes import moved
from torchzero_clip.functional.processes import device_of, gathered
from torchzero_clip.functional.shards import largest_on_all_ranks, mesh_groups
from torchzero_clip.functional.slices import joint_of_norms
from torchzero_clip.types import Group, State

Nonfinite: TypeAlias = Literal["propagate", "raise", "skip"]

_REMEMBERED = 10  # norms that an error shows
_WARNED_AFTER = 20  # refused steps in a row, for the first warning
WAY_OUT = (
    "go back to a checkpoint, or change a limit if it refuses good steps. "
    "With max_consecutive_skips=, such a run raises"
)


class _Verdict(NamedTuple):
    """What decides about a step."""

    norm: float  # the joint norm of all gradients
    is_bad: bool  # some gradient is not finite
    of_gates: list[tuple[Node, Tensor, bool]]  # each gate, the norm that it has judged, and whether it refuses the step


class StepPolicy:
    """Decides whether a step is taken, by the arguments of `Modular` and the gates among the transforms."""

    def __init__(
        self, nonfinite: Nonfinite, max_consecutive_skips: int | None, transforms: Mapping[str, Transform]
    ) -> None:
        one_of("nonfinite", nonfinite, ("propagate", "raise", "skip"))
        if max_consecutive_skips is not None:
            count("max_consecutive_skips", max_consecutive_skips)
        self.nonfinite: Nonfinite = nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self._gates = {name: transform for name, transform in transforms.items() if isinstance(transform, Gate)}
        self._recording = {name for name, gate in self._gates.items() if implements_record(type(gate))}
        self.bad_gradients: BadGradients | None = None  # the gradients of the last step that ``nonfinite`` has refused
        self.idle = Idle()  # counts steps without gradients, or with zeros
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._warned_at = 0  # steps in a row that the device has skipped, at the last warning
        self.has_gates = bool(self._gates)
        self.may_skip = nonfinite == "skip" or self.has_gates
        self.decides = self.may_skip or nonfinite == "raise"
        self.raising = frozenset({"nonfinite"} if nonfinite == "raise" else ())  # of ``refused_by``, what is an error
        self.names = [*self._gates, *(["nonfinite"] if nonfinite == "skip" else [])]
        """Who may skip a step."""
        # one joint norm is enough, unless a gate acts on some gradients only
        self._judges_all = not any(gate.scope.limited for gate in self._gates.values())
        if max_consecutive_skips is not None and not self.may_skip:
            raise ValueError("max_consecutive_skips needs nonfinite='skip' or a gate in the chain, such as SkipStep")

    def host_reasons(self) -> list[str]:
        """Why the host has to decide whether a step is taken; empty if the device may."""
        reasons = ['nonfinite="raise" raises in the same step'] if self.nonfinite == "raise" else []
        for name, gate in self._gates.items():
            if gate.needs_loss:
                reasons.append(f"{gate!r} reads losses")
            elif not (name in self._recording and is_pure(gate)):
                reasons.append(f"{gate!r} does not implement Gate.record, or is not pure")
        return reasons

    def described(self) -> list[str]:
        """The arguments that differ from their defaults, for the repr."""
        most = self.max_consecutive_skips
        lines = [] if self.nonfinite == "propagate" else [f"nonfinite={self.nonfinite!r}"]
        return lines if most is None else [*lines, f"max_consecutive_skips={most}"]

    def counts(self) -> dict[str, int]:
        """The counters that this policy needs, at 0."""
        return {SKIPPED: 0, CONSECUTIVE: 0} if self.may_skip else {}

    def decide(self, walk: Walk, counts: State) -> bool:
        """Return True if the step is to be taken. It synchronizes with the GPU once.

        If no process has a gradient, the step is not taken, and does not count as skipped. The errors are those of
        `Modular.step`.
        """
        self._refuse_capture(walk)
        verdict = self._judge(walk)
        # a step without gradients changes no state and does not count as a skip, as on one process
        if verdict is None:
            return False
        self._norms.append(verdict.norm)
        walk.are_zero = verdict.norm == 0
        walk.refused_by.extend(node.path for node, _, refuses_step in verdict.of_gates if refuses_step)
        if verdict.is_bad and self.nonfinite != "propagate":
            self._refuse(walk)
        is_taken = not walk.refused_by
        if not is_taken:
            # before the gates store anything, because it raises after too many skips
            self._count(walk, counts, verdict.of_gates)
        elif self.may_skip:
            counts[CONSECUTIVE] = 0
        for node, norm, _ in verdict.of_gates:
            step = _step_of_gate(walk, node)
            tell_gate(node, norm, step, is_taken)
            walk.store(node, step)
        return is_taken

    def _judge(self, walk: Walk) -> _Verdict | None:
        """Measure the gradients, ask the gates, and read all answers at once. None if no process has a gradient."""
        norms = walk.gradient_norms.measure(jointly=self._judges_all)  # `_joint_norms` uses them too
        group, device = _group_of(walk)
        if any(gate.needs_loss for gate in self._gates.values()):
            walk.loss.join(device or norms.device, walk.table.all_params(), group)
        # with other processes a gate without rows is asked too, because all have to send equally many numbers
        asked = self._asked(walk, everywhere=group is not None)
        (total, is_bad, *of_gates), taking_part = _joint_norms(walk, [rows for _, rows in asked])
        # a joint clip that comes first takes this norm of all processes instead of one more exchange
        walk.gradient_norms.norm_of_decision = total
        judged = [_judged(walk, node, norm) for (node, _), norm in zip(asked, of_gates, strict=True)]
        # gates decide by numbers that are equal on all processes, so the decisions are equal too
        answers = [answer.to(total.device) for _, _, answer in judged]
        numbers = torch.stack([x.to(total.dtype) for x in (total, is_bad, *answers, *taking_part)])
        # one read for all gates and for the norm, because each read synchronizes with the GPU
        norm, is_bad, *flags = numbers.tolist()
        has_gradients, *acting = flags[len(judged) :] or [True] * (1 + len(judged))
        if not has_gradients:
            return None
        of_gates = [(node, of_gate, bool(flag)) for (node, of_gate, _), flag in zip(judged, flags, strict=False)]
        # leave out the answers of gates whose scope has no gradient on any process
        return _Verdict(norm, bool(is_bad), list(compress(of_gates, acting)))

    def let_device_decide(
        self, gradient_norms: GradientNorms, walk: Walk | None, params: list[Tensor], decisions: DeviceDecisions
    ) -> None:
        """Let the device decide about a step with these parameters. It does not wait. Gates need the ``walk``."""
        total, finite = gradient_norms.total_and_finite()
        gradient_norms.norm_of_decision = total
        asked: list[tuple[Node, Tensor, Step]] = []
        if walk is not None:
            gates = self._asked(walk, everywhere=False)
            asked = [(node, gradient_norms.joint_of(rows, total), _step_of_gate(walk, node)) for node, rows in gates]
        # only if a gate is not asked, because a tensor of ones takes a launch
        passed = dict.fromkeys(self.names, torch.ones_like(finite)) if len(asked) < len(self._gates) else {}
        passed |= {node.path: ask_gate(node, norm, step).logical_not() for node, norm, step in asked}
        if self.nonfinite == "skip":
            passed["nonfinite"] = finite
            decisions.note_norms(finite, gradient_norms.measure(), params)
        decisions.decide(list(passed.values()))  # in the order of `names`: gates, then nonfinite
        gradient_norms.taken = decisions.taken
        for node, norm, step in asked:
            tell_gate(node, norm, step, decisions.taken)
            if walk is not None:
                walk.store(node, step)

    def _asked(self, walk: Walk, *, everywhere: bool) -> list[tuple[Node, list[int]]]:
        """The gates with a gradient in their scope, or all, each with the rows of its scope."""
        nodes = [walk.nodes.by_path[gate] for gate in self._gates]
        scopes = [(node, walk.table.in_scope(node, walk.table.rows)) for node in nodes]
        return [(node, rows) for node, rows in scopes if rows or everywhere]

    def posts(self, steps: int) -> bool:
        """True if the counts of a step about which the device decides are sent to the host."""
        return self.max_consecutive_skips is not None or not steps % MOST_LATE

    def judge_skips(self, in_a_row: int, at_step: int) -> None:
        """Raise or warn after too many steps in a row that the device has skipped, up to this step."""
        who = "skipped_by and bad_gradients say more of the last one"
        if self.max_consecutive_skips is None:
            if in_a_row < _WARNED_AFTER:
                self._warned_at = 0
            elif in_a_row >= 2 * self._warned_at:
                self._warned_at = in_a_row
                warn_user(
                    f"{in_a_row} steps in a row were skipped at step {at_step}. {who}. The model does not train until "
                    f"you act: {WAY_OUT}"
                )
        elif in_a_row > self.max_consecutive_skips:
            raise RuntimeError(
                f"{in_a_row} steps in a row were skipped at step {at_step}. The argument max_consecutive_skips allows "
                f"{self.max_consecutive_skips}. The device has decided, so this error may be {MOST_LATE} steps late; "
                f"{who}"
            )

    def note_bad(self, norms: Sequence[float], params: Sequence[Tensor], groups: Sequence[Group]) -> None:
        """Name the gradients of the last step that the device has refused because they were not finite."""
        names = _names(groups)
        norm_of = {names[param]: norm for param, norm in zip(params, norms, strict=True) if param in names}
        self.bad_gradients = bad_gradients(norm_of, [], None, torch.device("cpu"))

    def allow(self, norm: Tensor, counts: State) -> None:
        """Allow a step without gates whose gradients have this joint norm, which is finite."""
        self._norms.append(norm.item())
        if self.may_skip:
            counts[CONSECUTIVE] = 0

    def _refuse_capture(self, walk: Walk) -> None:
        """Raise while a CUDA graph is captured: it would repeat the decision of this step for all later gradients."""
        if walk.table.params and walk.table.params[0].is_cuda and is_capturing():
            who = ", ".join(map(repr, self._gates.values())) or f"nonfinite={self.nonfinite!r}"
            raise RuntimeError(
                f"a step with {who} cannot be captured in a CUDA graph, because the host decides whether it is taken: "
                "capture the forward and the backward only, or leave the policy out"
            )

    def _refuse(self, walk: Walk) -> None:
        """Refuse a step for a gradient that is not finite, or raise."""
        walk.refused_by.append("nonfinite")
        self.bad_gradients = bad = _bad_gradients(walk)
        if self.nonfinite == "raise":
            raise RuntimeError(
                f'gradients are not finite: {bad.listed}. Nothing was changed; use nonfinite="skip" to skip such '
                f"steps{bad.beside}"
            )

    def _count(self, walk: Walk, counts: State, judged: Sequence[tuple[Node, Tensor, bool]]) -> None:
        counts[SKIPPED] += 1
        counts[CONSECUTIVE] += 1
        skips = counts[CONSECUTIVE]
        if self.max_consecutive_skips is None:
            if is_worth_a_warning(skips):
                warn_of_skips(skips, self._reasons(walk, judged), WAY_OUT)
        elif skips > self.max_consecutive_skips:
            shown = ", ".join(f"{norm:.4g}" for norm in self._norms)
            bad = self.bad_gradients if "nonfinite" in walk.refused_by else None
            named = "" if bad is None else f" In the last one these gradients were not finite: {bad.listed}."
            raise RuntimeError(
                f"{skips} steps in a row were skipped.{named} The argument max_consecutive_skips allows "
                f"{self.max_consecutive_skips}. The norms of the last gradients, the latest at the end: {shown}"
            )

    def _reasons(self, walk: Walk, judged: Sequence[tuple[Node, Tensor, bool]]) -> dict[str, str]:
        """Why the step is refused, by who refuses it."""
        gates = [(node, norm) for node, norm, _ in judged if node.path in walk.refused_by]
        reasons = {repr(node.path): reason_of_gate(node, norm, _step_of_gate(walk, node)) for node, norm in gates}
        if "nonfinite" in walk.refused_by and self.bad_gradients is not None:
            reasons["nonfinite='skip'"] = f"these gradients were not finite: {self.bad_gradients.listed}"
        return reasons


def is_worth_a_warning(skips: int) -> bool:
    """True for 20, 40, 80, ... refused steps in a row."""
    times, rest = divmod(skips, _WARNED_AFTER)
    return times > 0 and not rest and not times & (times - 1)


@never_compiled
def warn_of_skips(skips: int, reasons: Mapping[str, str], way_out: str) -> None:
    """Warn of refused steps in a row. ``reasons`` has why the last one was refused, by who refused it."""
    (first, reason), *others = reasons.items()
    said = "; ".join([f"{first} refused the last one: {reason}", *(f"{who} refused it too: {s}" for who, s in others)])
    warn_user(f"{skips} steps in a row were skipped. {said}. The model does not train until you act: {way_out}")


def _group_of(walk: Walk) -> tuple[ProcessGroup | None, torch.device | None]:
    """The processes that hold other parameters, and the device from which numbers are sent to them."""
    company = walk.company
    return (None, None) if company is None else (company.group, company.device)


def _step_of_gate(walk: Walk, node: Node) -> Step:
    """The `Step` of a gate, which decides also on a process that has no gradients in its scope."""
    rows = walk.table.in_scope(node, walk.table.rows)
    stand_in = None if walk.company is None else walk.company.stand_in
    return walk.step_for(node, rows) if rows or stand_in is None else stand_in.step_for(node, [0])


def _judged(walk: Walk, node: Node, norm: Tensor) -> tuple[Node, Tensor, Tensor]:
    """A gate, the norm on the device of its state, and whether the gate refuses the step."""
    step = _step_of_gate(walk, node)
    # state is where the first parameter is, and the first gradient may be elsewhere
    state = next((value for value in step.global_state.values() if isinstance(value, Tensor)), norm)
    norm = moved(norm, state.device)
    return node, norm, ask_gate(node, norm, step)


def _joint_norms(walk: Walk, scopes: Sequence[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """What `GradientNorms.for_decision` returns, equal on all processes, and which parts of the chain have a gradient.

    The second list has a 1 if there is one, for the whole chain and then for each scope; it is empty without a group.
    """
    norms, table, (group, device) = walk.gradient_norms.for_decision(scopes), walk.table, _group_of(walk)
    flags = [] if group is None else [torch.full_like(norms[0], len(rows) > 0) for rows in (table.rows, *scopes)]
    # a rank may have plain gradients beside sharded ones, and all would hang if it skipped the step alone
    numbers = largest_on_all_ranks(torch.stack([*norms, *flags]), table.all_params())
    if group is None:
        return list(numbers.unbind()), []
    columns = gathered(numbers.to(device), group).T.contiguous()
    # a process without parameters sends norms of 0, which do not change a joint norm
    joint, taking_part = columns.split([len(norms), len(flags)])
    return [joint_of_norms(column, 2.0) for column in joint], list(taking_part.amax(dim=1).unbind())


def _bad_gradients(walk: Walk) -> BadGradients:
    """The names of the gradients that are not finite. All processes call it, because they have decided together."""
    table = walk.table
    names = _names(table.groups)
    norms = walk.gradient_norms.of_each().tolist()
    norm_of = {names[param]: norm for param, norm in zip(table.params, norms, strict=True)}
    group, params = _group_of(walk)[0], table.all_params()
    return bad_gradients(norm_of, mesh_groups(params), group, device_of(params, group))


def _names(groups: Sequence[Group]) -> dict[Tensor, str]:
    """The name of each parameter."""
    every = [named for group in groups for named in named_params(group)]
    # over all parameters, with or without a gradient, so that all processes number them alike
    return labels("parameter", [(named.name, named.param) for named in every])
