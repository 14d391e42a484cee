"""The errors for parameters that get a gradient from outside of the call of their layer."""

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.gradients.autograd_graph import leaves_of
from torchzero_clip.per_sample.rules.reruns import RERUN, RERUNS, rerun_error
from torchzero_clip.per_sample.whole import whole_line

NOT_CAPTURED = (
    "The forward may have run before the clipper was attached, or in a paused() block: "
    "run it again, or run the backward in that block. "
)


def outside_error(
    layers: Sequence[CapturedLayer], capture: Capture, name: str, *, ran: bool, reruns: bool
) -> RuntimeError:
    """The error for a parameter, by its name.

    ``ran`` says whether a forward was captured, and ``reruns`` whether this backward runs inside another.
    """
    layer = next((layer for layer in layers if RERUNS in layer.known and layer.has(name)), None)
    if layer is not None:
        return rerun_error(layer, f"{name!r} gets a gradient from modules that a backward runs")
    if reruns or name.rpartition(".")[0] in capture.reruns:
        way_out = f"It is used again in the backward: {RERUN}. "
    else:
        way_out = _way_out(capture, name) if ran else NOT_CAPTURED
    return RuntimeError(
        f"{name!r} got a gradient from outside the call of its layer, where samples cannot be told apart. "
        f"{way_out}For a penalty on parameters, use weight_decay"
    )


def _way_out(capture: Capture, name: str) -> str:
    """What to do if a parameter is used outside of the call of its layer, in a model whose forward was captured."""
    module, _, key = name.rpartition(".")
    owner = capture.model.get_submodule(module)
    made = leaves_of(x for x in vars(owner).values() if isinstance(x, Tensor))
    line = whole_line(capture.model, module, capture.reruns)
    if any(leaf is owner._parameters[key] for leaf in made):
        hooks = "Hooks such as that of torch.nn.utils.weight_norm make another tensor of it"
        return f"{hooks}: use torch.nn.utils.parametrizations{', or ' if line else ''}{line}. "
    if not line and isinstance(layer := vars(owner).get("forward"), CapturedLayer) and layer.rule.runs_layers:
        line = whole_line(capture.model, name, capture.reruns)  # the model itself
    return f"If the model uses it, {line or 'freeze it'}. "
