"""What a transform sees of one step."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchzero_clip.functional.measure import by_setting
from torchzero_clip.functional.shards import chosen
from torchzero_clip.types import Setting, State


@dataclass
class Step:
    """What one transform sees of one step. The optimizer makes it; each list has one entry per parameter in its scope.

    Args:
        params: The parameters, not to be modified.
        grads: Their gradients, not to be modified; a norm clip before an update rule may have scaled them.
        loss: What the closure returned; None without a closure.
        states: The state of each parameter: plain dicts, which the optimizer stores after the call.
        settings: The settings of each parameter: plain dicts; parameters of one group share one.
        global_state: The state that belongs to no single parameter, first made by `Transform.init_global_state`.
        metrics: What `Modular.metrics` will show under the name of this transform: 0-d tensors.
        gradient_norms: A p-norm of each gradient before any transform, from which `finite` and `nonzero` are read, for
            transforms that declare ``keeps_statistics``; None for others. Its p depends on the chain.
        apply_child: Applies a child of a composite, by its name, to tensors that it may write to.

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
    states: list[State]
    settings: list[Setting]
    global_state: State = field(default_factory=dict)
    metrics: MutableMapping[str, Tensor] = field(default_factory=dict)
    gradient_norms: Tensor | None = None
    apply_child: Callable[[str, list[Tensor]], list[Tensor]] | None = None

    def by_setting(self) -> list[tuple[Setting, slice]]:
        """Return each setting with the range of the lists that it belongs to: one operation serves the range."""
        return by_setting(self.settings)

    @property
    def finite(self) -> Tensor:
        """Where gradients were finite before any transform: a vector of booleans, equal on all ranks."""
        return self._declared_norms().isfinite()

    @property
    def nonzero(self) -> Tensor:
        """Where gradients had a non-zero element before any transform: a vector of booleans, equal on all ranks."""
        return self._declared_norms() != 0

    def usable(self, started: Tensor, *, indices: Sequence[int] | None = None, joint: bool = False) -> Tensor:
        """Return a vector of booleans: True where a statistic may be updated.

        A gradient is usable if it is finite and, before the statistic has started, not all zero. The update may still
        be non-finite, because an earlier transform may make an inf of a finite gradient.

        Args:
            started: A vector of booleans, True for statistics that have learned from a gradient; one element if
                ``joint``.
            indices: The indices of the parameters that the statistics belong to; None for all.
            joint: All gradients count as one.

        Raises:
            ValueError: If ``started`` is no vector of booleans, or has another length.
        """
        norms = self._declared_norms()
        if indices is not None:
            norms = chosen(norms, indices)
        expected = 1 if joint else norms.numel()
        if started.dtype != torch.bool or started.numel() != expected:
            got = f"{started.dtype} of shape {tuple(started.shape)}"
            raise ValueError(f"started must be booleans, {expected} of them, got {got}")
        finite, nonzero = norms.isfinite(), norms != 0
        if joint:
            finite, nonzero = finite.all(), nonzero.any()
        return finite & (nonzero | started)

    def _declared_norms(self) -> Tensor:
        if self.gradient_norms is None:
            raise RuntimeError(
                "a transform that asks what gradients were before the chain has to declare it: write "
                "keeps_statistics = True in its class"
            )
        return self.gradient_norms
