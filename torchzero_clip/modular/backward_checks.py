"""Raises for optimizers whose steps cannot be taken in the backward."""

import torch.distributed as dist

from torchzero_clip.compat import is_backward_compiled, is_distributed
from torchzero_clip.core.kinds import Gate
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.transform import treats_each_alone
from torchzero_clip.functional.lists import params_of
from torchzero_clip.modular.modular import Modular


def check_backward_steps(optimizer: Modular) -> None:
    """Raise if a step cannot be taken parameter by parameter."""
    for node in optimizer.runner.nodes:
        _refuse_transform(node)
    if optimizer.nonfinite != "propagate":
        raise ValueError(
            f"step_in_backward does not work with nonfinite={optimizer.nonfinite!r}, which decides about all gradients "
            "before the first update: leave it out, or take ordinary steps"
        )
    if optimizer.process_group is not None:
        raise ValueError("step_in_backward does not work with process_group=, which joins the norms of all gradients")
    if optimizer.runner.listener is not None:
        raise RuntimeError(
            "step_in_backward does not work with a listener, such as a Recorder, which needs all gradients at once: "
            "close it first, or take ordinary steps"
        )
    if is_backward_compiled():
        raise RuntimeError(
            "step_in_backward cannot be used with compiled autograd, whose hooks get no gradients: turn it off, or "
            "take ordinary steps. torch.compile of the model works"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _refuse_plain(optimizer)


def _refuse_transform(node: Node) -> None:
    transform = node.transform
    way_out = "use limits of single tensors, such as ClipNorm(1) or AdaptiveGradientClip(), or take ordinary steps"
    if isinstance(transform, Gate):
        problem = "decides about whole steps, and step_in_backward takes them in parts"
        raise ValueError(f"{transform!r} {problem}: {way_out}")
    if transform.target == "closure":
        raise ValueError(f"{transform!r} with target='closure' acts on the gradients that a closure leaves: {way_out}")
    if not treats_each_alone(transform) or node.global_keys:
        raise ValueError(
            f"{transform!r} may need the gradients of several parameters at once, and step_in_backward frees each "
            f"gradient before the next one exists: {way_out}. A transform of your own that treats each tensor alone "
            "says so by each_alone = True in its class"
        )


def _refuse_plain(optimizer: Modular) -> None:
    params = params_of(optimizer.param_groups)
    if any(param.requires_grad and not is_distributed(param) for param in params):
        raise ValueError(
            "step_in_backward cannot update plain parameters if there are several processes, even in a pipeline "
            "without DDP, because it cannot see whether gradients are averaged afterwards, as DDP does. Shard the "
            "model by fully_shard (FSDP2), or take ordinary steps"
        )
