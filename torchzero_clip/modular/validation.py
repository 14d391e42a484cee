"""Checks that a chain fits its parameters and the chains of other processes. They raise, or warn of mistakes."""

import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from traceback import walk_stack

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torchzero_clip.checkpoints.identity import kind_and_structure
from torchzero_clip.compat import warn_user
from torchzero_clip.core.chain import Chain, Transforms, as_written, flatten
from torchzero_clip.core.group_keys import why_refused
from torchzero_clip.core.kinds import FinalRule, Gate, UpdateRule
from torchzero_clip.core.learning_rate import LR, update_rules
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.core.transform import Transform
from torchzero_clip.engine.nonfinite import StepPolicy
from torchzero_clip.engine.table import Table
from torchzero_clip.functional.processes import check_group, device_of, gathered_texts
from torchzero_clip.types import Group

NOT_ZERO_REDUNDANCY = (
    "ZeroRedundancyOptimizer gives each process some of the parameters, so norms would be those of one process: use "
    "fully_shard (FSDP2), which shards the state of the optimizer too"
)


def listed_transforms(params: object, transforms: Sequence[Transforms]) -> list[Transform]:
    """The transforms in a list. Raises if there are none, or if ``params`` is a transform, a method or an optimizer."""
    if isinstance(params, Transform):
        way_out = f"A framework that passes params takes the class Modular.of({params!r}, ...)"
        raise TypeError(f"params come first, as in Modular(model.parameters(), {params!r}, ...). {way_out}")
    if inspect.isroutine(params):
        raise TypeError(f"params is a function: call it, as in Modular(model.{params.__name__}(), ...)")
    listed = list(flatten(transforms))
    if isinstance(params, Optimizer):
        has_rule = any(isinstance(transform, UpdateRule) for transform in listed)
        call, argument = ("Modular", "optimizer.param_groups") if has_rule else ("before_step", "optimizer")
        arguments = ", ".join([argument, *map(repr, as_written(transforms))])
        raise TypeError(f"params is an optimizer, {type(params).__name__}: write {call}({arguments})")
    if not listed:
        way_out = "Code that passes parameters alone, such as group_optimizers of torchrl, needs a class of Modular.of"
        example = "Modular(model.parameters(), ClipNorm(1), Adam())"
        raise ValueError(f"Modular needs at least one transform, as in {example}. {way_out}")
    return listed


def check_added(nodes: Nodes, params: Sequence[NamedParam], process_group: ProcessGroup | None) -> None:
    """Raise if a transform cannot act on added parameters, or if other processes hold parts of them unseen."""
    for node in nodes:
        scope = node.scope
        scope.check_names(node.transform, params)
        for i, named in enumerate(params):
            if scope.has(named):
                node.transform.check_parameter(named.name or f"parameter {i} of its group", named.param)
    _check_not_local(params)
    check_group(process_group, [named.param for named in params])


def _check_not_local(params: Sequence[NamedParam]) -> None:
    """Raise if parameters are shards but not DTensors: norms and skipped steps would be those of one process."""
    for i, named in enumerate(params):
        # FSDP1 marks its parameters in no other way
        if getattr(named.param, "_is_flat_param", False) or getattr(named.param, "_fsdp_flattened", False):
            raise ValueError(
                f"{named.name or f'parameter {i}'} belongs to FSDP1 (FullyShardedDataParallel), which keeps a part of "
                "it in each process without saying so: use fully_shard (FSDP2)"
            )
    if not (dist.is_available() and dist.is_initialized()):
        return
    # ZeroRedundancyOptimizer passes its inner optimizer only parameters, so its frame is searched
    if any(is_zero_redundancy(frame.f_locals.get("self")) for frame, _ in walk_stack(sys._getframe())):
        raise ValueError(NOT_ZERO_REDUNDANCY)


def is_zero_redundancy(optimizer: object) -> bool:
    """True for `ZeroRedundancyOptimizer`, which is not imported here, because that takes time."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def check_places(chain: Chain, nodes: Nodes, params: Sequence[NamedParam]) -> None:
    """Raise if a transform cannot stand at its place in the chain."""
    for node in nodes:
        if node.outer and isinstance(node.transform, Gate | FinalRule):
            deed = "decides about whole steps" if isinstance(node.transform, Gate) else "takes the step by itself"
            raise ValueError(f"{node.transform!r} {deed}: it cannot stand inside another transform")
    transforms = list(chain.transforms.values())
    for i, transform in enumerate(transforms):
        in_scope = [named for named in params if transform.scope.has(named)]
        acting = [any(other.scope.has(named) for named in in_scope) for other in transforms]
        before = [other for other, acts in zip(transforms[:i], acting[:i], strict=True) if acts]
        after = [other for other, acts in zip(transforms[i + 1 :], acting[i + 1 :], strict=True) if acts]
        if isinstance(transform, FinalRule):
            _check_last(transform, before, after)
        transform.check_chain(before, after)
        if transform.target == "params_difference" and (rules := [t for t in before if isinstance(t, UpdateRule)]):
            warn_user(f"{transform!r} replaces the update of {rules[-1]!r}, which has no effect then: put it first")


def _check_last(rule: FinalRule, before: Sequence[Transform], after: Sequence[Transform]) -> None:
    """Raise if a transform other than `LR` comes after a final rule, or if an `LR` comes before it."""
    for other in after:
        if not isinstance(other, LR):
            raise ValueError(f"{rule!r} takes the step by itself, so {other!r} has to come before it")
    for other in before:
        if isinstance(other, LR):
            way_out = f"so {other!r} has to come after it. The optimizer may also name the lr"
            raise ValueError(f"{rule!r} takes the step by itself, {way_out}")


def unmatched_names(nodes: Nodes, params: Sequence[NamedParam]) -> dict[str, bool]:
    """The warnings about names that match no parameter or group, and transforms without any; True if one applies."""
    warnings: dict[str, bool] = {}
    for node in nodes:
        warnings |= node.transform.scope.unmatched_names(node.transform, params)
    if params and not any(warnings.values()):  # else these names are the reason
        warnings |= {f"{n.path!r} acts on no parameter: {n.transform!r}": _is_empty(n, params) for n in nodes}
    return warnings


def _is_empty(node: Node, params: Sequence[NamedParam]) -> bool:
    """True if the scope of a transform leaves out all parameters that those around it have."""
    around = [named for named in params if all(outer.scope.has(named) for outer in node.outer)]
    return bool(around) and not any(node.transform.scope.has(named) for named in around)


def warn_of_slips(
    nodes: Nodes, params: Sequence[NamedParam], unmatched: Mapping[str, bool], listed: Sequence[Transform] | None
) -> None:
    """Warn of patterns that are ``unmatched``, and of parameters on which no update rule acts, or several.

    ``listed`` has the transforms that the user passed with a module, or is None. If none of them decides how far
    parameters move, this warns too.
    """
    for text, is_unmatched in unmatched.items():
        if is_unmatched:
            warn_user(text)
    scopes = [node.scope for node, _ in update_rules(nodes)]
    if not scopes:
        if listed is not None and not any(isinstance(transform, LR) for transform in listed):
            warn_user(
                "the chain has no optimizer, so each step subtracts the whole update from the parameters, as with a "
                "learning rate of 1. Put an optimizer at its end, such as AdamW(1e-3), or SGD(1.0) if this is meant"
            )
        return
    counts = [sum(scope.has(named) for scope in scopes) for named in params]
    without = [named for named, count in zip(params, counts, strict=True) if count == 0]
    several = [named for named, count in zip(params, counts, strict=True) if count > 1]
    consequence = "its update is the gradient times the learning rate, as with SGD()"
    _warn_of_params("no optimizer acts on", without, consequence)
    _warn_of_params("two optimizers act on", several, "one after the other")


def warn_of_unread_keys(groups: Sequence[Group], nodes: Nodes, shown: Iterable[str]) -> None:
    """Warn of keys that were written to param groups and would be refused in a group that is added."""
    for message in dict.fromkeys(why_refused(group, nodes, shown) for group in groups):
        if message is not None:
            warn_user(message)


def _warn_of_params(slip: str, params: Sequence[NamedParam], consequence: str) -> None:
    if params:
        others = f" and {len(params) - 1} more" if len(params) > 1 else ""
        warn_user(f"{slip} {params[0]}{others}: {consequence}. See only and without")


def check_tensors(nodes: Nodes, table: Table, fitting: set[object]) -> None:
    """Raise if a gradient or state does not fit its parameter. ``fitting`` has the kinds that fit, by earlier calls."""
    for param, state, g in zip(table.params, table.states, table.group_of, strict=True):
        group, shape, dtype = table.groups[g], param.shape, param.dtype
        if param.grad is not None and param.grad.shape != shape:
            raise RuntimeError(_shape_message("gradient", param.grad, param, group))
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            is_strict = key.startswith(nodes.of_final_rules)
            kind = (key, shape, dtype, value.shape, value.dtype)
            is_usual = value.shape == shape and value.dtype == dtype
            if is_usual or kind in fitting or not (is_strict or value.ndim):
                continue
            expected = nodes.possible_state(_named_param(param, group), group).get(key, value)
            if value.ndim and value.shape != expected.shape:
                raise RuntimeError(_shape_message(f"state {key!r}", value, param, group))
            if is_strict and value.dtype != expected.dtype:
                raise RuntimeError(
                    f"the state {key!r} of {_named_param(param, group)} is of {value.dtype}, and the parameter of "
                    f"{dtype}. After changing its dtype, reload the state: "
                    "optimizer.load_state_dict(optimizer.state_dict())"
                )
            fitting.add(kind)


def _named_param(param: Tensor, group: Group) -> NamedParam:
    return next(named for named in named_params(group) if named.param is param)


def _shape_message(what: str, value: Tensor, param: Tensor, group: Group) -> str:
    name = _named_param(param, group).name or "a parameter"
    return (
        f"the {what} of {name} has shape {tuple(value.shape)}, and the parameter has {tuple(param.shape)}. After "
        "changing its shape, set its .grad to None and delete its entry in optimizer.state"
    )


def agree(
    nodes: Nodes, policy: StepPolicy, params: Sequence[NamedParam], has_schedules: bool, group: ProcessGroup | None
) -> tuple[dict[str, bool], bool]:
    """Agree with the other processes, or raise. Each warning about a pattern is True if no process has a match.

    The second result is True if any process has a setting that is a function of the step.
    """
    # all processes of a group call this together, and all raise if their chains would not exchange the same numbers
    unmatched = unmatched_names(nodes, params)
    if group is None:
        return unmatched, has_schedules
    # the arguments and transforms that decide which numbers a step exchanges, one line for each
    arguments = [f"nonfinite={policy.nonfinite!r}", f"max_consecutive_skips={policy.max_consecutive_skips}"]
    said = json.dumps([[*arguments, *map(_line, nodes)], unmatched, has_schedules])
    device = device_of([param for param, *_ in params], group)
    of_processes = [json.loads(text) for text in gathered_texts(said, group, device)]
    _compare([lines for lines, _, _ in of_processes], dist.get_process_group_ranks(group))
    everywhere = {text: all(theirs.get(text, True) for _, theirs, _ in of_processes) for text in unmatched}
    return everywhere, any(has_schedules for *_, has_schedules in of_processes)


def _line(node: Node) -> str:
    transform = node.transform
    kind, structure = kind_and_structure(transform)
    arguments = ", ".join(f"{key}={value}" for key, value in structure.items())
    scope = " with a scope" if transform.scope.limited else ""
    loss = " that judges the loss" if isinstance(transform, Gate) and transform.needs_loss else ""
    return f"{node.path}: {kind}({arguments}){scope}{loss}"


def _compare(described: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
    for lines, rank in zip(described, ranks, strict=True):
        for first, line in zip_longest(described[0], lines, fillvalue="no transform"):
            if first != line:
                raise ValueError(
                    "all processes of process_group need the same chain, nonfinite and max_consecutive_skips: "
                    f"process {rank} has {line} where process {ranks[0]} has {first}. Only settings and the patterns "
                    "of scopes may differ"
                )
