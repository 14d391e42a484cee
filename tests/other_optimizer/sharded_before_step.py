"""What two processes do with transforms before an optimizer of torch; `test_before_step_sharded` starts them."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract.sharded import SHAPES, WAYS, as_param, full, sharded, train_sharded
from contract.training import assert_equal, gradients, parameters, set_grads, train, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from torchzero_clip import AutoClip, ClipNorm, ClipNormByEMA, ClipValueByEMA, SkipStep, ZClip, before_step

CHAINS = {
    "joint": lambda: [ClipNorm(0.5, dim="global")],
    "each": lambda: [ClipNorm(0.5)],
    "statistics": lambda: [ZClip(warmup_steps=2), ClipNormByEMA(0.5), AutoClip(50.0, window=3)],
    "values and a schedule": lambda: [ClipValueByEMA(0.5), ClipNorm(lambda step: 1.0 / (1 + step), dim="global")],
    "gate": lambda: [SkipStep(max_ratio=50.0), ClipNorm(0.5, dim="global")],
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01),
    "fused AdamW": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
}


def sharded_is_one_process() -> None:
    """Also a gradient that is not finite on one rank, or large, is judged by both."""
    for name, make in OPTIMIZERS.items():
        for chain in CHAINS.values():
            plain = parameters(torch.float64, SHAPES)
            _, params = sharded(values(plain))
            rows = gradients(plain, 8)
            rows[5][0][0] = 1e6
            rows[6][2][-1] = torch.nan
            optimizer, reference = make(params), make(plain)
            handle, other = (before_step(each, *chain(), nonfinite="skip") for each in (optimizer, reference))
            train(reference, plain, rows)
            train_sharded(optimizer, params, rows)
            torch.testing.assert_close(full(params), values(plain), rtol=1e-12, atol=1e-12, msg=name)
            assert handle.skipped_steps == other.skipped_steps >= 1
            torch.testing.assert_close(handle.metrics(), other.metrics(), rtol=1e-12, atol=1e-12)


def sharded_resumes(way: str) -> None:
    """Each chain before one of the optimizers, in each way before another one."""
    options, makes = WAYS[way], list(OPTIMIZERS.values())
    for k, chain in enumerate(CHAINS.values(), list(WAYS).index(way)):
        make = makes[k % len(makes)]
        initial = parameters(torch.float32, SHAPES)
        rows = gradients(initial, 6)
        model, params = sharded(values(initial))
        optimizer = make(params)
        handle = before_step(optimizer, *chain())
        train_sharded(optimizer, params, rows[:3])
        halfway = full(params)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        if not options.full_state_dict:
            dcp.save({"optimizer": saved}, checkpoint_id=Path(str(box[0])))
        train_sharded(optimizer, params, rows[3:])
        model, resumed = sharded(halfway)
        second = make(resumed)
        other = before_step(second, *chain())
        if not options.full_state_dict:
            saved = get_optimizer_state_dict(model, second, options=options)
            dcp.load({"optimizer": saved}, checkpoint_id=Path(str(box[0])))
        elif options.broadcast_from_rank0 and dist.get_rank():
            saved = {}
        set_optimizer_state_dict(model, second, saved, options=options)
        assert_equal(full(resumed), halfway)
        train_sharded(second, resumed, rows[3:])
        assert_equal(full(resumed), full(params))
        torch.testing.assert_close(handle.metrics(), other.metrics(), rtol=0, atol=0)


def stages_are_one_process() -> None:
    """Each process has half of the parameters, and the group joins them."""
    rank = dist.get_rank()
    stage = slice(0, 2) if rank == 0 else slice(2, 4)
    for make in OPTIMIZERS.values():
        for chain in (CHAINS["joint"], CHAINS["gate"], CHAINS["statistics"]):
            plain, params = parameters(torch.float64), parameters(torch.float64)[stage]
            optimizer, reference = make(params), make(plain)
            handle = before_step(optimizer, *chain(), process_group=dist.group.WORLD, nonfinite="skip")
            other = before_step(reference, *chain(), nonfinite="skip")
            for k, row in enumerate(gradients(plain, 8)):
                if k == 5:
                    row[0][0] = torch.nan
                set_grads(plain, row)
                set_grads(params, row[stage])
                reference.step()
                optimizer.step()
                assert handle.skipped_by == other.skipped_by
            torch.testing.assert_close(values(params), values(plain)[stage], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(handle.metrics(), other.metrics(), rtol=1e-9, atol=1e-12)


def a_model_that_is_sharded_afterwards() -> None:
    """`fully_shard` exchanges the parameters; the groups get the new ones."""
    from torch.distributed.fsdp import fully_shard

    plain = parameters(torch.float64, SHAPES)
    model = nn.ParameterList(value.clone() for value in values(plain))
    optimizer, reference = (torch.optim.SGD(params, 0.1) for params in (model.parameters(), plain))
    for each in (optimizer, reference):
        before_step(each, ClipNorm(0.5, dim="global"))
    fully_shard(model)
    params = list(model.parameters())
    optimizer.param_groups[0]["params"][:] = params
    for row in gradients(plain, 3):
        set_grads(plain, row)
        for param, grad in zip(params, row, strict=True):
            param.grad = as_param(grad, param)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(full(params), values(plain), rtol=1e-12, atol=1e-12)
