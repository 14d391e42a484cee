"""What two processes do with one entry under FSDP2; `test_sharded` starts them and reports what they found."""

import copy
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract.entries import ENTRIES, Entry, warm_up
from contract.training import Model, assert_equal, gradients, parameters, train, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueGrowth,
    Modular,
    Normalize,
    Recorder,
    SkipStep,
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    norm,
    normalize_grads_,
)

WAYS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}
RESUMED = (
    ("flattened", torch.bfloat16),
    ("plain", torch.float32),
    ("full", torch.float32),
    ("broadcast", torch.bfloat16),
)
SHAPES = [(7, 3), (1, 4), (5,), (2, 3, 2)]  # the second rank has no part of the second one


def sharded(initial: list[Tensor]) -> tuple[Model, list[nn.Parameter]]:
    model = Model(initial)
    fully_shard(model)
    return model, list(model.parameters())


def as_param(grad: Tensor, param: Tensor) -> Tensor:
    return distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad.clone()


def train_sharded(optimizer: Modular, params: list[nn.Parameter], grads: list[list[Tensor]]) -> None:
    train(optimizer, params, [[as_param(g, p) for g, p in zip(row, params, strict=True)] for row in grads])


def full(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in values(params)]


def equals_one_process(entry: Entry, beside: Sequence[tuple[int, ...]] = ()) -> None:
    """Also with parameters ``beside`` the sharded ones."""
    plain = parameters(torch.float64, [*SHAPES, *beside])
    _, params = sharded(values(plain)[: len(SHAPES)])
    params += [nn.Parameter(value) for value in values(plain)[len(SHAPES) :]]
    grads = gradients(plain, 4)
    optimizer, reference = Modular(params, entry.make()), Modular(plain, entry.make())
    train(reference, plain, grads)
    train_sharded(optimizer, params, grads)
    torch.testing.assert_close(full(params), values(plain), rtol=1e-12, atol=1e-12)
    for name, value in optimizer.metrics().items():
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        assert torch.equal(*both), f"{name} differs between ranks: {both}"
        torch.testing.assert_close(value, reference.metrics()[name], rtol=1e-12, atol=1e-12)


def resumes(entry: Entry, options: StateDictOptions, dtype: torch.dtype, directory: Path) -> None:
    initial = parameters(dtype, SHAPES)
    model, params = sharded(values(initial))
    grads = gradients(initial, 4)
    optimizer = Modular(params, entry.make())
    train_sharded(optimizer, params, grads[:2])
    halfway = full(params)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if not options.full_state_dict:
        dcp.save({"optimizer": saved}, checkpoint_id=directory)
    train_sharded(optimizer, params, grads[2:])

    model, resumed = sharded(halfway)
    second = Modular(resumed, entry.make())
    if not options.full_state_dict:
        saved = get_optimizer_state_dict(model, second, options=options)
        dcp.load({"optimizer": saved}, checkpoint_id=directory)
    elif options.broadcast_from_rank0 and dist.get_rank():
        saved = {}
    set_optimizer_state_dict(model, second, saved, options=options)
    if entry.name == "target params":  # it moves parameters whatever lr is, so also while torch prepares it
        with torch.no_grad():
            for param, value in zip(resumed, halfway, strict=True):
                param.copy_(as_param(value, param))
    assert_equal(full(resumed), halfway)
    train_sharded(second, resumed, grads[2:])
    assert_equal(full(resumed), full(params))
    for a, b in zip(params, resumed, strict=True):
        torch.testing.assert_close(second.state.get(b, {}), optimizer.state.get(a, {}), rtol=0, atol=0)


def resumes_in_every_way(entry: Entry) -> None:
    """Each entry in one of the ways, so that each way meets entries with and without state."""
    way, dtype = RESUMED[[each.name for each in entries_of("resumes")].index(entry.name) % len(RESUMED)]
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    resumes(entry, WAYS[way], dtype, Path(str(box[0])))


def groups_in_another_order_resume(_: Entry) -> None:
    """Schedules, counters and joint statistics come back, whatever group torch's loader puts first."""
    for options in (*WAYS.values(), StateDictOptions(cpu_offload=True)):
        initial = parameters(torch.float64, SHAPES)
        rows = gradients(initial, 5)
        rows[1] = [g * 1e9 for g in rows[1]]  # skipped
        optimizers, halfway = [], values(initial)
        for turned in (False, True):
            model, params = sharded(halfway)
            groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}]
            joint = [SkipStep(max_ratio=1e6), ClipNorm(warm_up, dim="global"), ClipNormByEMA(0.5, tensorwise=False)]
            optimizer = Modular(groups[::-1] if turned else groups, *joint, SGD(momentum=0.5))
            optimizers.append((optimizer, params))
            if not turned:
                train_sharded(optimizer, params, rows[:3])
                halfway = full(params)
                saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            else:
                given = saved if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}
                set_optimizer_state_dict(model, optimizer, given, options=options)
                assert optimizer.metrics()["skipped_steps"].item() == 1
            train_sharded(optimizer, params, rows[3:])
        (first, params), (second, resumed) = optimizers
        torch.testing.assert_close(full(resumed), full(params), rtol=1e-12, atol=1e-12)
        for key in ("schedule_step", "max_norm", "skip_step/mean", "clip_norm_by_ema/prev"):
            a, b = first.param_groups[0][key], second.param_groups[1][key]
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


VALUE = torch.linspace(-3, 4, 28, dtype=torch.float64).reshape(7, 4)
ROW = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
WHOLE = [*[VALUE] * 5, ROW]
ORDERS = (0, 1, 2, 3, 0.5, -1, torch.inf, -torch.inf, "mad", "std", "var", "sum")


def on_every_layout() -> list[Tensor]:
    """The tensors of ``WHOLE``."""
    mesh = init_device_mesh("cpu", (2,))
    return [
        *(distribute_tensor(VALUE.clone(), mesh, [placement]) for placement in (Shard(0), Shard(1), Replicate())),
        DTensor.from_local(VALUE / 2, mesh, [Partial()], run_check=False),
        VALUE.clone(),
        distribute_tensor(ROW.clone(), mesh, [Shard(0)]),
    ]


def norms_on_every_layout(_: Entry) -> None:
    for order in ORDERS:
        for tensor, whole in zip(on_every_layout(), WHOLE, strict=True):
            torch.testing.assert_close(norm(tensor, order), norm(whole, order), rtol=1e-12, atol=1e-12)


def functions_on_every_layout(_: Entry) -> None:
    calls: dict[str, Callable[[list[nn.Parameter]], Tensor | None]] = {
        "clip_grad_value_": lambda p: clip_grad_value_(p, 1.0),
        "total norm": lambda p: clip_grads_with_norm_(p, 1.0, get_total_norm([x.grad for x in p])),
    }
    for dim in (None, 0, 1, "global"):
        calls[f"normalize_grads_ {dim}"] = lambda p, dim=dim: normalize_grads_(p, 0.5, dim=dim)
        calls[f"centralize_grads_ {dim}"] = lambda p, dim=dim: centralize_grads_(p, dim)
        for order in ORDERS:
            calls[f"clip_grad_norm_ {order} {dim}"] = partial(clip_grad_norm_, max_norm=0.5, ord=order, dim=dim)
    for name, call in calls.items():
        params, plain = ([nn.Parameter(torch.zeros_like(t)) for t in tensors] for tensors in (on_every_layout(), WHOLE))
        params[3] = nn.Parameter(torch.zeros_like(params[2]))  # only its gradient is a pending sum
        for param, grad in zip(params, on_every_layout(), strict=True):
            param.grad = grad  # a clone would carry out pending sums
        for param, grad in zip(plain, WHOLE, strict=True):
            param.grad = grad.clone()
        found = [call(params), *(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in params)]
        expected = [call(plain), *(p.grad for p in plain)]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def extreme_magnitudes(_: Entry) -> None:
    for size, count in ((1e20, 100), (1e-25, 3)):
        _, params = sharded([torch.zeros(count, 1)])
        params[0].grad = as_param(torch.full((count, 1), size), params[0])
        for _ in range(2):
            total = clip_grad_norm_(params, size)
        torch.testing.assert_close(total.item(), size, rtol=1e-6, atol=0.0)


def gradients_with_pending_sums(_: Entry) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(2, dtype=torch.float64), mesh, [Replicate()]))
    half = torch.tensor([1.5, 2.0], dtype=torch.float64)
    optimizer = Modular([param], ClipNorm(1.0))
    param.grad = DTensor.from_local(half, mesh, [Replicate()], run_check=False)
    param.grad = DTensor.from_local(half, mesh, [Partial()], run_check=False)
    optimizer.step()
    torch.testing.assert_close(param.detach().full_tensor(), torch.tensor([-0.6, -0.8], dtype=torch.float64))


@contextmanager
def counted_all_reduces() -> Iterator[list[str]]:
    calls: list[str] = []
    counted = dist.all_reduce

    def all_reduce(*args, **kwargs):
        calls.append("all_reduce")
        return counted(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = counted


def each_norm_is_one_all_reduce(_: Entry) -> None:
    expected = {
        "ClipNorm": (ClipNorm(1.0), 1),
        "ClipNorm-global": (ClipNorm(1.0, dim="global"), 1),
        "ClipNorm-slices": (ClipNorm(1.0, 1, dim=0), 1),
        "ClipNorm-mad": (ClipNorm(1.0, "mad"), 1),
        "ClipValue": (ClipValue(1.0), 1),
        "Normalize": (Normalize(), 1),
        "Centralize": (Centralize(), 1),
        "ClipNormGrowth": (ClipNormGrowth(), 1),  # whether gradients are finite is read off their norms
        "ClipNormGrowth-joint": (ClipNormGrowth(parameterwise=False), 1),
        "ClipNormByEMA": (ClipNormByEMA(), 2),  # and that of the average
        "ClipNormByEMA-joint": (ClipNormByEMA(tensorwise=False), 3),  # and who has a gradient
        "ClipValueGrowth": (ClipValueGrowth(), 2),  # whether gradients are finite, and the share that was clipped
        "ClipNorm+ClipNormGrowth": ([ClipNorm(1.0), ClipNormGrowth()], 2),  # finite ones are known from ClipNorm
    }
    for name, (chain, count) in expected.items():
        _, params = sharded([torch.randn(7, 3) for _ in range(5)])
        optimizer = Modular(params, chain)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            with counted_all_reduces() as calls:
                optimizer.step()
            assert len(calls) == count, f"{name}: {len(calls)}"


def statistics_behind_a_clip_of_slices(_: Entry) -> None:
    """A rank that holds one slice of a tensor does not take its norm for that of the tensor."""
    for shape in ((3, 4), (2, 2)):  # two rows and one, or one row on each rank
        for clip in (ClipNorm(99.0, dim=1), ClipNorm(99.0, "std")):
            _, (param,) = sharded([torch.zeros(shape, dtype=torch.float64)])
            plain = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            optimizers = [Modular([p], clip, ClipNormGrowth(), LR(1.0)) for p in (plain, param)]
            for scale in (1.0, 10.0, 3.0):
                grad = torch.zeros(shape, dtype=torch.float64)
                grad[:, 0] = scale
                grad[-1] = scale * (scale > 2)
                plain.grad, param.grad = grad.clone(), as_param(grad, param)
                for optimizer in optimizers:
                    optimizer.step()
            torch.testing.assert_close(param.detach().full_tensor(), plain.detach(), rtol=1e-12, atol=1e-12)


def ranks_decide_alike_about_plain_gradients(_: Entry) -> None:
    """A NaN, or a large norm, in a plain gradient on one rank, beside sharded ones: it would hang the other rank."""
    for chain, options in (([SGD(0.1)], {"nonfinite": "skip"}), ([SkipStep(max_ratio=10.0), SGD(0.1)], {})):
        _, params = sharded([torch.randn(7, 3)])
        plain = nn.Parameter(torch.zeros(2))
        optimizer = Modular([*params, plain], *chain, **options)
        for bad in (1.0, torch.nan, 1.0, 1e6 if not options else torch.inf):
            params[0].grad = torch.ones_like(params[0])
            plain.grad = torch.full((2,), bad if dist.get_rank() == 1 else 1.0)
            optimizer.step()
        assert optimizer.metrics()["skipped_steps"].item() == 2
        for key in ("skip_step/mean", "skipped_steps"):
            found = [None, None]
            dist.all_gather_object(found, optimizer.param_groups[0].get(key))
            assert found[0] == found[1]


def a_checkpoint_is_refused_on_all_ranks_or_none(_: Entry) -> None:
    _, params = sharded([torch.randn(7, 3)])
    optimizer = Modular(params, ClipNormByEMA(), Adam())
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        saved["state"][0]["clip_norm_by_ema/ema"].to_local().fill_(torch.nan)
    before = optimizer.state[params[0]]["adam/exp_avg"]
    with pytest.raises(ValueError, match="not finite" if dist.get_rank() == 1 else "on another rank"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["adam/exp_avg"] is before


def statistics_rules(entry: Entry) -> None:
    """A gradient that is not finite, or zero, on one of the ranks only."""
    plain = parameters(torch.float64, SHAPES)
    _, params = sharded(values(plain))
    rows = gradients(plain, 6)
    rows[0] = [torch.zeros_like(g) for g in rows[0]]
    rows[1] = [torch.zeros_like(g) for g in rows[1]]
    for grad in rows[1]:
        grad.view(-1)[0] = 1.0  # the second rank sees zeros
    rows[3][0][-1, -1] = torch.nan  # the first rank sees a finite gradient
    rows[4][2][0] = torch.inf
    optimizer, reference = Modular(params, entry.make()), Modular(plain, entry.make())
    for row in rows:
        with torch.no_grad():
            for param in (*params, *plain):
                param.zero_()
        train(reference, plain, [row])
        train_sharded(optimizer, params, [row])
        torch.testing.assert_close(full(params), values(plain), rtol=1e-12, atol=1e-12, equal_nan=True)
        for param, other in zip(params, plain, strict=True):
            for key, value in reference.state.get(other, {}).items():
                actual = optimizer.state[param][key]
                actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
                torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-12, equal_nan=True)


def outcome(step: Callable, optimizer: Modular, params: list[nn.Parameter], row: list[Tensor]) -> str | None:
    """The error of a step, if there was one."""
    try:
        step(optimizer, params, [row])
    except RuntimeError as error:
        return str(error)
    return None


def skipping_is_decided_alike(_: Entry) -> None:
    """A gradient that is not finite, or large, on the second rank only."""
    for options, chain in (
        ({"nonfinite": "skip"}, lambda: AdamW(0.1)),
        ({}, lambda: [SkipStep(max_ratio=10.0), AdamW(0.1)]),
        ({"nonfinite": "raise"}, lambda: AdamW(0.1)),
    ):
        plain = parameters(torch.float64, SHAPES)
        _, params = sharded(values(plain))
        optimizer, reference = Modular(params, chain(), **options), Modular(plain, chain(), **options)
        for k, row in enumerate(gradients(plain, 6)):
            row = [g / g.norm() for g in row]
            if k in (2, 4):
                row[0][-1, -1] = torch.nan if k == 2 else 1e30
            outcomes = [outcome(train, reference, plain, row), outcome(train_sharded, optimizer, params, row)]
            assert outcomes[0] == outcomes[1], outcomes
            torch.testing.assert_close(full(params), values(plain), rtol=1e-12, atol=1e-12)
        counts = [o.metrics().get("skipped_steps") for o in (optimizer, reference)]
        assert counts[0] == counts[1], counts
        assert "nonfinite" in options or counts[0] == 2


def losses_may_be_reported_on_some_ranks(_: Entry) -> None:
    """Replicas with plain parameters: the loss of one rank makes both skip, and a rank without one reduces too."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Modular([weight], SkipStep(sigma=3.0, window=8), SGD(0.1))
    found = []
    for step in range(12):
        weight.grad = torch.ones(3)
        if dist.get_rank() == 0 and step not in (2, 9):
            optimizer.report_loss(1.0 + 0.1 * (step % 3) + 50.0 * (step == 8))
        elif dist.get_rank() == 1 and step in (4, 9):
            optimizer.report_loss(torch.tensor(1.1 if step == 4 else 90.0))
        optimizer.step()
        found.append(int(optimizer.metrics()["skipped_steps"]))
    assert found == [0] * 8 + [1, 2, 2, 2]
    torch.testing.assert_close(weight.detach(), torch.full((3,), -1.0))


def a_recorder_sees_full_norms(_: Entry) -> None:
    """Equal on all ranks, without a collective of its own where a clip measures the gradients; one rank writes."""
    plain = parameters(torch.float32, SHAPES)
    grads = gradients(plain, 4)
    expected = torch.tensor([[g.double().norm() for g in row] for row in grads], dtype=torch.float64)
    chains = [[ClipNorm(0.1)], [ClipNorm(0.1, dim="global")], [SkipStep(max_norm=1e6), ClipNorm(0.1)], [AdamW()]]
    for chain in chains:
        found = []
        for records in (False, True):
            _, params = sharded(values(plain))
            optimizer = Modular(params, *chain)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / f"{dist.get_rank()}.jsonl"
                recorder = Recorder(optimizer, path=path, ratios_every=0) if records else None
                with counted_all_reduces() as calls:
                    train_sharded(optimizer, params, grads)
                if recorder is not None:
                    recorder.flush()
                    assert path.exists() == (dist.get_rank() == 0)
            found.append((full(params), len(calls)))
        (without, few), (with_recorder, more) = found
        assert_equal(with_recorder, without)
        assert more == few + (len(grads) if isinstance(chain[0], AdamW) else 0), f"{chain}: {more} calls, not {few}"
        record = recorder.record()
        torch.testing.assert_close(record.layer_norms, expected, rtol=1e-6, atol=0)
        both = [torch.empty_like(record.layer_norms) for _ in range(2)]
        dist.all_gather(both, record.layer_norms.contiguous())
        assert torch.equal(*both)
    _, params = sharded(values(plain))
    optimizer = Modular(params, SGD(0.1))
    recorder = Recorder(optimizer, ratios_every=1)
    before = full(params)
    train_sharded(optimizer, params, grads[:1])
    moved = torch.stack([(a - b).double().norm() for a, b in zip(before, full(params), strict=True)])
    torch.testing.assert_close(recorder.record().ratios[0].updates, moved, rtol=1e-5, atol=1e-7)


def data_parallel(_: Entry) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=True)
    inputs = torch.randn(8, 3, dtype=torch.float64)
    optimizers = [Modular(m, ClipNorm(0.1, dim="global"), AdamW(0.1)) for m in (model, plain)]
    for _ in range(3):
        for m, x, optimizer in zip((model, plain), (inputs.chunk(2)[dist.get_rank()], inputs), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-12)


PER_ENTRY: dict[str, Callable[[Entry], None]] = {
    "equals one process": equals_one_process,
    "mixed with a plain parameter": partial(equals_one_process, beside=[(3,)]),
    "resumes": resumes_in_every_way,
    "rules of statistics": statistics_rules,
}
ONCE: dict[str, Callable[[Entry], None]] = {
    "norms on every layout": norms_on_every_layout,
    "extreme magnitudes": extreme_magnitudes,
    "gradients with pending sums": gradients_with_pending_sums,
    "each norm is one all-reduce": each_norm_is_one_all_reduce,
    "statistics behind a clip of slices": statistics_behind_a_clip_of_slices,
    "groups in another order resume": groups_in_another_order_resume,
    "ranks decide alike about plain gradients": ranks_decide_alike_about_plain_gradients,
    "a checkpoint is refused on all ranks or none": a_checkpoint_is_refused_on_all_ranks_or_none,
    "skipping is decided alike": skipping_is_decided_alike,
    "functions on every layout": functions_on_every_layout,
    "data parallel": data_parallel,
    "losses may be reported on some ranks": losses_may_be_reported_on_some_ranks,
    "a recorder sees full norms": a_recorder_sees_full_norms,
}


def entries_of(check: str) -> list[Entry]:
    """Entries that do not vary another one. Each equals one process, and most meet one of the other checks."""
    distinct = [entry for entry in ENTRIES if not entry.varies]
    others = [name for name in PER_ENTRY if name != "equals one process"]
    return distinct[others.index(check) :: 5] if check in others else distinct


def run_for_each_entry(check: str) -> dict[str, str]:
    """What goes wrong for each entry, on either of two processes; "" if all is right."""
    return {entry.name: _failure(PER_ENTRY[check], entry) for entry in entries_of(check)}


def run_once() -> dict[str, str]:
    """What goes wrong in each check of `ONCE`."""
    return {name: _failure(check, ENTRIES[0]) for name, check in ONCE.items()}


def _failure(check: Callable[[Entry], None], entry: Entry) -> str:
    own = ""
    try:
        check(entry)
    except Exception:
        own = traceback.format_exc()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, own)
    return "\n".join(filter(None, both))
