"""Proves the sample of each row, by further backwards of the losses times powers of two.

A backward is linear, so the gradient of a row of one sample is multiplied by exactly the power of this sample. Another
ratio belongs to a row of several samples, or to a backward that is not linear. There are 16 factors: each sample gets a
number, in a random order, and each further backward tells one digit of it in base 16.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from torchzero_clip.per_sample.samples.pattern import MIXED, UNTOLD, ZERO

PIECE = 1 << 20  # bytes of gradients that are compared at a time, so that all comparisons read them from the cache
WIDE = tuple(range(1, 65, 9))
"""The exponents of two. Float32 has room for gradients of up to 2**63. Means of up to 256 rows, squares and signs turn
none of these powers into another."""
NARROW = (-1, 1)
"""Those in float16, which has room for no others."""
SMALL = 2.0**26  # in smallest normal numbers: larger gradients are rounded as their multiples are
SMALL_NARROW = 2.0**4
UNDERFLOW = 4.0  # in smallest normal numbers: what underflow may change in an entry of a row


class Powers:
    """The factors of so many samples in each of some further backwards."""

    def __init__(self, count: int, random: Random, *, narrow: bool = False) -> None:
        self.exponents: Sequence[int] = NARROW if narrow else WIDE
        self._factors = [sign * 2.0**exponent for sign in (1, -1) for exponent in self.exponents]
        self.passes = 1
        while len(self._factors) ** self.passes < count:
            self.passes += 1
        self._numbers = random.sample(range(len(self._factors) ** self.passes), count)

    def weights(self, like: Tensor) -> list[Tensor]:
        """The factors of the samples in each pass."""
        base = len(self._factors)
        places = [[number // base**place % base for number in self._numbers] for place in range(self.passes)]
        return [like.new_tensor([self._factors[digit] for digit in digits]) for digits in places]

    def samples(self, ratios: Sequence[Tensor]) -> Tensor:
        """The sample of each row, by the numbers of its ratios in all passes; or `ZERO`, `UNTOLD` or `MIXED`."""
        base, of_passes = len(self._factors), torch.stack(list(ratios))
        ordered = torch.tensor(self._numbers, device=of_passes.device).sort()
        number = sum(((ratio - 1) * base**place for place, ratio in enumerate(of_passes)), torch.zeros_like(ratios[0]))
        place = torch.searchsorted(ordered.values, number).clamp(max=len(self._numbers) - 1)
        is_one = (of_passes > 0).all(0) & (ordered.values[place] == number)
        result = torch.where(is_one, ordered.indices[place], MIXED)
        result = result.masked_fill((of_passes == UNTOLD).any(0), UNTOLD)
        return result.masked_fill((of_passes == ZERO).all(0), ZERO)

    def ratios(self, first: Tensor, multiple: Tensor, *, exact: bool) -> Tensor:
        """The number of the factor between each pair of rows, from 1 on; 0 for other ratios; or `ZERO`, `UNTOLD`."""
        step = max(1, PIECE // max(first[:1].nbytes, 1)) if first.is_cpu else max(len(first), 1)
        pairs = zip(first.split(step), multiple.split(step), strict=True)
        return torch.cat([_ratios(*pair, self.exponents, exact=exact) for pair in pairs])


class Trace:
    """What the further backwards bring to rows with a gradient, which are its first ``leading`` dimensions."""

    def __init__(self, grad: Tensor, leading: int) -> None:
        self.grad = grad
        """The gradient in the ordinary backward."""
        self.ratios: list[Tensor] = []
        self.reached: Tensor | None = None
        """Which rows the last backward with NaN, or of one sample alone, has reached."""
        self.alone: list[Tensor] = []
        """The gradients from each sample alone."""
        self.is_repeated = True
        """Whether the backward of `repeat` was the ordinary one."""
        self._leading = leading

    def compare(self, grad: Tensor, powers: Powers, *, exact: bool) -> None:
        """Note the ratio of each row in a further backward."""
        ratios = powers.ratios(self._rows(self.grad), self._rows(grad), exact=exact)
        self.ratios.append(ratios.view(grad.shape[: self._leading]))

    def reach(self, grad: Tensor) -> None:
        """Note which rows got a gradient that is not 0."""
        self.reached = (self._rows(grad) != 0).any(1).view(grad.shape[: self._leading])

    def is_finite(self) -> Tensor:
        """Which rows have a finite gradient in the ordinary backward."""
        return self._rows(self.grad).isfinite().all(1).view(self.grad.shape[: self._leading])

    def repeat(self, grad: Tensor) -> None:
        """Note whether a gradient is that of the ordinary backward, up to rounding."""
        if self.grad.numel():
            scale = self.grad.abs().amax() * torch.finfo(grad.dtype).eps ** 0.5
            self.is_repeated = bool(((grad - self.grad).abs() <= scale).all())

    def _rows(self, grad: Tensor) -> Tensor:
        return grad.detach().unsqueeze(-1).flatten(self._leading).flatten(0, self._leading - 1)


def _ratios(first: Tensor, multiple: Tensor, exponents: Sequence[int], *, exact: bool) -> Tensor:
    if not first.numel():
        return torch.full(first.shape[:1], ZERO, device=first.device)
    info, low, high = torch.finfo(first.dtype), min(0, *exponents), max(exponents)
    large, larger = (x.abs().amax(1) for x in (first, multiple))
    exponent = (larger / large).log2().round().nan_to_num(0, 0, 0).clamp(low, high).long() - low
    shares = torch.tensor([2.0**-place for place in range(low, high + 1)], dtype=first.dtype, device=first.device)
    numbers = torch.zeros(high + 1 - low, dtype=torch.int64, device=first.device)
    numbers[torch.tensor(exponents, device=first.device) - low] = torch.arange(1, 1 + len(exponents)).to(first.device)
    share = multiple * shares[exponent][:, None]
    errors = [(share - first).abs_().amax(1), share.add_(first).abs_().amax(1)]  # of a positive and a negative ratio
    allowed = large * (0.0 if exact else info.eps**0.5) + info.tiny * UNDERFLOW
    fits = (torch.minimum(*errors) <= allowed) & (numbers[exponent] > 0)
    result = torch.where(fits, numbers[exponent] + len(exponents) * (errors[1] < errors[0]), 0)
    small = info.tiny * (SMALL if low >= 0 else SMALL_NARROW)
    rounded = (large > 0) & (large < small) & (larger < large * 4 * 2.0**high)
    result = torch.where(rounded | ~large.isfinite() | ~larger.isfinite(), UNTOLD, result)
    return torch.where((large == 0) & (larger < small), ZERO, result)
