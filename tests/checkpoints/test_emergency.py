"""A checkpoint that is saved after an error in a step loads into its own chain, and the run goes on."""

import copy
import sys
from contextlib import suppress

import pytest
import torch
from contract.training import gradients, parameters, set_grads
from other_optimizer.test_undone_steps import Interrupted
from table import MATRICES
from torch import nn

from torchzero_clip import (
    SGD,
    AdaGC,
    Adam,
    AdamW,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Muon,
    Wrap,
    ZClip,
)
from torchzero_clip.core.states import States

CHAINS = {
    "ema": lambda: [ClipNormByEMA(0.5), Adam()],
    "updates": lambda: [Adam(), ClipNormByEMA(0.5), ClipValueGrowth()],
    "values": lambda: [ClipValueByEMA(0.5, ema_tfm=ClipNormGrowth()), AdamW()],
    "momentum": lambda: [AdaGC(warmup_steps=1), SGD(momentum=0.9)],
    "muon": lambda: [ZClip(warmup_steps=1), ClipNormGrowth(), Muon()],
    "wrap": lambda: [ClipNormByEMA(0.5), Wrap(torch.optim.NAdam)],
}
SHAPES = [*MATRICES, (70, 9)]


def late(chain, fast):
    """A run whose last two parameters come after two steps."""
    params = parameters(torch.float32, SHAPES)
    for param in params[1:]:
        param.requires_grad_(False)
    optimizer = Modular(params, *CHAINS[chain](), fast=fast)
    rows = gradients(params, 4)
    for row in rows[:2]:
        set_grads(params[:1], row[:1])
        optimizer.step()
    for param in params[1:]:
        param.requires_grad_(True)
    set_grads(params, rows[2])
    return params, optimizer, rows


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("chain", CHAINS)
def test_an_error_at_any_operation_of_the_first_step_of_late_parameters(chain, fast):
    _, optimizer, _ = late(chain, fast)
    with Interrupted(-2) as counted:
        optimizer.step()
    for place in range(0, counted.count, max(1, counted.count // 15)):
        _, optimizer, rows = late(chain, fast)
        with pytest.raises(KeyboardInterrupt), Interrupted(place):
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        second = Modular(parameters(torch.float32, SHAPES), *CHAINS[chain](), fast=fast)
        second.load_state_dict(saved)
        for own in (optimizer, second):
            resumed = own.param_groups[0]["params"]
            set_grads(resumed, rows[3])
            own.step()
            assert all(param.isfinite().all() for param in resumed)
        assert all(any(key.partition("/")[2] for key in second.state[param]) for param in resumed)


class Traced:
    """Raises at one of the bytecodes of `States._store`, counted from 0."""

    def __init__(self, place):
        self.place, self.count = place, 0

    def __call__(self, frame, event, arg):
        if frame.f_code is States._store.__code__:
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.count += 1
                if self.count == self.place + 1:
                    raise KeyboardInterrupt
        return self


def interrupted_first_step(place):
    """An optimizer whose first step was interrupted at a bytecode, and how many there were."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Modular([weight], ClipNormByEMA(0.5), AdamW(), fast=False)
    weight.grad = torch.tensor([3.0, 4.0])
    before, tracer = sys.gettrace(), Traced(place)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it in sys.settrace only
    sys.settrace(tracer)
    try:
        with suppress(KeyboardInterrupt):
            optimizer.step()
    finally:
        sys.settrace(before)
    return weight, optimizer, tracer.count


def test_state_of_a_parameter_is_stored_as_a_whole_or_not_at_all():
    """An interrupt inside of `_store` in a first step leaves an optimizer that goes on."""
    *_, count = interrupted_first_step(-2)
    assert count > 20
    for place in range(count):
        weight, optimizer, _ = interrupted_first_step(place)
        keys = {key for key in optimizer.state.get(weight, {}) if key.startswith("clip_norm_by_ema/")}
        assert keys in (set(), {f"clip_norm_by_ema/{key}" for key in ("ema", "prev", "started")})
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer.step()


def test_a_transform_without_any_state_begins_later_and_one_with_a_part_is_refused():
    params = parameters(torch.float32, SHAPES)
    optimizer = Modular(params, ClipNormByEMA(0.5), ClipNorm(1.0), Adam())
    set_grads(params, gradients(params, 1)[0])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("adam/exp_avg", "adam/exp_avg_sq", "adam/step"):
        del saved["state"][1][key]
    second = Modular(parameters(torch.float32, SHAPES), ClipNormByEMA(0.5), ClipNorm(1.0), Adam())
    second.load_state_dict(saved)
    assert set(second.state[second.param_groups[0]["params"][1]]) == {
        f"clip_norm_by_ema/{key}" for key in ("ema", "prev", "started")
    }
    del saved["state"][1]["clip_norm_by_ema/prev"]
    with pytest.raises(ValueError, match=r"state of parameter 1 does not fit.*missing: 'clip_norm_by_ema/prev'"):
        second.load_state_dict(saved)
