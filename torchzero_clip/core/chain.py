"""Transforms that are made of transforms."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias

from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.checks import instance
from torchzero_clip.core.kinds import FinalRule, Gate, NeverApplied
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.schedules import at
from torchzero_clip.core.transform import T, Transform, altered, override_groups
from torchzero_clip.hints import did_you_mean
from torchzero_clip.types import Group, Setting, Target

Transforms: TypeAlias = "Transform | Sequence[Transforms]"
"""A transform, or lists of them nested in any way."""


class Composite(Transform):
    """A transform that applies others, whose settings and state the optimizer stores under their names."""

    def __init__(
        self,
        defaults: Setting,
        transforms: Mapping[str, Transform],
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        instance("transforms", transforms, Mapping, "write {'clip': ClipNorm(1)}")
        for key, transform in transforms.items():
            instance(f"transforms[{key!r}]", transform, Transform)
        self.transforms = dict(transforms)
        super().__init__(defaults, target=target, name=name)

    def nodes(self) -> Nodes:
        """All transforms inside, at any depth, each composite before its children."""
        # The first transform with a setting stores it under its bare name, later ones under their path. Gates, and the
        # children of composites other than chains, always use their path.
        made: list[Node] = []
        taken: set[str] = set()  # complete when the last node is made

        def add(composite: Composite, prefix: str, outer: tuple[Transform, ...], bare: bool) -> None:
            for name, transform in composite.transforms.items():
                path = prefix + name
                may_be_bare = bare and not isinstance(transform, Gate)
                keys = {key: key if may_be_bare and key not in taken else f"{path}/{key}" for key in transform.defaults}
                taken.update(keys.values())
                inside = transform.transforms if isinstance(transform, Composite) else ()
                global_keys = tuple(transform.init_global_state())
                stored = taken if isinstance(transform, FinalRule) else None
                children = frozenset(inside)
                made.append(Node(path, transform, outer, keys, global_keys, children, transform.has_state(), stored))
                if isinstance(transform, Composite):
                    add(transform, f"{path}/", (*outer, transform), may_be_bare and isinstance(transform, Chain))

        add(self, "", (), True)
        return Nodes(made)


class Chain(NeverApplied, Composite):
    """Applies transforms one after the other, as one transform.

    A plain chain inside another (or inside `Modular`) is the same as its transforms written there. A chain with another
    target stays a unit: ``Chain(ClipNorm(1), ClipValue(0.1), target="update_difference")`` passes on what both
    transforms together removed.

    Args:
        transforms: Transforms, or lists of them.
        target: What the chain as a whole acts on.
        name: The name of a chain that stays a unit.

    Raises:
        TypeError: If an argument is not a transform.
        ValueError: If a transform has ``target="closure"`` and the chain has another target than "update".

    Examples:
        >>> from torchzero_clip import Chain, ClipNorm, ClipValue
        >>> Chain(ClipValue(0.1), [ClipNorm(1.0), Chain(ClipNorm(2.0))])
        Chain(ClipValue(0.1), ClipNorm(1.0), Chain(ClipNorm(2.0)))
    """

    each_alone = pure = True

    def __init__(self, *transforms: Transforms, target: Target = "update", name: str | None = None) -> None:
        named: dict[str, Transform] = {}  # the second ``clip_norm`` is ``clip_norm_2``
        for child in flatten(transforms):
            if child.target == "closure" and target != "update":
                raise ValueError(f"{child!r}: target='closure' cannot stand inside a chain with target={target!r}")
            unique, n = child.name, 2
            while unique in named:
                unique, n = f"{child.name}_{n}", n + 1
            named[unique] = child
        self.written = list(as_written(transforms))
        super().__init__({}, named, target=target, name=name)

    @override
    def set_param_groups(self, param_groups: Iterable[Setting]) -> Self:
        """Return a copy of this chain that gives some parameters settings of their own.

        Each key goes to the first transform that has it. A call on the copy adds to its settings. This chain and its
        transforms do not change. The groups are as in `Transform.set_param_groups`.
        """
        nodes = self.nodes()
        owners: dict[str, tuple[Node, str]] = {}
        for node in nodes:
            for key, stored in node.storage_keys.items():
                owners[f"{node.path}/{key}"] = owners[stored] = (node, key)
        added: defaultdict[str, list[Group]] = defaultdict(list)
        for params, settings in override_groups(param_groups):
            for key, value in settings.items():
                if key not in owners:
                    hint = did_you_mean(key, nodes.storage_keys.values())
                    raise ValueError(f"no transform has a setting {key!r}{hint}")
                node, setting = owners[key]
                node.transform.check({setting: at(value, 0, setting)})
                added[f"/{node.path}"].append({"params": params, setting: value})
        return rebuilt(self, lambda transform, path: {"overrides": [*transform.overrides, *added.get(path, ())]})

    @override
    def _arguments(self) -> Iterator[str]:
        yield from map(repr, self.written)
        if self.target != "update":
            yield f"target={self.target!r}"


def flatten(transforms: Iterable[Transforms]) -> Iterator[Transform]:
    """The transforms of nested lists and plain chains, in order."""
    for item in as_written(transforms):
        if not isinstance(item, Chain) or item.target != "update":
            yield item
            continue
        for transform in item.transforms.values():
            yield altered(transform, scope=transform.scope.within(item.scope)) if item.scope.limited else transform


def as_written(transforms: Iterable[Transforms]) -> Iterator[Transform]:
    """The transforms and chains as they were written, without the lists around them. Raises for anything else."""
    for item in transforms:
        if isinstance(item, Transform) and "defaults" not in vars(item):
            raise TypeError(f"{type(item).__name__} is incomplete: its __init__ has to call super().__init__(settings)")
        if isinstance(item, Transform):
            yield item
        elif isinstance(item, list | tuple):
            yield from as_written(item)
        elif isinstance(item, Optimizer) or (isinstance(item, type) and issubclass(item, Optimizer)):
            name = item.__name__ if isinstance(item, type) else type(item).__name__
            raise TypeError(
                f"a chain takes transforms, got {name} of torch: write Wrap(torch.optim.{name}, ...), or take the "
                "transform of that name from torchzero_clip"
            )
        elif isinstance(item, type):
            raise TypeError(f"a chain takes transforms, got the class {item.__name__}: write {item.__name__}(...)")
        else:
            raise TypeError(f"a chain takes transforms and lists of them, got {type(item).__name__}")


def rebuilt(transform: T, change: Callable[[Transform, str], dict[str, object]], path: str = "") -> T:
    """A copy with other attributes, for the transform and for those inside it, by their paths."""
    changed = change(transform, path)
    if isinstance(transform, Composite):
        children = transform.transforms.items()
        changed["transforms"] = {name: rebuilt(child, change, f"{path}/{name}") for name, child in children}
    return altered(transform, **changed)
