"""A chain that changes the gradients of another optimizer, whose param groups it follows."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from torchzero_clip.compat import any_distributed
from torchzero_clip.core.chain import Chain, Composite, Transforms, as_written
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.transform import Transform
from torchzero_clip.core.undo import Spares, Undo
from torchzero_clip.engine.end import Deliver
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.walk import Walk
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.validation import check_added, check_places
from torchzero_clip.types import Group, Setting

OF_OPTIMIZER = ("params", "param_names", "name")
"""Keys of a param group that describe the optimizer, and are no settings of transforms."""


class Front(Modular):
    """Transforms whose updates are written into the gradients. Its param groups have the settings of the transforms."""

    ended: Walk | None = None
    """The last step, if the listener has not been told yet that it has ended."""

    def __init__(
        self, groups: Sequence[Group], transforms: Sequence[Transforms], *, module: nn.Module | None, **options: Any
    ) -> None:
        for transform in as_written(transforms):
            _refuse(transform, transform)
        self.delivery = self._delivery = Deliver()
        self._spares = Spares()
        self._names_in = module  # the module that has the names of the parameters
        self._followed = groups  # those of the other optimizer
        super().__init__(_named(groups, module), *transforms, **options)
        # an author's transform may read the gradients after they were changed
        self.delivery.over_grads = all(node.is_ours and node.transform.target == "update" for node in self.nodes)
        for own, group in zip(self.param_groups, groups, strict=True):
            own["params"] = group["params"]
        self._ids = _checked_ids(groups)

    @override
    def _tell(self, listener: Listener, walk: Walk) -> None:
        self.ended = walk

    @torch.no_grad()  # as in a step, outside of which this is called
    def tell(self) -> None:
        """Tell the listener that the step has ended, also if it was refused."""
        ended, self.ended = self.ended, None
        if ended is not None and self.listener is not None:
            self.listener.end(ended)

    @property
    def may_refuse(self) -> bool:
        """True if a gate or ``nonfinite="skip"`` may refuse a step."""
        return self._policy.may_skip

    def leave_out(self, refused_by: tuple[str, ...] = ()) -> None:
        """Note a step without transforms: clear the metrics and, if it is refused, the reported loss."""
        self.skipped_by = refused_by
        self._metrics, self._unread = {}, None
        if refused_by:
            self._reported.clear()

    def note_zeros(self) -> None:
        """Count a step with gradients of 0 that may only create state, into which a checkpoint is loaded."""
        self._policy.idle.zeros(self.steps_taken, is_taken=False)

    def change_gradients(self, groups: Sequence[Group], result: Any) -> None:
        """Apply the transforms to the gradients of param groups. ``result`` is what a closure has returned.

        If the step is refused, ``skipped_by`` names who did it, and the gradients are as before.
        """
        if not self._has_lists_of(groups):
            self.follow(groups)
        self._followed = groups
        self._undo = self._noted()
        try:
            self._step(None if result is None else lambda: result)
        except BaseException:
            self.end_step(is_taken=False)
            raise

    def end_step(self, *, is_taken: bool) -> None:
        """End the step of the optimizer. If it has raised, restore the state from before the transforms."""
        undo, self._undo = self._undo, None
        if undo is not None and not is_taken and not self.skipped_by:  # a refused step keeps its counts
            undo.restore()
            self._metrics, self._unread = {}, None
            if self.ended is not None:
                self.ended.refused_by.append("error")

    def _noted(self) -> Undo:
        """Note what a step may change, except for the state of parameters, which is noted before it changes."""
        undo = Undo(self._spares)
        undo.values(self._chain_state.values)
        for values in (self.state, *self.param_groups):
            undo.members(values)
        undo.then(partial(setattr, self, "steps_taken", self.steps_taken))
        return undo

    _step = Modular.step  # without hooks, which Optimizer adds when the first optimizer is made

    @override
    def begin(self) -> dict[str, list[Setting]]:
        self.sync(self._followed)
        return super().begin()

    def _has_lists_of(self, groups: Sequence[Group]) -> bool:
        own = self.param_groups
        if len(own) != len(groups):
            return False
        return all(mine["params"] is theirs["params"] for mine, theirs in zip(own, groups, strict=True))

    def sync(self, groups: Sequence[Group]) -> None:
        """Follow the other optimizer if its parameters have changed."""
        if not self._has_lists_of(groups) or _ids(groups) != self._ids:
            self.follow(groups)

    def settings_to_save(self) -> list[dict[str, Any]]:
        """The settings of each group and the state of the whole chain, for a checkpoint."""
        self._chain_state.take_counters(self.param_groups)
        self._chain_state.show(self.param_groups)
        return [{key: value for key, value in group.items() if key not in OF_OPTIMIZER} for group in self.param_groups]

    def follow(self, groups: Sequence[Group]) -> None:
        """Take over which parameters the other optimizer has. Raise, without any change, if they do not fit."""
        own = [dict(group) for group in self.param_groups]
        try:
            self._follow(groups)
            params = self._named_params()
            check_added(self.nodes, params, self.process_group)
            check_places(self.chain, self.nodes, params)
            ids = _checked_ids(groups)
        except Exception:
            self.param_groups[:] = own
            raise
        self._ids, self._has_meshes = ids, any_distributed([named.param for named in params])
        held = {param for group in groups for param in group["params"]}
        for param in self.state.keys() - held:
            del self.state[param]

    def _follow(self, groups: Sequence[Group]) -> None:
        known, given = list(self.param_groups), _named(groups, self._names_in)
        found = _successors(known, groups)
        for own, group, new in zip(found, groups, given, strict=True):
            if own is not None:
                own["params"] = group["params"]
                if "param_names" in own:
                    own["param_names"] = [name for name, _ in new["params"]]
        self.param_groups[:] = [own for own in found if own is not None]  # those that a new group is compared with
        for g, (group, new) in enumerate(zip(groups, given, strict=True)):
            if found[g] is None:
                self.add_param_group(new)
                found[g] = self.param_groups[-1]
                self.param_groups[-1]["params"] = group["params"]
        self.param_groups[:] = [own for own in found if own is not None]


def _ids(groups: Sequence[Group]) -> list[int]:
    return [id(param) for group in groups for param in group["params"]]


def _checked_ids(groups: Sequence[Group]) -> list[int]:
    ids = _ids(groups)
    if len(set(ids)) < len(ids):
        raise ValueError("a parameter is listed twice in the groups of the optimizer: list it once")
    return ids


def _successors(known: Sequence[Group], groups: Sequence[Group]) -> list[Group | None]:
    """The settings of each group: from the group with its list, or with one of its parameters, or at its place."""
    found: dict[int, Group] = {}
    ways: list[Callable[[Group, int], bool]] = [
        lambda own, g: own["params"] is groups[g]["params"],
        lambda own, g: not set(own["params"]).isdisjoint(groups[g]["params"]),
        lambda own, g: len(known) == len(groups) and own is known[g],
    ]
    left = list(known)  # a group has the settings of one group only
    for fits in ways:
        for g in [g for g in range(len(groups)) if g not in found]:
            place = next((k for k, own in enumerate(left) if fits(own, g)), None)
            if place is not None:
                found[g] = left.pop(place)
    return [found.get(g) for g in range(len(groups))]


def _named(groups: Sequence[Group], module: nn.Module | None) -> list[Group]:
    """The parameters of groups with the names that groups or the module have for them, and the names of the groups."""
    known = None if module is None else {id(param): name for name, param in module.named_parameters()}
    return [_with_names(group, known) for group in groups]


def _with_names(group: Group, known: Mapping[int, str] | None) -> Group:
    params = list(group["params"])
    names = group.get("param_names")
    if names is None and known is not None:
        names = [known.get(id(param), f"parameter {i}") for i, param in enumerate(params)]
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
