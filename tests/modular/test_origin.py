"""Parameters that a module gets after its optimizer was built: the optimizer does not train them, and says so once."""

import copy
import warnings

import pytest
import torch
from torch import nn

from torchzero_clip import Adam, ClipNorm, Modular

MESSAGE = r"the module has a gradient of '(\w+\.?\w+)'.*, which this optimizer does not have, so its steps"


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def backward(module):
    module(torch.ones(1, 2)).sum().backward()


def warnings_of(run):
    """The warnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


def step(module, optimizer, zero_grad=nn.Module.zero_grad):
    zero_grad(optimizer if zero_grad is Modular.zero_grad else module)
    backward(module)
    optimizer.step()


def replaced(module):
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def new_head(module):
    module[1] = nn.Linear(3, 1)


@pytest.mark.parametrize(
    ("change", "named"), [(replaced, "'0.weight' and of 3 more parameters"), (new_head, "'1.weight' and of 1 more p")]
)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_parameters_that_were_replaced_are_named_once(change, named, steps):
    module = model()
    optimizer = Modular(module, ClipNorm(1), Adam())
    for _ in range(steps):
        step(module, optimizer)
    change(module)
    texts = warnings_of(lambda: [step(module, optimizer) for _ in range(8)])
    assert len(texts) == 1
    assert f"the module has a gradient of {named}" in texts[0]
    assert "fully_shard and load_state_dict(assign=True)" in texts[0]
    assert "add_param_group" in texts[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert warnings_of(lambda: step(module, optimizer)) == []


def test_a_load_starts_the_search_anew():
    module = model()
    optimizer = Modular(module, ClipNorm(1), Adam(), fast=False)
    for _ in range(9):
        step(module, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    module.append(nn.Linear(1, 1, bias=False))
    with pytest.warns(UserWarning, match="the module has a gradient of '2.weight', which this"):
        step(module, optimizer)


def test_what_is_meant_gives_no_warning():
    module = model()
    module[1].requires_grad_(False)
    frozen = Modular(module, ClipNorm(1), Adam())
    some = Modular(module[0], ClipNorm(1), Adam())  # another optimizer has the rest
    listed = Modular(module.parameters(), ClipNorm(1), Adam())
    copied = copy.deepcopy(frozen)
    module.append(nn.Linear(1, 1))
    frozen.add_param_group({"params": list(module[2].parameters())})
    texts = warnings_of(lambda: [step(module, optimizer) for optimizer in (frozen, some, listed, copied)])
    assert texts == []
    module = model()
    tied = Modular(module, ClipNorm(1), Adam())
    module.append(nn.Linear(1, 1)).requires_grad_(True)[2].requires_grad_(False)
    assert warnings_of(lambda: [step(module, tied) for _ in range(4)]) == []


def test_the_optimizer_does_not_keep_the_module_alive():
    module = model()
    optimizer = Modular(module, ClipNorm(1), Adam())
    backward(module)
    params = list(module.parameters())
    del module
    assert optimizer._origin.module() is None
    optimizer.step()
    optimizer.zero_grad()
    assert [param.grad for param in params] == [None] * 4
