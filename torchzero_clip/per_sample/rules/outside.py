"""Gradients from outside of the call of a layer, which are refused, because samples cannot be told apart there.

Functions such as adjoint methods, reversible layers and checkpoints by hand run modules again in their backward. A
layer that runs again is captured then, as in a reentrant checkpoint. A module that is run whole is not: its forward got
copies of the parameters, and the function gives gradients to the parameters themselves, which the copies miss.
`torch.utils.checkpoint` with ``use_reentrant=False`` runs modules again only to restore tensors, which is right.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from torchzero_clip.compat import current_graph_task_id, is_restored_by_checkpoint
from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.gradients.autograd_graph import leaves_of, nodes_of
from torchzero_clip.per_sample.hooks import Hook
from torchzero_clip.per_sample.samples.call import call_of
from torchzero_clip.per_sample.whole import whole_hint

RERUN = (
    "instead of an adjoint method, a reversible layer or a checkpoint written by hand, let autograd differentiate the "
    "modules, or use torch.utils.checkpoint with use_reentrant=False"
)
"""The way out of a function that runs modules again."""
NOT_CAPTURED = (
    "The forward may have run before the clipper was attached, or in a paused() block: "
    "run it again, or run the backward in that block. "
)


def hook_modules(layer: CapturedLayer) -> None:
    """Raise if a module in a layer that is run whole runs in a backward."""
    if not layer.learnt.has_hooks:
        layer.learnt.has_hooks = True
        hook = Hook(partial(_refuse, layer))
        inside = [module for module in layer.module.modules() if module is not layer.module]
        layer.capture.handles += [module.register_forward_pre_hook(hook) for module in inside]


def note_functions(layer: CapturedLayer, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
    """Note, for an error in the backward, if the graph of a layer that is run whole has a `torch.autograd.Function`."""
    if layer.learnt.may_rerun:
        return
    nodes: Iterable[Node] = {*nodes_of(outputs)}.difference(nodes_of(inputs))
    if any(isinstance(node, BackwardCFunction) and call_of(node) is None for node in nodes):
        layer.learnt.may_rerun = True


def rerun_error(layer: CapturedLayer, what: str) -> RuntimeError:
    """The error for a layer that is run whole, and has a function that runs modules again."""
    return RuntimeError(f"{layer} runs sample by sample, but {what}, where samples cannot be told apart: {RERUN}")


def outside_error(
    layers: Sequence[CapturedLayer], capture: Capture, name: str, *, ran: bool, reruns: bool
) -> RuntimeError:
    """The error for a parameter, by its name.

    ``ran`` says whether a forward was captured, and ``reruns`` whether this backward runs inside another.
    """
    layer = next((layer for layer in layers if layer.learnt.may_rerun and layer.has(name)), None)
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


def _refuse(layer: CapturedLayer, module: nn.Module, *_: object) -> None:
    """Raise if a module runs in a backward, other than to restore what a checkpoint has freed."""
    capture = layer.capture
    if (
        capture.runs_whole
        or current_graph_task_id() == -1
        or not torch.is_grad_enabled()
        or is_restored_by_checkpoint()
    ):
        return
    if capture.enabled and capture.is_active and capture.forward.captured:
        capture.clear()
        name = next(name for name, inner in capture.model.named_modules() if inner is module)
        raise rerun_error(layer, f"a function runs {name!r} again in its backward")


def _way_out(capture: Capture, name: str) -> str:
    """What to do if a parameter is used outside of the call of its layer, in a model whose forward was captured."""
    module, _, key = name.rpartition(".")
    owner = capture.model.get_submodule(module)
    made = leaves_of(x for x in vars(owner).values() if isinstance(x, Tensor))
    hint = whole_hint(capture.model, module, capture.reruns)
    if any(leaf is owner.get_parameter(key) for leaf in made):
        hooks = "Hooks such as that of torch.nn.utils.weight_norm make another tensor of it"
        return f"{hooks}: use torch.nn.utils.parametrizations{', or ' if hint else ''}{hint}. "
    if not hint and isinstance(layer := vars(owner).get("forward"), CapturedLayer) and layer.rule.runs_layers:
        # nothing around the owner can run whole, so the hint names the owner
        hint = whole_hint(capture.model, name, capture.reruns)
    return f"If the model uses it, {hint or 'freeze it'}. "
