"""Types of the values that pass between the layers of this package."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

Setting: TypeAlias = Mapping[str, Any]
"""The settings of one transform for one parameter: numbers, tuples of numbers or None."""

State: TypeAlias = MutableMapping[str, Any]
"""State of transforms, of one parameter or of the whole chain: tensors and numbers by key."""

StateByParam: TypeAlias = MutableMapping[Tensor, State]
"""The state of each parameter, as an optimizer holds it."""

NewState: TypeAlias = dict[str, Any]
"""State that a transform returns before its first step."""

Group: TypeAlias = dict[str, Any]
"""A param group of an optimizer."""

StateDict: TypeAlias = dict[str, Any]
"""What ``state_dict()`` of an optimizer returns: "state" and "param_groups"."""

Checkpoint: TypeAlias = Mapping[str, Any]
"""A `StateDict` that is only read."""

Columns: TypeAlias = list[list[Tensor]]
"""Several lists of tensors, each with one tensor for each parameter."""

Runs: TypeAlias = Sequence[tuple[Setting, slice]]
"""Each setting, with the range of the parameters that share it."""

Closure: TypeAlias = Callable[[], Any]
"""Computes the gradients, and returns the loss or None."""

Metrics: TypeAlias = Callable[[], dict[str, Tensor]]
"""Computes the metrics of a step when they are read."""

Schedule: TypeAlias = Callable[[int], object]
"""A setting as a function of the number of steps that were taken before."""

Ord: TypeAlias = float | Tensor | Literal["l0", "l1", "l2", "l3", "l4", "linf", "mad", "std", "var", "sum"]
Dim: TypeAlias = int | Sequence[int] | Literal["global"] | None
Target: TypeAlias = Literal["update", "grad", "closure", "params_direct", "params_difference", "update_difference"]

Tensors: TypeAlias = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""One tensor or any iterable of them, generators included."""
