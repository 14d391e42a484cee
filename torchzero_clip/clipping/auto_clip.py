"""A limit at a percentile of past norms."""

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import percent, steps
from torchzero_clip.clipping.statistics import NormStatistics, Tracked
from torchzero_clip.compat import warn_user
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.functional.clip import within
from torchzero_clip.types import NewState, Schedule, Target


class AutoClip(NormStatistics):
    """Scales updates so that their joint norm is at most a percentile of the joint norms of the last steps.

        limit = percentile of the last ``window`` norms, the current one included, with linear interpolation
        u     ← u · min(1, limit / ‖u‖)

    You do not choose a limit in units of the gradient. After a lasting change of the norms, the limit follows within
    ``window`` steps. About ``100 - percentile`` percent of the steps are clipped, also in a run without spikes.

    **Guarantees.** The stored norms are those before the clip. Steps with a non-finite gradient are not stored, and
    their updates pass unchanged. Storing starts at the first gradient that is not all zero.

    Args:
        percentile: In [0, 100]; a setting that must be the same in all param groups. The paper uses 10, of all norms so
            far, which clips nine of ten steps. Its author suggests about 80 with a window.
        window: How many norms are stored, at least 1.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a percentile or a window out of range, an unknown ``target``, or groups that differ.
        TypeError: For an argument of the wrong type, such as ``window=None``.

    | update | result |
    | --- | --- |
    | the first one that is not all zero | unchanged |
    | norm 0 | unchanged; stored if an earlier gradient was not all zero |
    | inf or NaN in a gradient | all updates unchanged, nothing stored |

    It adds the metric ``limit``. State: ``window + 1`` numbers for the whole chain.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AutoClip, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], AutoClip(percentile=50.0, window=3))
        >>> for gradient in (1.0, 2.0, 9.0):
        ...     weight.data = torch.zeros(1)
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        ...     print(-weight.item())
        1.0
        1.5
        2.0

    Source: Seetharaman et al., [AutoClip: adaptive gradient clipping for source separation
    networks](https://arxiv.org/abs/2007.14469), 2020, without the window.
    """

    pure = True
    checks = {"percentile": percent}

    def __init__(
        self,
        percentile: float | Schedule = 80.0,
        window: int = 1000,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        steps("window", window)
        if isinstance(percentile, float) and 0 < percentile < 1:
            way_out = f"which clips nearly every step: write AutoClip({100 * percentile:g})"
            warn_user(f"percentile={percentile} is below 1 percent, {way_out}")
        self.window = window
        super().__init__({"percentile": percentile}, ord=2, joint=True, target=target, name=name)

    @override
    def init_global_state(self) -> NewState:
        """The last norms, and how many were stored."""
        return {"ring": torch.zeros(self.window, dtype=torch.float64), **zero_numbers("started")}

    @override
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        stored = tracked.remember()
        limit = stored.nanquantile(tracked.shared[0][0]["percentile"] / 100)
        tracked.show(limit=limit)
        return within(tracked.norms, limit, tracked.usable)
