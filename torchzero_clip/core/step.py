"""What a transform sees of one step."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.states import States
from torchzero_clip.core.tools import Tools
from torchzero_clip.functional.dtypes import moved
from torchzero_clip.functional.measure import by_setting
from torchzero_clip.functional.shards import elements_at
from torchzero_clip.types import Setting, State


@dataclass
class Step:
    """What one transform sees of one step. The optimizer makes it; each list has one entry per parameter in its scope.

    Args:
        params: The parameters, not to be modified.
        grads: Their gradients, not to be modified; a norm clip before an update rule may have scaled them.
        loss: What the closure returned, or the mean of what `Modular.report_loss` got; None without either, and for
            transforms that are ``pure``. A gate that declares ``needs_loss`` gets the mean over all processes.
        states: The state of each parameter: plain dicts, which the optimizer stores after the call. `column`, `numbers`
            and `keep` read and write one key of all parameters in few operations.
        settings: The settings of each parameter: plain dicts; parameters of one group share one dict.
        global_state: The state for all parameters together; `Transform.init_global_state` creates it.
        metrics: What `Modular.metrics` will show under the name of this transform: 0-d tensors.
        gradient_norms: A p-norm of each gradient before any transform, for transforms that declare
            ``keeps_statistics``; None for others. `finite` and `nonzero` read it. Its p depends on the chain.
        apply_child: Applies a child of a composite, by its name, to tensors that it may write to.
        tools: Norms and averages of lists of tensors.
        has_loss: Whether a process has a loss, as a 0-d tensor; None except for gates that declare ``needs_loss``.
        shares: What `show_share` was given.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Step
        >>> one, other = {"beta": 0.9}, {"beta": 0.5}
        >>> step = Step([], [], None, [], settings=[one, one, other])
        >>> step.by_setting()
        [({'beta': 0.9}, slice(0, 2, None)), ({'beta': 0.5}, slice(2, 3, None))]
    """

    params: list[Tensor]
    grads: list[Tensor]
    loss: Tensor | float | None
    states: Sequence[State]
    settings: list[Setting]
    global_state: State = field(default_factory=dict)
    metrics: MutableMapping[str, Tensor] = field(default_factory=dict)
    gradient_norms: Tensor | None = None
    apply_child: Callable[[str, list[Tensor]], list[Tensor]] | None = None
    tools: Tools = field(default_factory=Tools)
    has_loss: Tensor | None = None
    shares: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shared: tuple[list[Setting], list[tuple[Setting, slice]]] | None = None
        # one object: ``states`` for authors, ``stored`` for the optimizer, which reads and writes it
        self.states = self.stored = self.states if isinstance(self.states, States) else States.of(self.states)
        self.is_first = False
        """True if a parameter takes its first step."""
        self.global_state_before = dict(self.global_state)
        """The state of the whole chain as it was before the transform replaced a value."""

    def column(self, key: str, indices: Sequence[int] | None = None) -> list[Any]:
        """Return the state of all parameters, or of those at ``indices``, under one key."""
        stored = self.stored
        return list(stored.column(key, indices) if stored.undo is None else stored.changing(key, indices))

    def has(self, key: str) -> bool:
        """Return True if all parameters have state under this key. Some keys appear only after a few steps."""
        return self.stored.has(key)

    def numbers(self, key: str, indices: Sequence[int] | None = None) -> Tensor:
        """Return state that is one number for each parameter: a float64 vector.

        Args:
            key: The key of the state, whose values are 0-d tensors.
            indices: The indices of the parameters; None for all.
        """
        return self.stored.numbers(key, indices).clone()

    def live_numbers(self, key: str, indices: Sequence[int] | None = None) -> Tensor:
        """Return `numbers` without a copy. Do not modify it, and do not use it after `keep`."""
        return self.stored.numbers(key, indices)

    def keep(self, key: str, values: Tensor, indices: Sequence[int] | None = None) -> None:
        """Replace state that is one number for each parameter.

        Args:
            key: As in `numbers`.
            values: A vector with the new numbers.
            indices: As in `numbers`.
        """
        self.stored.keep(key, values, indices)

    def add(self, key: str, number: float | Tensor) -> None:
        """Add a number, or a 0-d tensor, to state that is one number for each parameter, for example to count steps."""
        self.stored.add(key, number)

    def show_share(self, name: str, changed: Tensor, count: int) -> None:
        """Set a metric to ``changed / count``.

        The metric "clipped" of an `Elementwise` covers all processes, and all parts of a step in the backward. Other
        shares are those of one process, or of the last part.

        Args:
            name: The name of the metric.
            changed: A number, such as that of the elements that were clipped: 0-d.
            count: How many there are; 0 gives the metric 0.
        """
        self.metrics[name] = changed / max(count, 1)
        self.shares[name] = (changed, count)

    def by_setting(self) -> list[tuple[Setting, slice]]:
        """Return each setting with the range of the lists that it applies to. One operation can serve the range."""
        if self._shared is None or self._shared[0] is not self.settings:
            self._shared = self.settings, by_setting(self.settings)
        return self._shared[1]

    @property
    def finite(self) -> Tensor:
        """True where gradients were finite before any transform: a vector of booleans, equal on all ranks."""
        return self.declared_norms < torch.inf  # False for NaN

    @property
    def nonzero(self) -> Tensor:
        """True where gradients were not all zero before any transform: a vector of booleans, equal on all ranks."""
        return self.declared_norms != 0

    def usable(self, started: Tensor, *, indices: Sequence[int] | None = None, joint: bool = False) -> Tensor:
        """Return a vector of booleans: True where a statistic may be updated.

        A gradient is usable if it is finite and, before the statistic has started, not all zero. The update may still
        be non-finite, because an earlier transform may make an inf of a finite gradient.

        Args:
            started: A vector of booleans, True for statistics that have been updated before; one element if ``joint``.
            indices: The indices of the parameters that the statistics belong to; None for all.
            joint: All gradients count as one.

        Raises:
            ValueError: If ``started`` is not a vector of booleans, or has another length.
        """
        expected = 1 if joint else self.declared_norms.numel() if indices is None else len(indices)
        if started.dtype != torch.bool or started.shape != (expected,):
            got = f"{started.dtype} of shape {tuple(started.shape)}"
            way = ". For one statistic of all gradients: joint=True" if not joint and started.numel() == 1 else ""
            raise ValueError(f"started must be booleans, {expected} of them, got {got}{way}")
        return usable_gradients(self, started, indices, joint=joint)

    @property
    def declared_norms(self) -> Tensor:
        """The ``gradient_norms``, or an error if the transform does not set ``keeps_statistics``."""
        if self.gradient_norms is None:
            raise RuntimeError(
                "finite, nonzero and usable need the norms of gradients before the chain: write "
                "keeps_statistics = True in the class of the transform"
            )
        return self.gradient_norms


def usable_gradients(step: Step, started: Tensor, indices: Sequence[int] | None, *, joint: bool) -> Tensor:
    """`Step.usable` without its checks. ``started`` may be booleans, or numbers that are 0 before the start."""
    # the norms are on the device of the first parameter, which may be another one
    norms = moved(step.declared_norms, started.device)
    if indices is not None:
        norms = elements_at(norms, indices)
    finite, counts = norms < torch.inf, norms  # False for NaN
    if joint and len(norms) > 1:
        finite, counts = finite.all(), (norms != 0).any()
    return finite & counts.logical_or(started)
