"""The factors of a proof, which are powers of two, and the sample that the ratio of a row stands for.

A backward is linear, so the gradient of a row of one sample is multiplied by exactly the power of this sample. Another
ratio belongs to a row of several samples, or to a backward that is not linear. There are 16 factors, eight of them
negative: each sample gets another number, and each further backward shows one digit of it in base 16. In float16, there
are four. The numbers are random: mixing that is hidden by the factors of one proof shows in another one.
"""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from torchzero_clip.per_sample.samples.pattern import MIXED, UNTOLD, ZERO

_PIECE = 1 << 22  # bytes of gradients that are compared at a time
_WIDE = tuple(range(1, 65, 9))
"""The exponents of two. In float32, gradients of up to 2**63 do not overflow. If a row gets
the mean of up to 256 samples, or if the backward squares or takes the sign, the ratio is none of these powers."""
OF_FLOAT16 = (-1, 1)
"""The exponents in float16, where larger ones overflow."""
_SMALL = 2.0**26  # times the smallest normal number: larger gradients and their multiples are rounded alike
SMALL_FLOAT16 = 2.0**4
UNDERFLOW = 4.0  # in smallest normal numbers: what underflow may change in an entry of a row


class Powers:
    """The factor of each of ``count`` samples in each further backward."""

    def __init__(self, count: int, random: Random, *, float16: bool = False) -> None:
        self.exponents: Sequence[int] = OF_FLOAT16 if float16 else _WIDE
        self._factors = [sign * 2.0**exponent for sign in (1, -1) for exponent in self.exponents]
        self.passes = 1
        while len(self._factors) ** self.passes < count:
            self.passes += 1
        base = len(self._factors)
        numbers = random.sample(range(base**self.passes), count)
        self._digits = [[number // base**place % base for number in numbers] for place in range(self.passes)]
        self._codes = base + 1 - UNTOLD
        self._table = self._samples_of_codes()
        self._bounds = torch.tensor([2.0 ** ((a + b) / 2) for a, b in pairwise(self.exponents)], device="cpu")
        self._shares = torch.tensor([2.0**-exponent for exponent in self.exponents], device="cpu")

    def _samples_of_codes(self) -> Tensor:
        """The sample for each combination of what `ratios` returns in all passes, counted from `UNTOLD` (-2) on."""
        table = torch.full((self._codes,) * self.passes, MIXED, device="cpu")
        places = [torch.tensor(digits, device="cpu") + 1 - UNTOLD for digits in self._digits]
        table[tuple(places)] = torch.arange(len(self._digits[0]), device="cpu")
        table[(ZERO - UNTOLD,) * self.passes] = ZERO
        for dim in range(self.passes):
            table.select(dim, 0).fill_(UNTOLD)
        return table.flatten()

    def weights(self, like: Tensor) -> list[Tensor]:
        """The factors of the samples in each pass."""
        return [like.new_tensor([self._factors[digit] for digit in digits]) for digits in self._digits]

    def samples(self, ratios: Sequence[Tensor]) -> Tensor:
        """The sample of each row, by the numbers of its ratios in all passes; or `ZERO`, `UNTOLD` or `MIXED`."""
        index = torch.zeros_like(ratios[0])
        for ratio in ratios:
            index.mul_(self._codes).add_(ratio - UNTOLD)
        return self._table.to(index.device)[index]

    def ratios(self, first: Tensor, multiple: Tensor, *, exact: bool) -> Tensor:
        """The number of the factor between each pair of rows, from 1 on; 0 for other ratios; or `ZERO`, `UNTOLD`."""
        if not first.numel():
            return torch.full(first.shape[:1], ZERO, device=first.device)
        step = max(1, _PIECE // max(first[:1].nbytes, 1)) if first.is_cpu else len(first)
        if len(first) <= step:
            return self._ratios(first, multiple, exact=exact)
        pairs = zip(first.split(step), multiple.split(step), strict=True)
        return torch.cat([self._ratios(*pair, exact=exact) for pair in pairs])

    def _ratios(self, first: Tensor, multiple: Tensor, *, exact: bool) -> Tensor:
        """`ratios` of some rows.

        A row (3, -1) with the multiple (3072, -1024) has the ratio 2**10, the second of `_WIDE`: its number is 2. With
        (-3072, 1024), it is 2 + 8, because the negative factors follow the eight positive ones. With (3072, -1100), no
        factor fits both entries: 0.
        """
        info = torch.finfo(first.dtype)
        high, low, higher, lower = first.amax(1), first.amin(1), multiple.amax(1), multiple.amin(1)
        largest, largest_multiple = torch.maximum(high, -low), torch.maximum(higher, -lower)
        # the factor that the largest entries suggest; the sum of both ends has the sign of the larger one
        nearest = torch.bucketize((largest_multiple / largest).float(), self._bounds.to(first.device))
        share = self._shares.to(first)[nearest].copysign((high + low) * (higher + lower))
        # does it fit all entries? If the ends are equally large, the sign may be the other one
        allowed = (0.0 if exact else largest * info.eps**0.5) + info.tiny * UNDERFLOW
        fits = _distance(first, multiple, share) <= allowed
        if not fits.all() and (others := _distance(first, multiple, -share) <= allowed).any():
            share, fits = torch.where(fits, share, -share), fits | others
        result = torch.where(fits, 1 + nearest + len(self.exponents) * share.signbit(), 0)
        # rows that are too small or not finite have no ratio, except if their multiple is far too large for any factor
        small = info.tiny * (_SMALL if min(self.exponents) >= 0 else SMALL_FLOAT16)
        if ((largest >= small) & (largest_multiple < torch.inf)).all():
            return result
        # 4 is room for rounding
        may_be_multiple = (largest > 0) & (largest_multiple < largest * 4 * 2.0 ** max(self.exponents))
        is_zero = (largest == 0) & (largest_multiple < small)
        of_small = torch.where(may_be_multiple, UNTOLD, torch.where(is_zero, ZERO, 0))
        result = torch.where(largest < small, of_small, result)
        return torch.where(largest.isfinite() & largest_multiple.isfinite(), result, UNTOLD)


class Trace:
    """What the further backwards bring to rows with a gradient, which are its first ``leading`` dimensions."""

    def __init__(self, grad: Tensor, leading: int, inputs: tuple[Tensor, ...] = ()) -> None:
        self.grad, self.inputs = grad, inputs
        """The gradient in the ordinary backward, and what a call has kept for its contributions."""
        self.ratios: list[Tensor] = []
        self.reached: Tensor | None = None
        """Which rows the last backward with NaN, or of some samples alone, has reached."""
        self.reached_by_nan: list[Tensor] = []
        """Those that the backwards with NaN have reached: of half of the samples, and of the others."""
        self.alone: list[Tensor] = []
        """The gradients from each sample alone."""
        self.is_repeated = True
        """Whether the backward of `repeat` was the ordinary one."""
        self._leading = leading

    def compare(self, grad: Tensor, powers: Powers, *, exact: bool) -> None:
        """Note the ratio of each row in a further backward."""
        ratios = powers.ratios(self._rows(self.grad), self._rows(grad), exact=exact)
        self.ratios.append(ratios.view(grad.shape[: self._leading]))

    def reach(self, grad: Tensor, *, by_nan: bool) -> None:
        """Note which rows got a gradient that is not 0."""
        self.reached = (self._rows(grad) != 0).any(1).view(grad.shape[: self._leading])
        if by_nan:
            self.reached_by_nan.append(self.reached)

    def is_finite(self) -> Tensor:
        """Which rows have a finite gradient in the ordinary backward."""
        return self._rows(self.grad).isfinite().all(1).view(self.grad.shape[: self._leading])

    def repeat(self, grad: Tensor) -> None:
        """Note whether a gradient is that of the ordinary backward, up to rounding."""
        self.is_repeated = not are_apart(self.grad, grad)

    def _rows(self, grad: Tensor) -> Tensor:
        return grad.detach().unsqueeze(-1).flatten(self._leading).flatten(0, self._leading - 1)


def _distance(first: Tensor, multiple: Tensor, share: Tensor) -> Tensor:
    """The largest difference between a row and a share of its multiple."""
    return torch.addcmul(first, multiple, share[:, None], value=-1).abs_().amax(1)


def are_apart(one: Tensor, other: Tensor) -> bool:
    """True if two gradients differ by more than rounding. A NaN does not count."""
    if not one.numel():
        return False
    return bool(((one - other).abs() > torch.finfo(one.dtype).eps ** 0.5 * one.abs().amax()).any())
