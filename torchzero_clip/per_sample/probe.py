"""Finds the samples of rows that labels have lost, by further backwards of losses times powers of two.

The gradient of a row of one sample is then multiplied by exactly the power of that sample. A row of several samples, or
behind a backward that is not linear, has another ratio.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from torchzero_clip.per_sample.autograd_graph import nodes_of
from torchzero_clip.per_sample.contributions import Contribution
from torchzero_clip.per_sample.row_products import regrouped
from torchzero_clip.per_sample.squared_norms import without_autocast

BASE = 64  # the powers are 2 to 2**64: float32 has room for gradients of up to 2**63
NORMAL = 2.0**26  # times the smallest normal number: larger gradients are rounded as their multiples are
UNDERFLOW = 4.0  # times the smallest normal number: what underflow may change in an entry of a row
REENTRANT = "a checkpoint with use_reentrant=True hides them"


class LostRows:
    """One call of a layer with rows of unknown samples. It is the function that makes the contributions of the call.

    Args:
        layer: The layer.
        contribute: Makes the contributions of the call, with each row as a sample.
        depth: The number of first dimensions of the output that tell rows apart.
    """

    def __init__(self, layer: Any, contribute: Callable[..., Sequence[Contribution]], depth: int) -> None:
        self.layer = layer
        self.seen: int = layer.engine.forward.batch_size
        """The number of samples in the forward."""
        self._contribute = contribute
        self._depth = depth
        self._rows: Tensor | None = None
        self._count = 0
        self.clear()

    def clear(self) -> None:
        """Drop what backwards have brought. Samples that were found stay."""
        self._grad: Tensor | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._digits: list[Tensor] = []

    def __call__(self, grad: Tensor, *inputs: Tensor) -> Sequence[Contribution]:
        """The contributions; none if the samples are not known yet."""
        if self._rows is not None:
            return [regrouped(part, self._rows, self._count) for part in self._contribute(grad, *inputs)]
        passes = self.layer.engine.probe.passes
        if passes is None:
            self.layer.engine.clear()
            raise self.layer.unknown_rows(instead=", or use backward(losses)")
        if not passes:
            raise self.refusal(REENTRANT)
        self._grad, self._inputs = grad, inputs
        return []

    def refusal(self, reason: object) -> ValueError:
        """The error for rows whose samples cannot be found."""
        return self.layer.unknown_rows(why=f", and backward(losses) cannot find them: {reason}")

    def compare(self, grad: Tensor) -> None:
        """Note by which power of two each row of a gradient is larger than in the first backward.

        It is 0 for any other ratio, and -1 for rows of zeros, which may belong to any sample.
        """
        if self._grad is None:
            return
        first, grad = self._grad.flatten(self._depth), grad.detach().flatten(self._depth)
        if not first.numel():
            self._digits.append(torch.full(first.shape[:-1], -1, device=first.device))
            return
        tiny, eps = torch.finfo(first.dtype).tiny, torch.finfo(first.dtype).eps
        large, larger = (x.abs().amax(-1) for x in (first, grad))
        digit = (larger / large).log2().round().nan_to_num(0, 0, 0).clamp(0, BASE).long()
        shares = torch.tensor([2.0**-place for place in range(BASE + 1)], dtype=first.dtype, device=first.device)
        error = (grad * shares[digit].unsqueeze(-1)).sub_(first).abs_().amax(-1)
        rounding = 0.0 if first.is_cpu else eps**0.5  # other devices may add up in another order each time
        fits = (error <= large * rounding + tiny * UNDERFLOW) & (large >= tiny * NORMAL)
        free = (large == 0) & (larger < tiny * NORMAL)
        self._digits.append(torch.where(free, -1, torch.where(fits, digit, 0)))

    def found(self, numbers: Tensor, passes: int, losses: Tensor) -> list[Contribution]:
        """The contributions, with the samples that have these numbers, whose digits in base 64 were the powers.

        Raises:
            ValueError: If the samples of some rows cannot be found.
        """
        grad, inputs, digits = self._grad, self._inputs, self._digits
        if grad is None:
            return []
        if len(digits) != passes:
            raise self.refusal(REENTRANT)
        self.clear()
        free = torch.stack(digits).lt(0).all(0)
        known = free | torch.stack(digits).gt(0).all(0)
        number = sum(((digit - 1) * BASE**place for place, digit in enumerate(digits)), torch.zeros_like(digits[0]))
        ordered, samples = numbers.to(grad.device).sort()
        place = torch.searchsorted(ordered, number).clamp(max=len(ordered) - 1)
        known &= free | (ordered[place] == number)
        if not bool(known.all()):
            raise self.refusal(_reason(grad.flatten(self._depth)[~known], losses))
        usual = torch.arange(len(free), device=grad.device).clamp(max=len(losses) - 1)
        rows = torch.where(free, usual.view(-1, *[1] * (free.ndim - 1)), samples[place])
        self._rows, self._count = rows.flatten(), len(losses)
        with without_autocast(grad):
            return list(self(grad, *inputs))


class Probe:
    """Plans the further backwards, runs them, and makes the contributions of calls with lost rows.

    If it is not ``possible``, layers raise for lost rows in the forward.
    """

    def __init__(self, engine: Any, *, possible: bool) -> None:
        self.possible = possible
        self.passes: int | None = None
        """The number of further backwards while `backward(losses)` runs, else None."""
        self.anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        """An input of every call with lost rows, so that a backward can be asked for these calls alone."""
        self.live: WeakSet[LostRows] = WeakSet()
        """The calls whose graphs exist."""
        self._engine = engine
        self._calls: list[LostRows] = []  # those of the losses
        self._numbers = torch.zeros(0, dtype=torch.int64, device="cpu")  # of the samples
        self._random = random.Random(0)

    def lost(self, call: LostRows) -> tuple[Tensor, LostRows]:
        """Note a call with lost rows. Return its anchor and the function that makes its contributions."""
        self.live.add(call)
        return self.anchor, call

    def plan(self, losses: Tensor) -> int:
        """The number of further backwards that are needed; 0 if no rows are lost.

        The digits of these backwards can tell 64 times as many samples apart. So a wrong ratio that is a power of two
        by chance has another number than the samples.

        Raises:
            ValueError: If a part of the graph computes in float16, whose gradients have no room for the powers.
        """
        nodes = list(nodes_of([losses])) if self.live else []
        self._calls = [call for node in nodes if isinstance(call := getattr(node, "contribute", None), LostRows)]
        if not self._calls:
            return 0
        if any(part.dtype == torch.float16 for node in nodes for part in node._input_metadata):
            raise self._calls[-1].refusal("a part of the graph computes in float16")
        passes = 1
        while BASE**passes < BASE * len(losses):
            passes += 1
        return passes

    def run(self, losses: Tensor, *, retain_graph: bool) -> None:
        """Run the further backwards."""
        engine, passes = self._engine, self.passes or 0
        numbers = self._random.sample(range(BASE**passes), len(losses)) if passes else []
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        inputs = [self.anchor, engine.anchor] if engine.processes.sharded else [self.anchor]
        for place in range(passes):
            digits = self._numbers // BASE**place % BASE + 1
            weights = torch.exp2(digits.double()).to(losses)
            try:
                again = retain_graph or place < passes - 1
                engine.repeat(losses, weights, inputs, probes=True, retain_graph=again)
            except Exception as error:  # of a loss that frees its memory, for example
                if not self._calls:  # they are in another process
                    raise
                raise self.refusal(error) from error

    def refusal(self, error: Exception) -> ValueError:
        """The error for a graph whose second backward raises an error."""
        return self._calls[-1].refusal(f"the graph cannot run backward twice ({error})")

    def receive(self, losses: Tensor) -> None:
        """Make the contributions of calls with lost rows."""
        captured = self._engine.captured
        for call in self._calls:
            captured.saw(call.layer, call.seen)
        captured.check_counts(len(losses), batch_first=self._engine.batch_first)
        for call in self._calls:
            for part in call.found(self._numbers, self.passes, losses):
                self._engine.receive(call.layer, part)

    def clear(self) -> None:
        """End `backward(losses)`."""
        for call in self._calls:
            call.clear()
        self._calls, self.passes = [], None


def _reason(rows: Tensor, losses: Tensor) -> str:
    """Why the samples of some rows were not found, from their gradients."""
    if not bool(rows.isfinite().all()):
        bad = (~losses.isfinite()).nonzero()[:, 0].tolist()
        return "their gradients are not finite" + (f", as the losses of samples {bad}" if bad else "")
    small, large = torch.finfo(rows.dtype).tiny * NORMAL, rows.abs().amax(-1)
    if bool(((large > 0) & (large < small)).any()):
        return f"some of their gradients are below {small:.0e}"
    return "some of them belong to several samples, or a function or a hook has a backward that is not linear"
