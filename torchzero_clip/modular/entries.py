"""The state of transforms in the checkpoints of another optimizer: an entry of each param group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchzero_clip.checkpoints.identity import IDENTITY
from torchzero_clip.checkpoints.saving import Load, without_device
from torchzero_clip.compat import warn_user
from torchzero_clip.core.group_keys import BEFORE_STEP as KEY
from torchzero_clip.core.scope import named_params
from torchzero_clip.modular.front import Front
from torchzero_clip.types import Group

_OF_CHAIN = (
    "the checkpoint is of a chain, which only a Modular can load. Load it into a Modular with the same transforms, "
    "then call optimizer.load_state_dict(to_torch_optim(modular, optimizer))"
)
_INCOMPLETE = (
    "the checkpoint lacks state of the transforms that stand before the steps of the optimizer. What saved or loaded "
    "it has dropped a part. torch.distributed.checkpoint loads into the state that exists: call before_step before the "
    "first step of the optimizer, and then load"
)


class Entries:
    """Saves and loads the state of a `Front` with the optimizer that it stands before.

    In a checkpoint, each group has an entry with the settings and the state of its parameters. In the optimizer, the
    groups have only the name of the chain under this key, because flat checkpoints save the keys that groups have.

    Entries are in groups because loaders drop other keys of a checkpoint, and because some optimizers do not start
    their own state if ``optimizer.state`` has tensors.
    """

    def __init__(self, front: Front, *, new: str | Iterable[str], dropped: str | Iterable[str]) -> None:
        self._front, self._new, self._dropped = front, new, dropped
        self._name = front.param_groups[0][IDENTITY]
        self._load: Load | None = None
        self._was_saved = self._has_warned = False

    def register(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Let the optimizer save and load the entries. Raise if it saves without hooks."""
        hooks = [
            optimizer.register_state_dict_post_hook(self.save),
            optimizer.register_load_state_dict_pre_hook(self.check),
            optimizer.register_load_state_dict_post_hook(self.restore, prepend=True),
        ]
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
            for group in optimizer.param_groups:
                group.pop(KEY)
            raise
        return hooks

    def look(self, groups: Sequence[Group]) -> None:
        """Take over entries that a load has left in the groups, and name the chain there."""
        found = [group.get(KEY) for group in groups]
        if found == [self._name] * len(groups):
            return
        if any(isinstance(entry, Mapping) for entry in found):
            self._check(groups, found)
            self._put()
        for group in groups:
            group[KEY] = self._name

    def save(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Write the entries to a checkpoint."""
        self._was_saved = True
        self._front.sync(optimizer.param_groups)
        own = without_device(self._front.state_dict())
        for mine, group in zip(own["param_groups"], saved["param_groups"], strict=True):
            states = {k: own["state"][i] for k, i in enumerate(mine["params"]) if own["state"].get(i)}
            settings = {key: value for key, value in mine.items() if key not in ("params", "name")}
            group[KEY] = {"settings": settings, "state": states, "states": len(states)}

    def check(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Check the entries of a checkpoint before anything is loaded, and return it without them."""
        self._load = None
        groups: Any = state_dict.get("param_groups")
        if not isinstance(groups, list | tuple):
            return None  # torch raises
        self._front.sync(optimizer.param_groups)
        if IDENTITY in set[str]().union(*groups).difference(*optimizer.param_groups):
            self._front.new_load((), ()).agree(ValueError(_OF_CHAIN), self._front.param_groups)
        self._check(groups, [group.get(KEY) for group in groups])
        return {**state_dict, "param_groups": [{k: v for k, v in g.items() if k != KEY} for g in groups]}

    def restore(self, optimizer: Optimizer) -> None:
        """Put the state of the entries in its place, after the optimizer was loaded."""
        self._put()
        for group in optimizer.param_groups:
            group[KEY] = self._name

    def _check(self, groups: Sequence[Group], entries: Sequence[Any]) -> None:
        front = self._front
        load = front.new_load(self._new, self._dropped)
        if not any(entries):
            load.agree(None, front.param_groups)
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    "the checkpoint of the optimizer has no state of the transforms before its steps. They continue "
                    "with the state that they have"
                )
            return
        if not all(isinstance(e, Mapping) and "settings" in e and len(_states(e)) == e.get("states") for e in entries):
            load.agree(ValueError(_INCOMPLETE), front.param_groups)
        load.check(_as_checkpoint(groups, entries), front.param_groups)
        self._load = load

    def _put(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            for own, loaded in zip(self._front.param_groups, load.groups, strict=True):
                own.update({key: value for key, value in loaded.items() if key != "params"})
            load.restore(self._front.param_groups, self._front.state)

    def begin(self) -> None:
        """Make the state that parameters have before their first step, for a checkpoint that is loaded in place."""
        front = self._front
        for group in front.param_groups:
            for named in named_params(group):
                if named.param.requires_grad and not front.state.get(named.param):
                    front.state[named.param] = front.nodes.init_state(named, group)


def _as_checkpoint(groups: Sequence[Group], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries in the form of the checkpoint of a `Modular`."""
    own: list[Group] = []
    state: dict[int, Any] = {}
    for group, entry in zip(groups, entries, strict=True):
        first = sum(len(before["params"]) for before in own)
        numbers = list(range(first, first + len(group["params"])))
        own.append({**entry["settings"], "params": numbers})
        known = dict(enumerate(numbers))  # if parameters are missing, `Load.check` says so
        state |= {known[int(k)]: values for k, values in _states(entry).items() if int(k) in known}
    return {"state": state, "param_groups": own}


def _states(entry: Mapping[str, Any]) -> Mapping[Any, Any]:
    return entry.get("state", {})  # torch.distributed.checkpoint drops it if it is empty
