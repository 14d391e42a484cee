"""The settings of param groups, as transforms see them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.checks import plain
from torchzero_clip.types import Setting


def same_in_all_groups(owner: object, groups: Sequence[Setting], keys: Iterable[str]) -> None:
    """Raise if groups differ in a setting of a transform that has one statistic for all tensors."""
    for key in keys:
        found = [settings[key] for settings in groups]
        if others := [value for value in found if value != found[0]]:
            raise ValueError(
                f"{key} must be the same in every param group for {owner!r}, which has one statistic for all "
                f"tensors; got {found[0]} and {others[0]}"
            )


def at(value: Any, step: int) -> Any:
    """A setting, or what its schedule gives after so many steps."""
    if not callable(value):
        return value
    try:
        return plain(value(step))
    except Exception as error:
        error.add_note(f"in a schedule, {value!r}, of step {step}")
        raise


def override_groups(param_groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """The parameters and the settings of each group given to `set_param_groups`."""
    if isinstance(param_groups, Mapping):
        raise TypeError("param_groups must be a list of dicts, got one dict: write [{...}]")
    for group in param_groups:
        if not isinstance(group, Mapping) or "params" not in group:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"each of param_groups must be a dict with 'params', got {group!r}")
        params = group["params"]
        settings = {key: plain(value) for key, value in group.items() if key != "params"}
        listed = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        yield listed, settings
