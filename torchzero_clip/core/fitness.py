"""Whether a chain and its parameters go together: what is refused when they meet, and what is warned of."""

import warnings
from collections.abc import Iterator, Sequence

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.composite import Composite
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.scope import Member, Scope
from torchzero_clip.core.transform import Transform


def check_members(chain: Chain, members: Sequence[Member]) -> None:
    """Raise if a transform chooses by names that parameters do not have, or cannot act on one in its scope."""
    for transform, scope in _scoped(chain, chain.scope):
        scope.check_names(transform, members)
        for i in scope.indices(members):
            name = members[i].name or f"parameter {i} of its group"
            transform.check_parameter(name, members[i].param)
    for transform in chain.walk():
        if transform.must_finish:
            _check_last(transform, chain, members)


def warn_of_slips(chain: Chain, members: Sequence[Member]) -> None:
    """Warn of scopes that are empty by mistake, of parameters without an optimizer, and of limits that say nothing."""
    for transform in chain.walk():
        transform.scope.warn_of_idle_names(transform, members)
    _warn_of_optimizers(chain, members)
    for i, first in enumerate(transforms := list(chain.transforms.values())):
        own = set(first.scope.indices(members)) if first.orthogonalizes else set[int]()
        for later in transforms[i + 1 :]:
            if later.scaling and own.intersection(later.scope.indices(members)):
                warnings.warn(
                    f"{later!r} comes after {first!r}, which makes updates whose norm goes by their shape alone: it "
                    "does not limit steps with large gradients, but those of large matrices. Put it before",
                    stacklevel=4,
                )
                return


def _warn_of_optimizers(chain: Chain, members: Sequence[Member]) -> None:
    """Warn of parameters that scopes leave to no optimizer, or to two."""
    optimizers = [transform for transform in chain.transforms.values() if transform.default_lr is not None]
    if not any(transform.scope.limited for transform in optimizers):
        return
    counts = [sum(transform.scope.has(member) for transform in optimizers) for member in members]
    for number, slip in ((0, "no optimizer acts on"), (2, "two optimizers act on")):
        found = [i for i, count in enumerate(counts) if min(count, 2) == number]
        if found:
            named = members[found[0]].name or f"parameter {found[0]}, of shape {tuple(members[found[0]].param.shape)}"
            others = f" and {len(found) - 1} more" if len(found) > 1 else ""
            consequence = (
                "its update is the gradient times the learning rate, as with SGD()"
                if number == 0
                else "one after the other"
            )
            warnings.warn(f"{slip} {named}{others}: {consequence}. See only and without", stacklevel=5)


def _check_last(transform: Transform, chain: Chain, members: Sequence[Member]) -> None:
    """Raise if others act on the parameters of a transform that has to be the last, or scale what it gets by the lr."""
    names = [name for name, other in chain.transforms.items() if other is transform]
    if not names:
        raise ValueError(f"{transform!r} takes the step by itself: it cannot stand inside another transform")
    before = list(chain.transforms.values())[: list(chain.transforms).index(names[0])]
    early = [other for other in before if isinstance(other, LR)]
    for i in transform.scope.indices(members):
        late = [chain.transforms[name] for name in chain.later(names[0], members[i])]
        late = [other for other in late if not isinstance(other, LR)]
        if late or early:
            advice = (
                "leave it out, and name the lr in the optimizer" if early else "put it before, or give the optimizer"
            )
            advice += "" if early else " an argument for it"
            raise ValueError(
                f"{transform!r} takes the step by itself, so {[*late, *early][0]!r} would have no meaning: {advice}"
            )


def _scoped(transform: Transform, scope: Scope) -> Iterator[tuple[Transform, Scope]]:
    """A transform and all that it is made of, each with the parameters that it really acts on."""
    yield transform, scope
    if isinstance(transform, Composite):
        for inner in transform.transforms.values():
            yield from _scoped(inner, inner.scope.within(scope))
