"""Normalization within a sample: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and BatchNorm in eval mode."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule, with_strides
from torchzero_clip.per_sample.gradients.contributions import Dense
from torchzero_clip.per_sample.rules.copies import EMPTY, copy_of


class NormalizationRule(Rule):
    """Weight: output gradient times normalized input. Bias: output gradient. Both are summed over other dimensions.

    ``function`` is that of torch, and ``settings`` are arguments of it that are attributes of the layer, as the
    parameters that it ``takes`` are. With ``channels``, these have the second dimension, instead of the last ones.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *settings: str,
        channels: bool = False,
        takes: Sequence[str] = ("weight", "bias"),
    ) -> None:
        self._function, self._settings, self._channels, self.takes = function, settings, channels, takes
        self.runs_empty = channels  # instance_norm of torch raises for them if it has a weight

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        if self._channels and layer.capture.forward.batch_size == 0 and len(input):  # rows that all samples share
            return EMPTY.run(layer, input)
        module: Any = layer.module
        affine = {name: x.detach() for name in self.takes if (x := getattr(module, name)) is not None}
        ndim = next(iter(affine.values())).ndim
        settings = {name: getattr(module, name) for name in self._settings}  # they may change before the next call
        # InstanceNorm takes inputs without a batch, which `find_samples` refuses; their ndim has no public name
        unbatched = module._get_no_batch_dim() if hasattr(module, "_get_no_batch_dim") else 0
        leading = int(input.ndim != unbatched) if self._channels else input.ndim - ndim
        found = layer.find_samples(input, leading, takes_positions=not self._channels)

        def summed(grads: Tensor) -> Tensor:
            others = range(2, grads.ndim) if self._channels else range(1, grads.ndim - ndim)
            return grads.sum(tuple(others)) if others else grads

        return layer.watch_params(
            laid(self._function(found.tensor, **affine, **settings)),
            found,
            layer.params,
            weight=lambda x, grad: Dense(layer.params["weight"], summed(grad * self._function(x, **settings))),
            bias=summed,
        )


class GroupNormRule(NormalizationRule):
    """GroupNorm, where possible with a copy of the parameters for each sample, at the cost of an ordinary backward.

    The kernel gets the batch as one sample with B times the channels.
    """

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        # copies in half precision would get rounded gradients
        affine = [x for x in (module.weight, module.bias) if x is not None]
        dtypes, lower = {x.dtype for x in (input, *affine)}, torch.is_autocast_enabled(input.device.type)
        fits = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and not lower
        # the kernel refuses one sample with one value in each group
        fits = fits and len(affine) == 2 and input.numel() > len(input) * module.num_groups
        found = layer.find_samples(input, 1) if fits and layer.capture.forward.batch_size != 0 else None
        if found is None or found.is_shared:
            return super().run(layer, input)
        x, own = found.tensor, {id(value): param for param, value in layer.values}
        on_shared = None if x.requires_grad else partial(layer.shared.note, found, layer.capture.forward)
        weight, bias = (
            copy_of(layer, own[id(value)], value, len(x), on_shared, beside=[x], ordered=False)
            if id(value) in own
            else value.expand(len(x), -1)
            for value in affine
        )
        one = x.reshape(1, weight.numel(), *x.shape[2:])
        return F.group_norm(one, len(x) * module.num_groups, weight.flatten(), bias.flatten(), module.eps).view_as(x)


def laid(output: Tensor) -> Tensor:
    """The output, whose gradient gets its layout if it is of one image: see `with_strides`."""
    node = output.grad_fn
    # only the name tells which kernel torch has chosen
    if node is not None and len(output) == 1 and node.name() == "NativeBatchNormBackward0":
        node.register_prehook(partial(_first_with_strides, output.stride()))
    return output


def _first_with_strides(strides: tuple[int, ...], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return with_strides(strides, grads[0]), *grads[1:]


def _instance_norm(input: Tensor, **settings: Any) -> Tensor:
    return F.group_norm(input, input.shape[1], **settings)  # every channel is a group


LAYER_NORM = NormalizationRule(F.layer_norm, "normalized_shape", "eps")
RMS_NORM = NormalizationRule(F.rms_norm, "normalized_shape", "eps", takes=["weight"])
GROUP_NORM = GroupNormRule(F.group_norm, "num_groups", "eps", channels=True)
INSTANCE_NORM = NormalizationRule(_instance_norm, "eps", channels=True)
BATCH_NORM = NormalizationRule(F.batch_norm, "running_mean", "running_var", "eps", channels=True)  # in eval mode
