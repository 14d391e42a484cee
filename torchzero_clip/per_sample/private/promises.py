"""Checks on which the guarantee of a step rests: no sample adds more than the limit, and no buffer changes.

Buffers are parts of the model that get no noise.
"""

import torch
from torch import Tensor, nn

from torchzero_clip.functional.dtypes import widened
from torchzero_clip.functional.shards import local
from torchzero_clip.per_sample.gradients.autograd_graph import leaves_of
from torchzero_clip.per_sample.gradients.row_norms import joint_norms
from torchzero_clip.per_sample.norm_clippers import NormClipper
from torchzero_clip.per_sample.processes.sharding import reshard
from torchzero_clip.per_sample.weighting import ClippingResult

_LARGEST = 1e30  # sums of larger gradients could overflow in float32, which would tell that they are there
_ROUNDING = 1e-5  # how far the norm of a clipped gradient may be above the limit, relative to it


def joint_limit(norm_clipper: NormClipper, params: int) -> float:
    """The norm of the vector of limits, for so many parameter tensors. Raise if their number or a limit is wrong."""
    limits = norm_clipper.thresholds.detach().cpu().double().flatten()
    if norm_clipper.is_per_layer and len(limits) == 1:
        limits = limits.expand(params)
    expected = params if norm_clipper.is_per_layer else 1
    if len(limits) != expected:
        raise ValueError(f"norm_clipper must have {expected} limits, got {len(limits)}: {norm_clipper!r}")
    if not bool(((limits >= 0) & (limits <= _LARGEST)).all()):
        raise ValueError(f"the limits of norm_clipper must be between 0 and {_LARGEST}, got {limits.tolist()}")
    return float(torch.linalg.vector_norm(limits))


def check_within(limit: float, norm_clipper: NormClipper, result: ClippingResult) -> None:
    """Raise a RuntimeError if the clipped gradient of a sample is above the joint limit."""
    if isinstance(result.factors, Tensor):
        added = (result.factors * result.norms).abs()
    else:
        pairs = zip(result.factors, result.param_norms.values(), strict=True)
        added = joint_norms(widened(torch.stack([factors * norms for factors, norms in pairs])))
    if not bool((added.masked_fill(result.nonfinite, 0) <= limit * (1 + _ROUNDING)).all()):  # also if one is NaN
        raise RuntimeError(
            f"{norm_clipper!r} breaks its own limit: the norm of a clipped gradient is above {limit}. "
            "Factor times norm must not exceed the limit for any norm. Nothing was changed"
        )


def refuse_other_leaves(losses: Tensor, inside: set[int]) -> None:
    """Raise a RuntimeError if the backward of the losses may give a gradient to another leaf than some parameters."""
    for leaf in leaves_of([losses]):
        if id(leaf) not in inside:
            raise RuntimeError(
                f"a tensor of shape {tuple(leaf.shape)} outside of the module would get a gradient that is not clipped "
                "and has no noise. Put it into the module that the clipper was made for, such as a parent of the model "
                "and its head, or call requires_grad_(False) on it"
            )


class Buffers:
    """Notices changes of buffers between the first forward after a release and the next release.

    Buffers are compared by value, because a change of ``buffer.data`` does not raise their version. Integers of one
    element are excepted: they count steps. Frozen parameters are watched too, by version, because they may be large.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.note()

    def note(self) -> None:
        """Begin anew."""
        # what fully_shard shows during a forward has versions of its own, and is old after a step without a backward
        reshard(self._model)
        self._known = {name: buffer.detach().clone() for name, buffer in fixed_buffers(self._model).items()}
        self._frozen = {
            name: (param, _versions(param)) for name, param in self._model.named_parameters() if _is_frozen(param)
        }
        self._is_fresh = True

    def changed(self) -> str | None:
        """The name of a buffer or frozen parameter that has changed, or of a buffer that was added or removed."""
        found = fixed_buffers(self._model)
        for name in self._known | found:
            if name not in found or name not in self._known or not _equal(self._known[name], found[name]):
                return name
        for name, (param, versions) in self._frozen.items():
            if _is_frozen(param) and _versions(param) != versions:
                return name
        return None

    def forward_began(self, *_: object) -> None:
        """The hook of the model before its forward."""
        if self._is_fresh:  # what the user has changed before, such as by load_state_dict, does not count
            self.note()
        self._is_fresh = False


def _is_frozen(param: nn.Parameter) -> bool:
    return not (param.requires_grad or param.is_inference())  # tensors of inference have no version


def _versions(param: nn.Parameter) -> tuple[int, int]:
    """The version counters of a parameter and of its local shard. A change in place raises at least one of them."""
    return param._version, local(param)._version


def fixed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that must not change, by name."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.numel() != 1 or buffer.is_floating_point() or buffer.is_complex()
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same bytes, also in place of a NaN."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    one, other = (value.detach().to_dense().contiguous().view(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(one, other)
