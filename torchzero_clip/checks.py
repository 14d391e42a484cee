"""Checks of arguments and settings; each raises an error that names the argument.

Comparisons are written so that NaN fails them. The checks in `Transform.checks` take the name and the value.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Check: TypeAlias = Callable[[str, Any], object]

NO_SETTINGS = frozenset({"params", "param_names", "chain", "skipped_steps", "consecutive_skips", "schedule_step"})
"""Keys of param groups that are not settings."""

HOW_TO_COMPUTE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Arguments of torch's optimizers that do not change the result of a step. The compiler adds one to param groups."""


def as_number(value: object) -> Any:
    """The value. A number of NumPy becomes an int or a float, which ``weights_only`` loading needs."""
    kind: type = type(value)
    if isinstance(value, Real) and kind not in (bool, int, float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def as_builtin(value: object) -> Any:
    """As `as_number`, also in lists, which become tuples."""
    return tuple(map(as_builtin, value)) if isinstance(value, tuple | list) else as_number(value)  # pyright: ignore[reportUnknownVariableType]


def is_numeric(value: object) -> bool:
    """True for a number, and for a tuple or list of numbers and Nones with at least one number."""
    items = value if isinstance(value, tuple | list) else (value,)
    numbers = [isinstance(item, int | float) and not isinstance(item, bool) for item in items if item is not None]
    return any(numbers) and all(numbers)


def are_parameters(value: object) -> bool:
    """True for a module, and for what may hold or yield its parameters."""
    if isinstance(value, nn.Module) or inspect.isgenerator(value):
        return True
    items: list[object] = list(value) if isinstance(value, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType]
    return bool(items) and all(isinstance(i, Tensor) or (isinstance(i, dict) and "params" in i) for i in items)


def needs_closure(optimizer_class: type[Optimizer]) -> bool:
    """True if each step of an optimizer needs a closure, as that of L-BFGS does."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_one(function: Callable[..., object]) -> bool:
    """False if a function cannot be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # functions in C may have no signature
        pass
    return True


def setting_name(key: str) -> None:
    """Raise if param groups use the name for something else, or if it would break qualified keys."""
    if key in NO_SETTINGS or "." in key or ":" in key or key.startswith("/"):
        raise ValueError(f"{key!r} cannot be the name of a setting")


def transform_name(name: str, value: object) -> None:
    """A name that can be part of keys."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value or any(sign in value for sign in "/.:"):
        raise ValueError(f"{name} must have letters, and neither of '/', '.' and ':', got {value!r}")


def number(name: str, value: object) -> float:
    """An int or a float. It returns the value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        if are_parameters(value):
            raise TypeError(
                f"{name} must be a number, got parameters ({type(value).__name__}). They are the first argument of "
                "Modular and of functions, and transforms take none"
            )
        hint = "; functions of the step go into the constructor, or into a new param group" if callable(value) else ""
        is_one = isinstance(value, Tensor) and value.numel() == 1
        hint = ": write float(...)" if is_one or (isinstance(value, Real) and hasattr(value, "item")) else hint
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}){hint}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} must be less than 2**63 if it is an int, got a larger int")
    return value


def positive(name: str, value: object) -> None:
    """A number > 0."""
    if not number(name, value) > 0:
        raise ValueError(f"{name} must be > 0, got {value}")


def at_least_one(name: str, value: object) -> None:
    """A number >= 1."""
    if not number(name, value) >= 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def non_negative(name: str, value: object) -> None:
    """A number >= 0."""
    if not number(name, value) >= 0:
        raise ValueError(f"{name} must be >= 0, got {value}")


def finite(name: str, value: object) -> None:
    """A number >= 0 that is not infinite."""
    non_negative(name, value)
    if value == math.inf:
        raise ValueError(f"{name} must be finite, got {value}")


def unit_interval(name: str, value: object) -> None:
    """A number in [0, 1]."""
    if not 0 <= number(name, value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def decay_rate(name: str, value: object) -> None:
    """A number in [0, 1)."""
    unit_interval(name, value)
    if value == 1:
        raise ValueError(f"{name} must be below 1, got {value}")


def percent(name: str, value: object) -> None:
    """A number in [0, 100]."""
    if not 0 <= number(name, value) <= 100:
        raise ValueError(f"{name} must be in [0, 100], got {value}")


def steps(name: str, value: object, least: int = 1) -> None:
    """An int that counts steps, at least ``least``."""
    if count(name, value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def betas(name: str, value: object) -> None:
    """Two decay rates in [0, 1)."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}")
    for i, beta in enumerate(value):
        if not 0 <= number(f"{name}[{i}]", beta) < 1:
            raise ValueError(f"{name}[{i}] must be in [0, 1), got {beta}")


def scalar(name: str, value: object) -> None:
    """A number >= 0, or a tensor of one element. It is not read, because this would synchronize with the GPU."""
    if not isinstance(value, Tensor):
        non_negative(name, value)
    elif value.numel() != 1 or value.layout != torch.strided or not value.is_floating_point() or value.is_meta:
        got = f"shape {tuple(value.shape)}, {value.dtype}, {value.layout}, on {value.device}"
        raise ValueError(
            f"{name} must have one element if it is a tensor, dense and of a floating point dtype, "
            f"not on the meta device; got {got}"
        )


def boolean(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """One of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def instance(name: str, value: object, kind: type, way_out: str = "") -> None:
    """An object of one class. The error ends with the way out, if there is one."""
    if not isinstance(value, kind):
        if kind is nn.Module and (are_parameters(value) or inspect.ismethod(value)):
            way_out = "pass the model itself"
        text = repr(value)
        shown = f"{text} ({type(value).__name__})" if len(text) < 80 and "\n" not in text else type(value).__name__
        raise TypeError(f"{name} must be of class {kind.__name__}, got {shown}{way_out and ': '}{way_out}")


def optional(check: Check) -> Check:
    """A check that lets None pass."""

    def checked(name: str, value: object) -> None:
        if value is not None:
            check(name, value)

    return checked


def count(name: str, value: object) -> int:
    """A whole number >= 0. It returns the value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    non_negative(name, value)
    return value


def floating_dtype(name: str, value: object) -> None:
    """A floating point dtype of torch."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(f"{name} must be a floating point dtype, got {value!r}")


def dims(name: str, value: object) -> None:
    """None, an int, a sequence of ints, or "global"."""
    is_text = isinstance(value, str)
    if value is None or (is_text and value == "global"):
        return
    items = value if isinstance(value, Sequence) else (value,)
    if is_text or any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        kind = ValueError if is_text else TypeError
        raise kind(f"{name} must be None, an int, a sequence of ints or 'global', got {value!r}")


def same_in_all_groups(owner: object, groups: Sequence[Mapping[str, object]], keys: Iterable[str]) -> None:
    """Raise if groups differ in a setting of a transform that has one statistic for all tensors."""
    for key in keys:
        values = [settings[key] for settings in groups]
        if others := [value for value in values if value != values[0]]:
            raise ValueError(
                f"{key} must be the same in every param group for {owner!r}, which has one statistic for all "
                f"tensors; got {values[0]} and {others[0]}"
            )
