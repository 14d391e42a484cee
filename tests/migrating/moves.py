"""Optimizers of torch with the chains that stand for them, and chains that go on where an optimizer is."""

from contract.training import SHAPES, gradients, parameters, through_file, train, values
from torch import nn, optim

from torchzero_clip import LR, SGD, Adam, AdamW, Modular, WeightDecay, Wrap, from_torch_optim

PAIRS = {
    "AdamW": (
        lambda p: optim.AdamW(p, 0.1, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.2),
        lambda: [Adam(fused=False), WeightDecay(0.0), LR(1.0)],
    ),
    "Adam": (lambda p: optim.Adam(p, 0.1), lambda: Adam(fused=False)),
    "Adam foreach": (lambda p: optim.Adam(p, 0.1, foreach=True), lambda: Adam(fused=False)),
    "Adam L2": (lambda p: optim.Adam(p, 0.1, weight_decay=0.2), lambda: [WeightDecay(0.0), Adam(fused=False)]),
    "SGD": (lambda p: optim.SGD(p, 0.1), lambda: SGD(fused=False)),
    "SGD momentum": (
        lambda p: optim.SGD(p, 0.1, 0.9, dampening=0.3, weight_decay=0.2),
        lambda: [WeightDecay(0.0), SGD(fused=False)],
    ),
    "SGD nesterov": (
        lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True),
        lambda: SGD(momentum=0.5, nesterov=True, fused=False),
    ),
    "Wrap": (lambda p: optim.NAdam(p, 0.1, weight_decay=0.2), lambda: Wrap(optim.NAdam)),
    "Wrap AdamW": (lambda p: optim.AdamW(p, 0.1, amsgrad=True), lambda: Wrap(optim.AdamW, amsgrad=True)),
    "AdamW fused": (
        lambda p: optim.AdamW(p, 0.1, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.2, fused=True),
        lambda: [Adam(), WeightDecay(0.0), LR(1.0)],
    ),
    "AdamW fused amsgrad": (
        lambda p: optim.AdamW(p, fused=True, amsgrad=True),
        lambda: AdamW(amsgrad=True, fused=True),
    ),
    "Adam fused": (lambda p: optim.Adam(p, 0.1, fused=True), lambda: Adam()),
    "SGD fused": (lambda p: optim.SGD(p, 0.1, fused=True), lambda: SGD()),
    "SGD fused momentum": (lambda p: optim.SGD(p, 0.1, 0.9, dampening=0.3, fused=True), lambda: SGD()),
    "SGD fused nesterov": (
        lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True, fused=True),
        lambda: SGD(momentum=0.5, nesterov=True),
    ),
}


def ran(make, steps, shapes=SHAPES):
    """Parameters and an optimizer of torch after some steps."""
    params = parameters(shapes=shapes)
    old = make(params)
    train(old, params, gradients(params, steps))
    return params, old


def twin(params):
    return [nn.Parameter(value) for value in values(params)]


def moved_to(params, old, *chain):
    """Copies of the parameters, and a chain that goes on where an optimizer of torch is."""
    moved = twin(params)
    optimizer = Modular(moved, *chain)
    optimizer.load_state_dict(from_torch_optim(through_file(old.state_dict()), optimizer))
    return moved, optimizer
