"""Converts the checkpoint of one chain for another, in which transforms were added, removed or renamed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchzero_clip.checkpoints.fitting import saved_groups
from torchzero_clip.checkpoints.identity import IDENTITY, Member, identity_text, matched, members_of, saved_members
from torchzero_clip.core.kinds import FinalRule
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.types import Checkpoint, Group, NewState, StateDict


def adapted(
    state_dict: Checkpoint, groups: list[Group], nodes: Nodes, new: Iterable[str], dropped: Iterable[str]
) -> StateDict:
    """Convert a checkpoint of another chain for this one. Its ``new`` transforms get their settings from ``groups``."""
    saved, members = saved_groups(state_dict, groups), members_of(nodes)
    identity = identity_text(members)
    if all(group.get(IDENTITY) == identity for group in saved):
        return dict(state_dict)
    theirs = saved_members(saved)
    keys = _Keys(theirs, matched(theirs, members, new, dropped))
    fresh = [node for node in nodes if node.path.split("/")[0] not in keys.names.values()]

    result: list[Group] = []
    for group, ours in zip(saved, groups, strict=True):
        added = {key: ours[key] for node in fresh for key in node.storage_keys.values()}
        for node in fresh:
            added |= node.init_global_state()
        result.append({**keys.of_group(group), **added, IDENTITY: identity})

    state = dict(state_dict["state"])
    params = [(named, ours) for ours in groups for named in named_params(ours)]
    for i, (named, ours) in zip([i for group in saved for i in group["params"]], params, strict=True):
        if isinstance(of_param := state.get(i), Mapping) and any("/" in str(key) for key in of_param):
            state[i] = {**keys.of_state(of_param), **fresh_state(fresh, named, ours)}
    return {**state_dict, "state": state, "param_groups": result}


def fresh_state(nodes: Iterable[Node], named: NamedParam, group: Group) -> NewState:
    """The state of a parameter before the first step of these transforms. Final rules make theirs in that step."""
    state: NewState = {}
    for node in nodes:
        if not isinstance(node.transform, FinalRule):
            state |= node.init_state(named, node.settings(group))
    return state


class _Keys:
    """Replaces the keys of saved transforms by those of the transforms of this chain with which they are paired."""

    def __init__(self, saved: Sequence[Member], pairs: Sequence[tuple[Member, Member]]) -> None:
        self.names = {old.name: member.name for old, member in pairs}
        self._saved_names = {member.name for member in saved}
        self._saved_settings = {key for member in saved for key in member.settings.values()}
        self._settings: dict[str, str] = {}
        for old, member in pairs:
            if old.settings.keys() != member.settings.keys():
                differ = ", ".join(sorted(old.settings.keys() ^ member.settings.keys()))
                raise ValueError(f"{member.name!r} has other settings in the checkpoint: {differ}")
            self._settings |= {old.settings[key]: member.settings[key] for key in old.settings}

    def of_group(self, group: Group) -> Group:
        """Convert a saved group: settings, the values that schedulers add to them, and state of the whole chain."""
        result: Group = {}
        for key, value in group.items():
            setting, colon, rest = key.partition(":")  # as_lr keeps "max_norm:initial_lr"
            moved: Group = {}
            if setting in self._settings:
                moved = {self._settings[setting] + colon + rest: value}
            elif setting not in self._saved_settings:
                moved = self.of_state({key: value})
            if twice := moved.keys() & result.keys():
                raise ValueError(f"the checkpoint has {twice.pop()!r} twice, also as {key!r}")
            result |= moved
        return result

    def of_state(self, values: Mapping[Any, object]) -> NewState:
        """Convert state, without that of dropped transforms."""
        result: NewState = {}
        for key, value in values.items():
            name, slash, rest = str(key).partition("/")
            if not slash or name not in self._saved_names:
                result[key] = value
            elif name in self.names:
                result[f"{self.names[name]}/{rest}"] = value
        return result
