"""Transforms that are made of transforms."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.namespace import Namespace
from torchzero_clip.core.scope import Member
from torchzero_clip.core.target import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.types import Setting, Target

T = TypeVar("T")


class Composite(Transform):
    """A transform that applies others, whose settings and state it keeps under their names.

    Args:
        defaults: Its own settings.
        transforms: The others, by name.
        target: As in `Transform`.
        name: As in `Transform`.
    """

    makes_own_state = True  # its transforms see to theirs, each by itself

    def __init__(
        self,
        defaults: Setting,
        transforms: Mapping[str, Transform],
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        self.transforms = dict(transforms)
        qualified = {f"{n}/{key}": value for n, t in self.transforms.items() for key, value in t.defaults.items()}
        super().__init__({**defaults, **qualified}, target=target, name=name)
        for own_name, transform in self.transforms.items():
            self.schedules.update({f"{own_name}/{key}": own for key, own in transform.schedules.items()})
        self.keeps_statistics = self.keeps_statistics or any(t.keeps_statistics for t in self.transforms.values())

    @override
    def check(self, settings: Setting) -> None:
        """Raise if a setting, of its own or of one of the transforms, is out of range."""
        super().check(settings)
        for name, transform in self.transforms.items():
            transform.check(Namespace(settings, name))

    @override
    def check_groups(self, groups: Sequence[Setting]) -> None:
        """Raise if a setting is out of range in some group, or groups differ where they must not."""
        super().check_groups(groups)
        for name, transform in self.transforms.items():
            transform.check_groups([Namespace(settings, name) for settings in groups])

    def hidden_settings(self) -> list[str]:
        """Prefixes of settings that have only their qualified names; gates leave the bare ones to those that work."""
        gates = [f"{name}/" for name, transform in self.transforms.items() if transform.gate]
        composites = [(name, t) for name, t in self.transforms.items() if isinstance(t, Composite)]
        return [*gates, *(f"{name}/{prefix}" for name, t in composites for prefix in t.hidden_settings())]

    @override
    def optional_state(self) -> list[str]:
        return [f"{name}/{prefix}" for name, t in self.transforms.items() for prefix in t.optional_state()]

    @override
    def walk(self) -> Iterator[Transform]:
        yield self
        for transform in self.transforms.values():
            yield from transform.walk()

    @override
    def out_of_scope(self, member: Member) -> list[str]:
        out: list[str] = []
        for name, transform in self.transforms.items():
            inner = transform.out_of_scope(member) if transform.scope.has(member) else [""]
            out += [f"{name}/{prefix}" for prefix in inner]
        return out

    @override
    def all_overrides(self) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
        yield from super().all_overrides()
        for name, transform in self.transforms.items():
            for params, settings in transform.all_overrides():
                yield params, {f"{name}/{key}": value for key, value in settings.items()}

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """Return the states of all transforms, under their names."""
        return _qualified({n: t.init_state(param, Namespace(setting, n)) for n, t in self.transforms.items()})

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        return _qualified({n: t.possible_state(param, Namespace(setting, n)) for n, t in self.transforms.items()})

    def state_in_scope(self, member: Member, setting: Setting, *, possible: bool = False) -> dict[str, Any]:
        """The state of one parameter (or all that it may be), of the transforms that act on it."""
        inside = [(name, t) for name, t in self.transforms.items() if t.scope.has(member)]
        views = [(name, t.possible_state if possible else t.init_state) for name, t in inside]
        state = _qualified({name: made(member.param, Namespace(setting, name)) for name, made in views})
        out = tuple(self.out_of_scope(member))
        return {key: value for key, value in state.items() if not key.startswith(out)}

    @override
    def init_global_state(self) -> dict[str, Any]:
        """Return the global states of all transforms, under their names."""
        return {f"{n}/{key}": v for n, t in self.transforms.items() for key, v in t.init_global_state().items()}

    def bind(self, name: str, step: Step) -> partial[list[Tensor]]:
        """One of the transforms as a function of the tensors alone."""
        states = [Namespace(state, name) for state in step.states]
        return partial(
            _apply,
            self.transforms[name],
            step,
            states,
            _one_for_each(step.settings, lambda setting: Namespace(setting, name)),
            Namespace(step.global_state, name),
            Namespace(step.metrics, name),
        )

    def bind_finish(self, name: str, later: Sequence[str], step: Step) -> Callable[[], None] | None:
        """`Transform.finish` of one of the transforms, bound; None if it cannot do the work of the later ones."""
        transform = self.transforms[name]
        tensors = step.updates(writable=False)
        states = [Namespace(state, name) for state in step.states]
        if not transform.can_finish(tensors, step.params, states, [self.transforms[n] for n in later]):
            return None
        settings = _one_for_each(step.settings, lambda s: ChainMap(*(Namespace(s, n) for n in (name, *later))))

        def finish() -> None:
            _init_states(transform, step, states, settings)
            transform.finish(tensors, step.params, states, settings)

        return finish


def _qualified(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}


def storage_keys(chain: Composite) -> dict[str, str]:
    """Where a group stores each setting: the first transform with a key stores it bare, later ones qualified."""
    stored: dict[str, str] = {}
    taken: set[str] = set()
    hidden = tuple(chain.hidden_settings())
    for key in chain.defaults:
        bare = key.rsplit("/", 1)[-1]
        stored[key] = key if bare in taken or key.startswith(hidden) else bare
        if not key.startswith(hidden):
            taken.add(bare)
    return stored


def _apply(
    transform: Transform,
    step: Step,
    states: list[Namespace],
    settings: list[Namespace],
    global_state: Namespace,
    metrics: Namespace,
    tensors: list[Tensor],
) -> list[Tensor]:
    _init_states(transform, step, states, settings)
    transform.global_state, transform.metrics = global_state, metrics
    transform.members, transform.entering = step.members, step.entering
    try:
        result = list(transform.apply_tensors(tensors, step.params, step.grads, step.loss, states, settings))
    finally:
        del transform.global_state, transform.metrics, transform.members, transform.entering
    _check_result(transform, result, tensors, states)
    return result


def _init_states(transform: Transform, step: Step, states: list[Namespace], settings: Sequence[Setting]) -> None:
    if not transform.makes_own_state and type(transform).init_state is not Transform.init_state:
        for param, state, setting in zip(step.params, states, settings, strict=True):
            if not state:
                state.update(transform.init_state(param, setting))


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


def _one_for_each(settings: Sequence[Setting], view: Callable[[Setting], T]) -> list[T]:
    """One view per settings object, so that parameters of one group go on sharing one."""
    views: dict[int, T] = {}
    for setting in settings:
        if id(setting) not in views:
            views[id(setting)] = view(setting)
    return [views[id(setting)] for setting in settings]
