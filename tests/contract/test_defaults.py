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


@pytest.mark.parametrize(
    ("default", "fast"),
    [("float64 by default", True), ("float64 by default", False), ("another device by default", True)],
)
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


WAYS = [(torch.float32, True, False), (torch.float32, False, True)]
WAYS += [(dtype, True, True) for dtype in (torch.bfloat16, torch.complex64)]


@pytest.mark.parametrize(("dtype", "fast", "maximize"), WAYS, ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_gradients_whose_negation_is_pending(entry, dtype, fast, maximize):
    """Every second step has them, because a step checks only once what gradients of one layout are like."""
    if dtype.is_complex and entry.name == "Muon+Adam":
        pytest.skip("Muon takes no complex parameters")
    params, others = parameters(dtype), parameters(dtype)
    plain, lazy = (Modular(p, entry.make(), fast=fast, maximize=maximize) for p in (params, others))
    # the means of gradients that are all plain are taken together, so that they are rounded in another way
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 0) if entry.name == "Centralize" and fast else 0

    def negated(grad):
        return torch.complex(grad, -grad).conj().imag if dtype == torch.float32 else torch._neg_view(-grad)

    for k, row in enumerate(gradients(params, 4)):
        for param, other, grad in zip(params, others, row, strict=True):
            param.grad = grad.clone()
            other.grad = negated(grad) if k % 2 == 0 else grad.clone()
            assert other.grad.is_neg() == (k % 2 == 0)
        plain.step()
        lazy.step()
        pairs = [(other, param) for param, other in zip(params, others, strict=True)]
        for found, expected in [*pairs, *((other.grad, param.grad) for other, param in pairs)]:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            assert not found.is_neg()
    assert_same_checkpoint(lazy.state_dict(), plain.state_dict())
