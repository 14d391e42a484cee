"""Two passes: a backward that shows the norms of the samples, and another one, which gives ordinary gradients.

`create_norm_sample` shows norms of other per-sample gradients in the same way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.checks import count, instance
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.per_sample.engine import Engine, processes_of
from torchzero_clip.per_sample.gradients.captured_gradients import Forward
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.gradients.row_norms import joint_norms, norms_of_rows, stacked
from torchzero_clip.per_sample.hooks import accumulate
from torchzero_clip.per_sample.layer import Layer


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
    def begin_forward(self, forward: Forward) -> None:
        super().begin_forward(forward)
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
    def receive(self, layer: Layer, part: Contribution) -> None:
        if self.enabled:
            super().receive(layer, part)
            return
        value = part.weighted_sum(torch.ones(part.batch_size, dtype=torch.float32, device="cpu"))
        earlier = self._sums.get(id(part.param))
        self._sums[id(part.param)] = part.param, value if earlier is None else earlier[1] + value

    @override
    def backward_ended(self, task: int) -> None:
        super().backward_ended(task)
        if self.tasks:
            return
        sums, self._sums = self._sums, {}
        accumulate(list(sums.values()))
        if self.prover.loss_count is None:
            self.check_joined()
        for part, norms in self.gathered(None).values() if self.captured.by_param else ():
            norms = (norms * self.loss_scale(len(norms))).to(wide_dtype(part.param.dtype))
            # Opacus has the second name
            self.set_attributes(part.param, norm_sample=norms, _norm_sample=norms)

    def read_norms(self) -> Tensor | None:
        """The norms of the last backward, (B,); None after a forward. Reading drops the gradients of this backward."""
        if self.captured.by_param:
            norms = joint_norms(stacked([norms for _, norms in self.gathered(None).values()]))
            self.clear()
            self.norms, self._were_read = norms.mul_(self.loss_scale(len(norms))).to(self.norm_dtype()), True
        return self.norms


def create_norm_sample(*, param: Tensor, grad_sample: Tensor, max_batch_len: int) -> None:
    """Set ``param.norm_sample`` to the norms of the per-sample gradients; a frozen parameter gets no attribute.

    Args:
        param: The parameter.
        grad_sample: Its per-sample gradients, (B, *param.shape).
        max_batch_len: The length of the attribute, at least B: the norms are followed by zeros.

    Raises:
        ValueError: If the shapes do not fit, or B is above ``max_batch_len``.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import create_norm_sample
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> create_norm_sample(param=param, grad_sample=torch.tensor([[3.0, 4.0]]), max_batch_len=2)
        >>> param.norm_sample
        tensor([5., 0.])
    """
    instance("param", param, Tensor)
    instance("grad_sample", grad_sample, Tensor)
    count("max_batch_len", max_batch_len)
    if grad_sample.shape[1:] != param.shape or grad_sample.ndim == 0:
        raise ValueError(f"grad_sample must have shape {('B', *param.shape)}, got {tuple(grad_sample.shape)}")
    if len(grad_sample) > max_batch_len:
        raise ValueError(f"max_batch_len must be at least the {len(grad_sample)} samples, got {max_batch_len}")
    if param.requires_grad:
        target: Any = param
        norms = torch.zeros(max_batch_len, dtype=wide_dtype(param.dtype), device=param.device)
        norms[: len(grad_sample)] = norms_of_rows(grad_sample.detach())
        target.norm_sample = target._norm_sample = norms
