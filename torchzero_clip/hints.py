"""What users probably meant by a name or a call that does not fit, for the texts of errors."""

import difflib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import are_parameters

P = ParamSpec("P")
T = TypeVar("T")

MEANT = {
    "AGC": ("AdaptiveGradientClip",),
    "ClipByGlobalNorm": ("ClipNorm",),
    "ClipGradNorm": ("ClipNorm",),
    "ClipGradValue": ("ClipValue",),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "clip_norm": ("max_norm", "flat_value"),
    "clip_value": ("value", "max_norm"),
    "clip_val": ("value", "max_norm"),
    "epsilon": ("eps",),
    "gradient_clip_val": ("max_norm", "value"),
    "learning_rate": ("lr",),
    "max_grad_norm": ("max_norm", "flat_value"),
    "max_norm": ("flat_value",),
    "norm_type": ("ord",),
    "wd": ("weight_decay",),
}
"""Names in other libraries, and ours."""

NEEDED = {
    "defaults": "write super().__init__({})",
    "norm_clipper": "write ConstantFlatClipper(1.0) after the model",
}
"""What to write for an argument that a call lacks."""


def nearest(name: str, names: Iterable[str], likeness: float = 0.75) -> str | None:
    """The one of ``names`` that a user probably meant; None if none has at least this share in common with it."""
    by_lower = {key.lower(): key for key in names}
    meant = [key for key in MEANT.get(name, ()) if key.lower() in by_lower]
    close = meant or difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[close[0].lower()] if close else None


def did_you_mean(name: str, names: Iterable[str], *, listed: bool = True) -> str:
    """The end of a message about an unknown name: the one of ``names`` that was meant, or with ``listed`` all."""
    names = list(names)
    if close := nearest(name, names):
        return f"; did you mean {close!r}?"
    return f"; there are: {', '.join(names) or 'none'}" if listed else ""


def explained(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it explains a call that does not fit its arguments."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError:
            check_call(function, args, kwargs)
            raise

    return call


class _OfConstructor:
    """The signature of a class is that of its ``__init__``. Python before 3.11.4 takes an inherited ``__new__``."""

    def __get__(self, obj: object, kind: type) -> inspect.Signature:
        if obj is not None:
            raise AttributeError("__signature__")  # an object that can be called has the signature of its __call__
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Explained:
    """A base of classes whose constructors explain a call that does not fit their arguments."""

    __signature__ = _OfConstructor()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if args or kwargs:  # copies and pickles give none
            check_call(cls, args, kwargs)
        return super().__new__(cls)


def check_call(kind: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise a TypeError with the way out for a call that does not fit. Rare cases keep the error of Python."""
    signature = inspect.signature(kind)
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError:
        pass
    name, parameters = kind.__qualname__.rpartition("<locals>.")[2], signature.parameters
    name = kind.__name__ if inspect.isclass(kind) else name
    # optimizers have params, clippers have module, and what stands for another optimizer has optimizer
    if args and are_parameters(args[0]) and parameters.keys().isdisjoint(("params", "module")):
        raise TypeError(
            f"{name} takes no parameters. Write Modular(model.parameters(), ..., {name}(...)). A framework that needs "
            f"a class takes Modular.of(..., {name}(...))"
        )
    plain = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    missing = next((key for key in plain[len(args) :] if key in NEEDED and key not in kwargs), None)
    takes_rules = parameters.keys().isdisjoint(("optimizer", "weight_decay"))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in kwargs:
        if key not in parameters and not takes_any:
            kinds = [type(value) for value in args if isinstance(value, Explained)]
            owner = next((kind.__name__ for kind in kinds if key in inspect.signature(kind).parameters), None)
            if owner is not None or (takes_rules and key == "lr" and "transforms" in parameters):
                way_out = f"; write {owner or 'AdamW'}({key}=...){_class_for_frameworks(kind, key, args)}"
            elif takes_rules and nearest(key, {*parameters, "weight_decay"}) == "weight_decay":
                way_out = "; write WeightDecay(0.1) in the chain, or AdamW(weight_decay=...)"
            else:
                way_out = did_you_mean(key, parameters, listed=missing is None) or f"; {NEEDED[str(missing)]}"
            raise TypeError(f"{name} has no argument {key!r}{way_out}")
    if missing is not None:
        raise TypeError(f"{name} needs the argument {missing!r}: {NEEDED[missing]}")
    if len(args) > len(plain):
        named = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
        noun = "argument" if len(plain) == 1 else "arguments"
        pair = " Write both betas as one pair, as in betas=(0.9, 0.999)." if "betas" in plain else ""
        raise TypeError(
            f"{name} takes at most {len(plain)} {noun} without a name ({', '.join(plain)}), got {len(args)}.{pair} "
            f"Write the names of these arguments: {', '.join(named)}"
        )


def _class_for_frameworks(kind: Callable[..., object], key: str, args: Iterable[object]) -> str:
    """The end of a message about an argument that the caller of `Modular` may be a framework for."""
    if not hasattr(kind, "of"):  # it is no `Modular`, which this file may not import
        return ""
    chain = ", ".join(repr(value) for value in args if isinstance(value, Explained)) or "ClipNorm(1), AdamW()"
    return f". A framework that passes {key!r} takes the class Modular.of({chain})"


def check_override(kind: type, name: str) -> None:
    """Raise a TypeError if the optimizer could not call a method of a class, because it takes other arguments."""
    first = next(each for each in reversed(kind.__mro__) if name in vars(each))
    method, base = vars(kind)[name], vars(first)[name]
    if not (inspect.isfunction(method) and inspect.isfunction(base)) or _arguments_of(method) == _arguments_of(base):
        return
    signature, expected = inspect.signature(method), inspect.signature(base).parameters
    try:
        signature.bind(*expected)
        fits = list(signature.parameters) == list(expected) or signature.parameters.keys() != expected.keys()
    except TypeError:
        fits = False
    if not fits:  # the arguments are other ones, or in another order
        written = f"def {name}({', '.join(expected)})"
        raise TypeError(f"{kind.__name__}.{name} takes ({', '.join(signature.parameters)}): write {written}")


def _arguments_of(function: FunctionType) -> tuple[object, ...]:
    """The arguments of a function as its code names them: a signature takes 100 times as long, in each import."""
    code = function.__code__  # whose flags 0x0C are those of *args and **kwargs
    return code.co_argcount, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_flags & 0x0C


def explanation(error: Exception, who: str, lookups: Mapping[str, Iterable[str]]) -> str | None:
    """Explain an error that was raised in an author's method. Return None if the error is clear by itself.

    ``lookups`` are the keys that the method can look up, by what they are keys of, such as "settings".
    """
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        key, keys = error.args[0], {kind: list(names) for kind, names in lookups.items()}
        if key == "lr" and key not in keys["settings"]:
            return f"{who} looked up 'lr', by which the chain multiplies after the rule: return the step for lr = 1"
        for kind, names in keys.items():
            if key in names:
                place = {"settings": "setting", "state of the whole chain": "step.global_state"}.get(kind, "state")
                index = names.index(key) if kind == "keys of state" else repr(key)
                return f"{who} looked up {key!r} in another place than its {kind}: write {place}[{index}]"
        meant = did_you_mean(key, [name for names in keys.values() for name in names], listed=False) or "."
        listed = "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in keys.items())
        return f"{who} looked up {key!r}, which does not exist{meant} It has these {listed}"
    # by their texts, because Python has no class of its own for these errors
    if isinstance(error, TypeError) and "indices must be integers or slices, not str" in str(error):
        return (
            f"{who} looked up a key in a list. step.settings and step.states have a dict for each parameter: zip them "
            "with the updates. The state that formula and change get has a tensor for each of keys, in this order"
        )
    if not lookups.get("keys of state", True) and str(error).endswith(("list index out of range", "got 0)")):
        return f"{who} has no state, because its class has no keys: write keys = ('average',)"
    return None


def described(value: object) -> str:
    """A value for an error: the shape and dtype of a tensor, a number with its type, else the type."""
    if not isinstance(value, Tensor):
        return f"{value!r} ({type(value).__name__})" if isinstance(value, int | float) else type(value).__name__
    layout = "" if value.layout == torch.strided else f", {value.layout}"
    return f"a tensor of shape {tuple(value.shape)} of {value.dtype}{layout}"


class Named(dict[str, Tensor]):
    """Values by their names. The KeyError for an unknown name lists the names that exist."""

    def __missing__(self, key: str) -> NoReturn:
        reason = did_you_mean(key, self) if self else ", because no step was taken yet"
        raise KeyError(f"{key!r} was not measured{reason}")

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load takes with weights_only=True
