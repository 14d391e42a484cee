"""Arithmetic on the numbers of a record: vectors of float64 on the CPU."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def quantile(values: Tensor, share: float) -> float:
    """The value that this share of the values does not exceed, linear between neighbors."""
    # torch.quantile refuses more than 16 million values
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[below], ordered[above], place - below))


def finite_ones(values: Mapping[str, float]) -> dict[str, float]:
    """Those values that are neither inf nor NaN, which JSON cannot hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def median_of(values: Tensor) -> float:
    return quantile(values, 0.5)


def effective_count(values: Tensor) -> float:
    """How many independent values tell as much as these values, which may depend on their neighbors."""
    # n / (1 + 2 Σ rₖ), where the sum of the autocorrelations rₖ ends before the first pair (r₂ₖ + r₂ₖ₊₁) that is not
    # above 0 (C. J. Geyer, Practical Markov Chain Monte Carlo, https://doi.org/10.1214/ss/1177011137, 1992)
    count, centered = len(values), values - values.mean()
    if centered.abs().max() <= 1e-9 * values.abs().max().clamp(min=1.0):
        return float(count)
    covariance = torch.fft.irfft(torch.fft.rfft(centered, 2 * count).abs().square())[: count // 2 * 2]
    times = 1.0
    for _ in range(4):
        # the mean of the values varies with them, which lowers each rₖ: uncorrected, 15 independent values count as 20
        lost = min(times / count, 0.5)
        pairs = ((covariance / covariance[0] + lost) / (1 + lost)).view(-1, 2).sum(dim=1)
        times = max(2 * float(pairs[(pairs > 0).cumprod(0).bool()].sum()) - 1, 1.0)
    return count / times


def share_range(above: int, count: int, independent: float) -> tuple[float, float]:
    """Where the share of future values above a limit is with 95%, if ``above`` of ``count`` values were above it."""
    numbers = torch.tensor([above, 0.025, 0.975], dtype=torch.float64, device="cpu")
    shares, chances = _future_shares(numbers[:1], count, independent, 20_001)
    low, high = shares[0][torch.searchsorted(chances[0].cumsum(0), numbers[1:])].tolist()
    return low if above else 0.0, high


def chance_between(low: float, high: float, above: Tensor, count: int, independent: float) -> float:
    """The probability that the future share is from ``low`` to ``high``: the mean over several numbers ``above``."""
    shares, chances = _future_shares(above, count, independent, 2_001)
    return float(torch.where((shares >= low) & (shares <= high), chances, 0.0).sum(dim=1).mean())


def _future_shares(above: Tensor, count: int, independent: float, points: int) -> tuple[Tensor, Tensor]:
    """Possible shares of future values above a limit, and their probabilities: a row for each number ``above``."""
    # if the limit is one of the values, the share has the distribution Beta(above + 1, count - above)
    a, b = ((x * independent / count)[:, None] for x in (above + 1, (count - above).clamp(min=0.5)))
    width = 25 * torch.maximum((1 / a + 1 / b).sqrt(), 1 / a + 1 / b)
    logits = (a / b).log() + width * torch.linspace(-1, 1, points, dtype=torch.float64, device="cpu")
    density = a * torch.nn.functional.logsigmoid(logits) + b * torch.nn.functional.logsigmoid(-logits)
    return logits.sigmoid(), density.softmax(dim=1)


def joined_norms(norms: Tensor) -> Tensor:
    """The joint norm of each row of norms, where -1 means no gradient; NaN if a row has no gradient."""
    absent = norms < 0
    present = torch.where(absent, 0.0, norms)
    largest = present.amax(dim=-1, keepdim=True) if norms.shape[-1] else norms.new_zeros((*norms.shape[:-1], 1))
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    joint = scale.squeeze(-1) * (present / scale).square().sum(dim=-1).sqrt()
    return torch.where(absent.all(dim=-1), torch.nan, joint)


def medians(norms: Tensor) -> Tensor:
    """The median of the finite numbers >= 0 in each column; NaN for a column without such numbers."""
    if not norms.numel():
        return norms.new_full((norms.shape[1],), torch.nan)
    return torch.where(norms.isfinite() & (norms >= 0), norms, torch.nan).nanquantile(0.5, dim=0)
