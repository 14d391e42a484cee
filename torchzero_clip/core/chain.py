"""A transform made of transforms."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.core.composite import Composite, storage_keys
from torchzero_clip.core.entering import Entering
from torchzero_clip.core.scope import Member, Scope
from torchzero_clip.core.settings import at, override_groups
from torchzero_clip.core.target import TARGETS, Action, Step, change_gradients
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.types import Setting, State, Target

Transforms: TypeAlias = "Transform | Sequence[Transforms]"
"""A transform, or lists of them nested in any way."""


class Chain(Composite):
    """Applies transforms one after the other, as one transform.

    A plain chain inside another (or inside `Modular`) is the same as its transforms written there. One with a target of
    its own stays a unit: ``Chain(ClipNorm(1), ClipValue(0.1), target="update_difference")`` passes on what both
    together removed.

    Args:
        transforms: Transforms, or lists of them.
        target: What the chain as a whole acts on.
        name: The name of a chain that stays a unit.

    Raises:
        TypeError: If something is not a transform.
        ValueError: If ``target="closure"`` is asked for inside a chain with another target.

    Examples:
        >>> from torchzero_clip import Chain, ClipNorm, ClipValue
        >>> Chain(ClipValue(0.1), [ClipNorm(1.0), Chain(ClipNorm(2.0))])
        Chain(ClipValue(0.1), ClipNorm(1.0), ClipNorm(2.0))
    """

    def __init__(self, *transforms: Transforms, target: Target = "update", name: str | None = None) -> None:
        named = named_uniquely(flatten(transforms))
        for child in named.values():
            if child.target == "closure" and target != "update":
                raise ValueError(f"{child!r}: target='closure' cannot stand inside a chain with target={target!r}")
        super().__init__({}, named, target=target, name=name)

    @override
    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Give some parameters settings of their own; each key goes to the first transform that has it.

        Args:
            param_groups: As in `Transform.set_param_groups`.
        """
        qualified = {stored: key for key, stored in storage_keys(self).items()}
        given: list[tuple[Transform, dict[str, Any]]] = []
        for params, items in override_groups(param_groups):
            for key, value in items.items():
                target = key if key in self.defaults else qualified.get(key)
                if target is None:
                    raise ValueError(
                        f"no transform has a setting {key!r}; settings of this chain: {', '.join(qualified)}"
                    )
                name, own = target.split("/", 1)
                self.transforms[name].check({own: at(value, 0)})
                given.append((self.transforms[name], {"params": params, own: value}))
        for transform, settings in given:
            transform.overrides.append(settings)
        return self

    @override
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Apply all transforms in turn."""
        step = Step(
            self.members,
            grads,
            states,
            settings,
            loss,
            self.entering,
            self.global_state,
            self.metrics,
            keep_grads=True,
            made=[*tensors],
        )
        self.run(step)
        return step.updates(writable=True)

    def run(self, step: Step, *, to_parameters: bool = False) -> None:
        """Take one step down the chain; ``to_parameters`` subtracts what comes out of it."""
        transforms = list(self.transforms.values())
        for i, (name, transform) in enumerate(self.transforms.items()):
            if self.keeps_statistics and not (transform.keeps_statistics and transform.sees_all_gradients()):
                step.entering.settle()
            if to_parameters and transform.finishes:
                step = self._finish(name, step)
            if not step.members:
                return
            if transform.changes_grads():
                step.keep_made()
            saves_a_copy = transform.scaling and not step.keep_grads and _reader_is_next(transforms[i + 1 :])
            self._act(name, TARGETS[transform.target], step, transform.pure or saves_a_copy)
            if self.keeps_statistics:
                step.entering.settle()
        if to_parameters:
            foreach.subtract_(step.params, step.updates(writable=False))

    def later(self, name: str, member: Member) -> tuple[str, ...]:
        """The transforms after one that act on a parameter."""
        return tuple(n for n in self._after(name) if self.transforms[n].scope.has(member))

    def _after(self, name: str) -> list[str]:
        names = list(self.transforms)
        return names[names.index(name) + 1 :]

    def _finish(self, name: str, step: Step) -> Step:
        """Let one transform take parameters to the end of the step, where it can; return what is left to do."""
        transform = self.transforms[name]
        after = [(n, self.transforms[n].scope) for n in self._after(name)]
        alike: dict[Any, list[int]] = {}  # those that later transforms treat alike
        for i in transform.scope.indices(step.members):
            member = step.members[i]
            later = tuple(n for n, scope in after if not scope.limited or scope.has(member))
            alike.setdefault((later, member.param.dtype), []).append(i)
        done: set[int] = set()
        for (later, _), indices in alike.items():
            part = step.part(indices) if len(indices) < len(step.members) else step
            finish = self.bind_finish(name, later, part)
            if finish is not None:
                finish()
                done.update(indices)
        return step.part([i for i in range(len(step.members)) if i not in done]) if done else step

    def run_on_closure(self, step: Step) -> None:
        """Apply the transforms with ``target="closure"`` to the gradients that the closure left."""
        for name, transform in self.transforms.items():
            if transform.target == "closure":
                if transform.keeps_statistics:
                    step.entering.flags()
                self._act(name, change_gradients, step, False)
                step.entering = Entering(step.grads)

    def _act(self, name: str, act: Action, step: Step, on_grads: bool) -> None:
        """Let one transform act on the parameters in its scope."""
        scope = self.transforms[name].scope
        if not scope.limited:
            act(step, self.bind(name, step), on_grads)
        elif indices := scope.indices(step.members):
            part = step.part(indices)
            act(part, self.bind(name, part), on_grads)
            step.take(part, indices)

    def __repr__(self) -> str:
        target = [] if self.target == "update" else [f"target={self.target!r}"]
        return f"Chain({', '.join([*map(repr, self.transforms.values()), *target])}){self.scope}"


def _reader_is_next(rest: Sequence[Transform]) -> bool:
    """Whether the next transform that does more than scale the updates only reads them."""
    following = next((t for t in rest if t.target == "update" and not t.scaling), None)
    return following is not None and following.pure


def flatten(transforms: Iterable[Transforms]) -> Iterator[Transform]:
    """The transforms of nested lists and plain chains, in order."""
    for item in transforms:
        if isinstance(item, Chain) and item.target == "update":
            yield from (_within(item.scope, transform) for transform in item.transforms.values())
        elif isinstance(item, Transform):
            yield item
        elif isinstance(item, list | tuple):
            yield from flatten(item)
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


def _within(scope: Scope, transform: Transform) -> Transform:
    """The transform, limited to the scope of the chain that it was written in."""
    if not scope.limited:
        return transform
    limited = copy.copy(transform)
    limited.scope = transform.scope.within(scope)
    return limited


def named_uniquely(transforms: Iterable[Transform]) -> dict[str, Transform]:
    """Transforms by name; the second ``clip_norm`` is ``clip_norm_2``."""
    named: dict[str, Transform] = {}
    for transform in transforms:
        name, n = transform.name, 2
        while name in named:
            name, n = f"{transform.name}_{n}", n + 1
        named[name] = transform
    return named
