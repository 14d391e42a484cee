"""A run moves from an optimizer of torch to a chain and back, and takes the same steps to the last bit.

Runs of torch's fused optimizers do so with the default, runs of torch's loop with ``fused=False`` in the chain.
"""

import pytest
import torch
from contract.training import assert_equal, gradients, parameters, through_file, train
from migrating.moves import PAIRS, moved_to, twin
from test_examples import example
from torch import optim

from torchzero_clip import (
    SGD,
    Adam,
    AdamW,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Wrap,
    from_torch_optim,
    to_torch_optim,
)

# the chain's SGD takes the loop in bfloat16, where torch's kernel is wrong
CASES = [(n, d) for n in PAIRS for d in (torch.float32, torch.bfloat16) if "SGD fused" not in n or d == torch.float32]


def groups_of(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]


@pytest.mark.parametrize("clip", [lambda: ClipNorm(1e9, dim="global"), lambda: ClipNormGrowth(mul=1e9)])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_goes_on_bit_for_bit_where_clipping_is_inactive(name, dtype, clip):
    make, chain = PAIRS[name]
    params = parameters(dtype)
    old = make(groups_of(params))
    scheduler = optim.lr_scheduler.ExponentialLR(old, 0.9)
    grads = gradients(params, 9)
    train(old, params, grads[:3])
    scheduler.step()
    saved, progress = through_file(old.state_dict()), through_file(scheduler.state_dict())

    moved = twin(params)
    optimizer = Modular(groups_of(moved), clip(), chain())
    optimizer.load_state_dict(from_torch_optim(saved, optimizer))
    second = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    second.load_state_dict(progress)
    optimizer.load_state_dict(from_torch_optim(saved, optimizer))  # a new scheduler sets the lr anew
    assert [g["initial_lr"] for g in optimizer.param_groups] == [g["initial_lr"] for g in old.param_groups]
    for row in grads[3:6]:
        train(old, params, [row])
        train(optimizer, moved, [row])
        assert_equal(moved, params)
        scheduler.step()
        second.step()

    back_params = twin(moved)
    back = make(groups_of(back_params))
    back.load_state_dict(through_file(to_torch_optim(optimizer, back)))
    if name == "Wrap" and dtype == torch.bfloat16:
        return  # torch's own loading rounds NAdam's mu_product
    torch.testing.assert_close(back.state_dict()["state"], old.state_dict()["state"], rtol=0, atol=0)
    for key in ("lr", "fused") if "fused" in old.param_groups[0] else ("lr",):
        assert [g[key] for g in back.param_groups] == [g[key] for g in old.param_groups]
    for row in grads[6:]:
        train(old, params, [row])
        train(back, back_params, [row])
        assert_equal(back_params, params)


OPTIMIZERS = {"Adam": (optim.Adam, Adam), "AdamW": (optim.AdamW, AdamW), "SGD": (optim.SGD, SGD)}


@pytest.mark.parametrize("in_chain", [{}, {"fused": True}, {"fused": False}], ids=["default", "fused", "loop"])
@pytest.mark.parametrize("before", [None, True], ids=["from loop", "from fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_is_part_of_the_chain_and_not_of_the_checkpoint(name, before, in_chain):
    torchs, ours = OPTIMIZERS[name]
    numbers = {"momentum": 0.9} if name == "SGD" else {}
    params = parameters()
    old = torchs(params, 0.1, **numbers, fused=before)
    grads = gradients(params, 8)
    train(old, params, grads[:3])

    moved, optimizer = moved_to(params, old, ClipNorm(1e9, dim="global"), ours(**in_chain))
    assert "fused" not in optimizer.param_groups[0]
    other = twin(params)
    reference = torchs(other, 0.1, **numbers)
    reference.load_state_dict(through_file(old.state_dict()))
    reference.param_groups[0]["fused"] = in_chain.get("fused", True)
    for row in grads[3:]:
        train(optimizer, moved, [row])
        train(reference, other, [row])
        assert_equal(moved, other)
    assert to_torch_optim(optimizer, old)["param_groups"][0]["fused"] is before


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("chain", "fused"),
    [(SGD(fused=False), None), (Wrap(optim.SGD), None), (SGD(), True)],
    ids=["loop", "Wrap", "fused"],
)
def test_a_momentum_that_has_not_begun_begins_as_in_torch(chain, fused, momentum):
    """Checkpoints of older versions have None where SGD has no momentum."""
    params = parameters()
    old = optim.SGD(params, 0.1, momentum, dampening=0.5)
    saved = old.state_dict()
    saved["state"] = {i: {"momentum_buffer": None} for i in range(len(params))}
    rows = gradients(params, 2)
    moved, same = twin(params), twin(params)
    optimizer = Modular(moved, chain)
    optimizer.load_state_dict(from_torch_optim(saved, optimizer))
    train(optimizer, moved, rows)
    train(optim.SGD(same, 0.1, momentum, dampening=0.5, fused=fused), same, rows)
    assert_equal(moved, same)


@pytest.mark.parametrize(("fused", "in_chain"), [(None, {"fused": False}), (True, {})], ids=["loop", "fused"])
def test_the_usual_two_groups_move_and_come_back(fused, in_chain):
    def groups(tensors):
        return [{"params": tensors[:1], "weight_decay": 0.3}, {"params": tensors[1:], "weight_decay": 0.0}]

    params = parameters()
    old = optim.AdamW(groups(params), 0.1, fused=fused)
    rows = gradients(params, 4)
    train(old, params, rows[:2])
    other = twin(params)
    optimizer = Modular(groups(other), ClipNorm(1e9), AdamW(**in_chain))
    optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    train(old, params, rows[2:])
    train(optimizer, other, rows[2:])
    assert_equal(other, params)
    back = to_torch_optim(optimizer, old)["param_groups"]
    assert [group["weight_decay"] for group in back] == [0.3, 0.0]


def test_adam_goes_on_after_double_as_torchs_does():
    params, others = parameters(), parameters()
    optimizer, reference = Modular(params, Adam(0.1, fused=False)), torch.optim.Adam(others, 0.1, foreach=False)
    grads = gradients(params, 4)
    for either, its_params in ((optimizer, params), (reference, others)):
        train(either, its_params, grads[:2])
        for param in its_params:
            param.grad, param.data = None, param.data.double()
        either.load_state_dict(either.state_dict())
        train(either, its_params, [[grad.double() for grad in row] for row in grads[2:]])
    assert_equal(params, others)


def test_a_moved_run_takes_the_same_steps():
    assert example("move_a_run").move(20) == (True, True, False, 20)
