"""An optimizer of a chain and that of torch with the same arguments, parameters and gradients."""

import copy

import torch
from torch import nn

from torchzero_clip import WeightDecay


def same(ours, theirs, *args, decay=None, **kwargs):
    """Two functions: one makes the chain, and one torch's optimizer of parameters. ``decay`` adds to the gradients."""

    def chain(**fused):
        rule = ours(*copy.deepcopy(args), **kwargs, **fused)  # schedulers write to tensors
        return rule if decay is None else [WeightDecay(decay), rule]

    def optimizer(params, **fused):
        own = kwargs if decay is None else {**kwargs, "weight_decay": decay}
        return theirs(params, *copy.deepcopy(args), **own, **fused)

    return chain, optimizer


def two_of(values):
    return tuple([nn.Parameter(value.clone()) for value in values] for _ in range(2))


def same_gradients(params, other, size=1.0):
    for a, b in zip(params, other, strict=True):
        a.grad = torch.randn_like(a) * size
        b.grad = a.grad.clone()
