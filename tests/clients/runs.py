"""A small task that every client trains, with the same numbers in each run."""

import io

import torch
from torch import nn

STEPS = 16
SPIKE = 12  # this batch has gradients that are about 1e3 times as long


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def set_gradients(model, step):
    """Those of a regression, with a spike."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    loss = (model(x) - x[:, :2].sin()).square().mean()
    (loss * (1e3 if step == SPIKE else 1)).backward()


def norm(model):
    return torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item()


def train(model, optimizer, steps=range(STEPS), clip=None):
    """Train. Return the norms of the gradients before any clipping."""
    norms = []
    for step in steps:
        set_gradients(model, step)
        norms.append(norm(model))
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
    return norms


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
