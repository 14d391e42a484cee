"""Results depend on no default dtype and device of the process, and on no negation that is pending in gradients."""

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    gradients,
    parameters,
    set_grads,
    through_file,
    train,
    values,
)
from defaults import DEFAULTS

from torchzero_clip import Modular

LOSS = 1.1  # float32 does not hold it exactly


def run(entry, params, grads, fast):
    """Two steps, a checkpoint, and two steps of the optimizer that loads it: its metrics and its checkpoint."""
    optimizer = Modular(params, entry.make(), fast=fast)
    train(optimizer, params, grads[:2])
    saved = through_file(optimizer.state_dict())
    optimizer = Modular(params, entry.make(), fast=fast)
    optimizer.load_state_dict(saved)
    for row in grads[2:]:
        set_grads(params, row)
        optimizer.step(lambda: LOSS)
    return optimizer.metrics(), optimizer.state_dict()


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("default", ["float64 by default", "another device by default"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_defaults_of_the_process_do_not_matter(entry, default, fast):
    params, others = parameters(), parameters()
    grads = gradients(params, 4)
    expected = run(entry, params, grads, fast)
    with DEFAULTS[default]():
        found = run(entry, others, grads, fast)
    assert_equal(others, params)
    assert all(value.device.type == "cpu" for value in found[0].values())
    for state in found[1]["state"].values():
        if "wrap/step" in state:  # torch's optimizers count steps in float64 if that is the default
            state["wrap/step"] = state["wrap/step"].float()
    assert_same_checkpoint(found, expected)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_gradients_whose_negation_is_pending(entry, options, fast):
    """Every second step has them, because a step checks only once what gradients of one layout are like."""
    params, others = parameters(), parameters()
    plain, lazy = (
        Modular(params, entry.make(), fast=fast, **options),
        Modular(others, entry.make(), fast=fast, **options),
    )
    # the means of gradients that are all plain are taken together, so that they are rounded in another way
    tolerance = 1e-6 if entry.name == "Centralize" and fast else 0
    for k, row in enumerate(gradients(params, 4)):
        for param, other, grad in zip(params, others, row, strict=True):
            param.grad = grad.clone()
            other.grad = torch.complex(grad, -grad).conj().imag if k % 2 == 0 else grad.clone()
            assert other.grad.is_neg() == (k % 2 == 0)
        plain.step()
        lazy.step()
        pairs = [(other, param) for param, other in zip(params, others, strict=True)]
        for found, expected in [*pairs, *((other.grad, param.grad) for other, param in pairs)]:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            assert not found.is_neg()
    assert_same_checkpoint(lazy.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.name != "Muon+Adam"], ids=str)  # Muon takes no complex ones
def test_gradients_of_other_dtypes_whose_negation_is_pending(entry, dtype):
    params, others = parameters(dtype), parameters(dtype)
    plain, lazy = Modular(params, entry.make()), Modular(others, entry.make())
    tolerance = 1e-12 if entry.name == "Centralize" and dtype == torch.float64 else 0  # as above
    for row in gradients(params, 3):
        for param, other, grad in zip(params, others, row, strict=True):
            param.grad, other.grad = grad.clone(), torch._neg_view(-grad)
        plain.step()
        lazy.step()
    torch.testing.assert_close(values(others), values(params), rtol=tolerance, atol=tolerance)
