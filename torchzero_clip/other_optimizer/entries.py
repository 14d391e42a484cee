"""Transforms in the checkpoints of another optimizer: their state by parameter, and an entry of each param group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchzero_clip.checkpoints.identity import IDENTITY
from torchzero_clip.checkpoints.portable import unpacked
from torchzero_clip.checkpoints.saving import Load
from torchzero_clip.compat import warn_user
from torchzero_clip.core.group_keys import BEFORE_STEP as KEY
from torchzero_clip.core.scope import named_params
from torchzero_clip.other_optimizer.followed import OF_OPTIMIZER, Followed
from torchzero_clip.other_optimizer.placed import Placed
from torchzero_clip.types import Group, StateDict

_OF_CHAIN = (
    "the checkpoint is of a chain, which only a Modular can load. Load it into a Modular with the same transforms, "
    "then call optimizer.load_state_dict(to_torch_optim(modular, optimizer))"
)
_OF_COPY = (
    "the checkpoint has no state of the transforms that stand before the steps of the optimizer, only their name: an "
    "optimizer was copied or unpickled, which loses transforms, and then saved. Call before_step on the copy before it "
    "saves. To begin anew with this checkpoint, load it before the call of before_step"
)
_INCOMPLETE = (
    "the checkpoint lacks state of the transforms that stand before the steps of the optimizer. The tool that saved "
    "or loaded it has dropped a part. torch.distributed.checkpoint loads into the state that exists: call before_step "
    "before the first step of the optimizer, set gradients to None, and then load"
)


class Entries:
    """Saves and loads a `Followed` together with the optimizer behind it.

    In a checkpoint, each param group has an entry with the settings and the state of the whole chain, because loaders
    drop other keys of a checkpoint. In the optimizer, the groups have the name of the chain under ``KEY``, because
    flat checkpoints save the keys that groups have. `Placed` has the state of each parameter.
    """

    def __init__(self, followed: Followed, *, new: str | Iterable[str], dropped: str | Iterable[str]) -> None:
        self._followed, self._new, self._dropped = followed, new, dropped
        self._name = followed.param_groups[0][IDENTITY]
        self.placed = Placed(followed)
        self._load: Load | None = None
        self._was_checked = self._was_saved = self._has_warned = False
        self._before: tuple[Any, Any] = None, None  # state and groups of the optimizer before a load

    def register(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Let the optimizer save and load the entries. Raise if it saves without hooks."""
        hooks = [
            optimizer.register_state_dict_post_hook(self.save),
            optimizer.register_load_state_dict_pre_hook(self.check),
            optimizer.register_state_dict_pre_hook(self.placed.drop_removed),
            # first, so that later hooks see the complete state
            optimizer.register_load_state_dict_post_hook(self.restore, prepend=True),
        ]
        self._check_hook = hooks[1].id
        try:
            optimizer.state_dict()
            if not self._was_saved:
                raise TypeError(
                    f"{type(optimizer).__name__}.state_dict runs no hooks of torch, so checkpoints would lack the "
                    "state of the transforms: call before_step on the optimizer inside it"
                )
        except Exception:
            for hook in hooks:
                hook.remove()
            self.remove(optimizer)
            raise
        return hooks

    def remove(self, optimizer: Optimizer) -> None:
        """Remove everything from the optimizer."""
        self.placed.forget(optimizer)
        for group in optimizer.param_groups:
            group.pop(KEY, None)

    def begin(self, optimizer: Optimizer) -> None:
        """Take over entries of a checkpoint that was loaded before. A copy of another optimizer begins anew."""
        if any(isinstance(group.get(KEY), Mapping) for group in optimizer.param_groups):
            self.take_over_changes(optimizer)
        else:
            self.placed.forget(optimizer)
            self._name_groups(optimizer)

    def take_over_changes(self, optimizer: Optimizer) -> None:
        """Take over what a load without hooks, or a user, has left in the optimizer."""
        groups = optimizer.param_groups
        entries = [group.get(KEY) for group in groups]
        if entries != [self._name] * len(groups):
            if not any(entry == self._name for entry in entries):  # else a group was added
                if (load := self._checked(*_loaded(optimizer))) is not None:
                    self._take_over(load)
                self.placed.place(optimizer)
            self._name_groups(optimizer)
        self.placed.take_over_changes(optimizer)

    def save(self, optimizer: Optimizer, saved: StateDict) -> None:
        """Write everything to a checkpoint."""
        self._was_saved = True
        followed = self._followed
        followed.sync(optimizer.param_groups)
        followed.runner.read_decisions(followed.param_groups)
        self.placed.take_over_changes(optimizer)
        each = self.placed.save(optimizer, saved)
        for settings, group in zip(followed.settings_to_save(), saved["param_groups"], strict=True):
            group[KEY] = {"settings": settings, "each": each}

    def check(self, optimizer: Optimizer, state_dict: StateDict) -> None:
        """Check a checkpoint before anything is loaded."""
        self._load, self._was_checked = None, False
        self._before = optimizer.state, optimizer.param_groups
        groups, states = state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(groups, list | tuple) or not isinstance(states, Mapping):
            return  # torch raises
        self._followed.sync(optimizer.param_groups)
        self._followed.runner.read_decisions(self._followed.param_groups)
        # true only if the checkpoint is that of a chain, and the optimizer is none
        if IDENTITY in set[str]().union(*groups).difference(*optimizer.param_groups):
            self._followed.runner.new_load((), ()).agree(ValueError(_OF_CHAIN), self._followed.param_groups)
        hooks: Any = optimizer  # torch has no public way to see which hook is the last
        if next(reversed(hooks._optimizer_load_state_dict_pre_hooks)) == self._check_hook:
            self._load = self._checked(groups, states)
            self._was_checked = True
        # else a later hook may give each state to another parameter: `restore` checks what it leaves

    def restore(self, optimizer: Optimizer) -> None:
        """Put everything in its place, after the optimizer was loaded."""
        if not self._was_checked:
            try:
                self._load = self._checked(*_loaded(optimizer))
            except Exception:
                optimizer.state, optimizer.param_groups = self._before
                raise
        self._before, self._was_checked = (None, None), False
        if self._load is None:
            self.placed.place(optimizer)
        else:
            self._take_over(self._load)
            self.placed.place_later()
        self._name_groups(optimizer)

    def _name_groups(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group[KEY] = self._name

    def _checked(self, groups: Sequence[Group], states: Mapping[Any, Any]) -> Load | None:
        """A checked load of groups and states; None if transforms have no state there. Raise if it does not fit."""
        followed, entries = self._followed, [group.get(KEY) for group in groups]
        load = followed.runner.new_load(self._new, self._dropped)
        ours = {key: entry[KEY] for key, entry in states.items() if isinstance(entry, Mapping) and KEY in entry}
        if all(entry is None for entry in entries) and not ours:
            load.agree(None, followed.param_groups)
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    "the checkpoint of the optimizer has no state of the transforms before its steps. They continue "
                    "with the state that they have"
                )
            return None
        try:
            checkpoint = _as_checkpoint(groups, entries, ours)
            _check_whole(groups, entries, states, [p for g in followed.param_groups for p in g["params"]])
        except ValueError as error:
            load.agree(error, followed.param_groups)
            raise
        load.check(checkpoint, followed.param_groups)
        return load

    def _take_over(self, load: Load) -> None:
        self._load = None
        self._followed.runner.read_decisions(self._followed.param_groups)
        for group, loaded in zip(self._followed.param_groups, load.groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in OF_OPTIMIZER})
        load.restore(self._followed.param_groups, self._followed.state)

    def begin_states(self) -> None:
        """Make the state that parameters have before their first step, for a checkpoint that is loaded in place."""
        followed = self._followed
        for group in followed.param_groups:
            for named in named_params(group):
                if named.param.requires_grad and not followed.state.get(named.param):
                    followed.state[named.param] = followed.nodes.init_state(named, group)


def _as_checkpoint(groups: Sequence[Group], entries: Sequence[Any], ours: Mapping[Any, Any]) -> StateDict:
    """Entries and states in the form of the checkpoint of a `Modular`."""
    if all(isinstance(entry, str) for entry in entries):
        raise ValueError(_OF_COPY)
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("settings"), Mapping) for entry in entries):
        raise ValueError(_INCOMPLETE)
    saved_groups: list[Group] = []
    for group, entry in zip(groups, entries, strict=True):
        settings = {key: value for key, value in entry["settings"].items() if key not in OF_OPTIMIZER}
        saved_groups.append({**settings, "params": list(group["params"])})
    return {"state": {key: unpacked(saved) for key, saved in ours.items()}, "param_groups": saved_groups}


def _check_whole(
    groups: Sequence[Group], entries: Sequence[Any], states: Mapping[Any, Any], params: Sequence[Any]
) -> None:
    """Raise if a parameter lacks state, although each one had some when the checkpoint was made."""
    states_of = [
        (entry.get("each") is True, states.get(i))
        for g, entry in zip(groups, entries, strict=True)
        for i in g["params"]
    ]
    is_lost = [bool(each and state and not state.get(KEY)) for each, state in states_of]
    has_none = all(each and not (state and state.get(KEY)) for each, state in states_of)
    if any(is_lost) or (has_none and any(param.requires_grad for param in params)):
        raise ValueError(_INCOMPLETE)


def _loaded(optimizer: Optimizer) -> tuple[list[Group], dict[int, Any]]:
    """The groups and states of an optimizer, with numbers in place of parameters."""
    numbers = {param: i for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [{**group, "params": [numbers[param] for param in group["params"]]} for group in optimizer.param_groups]
    return groups, {numbers[param]: state for param, state in optimizer.state.items() if param in numbers}
