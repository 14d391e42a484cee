"""Frozen attention modules of torch in eval mode, whose fast path returns zeros for padding."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.samples.arguments import tensors_in
from torchzero_clip.per_sample.samples.following import without_own_modes
from torchzero_clip.per_sample.samples.labels import LOST, Known, Place, place_of, step_at

KINDS = nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention


class FastPathRule(Rule):
    """Runs frozen attention outside of the clipper's modes, because torch takes its fast path only there.

    The first output has the samples in the batch dimension of the module if all arguments with samples have them there.
    The samples of other outputs are lost.
    """

    runs_layers = True  # in training mode the functions of the module are followed
    runs_empty = True

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> object:
        module, provenance = layer.module, layer.engine.forward.provenance
        if module.training:
            return type(module).forward(module, *args, **kwargs)
        inputs = tensors_in((args, kwargs))
        with without_own_modes():
            output = type(module).forward(module, *args, **kwargs)
        found = [(x, labels) for x in inputs if provenance and (labels := provenance.of(x)) is not None]
        if provenance and found:
            place = _place(module, provenance.count, found)
            for i, x in enumerate(tensors_in(output)):
                known = place is not None and i == 0 and x.ndim == 3 and x.shape[place.dim] == provenance.count
                provenance.note(x, step_at(place, tuple(x.shape)) if known else LOST)
        return output


def _place(module: nn.Module, count: int, inputs: Sequence[tuple[Tensor, Known]]) -> Place | None:
    """Where the samples are in inputs of three dimensions; None if some are elsewhere, or in another order."""
    batch_first = next(m.batch_first for m in module.modules() if isinstance(m, nn.MultiheadAttention))
    dim = 0 if batch_first else 1
    for x, labels in inputs:
        expected = Place(dim if x.ndim == 3 else 0)  # masks of padding have two dimensions
        if isinstance(labels, Tensor) or place_of(labels, tuple(x.shape), count) != expected:
            return None
    return Place(dim)
