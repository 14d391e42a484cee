"""A transform made of transforms."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.namespace import Namespace
from torchzero_clip.core.target import TARGETS, Step
from torchzero_clip.core.transform import Transform, override_groups
from torchzero_clip.types import Setting, State, Target

Transforms: TypeAlias = "Transform | Iterable[Transforms]"
"""A transform, or lists of them nested in any way."""


class Chain(Transform):
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

    makes_own_state = True  # each of its transforms does

    def __init__(self, *transforms: Transforms, target: Target = "update", name: str | None = None) -> None:
        self.transforms = named_uniquely(flatten(transforms))
        for child in self.transforms.values():
            if child.target == "closure" and target != "update":
                raise ValueError(f"{child!r}: target='closure' cannot stand inside a chain with target={target!r}")
        qualified = {f"{n}/{key}": value for n, t in self.transforms.items() for key, value in t.defaults.items()}
        super().__init__(qualified, target=target, name=name)

    @override
    def check(self, settings: Setting) -> None:
        """Raise if a setting of any of the transforms is out of range."""
        for name, transform in self.transforms.items():
            transform.check(Namespace(settings, name))

    @override
    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Give some parameters settings of their own; each key goes to the first transform that has it.

        Args:
            param_groups: As in `Transform.set_param_groups`.
        """
        owners = {key: t for t in reversed(self.transforms.values()) for key in t.defaults}
        given: list[tuple[Transform, dict[str, Any]]] = []
        for params, settings in override_groups(param_groups):
            for key, value in settings.items():
                if key not in owners:
                    raise ValueError(f"no transform has a setting {key!r}; settings of this chain: {', '.join(owners)}")
                owners[key].check({key: value})
                given.append((owners[key], {"params": params, key: value}))
        for transform, own in given:
            transform.overrides.append(own)
        return self

    @override
    def changes_grads(self) -> bool:
        return self.target == "grad" or any(transform.changes_grads() for transform in self.transforms.values())

    @override
    def optional_state(self) -> list[str]:
        return [f"{name}/{prefix}" for name, t in self.transforms.items() for prefix in t.optional_state()]

    @override
    def all_overrides(self) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
        for name, transform in self.transforms.items():
            for params, settings in transform.all_overrides():
                yield params, {f"{name}/{key}": value for key, value in settings.items()}

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """Return the states of all transforms, under their names."""
        state: dict[str, Any] = {}
        for name, transform in self.transforms.items():
            own = transform.init_state(param, Namespace(setting, name))
            state |= {f"{name}/{key}": value for key, value in own.items()}
        return state

    @override
    def init_global_state(self) -> dict[str, Any]:
        """Return the global states of all transforms, under their names."""
        return {f"{n}/{key}": v for n, t in self.transforms.items() for key, v in t.init_global_state().items()}

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
        step = Step(params, grads, loss, keep_grads=True, made=tensors)
        self.run(step, states, settings, self.global_state, self.metrics)
        return step.updates(writable=True)

    def run(
        self,
        step: Step,
        states: Sequence[State],
        settings: Sequence[Setting],
        global_state: State,
        metrics: MutableMapping[str, Tensor],
    ) -> None:
        """Take one step down the chain."""
        transforms = list(self.transforms.values())
        for i, (name, transform) in enumerate(self.transforms.items()):
            apply = self.bind(name, step, states, settings, global_state, metrics)
            if transform.changes_grads() and step.made is not None:
                step.updates(writable=True)  # what an earlier transform made stays as it is
            saves_a_copy = transform.scaling and not step.keep_grads and _reader_is_next(transforms[i + 1 :])
            on_grads = transform.pure or saves_a_copy
            TARGETS[transform.target](step, apply, on_grads)

    def bind(
        self,
        name: str,
        step: Step,
        states: Sequence[State],
        settings: Sequence[Setting],
        global_state: State,
        metrics: MutableMapping[str, Tensor],
    ) -> partial[list[Tensor]]:
        """One transform of the chain as a function of the tensors alone."""
        transform = self.transforms[name]
        own_settings = _views(settings, name)
        own_states = [Namespace(state, name) for state in states]
        return partial(
            _apply, transform, step, own_states, own_settings, Namespace(global_state, name), Namespace(metrics, name)
        )

    def __repr__(self) -> str:
        target = [] if self.target == "update" else [f"target={self.target!r}"]
        return f"Chain({', '.join([*map(repr, self.transforms.values()), *target])})"


def _reader_is_next(rest: Sequence[Transform]) -> bool:
    """Whether the next transform that does more than scale the updates only reads them."""
    following = next((t for t in rest if t.target == "update" and not t.scaling), None)
    return following is not None and following.pure


def _apply(
    transform: Transform,
    step: Step,
    states: list[Namespace],
    settings: list[Namespace],
    global_state: Namespace,
    metrics: Namespace,
    tensors: list[Tensor],
) -> list[Tensor]:
    if not transform.makes_own_state and type(transform).init_state is not Transform.init_state:
        for param, state, setting in zip(step.params, states, settings, strict=True):
            if not state:
                state.update(transform.init_state(param, setting))
    transform.global_state, transform.metrics = global_state, metrics
    try:
        result = list(transform.apply_tensors(tensors, step.params, step.grads, step.loss, states, settings))
    finally:
        del transform.global_state, transform.metrics
    _check_result(transform, result, tensors, states)
    return result


def _check_result(transform: Transform, result: list[Tensor], given: list[Tensor], states: list[Namespace]) -> None:
    """Catch an author's slips where their transform is still known."""
    if len(result) != len(given):
        raise RuntimeError(f"{transform!r} returned {len(result)} tensors for {len(given)}")
    for new, old in zip(result, given, strict=True):
        if not isinstance(new, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuntimeError(f"{transform!r} returned {type(new).__name__} instead of a tensor")
        if new.shape != old.shape or new.dtype != old.dtype:
            got, expected = (f"{tuple(t.shape)} of {t.dtype}" for t in (new, old))
            raise RuntimeError(f"{transform!r} returned a tensor of shape {got} for one of shape {expected}")
    if states and states[0] and type(transform).init_state is Transform.init_state:
        raise RuntimeError(f"{transform!r} keeps state {list(states[0])} that its init_state does not return")


def _views(settings: Sequence[Setting], name: str) -> list[Namespace]:
    """One view per settings object, so that parameters of one group go on sharing one."""
    views = {id(setting): Namespace(setting, name) for setting in settings}
    return [views[id(setting)] for setting in settings]


def flatten(transforms: Iterable[Transforms]) -> Iterator[Transform]:
    """The transforms of nested lists and plain chains, in order."""
    for item in transforms:
        if isinstance(item, Chain) and item.target == "update":
            yield from item.transforms.values()
        elif isinstance(item, Transform):
            yield item
        elif isinstance(item, list | tuple):
            yield from flatten(item)
        elif isinstance(item, type):
            raise TypeError(f"a chain takes transforms, got the class {item.__name__}: write {item.__name__}(...)")
        else:
            raise TypeError(f"a chain takes transforms and lists of them, got {type(item).__name__}")


def named_uniquely(transforms: Iterable[Transform]) -> dict[str, Transform]:
    """Transforms by name; the second ``clip_norm`` is ``clip_norm_2``."""
    named: dict[str, Transform] = {}
    for transform in transforms:
        name, n = transform.name, 2
        while name in named:
            name, n = f"{transform.name}_{n}", n + 1
        named[name] = transform
    return named
