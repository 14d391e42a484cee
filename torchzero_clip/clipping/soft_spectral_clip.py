"""A soft limit of singular values."""

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import positive
from torchzero_clip.checks import steps as check_steps
from torchzero_clip.compat import without_autocast
from torchzero_clip.core.transform import TensorwiseTransform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.norms import norm
from torchzero_clip.functional.shards import laid_out_as, replicated
from torchzero_clip.types import Schedule, Setting, State, Target


class SoftSpectralClip(TensorwiseTransform):
    """Brings the singular values σ of each matrix smoothly below ``limit``.

        σ ← σ / √(1 + σ² / limit²)

    Small singular values hardly change, large ones become about equal to the limit, and singular vectors do not change.
    The matrix is multiplied by (I + u uᵀ / limit²)^(-1/2), computed in ``steps`` Newton-Schulz iterations. They are
    accurate to 2 % for singular values up to half of ``1.5 ** steps`` times the limit. If one is larger, small singular
    values shrink too. Tensors of more than two dimensions are treated as matrices with their first dimension as rows.

    A vector or scalar with a norm n up to the limit is unchanged. Above the limit its norm becomes
    ``n / √(1 + n² / limit²)``. So the norm drops by a factor of √2 at the limit.

    Exclude embeddings with ``.without("embed*")``: their rows are looked up one by one, and the matrix products are
    large.

    Args:
        limit: The limit of singular values, > 0, in units of the update; a setting of the param groups. The paper uses
            10 for updates of an optimizer and 0.1 for gradients.
        steps: The number of iterations, at least 1.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, or an unknown ``target``.
        TypeError: For an argument of the wrong type.

    Half precision is computed in float32. A tensor that is not finite passes unchanged. A sharded matrix is gathered on
    each rank. It has no state. Each iteration but the first takes three products of small Gram matrices. Two more
    products take the complete matrix.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, SoftSpectralClip
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Modular([weight], SoftSpectralClip(1.0))
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
        >>> optimizer.step()
        >>> [round(-x, 4) for x in weight.diag().tolist()]
        [0.9487, 0.0995]

    Source: [Enhancing LLM training via spectral clipping](https://arxiv.org/abs/2603.14315), 2026.
    """

    pure = True
    checks = {"limit": positive}

    def __init__(
        self, limit: float | Schedule, *, steps: int = 10, target: Target = "update", name: str | None = None
    ) -> None:
        check_steps("steps", steps)
        self.steps = steps
        super().__init__({"limit": limit}, target=target, name=name)

    @override
    def apply_tensor(
        self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Tensor | float | None, state: State, setting: Setting
    ) -> Tensor:
        limit, dtype = setting["limit"], torch.promote_types(tensor.dtype, torch.float32)
        if tensor.ndim < 2:
            length = norm(tensor).to(tensor.device)
            shrunk = torch.hypot(length / limit, torch.ones_like(length)).reciprocal()
            factor = torch.where((length > limit) & length.isfinite(), shrunk, 1.0)
            foreach.copy_([tensor], [tensor.to(dtype) * factor])
            return tensor
        whole = replicated(tensor)
        with without_autocast(whole):  # it would multiply matrices in half precision
            result = _soft(whole.to(dtype).flatten(1), limit, self.steps).to(whole.dtype).view_as(whole)
        return laid_out_as(torch.where(whole.isfinite().all(), result, whole), tensor)


def _soft(matrix: Tensor, limit: float, count: int) -> Tensor:
    """The matrix with its singular values below the limit."""
    if not matrix.numel():
        return matrix
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mH if is_tall else matrix
    largest = x.abs().amax().clamp(min=torch.finfo(matrix.dtype).tiny)
    reach = (torch.linalg.matrix_norm(x / largest) * largest).clamp(min=limit)
    x = x / reach  # of norm at most 1, so that nothing overflows
    one = torch.eye(x.shape[0], dtype=x.dtype, device=x.device)
    gram = one * (limit / reach).square() + x @ x.mH
    size = torch.linalg.matrix_norm(gram)  # at least the largest eigenvalue, so that the iteration converges
    root = gram / size
    inverse = factor = 1.5 * one - 0.5 * root  # of the first step: its inverse is still the identity
    for _ in range(count - 1):
        root = root @ factor
        factor = torch.addmm(one, inverse, root, beta=1.5, alpha=-0.5)
        inverse = factor @ inverse
    result = (inverse @ x) * (limit * size.rsqrt())
    return result.mH if is_tall else result
