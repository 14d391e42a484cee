"""Clipping by the root of the mean square."""

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import scalar
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.step import Step
from torchzero_clip.functional.choice import where
from torchzero_clip.functional.clip import clip_factors
from torchzero_clip.functional.measure import Measured
from torchzero_clip.types import Schedule, Target


class ClipRMS(Scaling):
    """Scales updates so that the root of the mean square of the elements of each tensor is at most ``max_rms``.

        u ← u / max(1, RMS(u) / max_rms),   RMS(u) = ‖u‖ / √elements

    The real and the imaginary part of a complex number are two elements.

    Use it after Adam. Adam's updates have an RMS of 0.2 for noise and of 1 for constant gradients. They become larger
    if gradients grow suddenly, because Adam's averages follow slowly. Before an optimizer, this transform is `ClipNorm`
    with a limit that grows with the size of the tensor.

    Args:
        max_rms: The limit, a setting of the param groups: a number >= 0, or a tensor of one element, which is not read
            on the host: a negative one gives NaN. Adafactor uses 1.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a limit out of range, or an unknown ``target``.
        TypeError: For an argument of the wrong type.

    An update that is not finite passes unchanged. With ``max_rms=0`` all others become 0. It has no state.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Adam, ClipRMS, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> optimizer = Modular([weight], ClipRMS())
        >>> weight.grad = torch.full((4,), 3.0)
        >>> optimizer.step()
        >>> weight.data
        tensor([-1., -1., -1., -1.])

    Source: Shazeer, Stern, [Adafactor: adaptive learning rates with sublinear memory
    cost](https://arxiv.org/abs/1804.04235), 2018.
    """

    checks = {"max_rms": scalar}
    each_alone = pure = True
    limit_setting = "max_rms"

    def __init__(
        self, max_rms: float | Tensor | Schedule = 1.0, *, target: Target = "update", name: str | None = None
    ) -> None:
        super().__init__({"max_rms": max_rms}, target=target, name=name)

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        def made() -> Tensor:
            counts = [updates[i].numel() * (2 if updates[i].is_complex() else 1) for i in measured.indices]
            return torch.tensor(counts, dtype=torch.float64, device="cpu").sqrt().to(measured.vector)

        # a chain may have two of these transforms, which measure other tensors, so the name has the id
        scratch = step.tools.scratch_for(updates)  # its memory lets later steps copy nothing to the device
        roots = made() if scratch is None else scratch.plan(f"roots {id(self)}", updates, made)
        rms, metric = replace(measured, vector=measured.vector / roots), measured.metric
        factors = rms.by_setting(step.settings, lambda norms, s: clip_factors(metric, norms, s["max_rms"]))
        return where(rms.vector < torch.inf, factors, 1.0)
