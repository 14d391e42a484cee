"""The settings of transforms for the param groups of another optimizer, which they follow."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from torchzero_clip.compat import any_distributed
from torchzero_clip.core.chain import Chain, Composite, Transforms, as_written, flatten
from torchzero_clip.core.chain_state import same
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.scope import all_named_params
from torchzero_clip.core.transform import Transform
from torchzero_clip.engine.end import Deliver
from torchzero_clip.functional.lists import has_repeats, params_of
from torchzero_clip.modular.runner import Runner
from torchzero_clip.modular.validation import check_added, check_places
from torchzero_clip.types import Group, State

OF_OPTIMIZER = ("params", "param_names", "name")
"""Keys of a param group that describe the optimizer, and are no settings of transforms."""


def runner_before(delivery: Deliver, transforms: Sequence[Transforms], **options: Any) -> Runner:
    """A runner that writes its updates into the gradients, for another optimizer that takes the step."""
    for transform in as_written(transforms):
        _refuse(transform, transform)
    runner = Runner(Chain(*flatten(transforms)), delivery=delivery, **options)
    # other transforms may read the gradients after they were changed
    delivery.over_grads = all(node.transform.pure and node.transform.target == "update" for node in runner.nodes)
    return runner


class Followed:
    """Param groups with the settings of transforms, one for each group of another optimizer, and their state."""

    def __init__(self, runner: Runner, groups: Sequence[Group], module: nn.Module | None) -> None:
        self.runner, self.nodes = runner, runner.nodes
        self.param_groups: list[Group] = []
        self.state: dict[Tensor, State] = {}
        self._names_in = module  # the module that has the names of the parameters
        for group in _groups_with_names(groups, module):
            runner.add(group, self.param_groups, self._append, module=None)
        runner.complete(self.param_groups, None)
        for ours, group in zip(self.param_groups, groups, strict=True):
            ours["params"] = group["params"]
        _check_listed_once(groups)
        self._ids = _ids_in(groups)

    def _append(self, group: Group) -> None:
        """Add a group, and store the names of its parameters as torch does."""
        pairs = [item for item in group["params"] if isinstance(item, tuple)]
        if pairs:
            group["param_names"], group["params"] = [name for name, _ in pairs], [param for _, param in pairs]
        self.param_groups.append({**group, **self._shared_settings()})

    def _shared_settings(self) -> dict[str, Any]:
        """The settings that are equal in all groups. An added group gets them, because some have to stay equal."""
        groups, schedules = self.param_groups, self.runner.schedules
        stored = self.nodes.storage_keys.values() if groups else ()
        columns = {key: [group[key] for group in groups] for key in stored if key not in schedules}
        return {key: column[0] for key, column in columns.items() if all(same(column[0], value) for value in column)}

    def sync(self, groups: Sequence[Group]) -> None:
        """Follow the other optimizer if its parameters have changed."""
        if _ids_in(groups) != self._ids:
            self.follow(groups)

    def settings_to_save(self) -> list[dict[str, Any]]:
        """The settings of each group and the state of the whole chain, for a checkpoint."""
        chain_state = self.runner.chain_state
        chain_state.adopt_counters(self.param_groups)
        chain_state.show(self.param_groups)
        return [{key: value for key, value in group.items() if key not in OF_OPTIMIZER} for group in self.param_groups]

    def follow(self, groups: Sequence[Group]) -> None:
        """Take over which parameters the other optimizer has. Raise, without any change, if they do not fit."""
        before = [dict(group) for group in self.param_groups]
        try:
            self._follow(groups)
            params = all_named_params(self.param_groups)
            runner = self.runner
            check_added(self.nodes, params, runner.shared.group)
            check_places(runner.chain, self.nodes, params)
            _check_listed_once(groups)
        except Exception:
            self.param_groups[:] = before
            raise
        self._ids, runner.has_meshes = _ids_in(groups), any_distributed([named.param for named in params])
        held = set(params_of(groups))
        for param in self.state.keys() - held:
            del self.state[param]

    def _follow(self, groups: Sequence[Group]) -> None:
        before, named = list(self.param_groups), _groups_with_names(groups, self._names_in)
        successors = _successors(before, groups)
        for ours, group, new in zip(successors, groups, named, strict=True):
            if ours is not None:
                ours["params"] = group["params"]
                if "param_names" in ours:
                    ours["param_names"] = [name for name, _ in new["params"]]
        self.param_groups[:] = [ours for ours in successors if ours is not None]  # a new group is compared with them
        for g, (group, new) in enumerate(zip(groups, named, strict=True)):
            if successors[g] is None:
                self.runner.add(new, self.param_groups, self._append, module=None)
                successors[g] = self.param_groups[-1]
                self.param_groups[-1]["params"] = group["params"]
        self.param_groups[:] = [ours for ours in successors if ours is not None]


def _ids_in(groups: Sequence[Group]) -> list[int]:
    """The ids of the lists of parameters, and of the parameters in them.

    Our groups have the same lists, which keeps them alive, so that no other list gets the id of one.
    """
    lists = [group["params"] for group in groups]
    return [*map(id, lists), *map(len, lists), *map(id, chain.from_iterable(lists))]


def _check_listed_once(groups: Sequence[Group]) -> None:
    if has_repeats(params_of(groups)):
        raise ValueError("a parameter is listed twice in the groups of the optimizer: list it once")


def _successors(before: Sequence[Group], groups: Sequence[Group]) -> list[Group | None]:
    """The settings of each group: from the group with its list, or with one of its parameters, or at its place."""
    successors: dict[int, Group] = {}
    ways: list[Callable[[Group, int], bool]] = [
        lambda ours, g: ours["params"] is groups[g]["params"],
        lambda ours, g: not set(ours["params"]).isdisjoint(groups[g]["params"]),
        lambda ours, g: len(before) == len(groups) and ours is before[g],
    ]
    left = list(before)  # a group has the settings of one group only
    for fits in ways:
        for g in [g for g in range(len(groups)) if g not in successors]:
            place = next((k for k, ours in enumerate(left) if fits(ours, g)), None)
            if place is not None:
                successors[g] = left.pop(place)
    return [successors.get(g) for g in range(len(groups))]


def _groups_with_names(groups: Sequence[Group], module: nn.Module | None) -> list[dict[str, Any]]:
    """The parameters of groups with the names that groups or the module have for them, and the names of the groups."""
    names = None if module is None else {id(param): name for name, param in module.named_parameters()}
    return [_group_with_names(group, names) for group in groups]


def _group_with_names(group: Group, names_in_module: Mapping[int, str] | None) -> dict[str, Any]:
    params = list(group["params"])
    names = group.get("param_names")
    if names is None and names_in_module is not None:
        names = [names_in_module.get(id(param), f"parameter {i}") for i, param in enumerate(params)]
    of_group: Group = {"name": group["name"]} if "name" in group else {}
    if names is not None and not names:
        of_group["param_names"] = []  # an empty group does not show that parameters have names
    return {"params": params if names is None else list(zip(names, params, strict=True)), **of_group}


def _refuse(transform: Transform, written: Transform) -> None:
    """Raise if a transform, as it was written, changes parameters, or gives parameters settings of their own."""
    is_one = isinstance(transform, Chain) and type(transform) is not Chain  # such as AdamW
    for child in transform.transforms.values() if isinstance(transform, Composite) else ():
        _refuse(child, written if is_one else child)
    if isinstance(transform, UpdateRule | LR) or transform.target in ("params_direct", "params_difference"):
        raise TypeError(f"the optimizer takes the step: leave out {written!r}")
    if transform.overrides:
        raise ValueError(
            f"{transform!r} has set_param_groups, and before_step has one group of settings for each group of the "
            "optimizer: give these parameters a group of their own there, and set handle.param_groups[i]"
        )
