"""Checks the state of a recorder before it is loaded."""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn, NotRequired, SupportsIndex, TypedDict, get_args, get_origin, get_type_hints

import torch
from torch import Tensor


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_KINDS: Mapping[type, tuple[str, Callable[[Any], bool]]] = {
    int: (
        "an int >= 0",
        lambda x: isinstance(x, SupportsIndex) and not isinstance(x, bool | Tensor) and operator.index(x) >= 0,
    ),
    float: ("a number", lambda x: isinstance(x, int | float) and not isinstance(x, bool)),
    str: ("a string", lambda x: isinstance(x, str)),
    Tensor: ("a tensor", lambda x: isinstance(x, Tensor)),
    dict: ("a dict", lambda x: isinstance(x, Mapping)),
    list: ("a list", _is_list),
    tuple: ("a pair", lambda x: _is_list(x) and len(x) == 2),
}


class SavedTape(TypedDict):
    """What `Tape.state_dict` returns."""

    names: list[str]  # of the parameters
    steps: list[int]
    refused_by: list[str]
    limits: list[dict[str, float]]
    keys: list[str]  # the names of the numbers
    norms: Tensor
    numbers: Tensor
    ratios: list[tuple[int, Tensor]]
    used: Tensor  # which parameters had a gradient other than 0 before the saved steps
    keep: int  # how many steps can be read


class SavedRecorder(TypedDict):
    """What `Recorder.state_dict` returns."""

    step: int
    joint: list[str]
    tape: SavedTape | None
    run: NotRequired[str]


def checked_state(state: object) -> SavedRecorder:
    """The state. A ValueError names the key if it was not returned by `Recorder.state_dict`."""
    if not isinstance(state, Mapping) or not {"step", "tape"} <= set(state):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError("state_dict must come from Recorder.state_dict(), with the keys 'step' and 'tape'")
    given: Mapping[str, Any] = state  # pyright: ignore[reportUnknownVariableType]
    saved: SavedRecorder = {"step": given["step"], "joint": given.get("joint", []), "tape": given["tape"]}
    if "run" in given:
        saved["run"] = given["run"]
    for key, kind in get_type_hints(SavedRecorder).items():
        if key in saved and key != "tape":
            _check(f"[{key!r}]", saved[key], kind)
    if saved["tape"] is not None:
        _check_tape(saved["tape"])
    return saved


def _check_tape(tape: SavedTape) -> None:
    _check("['tape']", tape, dict)
    for key, kind in get_type_hints(SavedTape).items():
        if key not in tape:
            _raise(f"['tape'] lacks the key {key!r}")
        _check(f"['tape'][{key!r}]", tape[key], kind)
    if tape["keep"] < 1:
        _raise(f"['tape']['keep'] must be an int >= 1, got {tape['keep']}")
    for before, step in pairwise(tape["steps"]):
        if step <= before:
            _raise(f"['tape']['steps'] must increase, got {before} and then {step}")
    count, width = len(tape["steps"]), len(tape["names"])
    for key in ("refused_by", "limits"):
        if len(tape[key]) != count:
            _raise(f"['tape'][{key!r}] must have {count} entries like ['tape']['steps'], got {len(tape[key])}")
    _check_tensor("['tape']['norms']", tape["norms"], (count, width))
    _check_tensor("['tape']['numbers']", tape["numbers"], (count, len(tape["keys"])))
    _check_tensor("['tape']['used']", tape["used"], (width,), torch.bool)
    for i, (_, norms) in enumerate(tape["ratios"]):
        _check_tensor(f"['tape']['ratios'][{i}][1]", norms, (2, width))


def _check(place: str, value: Any, kind: Any) -> None:
    """Raise unless a value is of a type such as ``list[tuple[int, Tensor]]``."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    name, is_one = _KINDS[origin]
    if not is_one(value):
        _raise(f"{place} must be {name}, got {_shown(value)}")
    if not inner:
        return
    if origin is dict:
        for key, entry in value.items():
            _check(place, key, inner[0])
            _check(f"{place}[{key!r}]", entry, inner[1])
    else:
        for i, entry in enumerate(value):
            _check(f"{place}[{i}]", entry, inner[i] if origin is tuple else inner[0])


def _check_tensor(place: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if tuple(value.shape) != shape:
        _raise(f"{place} must have shape {shape}, got {tuple(value.shape)}")
    is_right = value.is_floating_point() if dtype is None else value.dtype == dtype
    if not is_right:
        _raise(f"{place} must be of {dtype or 'a floating point dtype'}, got {value.dtype}")


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor | list | dict) else repr(value)


def _raise(problem: str) -> NoReturn:
    raise ValueError(f"state_dict does not come from Recorder.state_dict(): state_dict{problem}")
