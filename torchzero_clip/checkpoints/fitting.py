"""Checks a checkpoint before an optimizer loads any part of it."""

import copy
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.checkpoints.identity import IDENTITY
from torchzero_clip.checks import count
from torchzero_clip.compat import is_distributed
from torchzero_clip.core.chain_state import CONSECUTIVE, COUNTERS, SCHEDULE_STEP, saved_chain_state
from torchzero_clip.core.group_keys import why_refused
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.schedules import Schedules
from torchzero_clip.core.scope import NamedParam, all_named_params
from torchzero_clip.functional.dtypes import moved
from torchzero_clip.functional.shards import local
from torchzero_clip.hints import described
from torchzero_clip.types import Checkpoint, Group, NewState, State

Statistics: TypeAlias = dict[str, tuple[Tensor, torch.dtype]]
"""Tensors that must be finite, by their description in errors, each with the dtype that it gets."""


def fitted(
    state_dict: Checkpoint, groups: list[Group], nodes: Nodes, schedules: Schedules, of_chain: State
) -> tuple[Checkpoint, NewState]:
    """The checkpoint, checked and completed from the param groups, and its state of the whole chain.

    ``of_chain`` is the state of the whole chain that the optimizer has now.
    """
    all_saved = saved_groups(state_dict, groups)
    for saved in all_saved:
        if lacks := [key for key in nodes.storage_keys.values() if key not in saved]:
            raise ValueError(f"a param group of the checkpoint lacks the setting {', '.join(map(repr, lacks))}")
    loaded = saved_chain_state(all_saved, of_chain)
    statistics = _statistics_of_chain(loaded, of_chain)
    begins = {key: 0 for key in (CONSECUTIVE, SCHEDULE_STEP) if key in of_chain}  # a new schedule starts at 0
    chain_state: NewState = {**of_chain, **begins}
    chain_state |= {key: _like(value, of_chain.get(key)) for key, value in loaded.items()}
    merged = [{**_merged(group, saved), **chain_state} for group, saved in zip(groups, all_saved, strict=True)]
    # a schedule of this optimizer decides at the saved step, whatever number the checkpoint has
    merged = schedules.applied(groups, merged, chain_state.get(SCHEDULE_STEP, 0))
    nodes.checked_settings(merged)

    state = state_dict["state"]
    params = all_named_params(groups)
    settings = [saved for saved in merged for _ in saved["params"]]
    ids = [i for saved in all_saved for i in saved["params"]]
    if len(set(ids)) < len(ids):
        raise ValueError(f"the param groups of the checkpoint list a parameter twice: {ids}")
    listed = set(ids)
    if strangers := [i for i in state if i not in listed]:
        raise ValueError(f"the checkpoint has state for parameters that none of its param groups lists: {strangers}")
    placed: dict[int | str, NewState] = {}
    for i, named, group in zip(ids, params, settings, strict=True):
        if i in state:
            fresh = _check_state(i, state[i], nodes, named, group, statistics)
            placed[i] = {key: _like(value, fresh[key]) for key, value in state[i].items()}
    # all statistics at once, because each read synchronizes with the GPU
    _check_finite(statistics)
    # last, because the errors above say more precisely what does not fit
    for saved in all_saved:
        if message := why_refused(saved, nodes, {*of_chain, *COUNTERS, IDENTITY}):
            raise ValueError(message)
    return {**state_dict, "state": placed, "param_groups": merged}, chain_state


def fitted_state(saved: State, nodes: Nodes, named: NamedParam, group: Group) -> State:
    """A copy of the state of one parameter, checked. Raises ValueError if it does not fit."""
    statistics: Statistics = {}
    fresh = _check_state(named.name or "", saved, nodes, named, group, statistics)
    _check_finite(statistics)
    return {key: _like(value, fresh[key]) for key, value in saved.items()}


def _statistics_of_chain(loaded: State, of_chain: State) -> Statistics:
    """The tensors in the state of a chain, after checking it. Raise if it does not fit ``of_chain``."""
    statistics: Statistics = {}
    for key in COUNTERS:
        count(key, loaded.get(key, 0))
    for key, expected in of_chain.items():
        if key in COUNTERS:
            continue  # nonfinite= is not part of the chain, so the checkpoint may lack the counts
        what = f"the state {key!r} of the chain"
        if key not in loaded:
            raise ValueError(f"the checkpoint lacks {what}: load it into the chain that wrote it")
        _check_value(what, loaded[key], expected)
        if isinstance(expected, Tensor):
            statistics[what] = loaded[key], expected.dtype
    return statistics


def _merged(group: Group, saved: Group) -> Group:
    """A saved group, completed from the group of the optimizer, whose names stay: wrappers change names."""
    names, saved_names = group.get("param_names"), saved.get("param_names")
    if saved_names is not None:
        is_list = isinstance(saved_names, list | tuple) and len(saved_names) == len(saved["params"])
        if not is_list or not all(isinstance(name, str) for name in saved_names):
            raise ValueError("'param_names' of a checkpoint's group is a list with a name for each parameter")
    if names and saved_names and names != saved_names and sorted(names) == sorted(saved_names):
        raise ValueError(
            "the checkpoint has the same parameters in another order: build the optimizer with them in the order of "
            f"its 'param_names', {saved_names[0]!r} first"
        )
    names_of_group = {key: group[key] for key in ("param_names", "name") if key in group}
    # names that only the checkpoint has would change scopes; counts that this optimizer keeps come from `fitted`
    left_out = (IDENTITY, "name", "param_names", *COUNTERS)
    # a learning rate may be a tensor that belongs to a graph
    settings = {k: v.detach() if isinstance(v, Tensor) else v for k, v in saved.items() if k not in left_out}
    return {**{k: v for k, v in group.items() if k != "params"}, **settings, **names_of_group}


def _like(value: object, fresh: object) -> object:
    """A copy of a saved value, on the device and in the dtype of a fresh one."""
    # torch's optimizers count steps on the CPU; ``model.double()`` changes dtypes
    if isinstance(value, Tensor) and isinstance(fresh, Tensor):
        return value.detach().to(fresh.device, fresh.dtype, copy=True)
    return copy.deepcopy(value)


def saved_groups(state_dict: object, groups: list[Group]) -> list[Group]:
    """The param groups of a checkpoint. Raises if it is not a checkpoint, or if its groups have other sizes."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = f"the keys {list(state_dict)[:5]}" if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"a checkpoint is a dict with the keys 'state' and 'param_groups', as state_dict() returns it; got {got}"
        )
    saved = state_dict["param_groups"]
    is_list = isinstance(saved, list | tuple) and all(isinstance(g, Mapping) for g in saved)
    if not is_list or not all(isinstance(g.get("params"), list | tuple) for g in saved):
        raise ValueError("'param_groups' of a checkpoint is a list of dicts, each with a list 'params'")
    if not all(isinstance(i, int | str) for g in saved for i in g["params"]):
        raise ValueError("'params' of a checkpoint's groups are numbers of parameters, or their names")
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError("'state' of a checkpoint is a dict from parameter numbers to dicts")
    sizes, saved_sizes = ([len(g["params"]) for g in gs] for gs in (groups, saved))
    if sizes != saved_sizes:
        raise ValueError(
            f"the checkpoint has param groups of {saved_sizes} parameters, this optimizer of {sizes}: "
            "build it with the same parameters in the same groups"
        )
    return [dict(g) for g in saved]


def _check_state(
    number: int | str, saved: object, nodes: Nodes, named: NamedParam, group: Group, statistics: Statistics
) -> NewState:
    """Return the state that a parameter may have, and add statistics of the saved one. Raises if that does not fit."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of parameter {number} is a dict, got {type(saved).__name__}")
    # the keys of state may depend on settings, which may have changed since the last step
    now, at_first = nodes.init_state(named, group), nodes.init_state(named)
    expected = {**nodes.possible_state(named, group), **at_first, **now}
    rules = [node.path for node in nodes if isinstance(node.transform, UpdateRule)]
    # a bare key belongs to another package, unless torch's optimizer has it
    others = {k: v for k, v in saved.items() if "/" not in k and not any(f"{rule}/{k}" in expected for rule in rules)}
    saved = {key: value for key, value in saved.items() if key not in others}
    # All state of a transform may be missing, but not a part: another setting at the first gradient left it out, or
    # that step raised
    begun = [node for node in nodes if node.state(saved)]
    needed = [key for node in begun for key in node.qualified(node.state(expected)) if key in now and key in at_first]
    missing = [key for key in needed if key not in saved]
    extra = [key for key in saved if key not in expected]
    if missing or extra:
        raise ValueError(_changed_chain_message(number, missing, extra, nodes))
    of_statistics = tuple(f"{node.path}/" for node in nodes if node.transform.keeps_statistics)
    for key, value in saved.items():
        what = f"the state {key!r} of parameter {number}"
        _check_value(what, value, expected[key])
        if key.startswith(of_statistics) and isinstance(value, Tensor):
            statistics[what] = value, expected[key].dtype
    return expected | {k: moved(v, named.param.device) if isinstance(v, Tensor) else v for k, v in others.items()}


def _check_finite(statistics: Statistics) -> None:
    """Raise if a statistic is not finite in the dtype that it will have. Waits once for each device."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for what, (value, dtype) in statistics.items():
        # in the dtype after loading: 1e300 is finite in float64 and inf in float32
        by_device.setdefault(value.device, {})[what] = local(value).to(dtype).isfinite().all()
    for flags in by_device.values():
        for what, is_finite in zip(flags, torch.stack(list(flags.values())).tolist(), strict=True):
            if not is_finite:
                dtype = statistics[what][1]
                raise ValueError(f"{what} is not finite in {dtype}: it is a statistic, which no gradient makes inf")


def _check_value(what: str, value: object, expected: object) -> None:
    if not isinstance(expected, Tensor):
        # a wrapped optimizer may have a bool or None as state. True is an int
        numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in (value, expected)]
        if not all(numbers) and type(value) is not type(expected):
            kind = "a number" if numbers[1] else f"of type {type(expected).__name__}"
            raise ValueError(f"{what} is {kind} in this chain, got {type(value).__name__}")
        return
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise ValueError(f"{what} is a dense tensor in this chain, got {described(value)}")
    # dtypes may differ, because torch's load_state_dict casts state to the dtype of the parameter too
    if value.shape != expected.shape or _kind_of(value) != _kind_of(expected):
        raise ValueError(
            f"{what} is {described(value)} in the checkpoint, and {described(expected)} in this chain: "
            "build the optimizer on a model of the same shapes"
        )
    if is_distributed(expected) != is_distributed(value):
        raise ValueError(f"{what}: sharded and whole tensors do not mix; load through torch.distributed.checkpoint")


def _kind_of(value: Tensor) -> torch.dtype | str:
    """Equal for dtypes of which one may be converted to the other, as torch's optimizers do."""
    return "complex" if value.is_complex() else "real" if value.is_floating_point() else value.dtype


def _changed_chain_message(number: int | str, missing: list[str], extra: list[str], nodes: Nodes) -> str:
    names = ", ".join(node.path for node in nodes if not node.outer)
    problems = [f"the state of parameter {number} does not fit this chain ({names})"]
    if missing:
        problems.append(f"missing: {', '.join(map(repr, missing))}")
    if extra:
        problems.append(f"extra: {', '.join(map(repr, extra))}")
    if any("/" not in str(key) for key in extra):
        problems.append("keys without the name of a transform come from another optimizer: see from_torch_optim")
    # a checkpoint does not store scopes, so a parameter may have state of a transform that no longer selects it
    selective = (node.path for node in nodes if node.scope.limited)
    left = [path for path in selective if any(str(key).startswith(f"{path}/") for key in extra)]
    if left:
        problems.append(f"if the parameter is not in the scope of {', '.join(left)}, select it, or delete this state")
    return "; ".join(problems) + ". Load it into the chain that wrote it"
