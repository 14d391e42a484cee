"""Checks the state of a recorder before it is loaded."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, NotRequired, SupportsIndex, TypedDict

import torch
from torch import Tensor

KINDS = {str: "a string", Mapping: "a dict", Sequence: "a list"}


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
    used: Tensor
    keep: int


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
    saved: Mapping[str, Any] = state  # pyright: ignore[reportUnknownVariableType]
    step, joint, tape = saved["step"], saved.get("joint", []), saved["tape"]
    _check_int("['step']", step)
    _check_strings("['joint']", joint)
    if tape is not None:
        _check_kind("['tape']", tape, Mapping)
        _check_tape(tape)
    if "run" not in saved:
        return {"step": step, "joint": joint, "tape": tape}
    _check_kind("['run']", saved["run"], str)
    return {"step": step, "joint": joint, "tape": tape, "run": saved["run"]}


def _check_tape(tape: Mapping[str, Any]) -> None:
    if missing := [key for key in SavedTape.__annotations__ if key not in tape]:
        _raise(f"['tape'] lacks the key {missing[0]!r}")
    for key in ("names", "refused_by", "keys"):
        _check_strings(f"['tape'][{key!r}]", tape[key])
    for key in ("steps", "limits", "ratios"):
        _check_kind(f"['tape'][{key!r}]", tape[key], Sequence)
    _check_int("['tape']['keep']", tape["keep"], least=1)
    for i, step in enumerate(tape["steps"]):
        _check_int(f"['tape']['steps'][{i}]", step)
        if i and step <= tape["steps"][i - 1]:
            _raise(f"['tape']['steps'] must increase, got {tape['steps'][i - 1]} and then {step}")
    _check_limits(tape["limits"])
    count, width = len(tape["steps"]), len(tape["names"])
    for key in ("refused_by", "limits"):
        if len(tape[key]) != count:
            _raise(f"['tape'][{key!r}] must have {count} entries like ['tape']['steps'], got {len(tape[key])}")
    _check_tensor("['tape']['norms']", tape["norms"], (count, width))
    _check_tensor("['tape']['numbers']", tape["numbers"], (count, len(tape["keys"])))
    _check_tensor("['tape']['used']", tape["used"], (width,), torch.bool)
    for i, ratio in enumerate(tape["ratios"]):
        place = f"['tape']['ratios'][{i}]"
        _check_kind(place, ratio, Sequence)
        if len(ratio) != 2:
            _raise(f"{place} must be a step and a tensor, got {len(ratio)} entries")
        _check_int(f"{place}[0]", ratio[0])
        _check_tensor(f"{place}[1]", ratio[1], (2, width))


def _check_limits(limits: Sequence[Mapping[str, object]]) -> None:
    for i, by_name in enumerate(limits):
        place = f"['tape']['limits'][{i}]"
        _check_kind(place, by_name, Mapping)
        _check_strings(place, list(by_name))
        for name, limit in by_name.items():
            if isinstance(limit, bool) or not isinstance(limit, int | float):
                _raise(f"{place}[{name!r}] must be a number, got {limit!r}")


def _check_int(place: str, value: object, least: int = 0) -> None:
    if isinstance(value, bool | Tensor) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        _raise(f"{place} must be an int >= {least}, got {_shown(value)}")


def _check_kind(place: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str | bytes)):
        _raise(f"{place} must be {KINDS[kind]}, got {_shown(value)}")


def _check_strings(place: str, values: Sequence[object]) -> None:
    _check_kind(place, values, Sequence)
    for i, value in enumerate(values):
        _check_kind(f"{place}[{i}]", value, str)


def _check_tensor(place: str, value: object, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if not isinstance(value, Tensor):
        _raise(f"{place} must be a tensor, got {_shown(value)}")
    if tuple(value.shape) != shape:
        _raise(f"{place} must have shape {shape}, got {tuple(value.shape)}")
    if not value.is_floating_point() if dtype is None else value.dtype != dtype:
        _raise(f"{place} must be of {dtype or 'a floating point dtype'}, got {value.dtype}")


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor | list | dict) else repr(value)


def _raise(problem: str) -> NoReturn:
    raise ValueError(f"state_dict does not come from Recorder.state_dict(): state_dict{problem}")
