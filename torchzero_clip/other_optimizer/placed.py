"""Stores the state of transforms beside the state that another optimizer has of each parameter."""

from collections.abc import Container, Iterable, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.checkpoints.fitting import fitted_state
from torchzero_clip.checkpoints.portable import FIT_FLOAT32, packed, unpacked
from torchzero_clip.core.group_keys import BEFORE_STEP as KEY
from torchzero_clip.core.scope import named_params
from torchzero_clip.functional.lists import same_objects
from torchzero_clip.other_optimizer.followed import Followed
from torchzero_clip.types import Group, State, StateDict


class Placed:
    """Keeps the state of a `Followed` in ``optimizer.state[param]``, as a dict under one key.

    Loaders place state by the name of its parameter, so each parameter gets its own, whatever the order. Users who
    reset or move the state of the optimizer reset or move this state too.
    """

    # An optimizer makes its state of a parameter if `optimizer.state[param]` is empty. So ours is put there after that
    # step. Where the optimizer still has no state, our entry is withdrawn during steps.

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self._has_state = any(node.has_state for node in followed.nodes)
        self._params: list[Tensor] = []  # the keys of ``optimizer.state``, as `place` has left it
        self._dicts: list[Any] = []  # what each of them has under ``KEY``
        self._states: list[State] = []  # what `Followed.state` had, as it was placed
        self._alone: list[Tensor] = []  # parameters of which the optimizer has no state
        self._is_out = False  # True while the entries of ``_alone`` are removed
        self._is_loaded = False  # the optimizer has the portable form (`checkpoints.portable`) of the loaded state

    def place(self, optimizer: Optimizer) -> None:
        """Put the state of all parameters at its place. Called after each step and each load."""
        if not self._has_state:
            return
        is_placed = not self._is_out and same_objects(self._followed.state.values(), self._states)
        if is_placed and self._is_unchanged(optimizer):
            return
        states: Any = optimizer.state
        self._alone, self._is_out = [], False
        for param, _ in _listed(self._followed.param_groups):
            if _has_state_of(states, param) and isinstance(states[param], dict):
                states[param].setdefault(KEY, {})  # a load of a flattened state dict fills the keys that exist
        for param, state in self._followed.state.items():
            if not state:
                continue
            if not _has_state_of(states, param):
                states[param] = {}
                self._alone.append(param)
            if isinstance(states[param], dict):  # else `save` raises
                states[param][KEY] = state
        self._note(optimizer)

    def place_later(self) -> None:
        """Put the loaded state at its place at the next `take_over_changes`: a load may go on after our hook."""
        self._is_loaded = True

    def withdraw(self, optimizer: Optimizer) -> None:
        """Before a step: remove entries without state of the optimizer, which makes its state only if there is none."""
        for param in self._alone:
            optimizer.state.pop(param, None)
        self._is_out = bool(self._alone)

    def take_over_changes(self, optimizer: Optimizer) -> None:
        """Take over what was done to ``optimizer.state`` since `place`: replaced, cleared, moved or cast state."""
        followed, states = self._followed, optimizer.state
        if self._is_loaded:
            for param in [param for param in followed.state if _ours(states, param) is None]:  # removed after the load
                del followed.state[param]
            self._is_loaded = False
            self.place(optimizer)
        if not self._has_state or self._is_out or self._is_unchanged(optimizer):
            return
        was_placed = {param for param, entry in zip(self._params, self._dicts, strict=True) if entry}
        for group in followed.param_groups:
            for named in named_params(group):
                placed, ours = _ours(states, named.param), followed.state.get(named.param)
                if placed is ours or (placed is None and named.param not in was_placed):
                    continue
                followed.state.pop(named.param, None)
                if placed is not None:
                    try:
                        followed.state[named.param] = fitted_state(unpacked(placed), followed.nodes, named, group)
                    except ValueError:  # state that was moved to a parameter of another shape begins anew
                        del states[named.param][KEY]
        self.place(optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Remove the state from the optimizer."""
        states: Any = optimizer.state
        for param, entry in list(states.items()):
            if isinstance(entry, dict) and entry.pop(KEY, None) is not None and not entry:
                del states[param]

    def drop_removed(self, optimizer: Optimizer) -> None:
        """Before a save: remove entries of parameters that are in no group any more, for which torch has no number."""
        held = set(map(id, (param for param, _ in _listed(optimizer.param_groups)))) if self._alone else set[int]()
        for param in self._alone:
            if id(param) not in held:
                optimizer.state.pop(param, None)

    def save(self, optimizer: Optimizer, saved: StateDict) -> bool:
        """Add the state to a checkpoint of the optimizer. Return True if no parameter lacks state."""
        states, to_save = optimizer.state, self._to_save(optimizer)
        numbered = [(i, param, group) for i, (param, group) in enumerate(_listed(optimizer.param_groups))]
        entries, alone = {i: _without_key(entry) for i, entry in saved["state"].items()}, set(self._alone)
        for i, param, group in numbered:
            if to_save.get(param) and (_has_state_of(states, param) or param in alone):
                theirs = entries.get(i, {})
                if not isinstance(theirs, dict):
                    raise TypeError(
                        f"{type(optimizer).__name__} has {type(theirs).__name__} as state of a parameter, not a dict, "
                        "so the state of transforms cannot be stored there: call handle.remove() before you save"
                    )
                # a new dict, because this one is the optimizer's
                entries[i] = {**theirs, KEY: packed(to_save[param], _kept_dtypes(optimizer, group))}
        stepped = [param for _, param, _ in numbered if _has_state_of(states, param)]
        trainable = [(i, param) for i, param, _ in numbered if param.requires_grad]
        if entries and not stepped:
            # torch.distributed.checkpoint takes the missing entries of an optimizer without state for an error
            entries = {**{i: {} for i, _ in trainable}, **entries}
        saved["state"] = entries
        return bool(entries) and all(to_save.get(param) for param in stepped or [param for _, param in trainable])

    def _to_save(self, optimizer: Optimizer) -> Mapping[Tensor, State]:
        """The state of each parameter: that before the first step where the optimizer has state, and transforms none.

        torch.distributed.checkpoint loads into what exists, so a checkpoint has all of it.
        """
        followed = self._followed
        if not self._has_state:
            return followed.state
        to_save = dict(followed.state)
        for group in followed.param_groups:
            for named in named_params(group):
                if not to_save.get(named.param) and _has_state_of(optimizer.state, named.param):
                    to_save[named.param] = followed.nodes.init_state(named, group)
        return to_save

    def _is_unchanged(self, optimizer: Optimizer) -> bool:
        states = optimizer.state
        return same_objects(states.keys(), self._params) and same_objects(_each(states), self._dicts)

    def _note(self, optimizer: Optimizer) -> None:
        self._params, self._dicts = list(optimizer.state), _each(optimizer.state)
        self._states = list(self._followed.state.values())


def _each(states: Mapping[Any, Any]) -> list[Any]:
    """What each entry has under the key."""
    try:
        return list(map(dict.get, states.values(), repeat(KEY)))
    except TypeError:  # some optimizers have entries that are no dicts
        return [_ours(states, key) for key in states]


def _ours(states: Mapping[Any, Any], param: Any) -> Any:
    """What a parameter has under the key. None for an empty dict, because flat loads put it under missing keys."""
    entry = states.get(param)
    return (entry.get(KEY) or None) if isinstance(entry, dict) else None


def _without_key(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != KEY} if isinstance(entry, dict) else entry


def _has_state_of(states: Mapping[Any, Any], param: Tensor) -> bool:
    """True if the optimizer has state of a parameter."""
    entry = states.get(param)
    return bool(entry) and not (isinstance(entry, dict) and entry.keys() == {KEY})


def _listed(groups: Iterable[Group]) -> list[tuple[Tensor, Group]]:
    return [(param, group) for group in groups for param in group["params"]]


def _kept_dtypes(optimizer: Optimizer, group: Group) -> Container[torch.dtype] | None:
    """The dtypes that a load of the optimizer leaves as they are under the key "step"; None for all."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return ()  # another package may cast as it likes
    return FIT_FLOAT32 if group.get("fused") or group.get("capturable") else None
