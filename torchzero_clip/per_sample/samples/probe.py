"""Finds the samples of rows whose labels are lost, by further backwards of losses times powers of two.

The gradient of a row of one sample is then multiplied by exactly the power of that sample. The ratio is another one
for a row of several samples, or after a backward that is not linear. There are 16 factors: each sample gets a number,
and each further backward finds one of its digits in base 16.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchzero_clip.compat import current_graph_task_id, without_autocast
from torchzero_clip.per_sample.gradients.autograd_graph import nodes_of
from torchzero_clip.per_sample.gradients.contributions import PIECE, Contribution
from torchzero_clip.per_sample.gradients.rows import regrouped
from torchzero_clip.per_sample.samples.labels import Place

LARGEST = 64  # float32 has room for gradients of up to 2**63
STEP = 9  # exponents are 1, 10, ..., 64: means of up to 256 rows, squares and signs turn none of them into another
POWERS = [2.0**exponent for exponent in range(1, LARGEST + 1, STEP)]
FACTORS = [*POWERS, *(-power for power in POWERS)]
BASE = len(FACTORS)
SMALL = 2.0**26  # in smallest normal numbers: larger gradients are rounded as their multiples are
UNDERFLOW = 4.0  # in smallest normal numbers: what underflow may change in an entry of a row
# in place of a sample: rows of zeros may be of any sample, others are too small or not finite, or have other ratios
ZERO, UNTOLD, WRONG = -1, -2, -3
REENTRANT = "a checkpoint with use_reentrant=True hides them"
NOT_REENTRANT = "Call checkpoint with use_reentrant=False"


class Call:
    """The gradient of a call in the first backward, and its ratios in others. ``where`` is as in `Samples`."""

    def __init__(self, layer: Any, where: Place | Tensor) -> None:
        self.layer = layer
        self._depth = where.ndim if isinstance(where, Tensor) else where.dim + 1
        self.clear()

    def clear(self) -> None:
        """Drop what backwards have brought."""
        self.grad: Tensor | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.ratios: list[Tensor] = []

    def compare(self, grad: Tensor) -> None:
        """Note the ratio of each row in a further backward, once there is a first gradient."""
        if self.grad is None:
            return
        shape = self.grad.shape[: self._depth]
        first, grad = (x.flatten(0, self._depth - 1).flatten(1) for x in (self.grad, grad.detach()))
        exact = first.is_cpu and self.layer.engine.probe.exact
        step = max(1, PIECE // first[:1].nbytes) if first.is_cpu and first.numel() else max(len(first), 1)
        pairs = zip(first.split(step), grad.split(step), strict=True)
        found = [_ratios(*pair, 0.0 if exact else torch.finfo(first.dtype).eps ** 0.5) for pair in pairs]
        self.ratios.append(torch.cat(found).view(shape))

    def samples(self, numbers: Tensor) -> Tensor:
        """The sample of each row by its ratios, or `ZERO`, `UNTOLD` or `WRONG`."""
        ratios, ordered = torch.stack(self.ratios), numbers.to(self.ratios[0].device).sort()
        number = sum(((ratio - 1) * BASE**place for place, ratio in enumerate(ratios)), torch.zeros_like(ratios[0]))
        place = torch.searchsorted(ordered.values, number).clamp(max=len(numbers) - 1)
        right = (ratios > 0).all(0) & (ordered.values[place] == number)
        result = torch.where(right, ordered.indices[place], WRONG)
        for kind in (ZERO, UNTOLD):
            result = result.masked_fill((ratios == kind).all(0), kind)
        return result


class LostRows(Call):
    """A call with rows of unknown samples. The object makes the contributions of the call.

    ``contribute`` makes them as if each row were a sample. This is right if there are as many losses as ``rows``.
    """

    def __init__(
        self,
        layer: Any,
        contribute: Callable[..., Iterable[Contribution]],
        where: Place | Tensor,
        *,
        rows: int | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(layer, where)
        self.seen: int | None = layer.engine.forward.batch_size
        """The number of samples in the forward; None if it is not known."""
        self.rows = rows
        self.shared = shared and not layer.engine.given
        """Whether all samples may share the rows, because they have no labels, and the user has not called `rows()`."""
        self._contribute, self._hidden = contribute, current_graph_task_id() != -1  # in a reentrant checkpoint
        self._rows: Tensor | None = None
        self._count = 0
        layer.engine.probe.live[self] = None

    def __call__(self, grad: Tensor, *inputs: Tensor) -> Sequence[Contribution]:
        """The contributions; none if the samples are not known yet."""
        if self._rows is not None:
            return [regrouped(part, self._rows, self._count) for part in self._contribute(grad, *inputs)]
        engine = self.layer.engine
        if self.rows is not None and not engine.probe.passes:
            return [*self._contribute(grad, *inputs)]
        if engine.probe.passes is None and not self._hidden:
            engine.clear()
            raise next(iter(engine.probe.live)).layer.unknown_rows(instead=", or use backward(losses)")
        if not engine.probe.passes:
            raise self.refusal(REENTRANT, NOT_REENTRANT)
        self.grad, self.inputs = grad, inputs
        return []

    def refusal(self, reason: str, how: str = "") -> ValueError:
        """The error for rows whose samples cannot be found."""
        return self.layer.unknown_rows(why=f", and backward(losses) cannot find them: {reason}", how=how)

    def found(self, numbers: Tensor, losses: Tensor) -> Sequence[Contribution]:
        """The contributions, once the further backwards have run."""
        if (grad := self.grad) is None:
            return []
        if not self.ratios:
            raise self.refusal(REENTRANT, NOT_REENTRANT)
        rows = self.samples(numbers)
        if bool((rows == UNTOLD).any()):
            bad = (~losses.isfinite()).nonzero()[:, 0].tolist()
            small = f"not finite or below {torch.finfo(grad.dtype).tiny * SMALL:.0e}"
            raise self.refusal(
                f"their gradients are {small}{f'; losses of samples {bad} are not finite' if bad else ''}"
            )
        if bool((rows == WRONG).any()):
            shared = "If all samples share them, as positions, give them a first dimension of size 1: x[None]"
            raise self.refusal(
                "some belong to several samples, or a function or hook has a backward that is not linear",
                shared if self.shared else "",
            )
        usual = torch.arange(len(rows), device=rows.device).clamp(max=len(losses) - 1)
        self._rows = torch.where(rows == ZERO, usual.view(-1, *[1] * (rows.ndim - 1)), rows).flatten()
        self._count = len(losses)
        with without_autocast(grad):
            return self(grad, *self.inputs)


class KnownRows(Call):
    """A call with labels: ``where`` is the place of the samples, or the sample of each row."""

    def __init__(self, layer: Any, where: Place | Tensor, grad: Tensor) -> None:
        super().__init__(layer, where)
        self._where = where if isinstance(where, Tensor) else torch.arange(grad.shape[where.dim]) // where.run
        self.grad = grad

    def check(self, numbers: Tensor) -> None:
        """Raise a RuntimeError if the loss of a sample gives a gradient to rows of another sample."""
        rows = self.samples(numbers) if self.ratios else self._where
        if not bool(((rows == self._where.to(rows.device)) | (rows == ZERO) | (rows == UNTOLD)).all()):
            raise RuntimeError(
                f"the model or the loss mixes or reorders samples, in {self.layer} or later: check_per_sample names "
                "the module. Nothing was changed"
            )


class Probe:
    """Plans and runs further backwards for calls with lost rows. If not ``possible``, layers raise in the forward."""

    def __init__(self, engine: Any, *, possible: bool) -> None:
        self.possible = possible
        self.passes: int | None = None
        """The number of further backwards while `backward(losses)` runs, else None."""
        self.live: WeakKeyDictionary[LostRows, None] = WeakKeyDictionary()
        """The calls whose graphs exist, in their order."""
        self.exact = True
        """Whether backwards on the CPU add up in the same order each time."""
        self._engine = engine
        self._of_several = (
            False  # some layer had more rows than there were losses, or layers differed: an equal number may be chance
        )
        self._lost: list[LostRows] = []
        self._known: list[KnownRows] = []
        self._numbers = torch.zeros(0, dtype=torch.int64, device="cpu")  # of the samples: their digits are the powers
        self._random = random.Random(0)

    def plan(self, losses: Tensor) -> int:
        """The number of further backwards that the losses need, which is 0 without lost rows."""
        if not len(losses) or (not self._of_several and all(call.rows == len(losses) for call in self.live)):
            return 0
        nodes = list(nodes_of([losses]))
        calls = {getattr(node, "contribute", None) for node in nodes}
        found = [call for call in self.live if call in calls]
        rows = {call.rows for call in found if call.rows is not None}
        self._of_several |= len(rows) > 1 or max(rows, default=0) > len(losses)
        if not found or not (self._of_several or any(call.rows is None for call in found)):
            return 0
        self._lost = found
        if any(part.dtype == torch.float16 for node in nodes for part in node._input_metadata):
            raise self._lost[0].refusal("a part of the graph computes in float16")  # it has no room for the powers
        # several threads add up the gradients of x[index] in another order each time
        self.exact = torch.get_num_threads() == 1 or all(node.name() != "IndexBackward0" for node in nodes)
        passes = 1
        while BASE**passes < len(losses):
            passes += 1
        return passes

    def known(self, layer: Any, where: Place | Tensor, grad: Tensor) -> KnownRows | None:
        """Note a call with labels, which the further backwards have to confirm, if there are any."""
        if not self._lost:
            return None
        self._known.append(call := KnownRows(layer, where, grad))
        return call

    def run(self, losses: Tensor, *, retain_graph: bool) -> None:
        """Run the further backwards."""
        passes = self.passes or 0
        numbers = self._random.sample(range(BASE**passes), len(losses))
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        for place in range(passes):
            weights = losses.new_tensor([FACTORS[number // BASE**place % BASE] for number in numbers])
            try:
                self._engine.repeat(losses, weights, retain_graph=retain_graph or place < passes - 1)
            except Exception as error:  # of a loss that frees its memory, for example
                if not self._lost:  # they are in another process
                    raise
                raise self.refusal(error) from error

    def refusal(self, error: Exception) -> ValueError:
        """The error for a graph whose second backward raises an error."""
        return self._lost[0].refusal(f"the graph cannot run backward twice ({error})")

    def receive(self, losses: Tensor) -> None:
        """Make the contributions of calls with lost rows."""
        captured = self._engine.captured
        for call in self._lost:
            captured.counts.append((call.layer, len(losses) if call.seen is None else call.seen))
        if self._lost:
            captured.check_counts(len(losses), batch_first=self._engine.batch_first)
        for call in self._lost:
            for part in call.found(self._numbers, losses):
                self._engine.receive(call.layer, part)
            call.clear()
        for call in self._known:
            call.check(self._numbers)

    def clear(self) -> None:
        """End `backward(losses)`."""
        for call in (*self._lost, *self._known):
            call.clear()
        self._lost, self._known, self.passes = [], [], None


def _ratios(first: Tensor, grad: Tensor, rounding: float) -> Tensor:
    """The number of the factor between each pair of rows, 1 to 16; 0 for other ratios; or `ZERO`, `UNTOLD`."""
    if not first.numel():
        return torch.full(first.shape[:1], ZERO, device=first.device)
    tiny = torch.finfo(first.dtype).tiny
    large, larger = (x.abs().amax(1) for x in (first, grad))
    exponent = (larger / large).log2().round().nan_to_num(0, 0, 0).clamp(0, LARGEST).long()
    shares = torch.tensor([2.0**-place for place in range(LARGEST + 1)], dtype=first.dtype, device=first.device)
    share = grad * shares[exponent][:, None]
    errors = [(share - first).abs_().amax(1), share.add_(first).abs_().amax(1)]  # of a positive and a negative ratio
    fits = (torch.minimum(*errors) <= large * rounding + tiny * UNDERFLOW) & (exponent % STEP == 1)
    number = torch.where(fits, 1 + exponent // STEP + len(POWERS) * (errors[1] < errors[0]), 0)
    small = (large > 0) & (large < tiny * SMALL) & (larger < large * 4 * 2.0**LARGEST)
    number = torch.where(small | ~large.isfinite(), UNTOLD, number)
    return torch.where((large == 0) & (larger < tiny * SMALL), ZERO, number)
