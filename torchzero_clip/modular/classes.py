"""Classes of optimizers that have their transforms already, for frameworks that construct the optimizer themselves."""

import copyreg
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from keyword import iskeyword
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from torchzero_clip.checks import HOW_TO_COMPUTE, as_builtin
from torchzero_clip.core.chain import Chain, Transforms, as_written, flatten, rebuilt
from torchzero_clip.core.group_keys import HINTS, has_effect, torchs_arguments
from torchzero_clip.core.learning_rate import rates_of, with_learning_rate
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.schedules import at
from torchzero_clip.core.transform import Transform
from torchzero_clip.hints import check_call, did_you_mean
from torchzero_clip.modular.validation import listed_transforms
from torchzero_clip.types import Setting

_CLASSES: dict[object, type] = {}  # by what `Modular.of` was called with

classes = SimpleNamespace()
"""The classes by their unique names, under which cloudpickle finds them. Else it would write their code."""


class Ready(type):
    """The type of classes that have their transforms already."""

    def __repr__(cls) -> str:
        if "_made_of" not in vars(cls):
            return super().__repr__()
        base, transforms, options = vars(cls)["_made_of"]
        arguments = [*map(repr, transforms), *(f"{key}={value!r}" for key, value in options.items())]
        return f"<class {base.__name__}.of({', '.join(arguments)})>"


class ClassMaker:
    """A base of `Modular`, whose constructor takes parameters and transforms."""

    replaced_settings: Setting = {}
    """The settings that replace those of the transforms while an object is made."""

    @classmethod
    def of(cls, *transforms: Transforms, **options: Any) -> type[Any]:
        """Return a class that has its transforms already, for frameworks that construct the optimizer themselves.

        It is a subclass of `Modular`. Its constructor is ``(params, lr=None, **settings)``. The settings are those of
        the transforms, by their keys in param groups. ``lr`` and settings replace the numbers in the transforms. A
        param group that has a setting of its own keeps it. Arguments of torch's optimizers that have no effect, such as
        ``weight_decay=0``, are ignored. Equal calls return the same class, also after a pickle.

        Args:
            *transforms: As in `Modular`.
            **options: ``nonfinite``, ``fast`` and the other arguments of `Modular`.

        Raises:
            TypeError: If an argument is not a transform, for an unknown option, or if this class has transforms
                already. The class itself raises it for an unknown setting, and for ``lr`` if several transforms name
                a learning rate.
            ValueError: As in `Modular`, if transforms do not fit together.

        Examples:
            >>> import torch
            >>> from torchzero_clip import AdamW, ClipNorm, Modular
            >>> Clipped = Modular.of(ClipNorm(0.5, dim="global"), AdamW(), nonfinite="skip")
            >>> Clipped
            <class Modular.of(ClipNorm(0.5, dim='global'), AdamW(), nonfinite='skip')>
            >>> Clipped(torch.nn.Linear(2, 1).parameters(), lr=1e-4, max_norm=2.0)
            Modular(
                {'params': <2 tensors, 3 elements>, 'lr': 0.0001},
                ClipNorm(2.0, dim='global'),
                AdamW(),
                nonfinite='skip',
            )
        """
        if isinstance(cls, Ready):
            raise TypeError(f"{cls!r} has its transforms already: call of() of the class that it was made from")
        listed_transforms(None, transforms)  # raises if one is none
        check_call(cls, (None, *transforms), options)
        return _class_of(cls, tuple(as_written(transforms)), options)


def _class_of(base: type, transforms: tuple[Transform, ...], options: Mapping[str, object]) -> type:
    """The class for these arguments. It is made at the first call."""
    key = base, _key(transforms), _key(options)
    if key not in _CLASSES:
        name = f"{base.__name__}_{uuid4().hex}"
        attributes = {
            "_made_of": (base, transforms, options),
            "__module__": __name__,
            "__qualname__": f"classes.{name}",
        }
        made = Ready(base.__name__, (base,), attributes | {"__init__": _constructor(base, transforms, options)})
        _CLASSES[key] = made
        vars(classes)[name] = made
    return _CLASSES[key]


def _unpickled(name: str, base: type, transforms: tuple[Transform, ...], options: Mapping[str, object]) -> type:
    """The class of a pickle, by its unique name: transforms may hold functions, whose copies do not equal them."""
    made = vars(classes).get(name) or _class_of(base, transforms, options)
    vars(classes)[name] = made
    return made


def _reduced(cls: Ready) -> Any:
    if "_made_of" not in vars(cls):
        return cls.__qualname__  # a subclass, which has a place in a module
    return _unpickled, (cls.__qualname__.partition(".")[2], *vars(cls)["_made_of"])


copyreg.pickle(Ready, _reduced)  # pickle does not ask a class itself how it is stored


def _constructor(base: Any, transforms: tuple[Transform, ...], options: Mapping[str, object]) -> Callable[..., None]:
    """The method ``__init__`` of a class. Its signature has the settings, because some frameworks read it."""
    nodes = Chain(*with_learning_rate(list(flatten(transforms)))).nodes()
    stored = set(nodes.storage_keys.values())
    accepted = stored.union(*(inspect.signature(type(transform)).parameters for transform in transforms))

    def __init__(self: Any, params: Any, lr: Any = None, **settings: Any) -> None:  # noqa: N807
        # frameworks may pass arguments that change no result
        others = torchs_arguments(settings) - accepted
        ignored = {key for key in others if key in HOW_TO_COMPUTE or not has_effect(settings[key])}
        settings = {key: value for key, value in settings.items() if key not in ignored}
        if unknown := [key for key in settings if key not in stored]:
            raise TypeError(f"no transform has a setting {unknown[0]!r}{_way_out(unknown[0], base, transforms, nodes)}")
        self.replaced_settings = settings if lr is None else {"lr": lr, **settings}
        base.__init__(self, params, *transforms, **options)

    values = {**nodes.defaults(), **nodes.schedules()}
    names = [key for key in values if key.isidentifier() and not iskeyword(key) and key not in ("self", "lr")]
    first = list(inspect.signature(__init__).parameters.values())
    keywords = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=values[key]) for key in names]
    __init__.__signature__ = inspect.Signature([*first[:-1], *keywords, first[-1]])  # pyright: ignore
    return __init__


def _way_out(name: str, base: type, transforms: Sequence[Transform], nodes: Nodes) -> str:
    """The end of an error: where an argument belongs that is not a setting."""
    kinds = [type(transform) for transform in transforms if name in inspect.signature(type(transform)).parameters]
    if kinds:
        return f": write {kinds[0].__name__}({name}=...) in {base.__name__}.of(...)"
    if name in inspect.signature(base).parameters:
        return f": write {base.__name__}.of(..., {name}=...)"
    return f"{did_you_mean(name, nodes.storage_keys.values())}{HINTS.get(name, '')}"


def configured(chain: Chain, settings: Setting) -> Chain:
    """The chain with other settings."""
    if not settings:
        return chain
    nodes = chain.nodes()
    places = {stored: (node.path, key) for node in nodes for key, stored in node.storage_keys.items()}
    changed: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in settings.items():
        path, key = places[name]
        changed[f"/{path}"][key] = value
    if "lr" in settings and (rates := rates_of(nodes)):
        raise TypeError(
            f"lr would be one learning rate for {', '.join(repr(node.transform) for node, _ in rates)}, which have "
            "their own: leave lr out, write it into the param groups, or name one rate at most among the transforms"
        )

    def change(transform: Transform, path: str) -> dict[str, object]:
        replaced = changed.get(path, {})
        schedules = {key: value for key, value in (transform.schedules | replaced).items() if callable(value)}
        first = {key: as_builtin(at(value, 0, key)) for key, value in replaced.items()}
        return {"schedules": schedules, "defaults": transform.defaults | first}

    return rebuilt(chain, change)


def _key(value: object) -> Hashable:
    """A key that only equal values of the same type share: True and 1 have different keys."""
    if isinstance(value, Transform):
        return type(value), _key(value.__getstate__())
    if isinstance(value, Mapping):
        return type(value), frozenset((key, _key(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_key, value))
    return type(value), value if isinstance(value, Hashable) else id(value)  # the class keeps the object
