"""The repr of an optimizer: the transforms as the user wrote them, with the settings of its param groups."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchzero_clip.core.chain import Chain, Composite, flatten
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import named_params
from torchzero_clip.core.transform import Transform
from torchzero_clip.types import Group, Setting


def repr_lines(written: Sequence[Transform], nodes: Nodes, groups: Sequence[Group]) -> list[str]:
    """A line about the parameters, and one for each transform or chain that was written."""
    used = _Used(nodes, groups)
    names = iter([node.path for node in nodes if not node.outer])
    shown = used.settings()
    rules = [node.transform for node in nodes if isinstance(node.transform, UpdateRule)]
    if not any(isinstance(leaf, LR) for leaf in flatten(written)) and all(rule.lr is None for rule in rules):
        shown["lr"] = next((rule.default_lr for rule in rules if rule.default_lr is not None), 1.0)
    return [_groups_line(groups, shown), *(repr(used.copy(transform, names)) for transform in written)]


class _Used:
    """Copies of transforms, with the settings that param groups use."""

    def __init__(self, nodes: Nodes, groups: Sequence[Group]) -> None:
        self._nodes, self._groups = nodes, groups

    def copy(self, transform: Transform, names: Iterator[str], prefix: str = "", *, is_unit: bool = False) -> Transform:
        """A copy of a transform that was written, with the settings that param groups use."""
        # A plain chain has no name of its own, so the names of its transforms follow in order. As the child of a
        # composite it has one
        used = copy.copy(transform)
        if isinstance(used, Chain) and not is_unit and used.target == "update":
            used.written = [self.copy(t, names, prefix) for t in used.written]
            return used
        node = self._nodes.by_path[prefix + next(names)]
        if isinstance(used, Chain):
            inside = iter(used.transforms)
            used.written = [self.copy(t, inside, f"{node.path}/") for t in used.written]
        elif isinstance(used, Composite) and isinstance(transform, Composite):
            items = used.transforms.items()
            used.transforms = {k: self.copy(t, iter([k]), f"{node.path}/", is_unit=True) for k, t in items}
            for key, child in used.transforms.items():  # an argument is stored under the name of the child
                if (argument := getattr(used, key, None)) is not None:
                    setattr(used, key, child if argument is transform.transforms[key] else _like(argument, child))
        keys = node.storage_keys.items()
        used.defaults = {key: self._value(node, stored, used.defaults[key]) for key, stored in keys}
        if isinstance(used, UpdateRule) and used.lr is not None and not callable(used.lr):
            used.lr = self._value(node, "lr", used.lr)
        return used

    def settings(self) -> dict[str, Any]:
        """The settings as `copy` shows them, by the keys of param groups."""
        places = [(node, key, stored) for node in self._nodes for key, stored in node.storage_keys.items()]
        return {stored: self._value(node, stored, node.transform.defaults[key]) for node, key, stored in places}

    def _value(self, node: Node, stored: str, value: Any) -> Any:
        """The value of the constructor if some param group uses it, else that of the first group."""
        groups = [group for group in self._groups if any(node.scope.has(named) for named in named_params(group))]
        values = [group[stored] for group in groups if stored in group]
        return value if not values or any(used is value or used == value for used in values) else values[0]


def _like(argument: object, child: Transform) -> Any:
    """The child of a composite in the form of its argument: a chain, a list or one transform."""
    if not isinstance(child, Chain):
        return argument
    return child.written if isinstance(argument, list | tuple) else child.written[0]


def _groups_line(groups: Iterable[Group], shown: Setting) -> str:
    """The number of parameters in each group, with the settings that the transforms do not show."""
    texts: list[str] = []
    for group in groups:
        params = group["params"]
        count = f"<{len(params)} tensors, {sum(p.numel() for p in params)} elements>"
        differing = {k: group[k] for k in shown if k in group and group[k] is not shown[k] and group[k] != shown[k]}
        texts.append(f"{{'params': {count}, {repr(differing)[1:]}" if differing else count)
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
