"""Chooses the rule for a module."""

from typing import Any

import torch
from torch import nn

# the base classes of all batch and instance norms, also of users' own; torch has them under private names only
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.utils import parametrize

from torchzero_clip.checks import instance
from torchzero_clip.per_sample.captured_layer import Rule
from torchzero_clip.per_sample.layer import trainable
from torchzero_clip.per_sample.rules.attention import AttentionRule
from torchzero_clip.per_sample.rules.bare import BareRule
from torchzero_clip.per_sample.rules.conv import ConvRule
from torchzero_clip.per_sample.rules.embedding import EmbeddingBagRule, EmbeddingRule
from torchzero_clip.per_sample.rules.experts import ExpertsRule, is_experts
from torchzero_clip.per_sample.rules.generic import GENERIC
from torchzero_clip.per_sample.rules.linear import LINEAR
from torchzero_clip.per_sample.rules.normalization import BATCH_NORM, GROUP_NORM, INSTANCE_NORM, LAYER_NORM, RMS_NORM
from torchzero_clip.per_sample.rules.recurrent import RecurrentRule
from torchzero_clip.per_sample.rules.registered import PerSampleGradients, RegisteredRule

BARE = BareRule()
EXPERTS = ExpertsRule()
RUNS = "forward", "_conv_forward"
"""Methods that run a layer. A class that overrides one does not get the rule of its base."""
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: LINEAR,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvRule()),
    nn.Embedding: EmbeddingRule(),
    nn.EmbeddingBag: EmbeddingBagRule(),
    nn.LayerNorm: LAYER_NORM,
    nn.RMSNorm: RMS_NORM,
    nn.GroupNorm: GROUP_NORM,
    BatchNorm: BATCH_NORM,
    InstanceNorm: INSTANCE_NORM,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), RecurrentRule()),
    nn.MultiheadAttention: AttentionRule(),
}


def register_rule(module_class: type[nn.Module], per_sample_gradients: PerSampleGradients) -> None:
    """Use a function for the per-sample gradients of all layers of one class, instead of the generic rule by vmap.

    The layer must return one tensor. The graph of its forward does not contain its parameters, so they get only the
    gradients that the function returns. `check_per_sample` checks these.

    Args:
        module_class: The class. Subclasses that have the same `forward` get the rule too.
        per_sample_gradients: A function of the layer, the gradient of its output, and the arguments of the call. It
            returns a dict with a tensor of shape (B, *shape) for every trainable parameter of the layer, by name.

    Raises:
        TypeError: If ``module_class`` is not a class of modules, or ``per_sample_gradients`` is not a function.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper, register_rule
        >>> class Scale(nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(size))
        ...
        ...     def forward(self, x):  # (B, T, size)
        ...         return x * self.weight
        >>> def gradients(module, grad_output, x):
        ...     return {"weight": (grad_output * x).sum(1)}
        >>> register_rule(Scale, gradients)
        >>> model = Scale(2)
        >>> clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
        >>> x = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[0.1, 0.1], [0.0, 0.0]]])
        >>> clipper.backward(model(x).sum((1, 2))).norms
        tensor([5.0000, 0.1414])
    """
    instance("module_class", module_class, type)
    if not issubclass(module_class, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"module_class must be a class of modules, got {module_class!r}")
    if not callable(per_sample_gradients):
        raise TypeError(f"per_sample_gradients must be a function, got {per_sample_gradients!r}")
    RULES[module_class] = RegisteredRule(per_sample_gradients)


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for a module; None for a container without own parameters or a rule for the whole of it."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):  # `refusal` has raised for one that trains
        return None
    run = [getattr(kind, name, None) for name in RUNS]  # a class that overrides one of them has no rule
    found = next((RULES[c] for c in kind.__mro__ if c in RULES and run == [getattr(c, n, None) for n in RUNS]), None)
    # an instance may have a convolution of its own, whose gradient the rule would not know
    if parametrize.is_parametrized(module) or "_conv_forward" in vars(module):
        return GENERIC
    if found is not None and found.covers_submodules:  # before the names of parameters are asked for, which vary
        return found
    if is_experts(module):
        return EXPERTS
    own = own_params(module)
    if found is not None and set(own.values()) <= {*found.takes} and not list(module.children()):
        return found
    if not own or kind.forward is nn.Module.forward:
        return None
    inside = [(rule_for(inner), inner) for inner in module.modules() if inner is not module and trainable(inner)]
    return GENERIC if any(rule is not None and rule.refusal(inner) is not None for rule, inner in inside) else BARE


def own_params(module: nn.Module) -> dict[int, str]:
    """The trainable parameters that a forward uses itself, those in lists of parameters included: id -> name."""
    found = {id(param): name for name, param in module.named_parameters(recurse=False) if param.requires_grad}
    for child in module.children():
        if not isinstance(child, torch.jit.ScriptModule) and type(child).forward is nn.Module.forward:
            found |= own_params(child)
    return found


def mixes(module: nn.Module) -> str | None:
    """The reason why a module mixes samples in its present mode, and the way out; None if it does not."""
    # without running statistics, it takes those of the batch in eval mode too
    if isinstance(module, BatchNorm) and (module.training or getattr(module, "running_mean", None) is None):
        return "it mixes the samples of a batch in training mode: call its eval(), or use GroupNorm or LayerNorm"
    return None


def refusal(module: nn.Module, *, batch_first: bool) -> str | None:
    """The reason why a module makes per-sample gradients of a model wrong, and the way out; None if there is none."""
    if isinstance(module, torch.jit.ScriptModule) and trainable(module):
        return "it is scripted, and has no forward in Python: use the module that it was made of"
    if isinstance(module, InstanceNorm) and module.track_running_stats:
        return "track_running_stats=True mixes the samples: use track_running_stats=False"
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        own: Any = module.self_attn.batch_first
        if own != batch_first:
            return (
                f"its linear layers see batch_first={own}, and batch_first={batch_first} was declared: give the layer "
                f"batch_first={batch_first} and remove the transposes around it. If all inputs of the model have the "
                f"batch in dimension {0 if own else 1}, declare batch_first={own} instead"
            )
    return None
