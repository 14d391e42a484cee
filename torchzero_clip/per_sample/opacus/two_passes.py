"""Two passes: a backward that shows the norms of the samples, and another one, which gives ordinary gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.engine import Engine, processes_of
from torchzero_clip.per_sample.gradients.captured_gradients import Forward
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.hooks import accumulate


class TwoPassEngine(Engine):
    """Shows the norms of a backward as ``norm_sample`` of the parameters, until the next forward.

    While ``enabled`` is False, backwards give ordinary gradients. Layers do not return gradients of parameters to
    autograd, so this class adds up the per-sample gradients.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        if processes_of(model)[0].group is not None:
            raise ValueError("two passes work in one process only: for several processes, use PerSampleGradientClipper")
        self.norms: Tensor | None = None
        """The norms of the last backward, after they were read; None after a forward."""
        super().__init__(model, **settings)
        self._allow_steps()  # gradients never wait: the second backward gives them

    @override
    def clear(self) -> None:
        super().clear()
        self._were_read = False
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # of the gradients of samples, with the parameter, by its id

    @override
    def discard(self) -> None:
        super().discard()
        self.norms = None

    @override
    def begin(self, forward: Forward) -> None:
        super().begin(forward)
        self.norms, self._were_read = None, False

    @override
    def refuse_forward(self) -> None:
        again = self._were_read
        self.clear()
        if again:
            raise RuntimeError(
                "a backward after get_clipping_coef() gave norms again, not gradients: call disable_hooks() before "
                "it, and enable_hooks() after it"
            )

    @override
    def receive(self, layer: CapturedLayer, part: Contribution) -> None:
        if self.enabled:
            super().receive(layer, part)
            return
        value = part.weighted_sum(torch.ones(part.batch_size, dtype=torch.float32, device="cpu"))
        earlier = self._sums.get(id(part.param))
        self._sums[id(part.param)] = part.param, value if earlier is None else earlier[1] + value

    @override
    def all_arrived(self) -> None:
        sums, self._sums = self._sums, {}
        accumulate(list(sums.values()))
        for part, squares in self.gathered(None).values() if self.waits else ():
            norms = (squares.sqrt() * self.scale(len(squares))).to(wide_dtype(part.param.dtype))
            # Opacus has the second name
            self.show(part.param, norm_sample=norms, _norm_sample=norms)

    def read_norms(self) -> Tensor | None:
        """The norms of the last backward, (B,); None after a forward. Reading drops the gradients of this backward."""
        if self.waits:
            squares = torch.stack([squares for _, squares in self.gathered(None).values()]).sum(0)
            self.clear()
            self.norms, self._were_read = squares.sqrt().mul_(self.scale(len(squares))).to(self.norm_dtype()), True
        return self.norms
