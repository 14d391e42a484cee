"""The fast way equals the readable one up to rounding, on random chains, tensors and events, and takes no memory."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from contract.entries import ClipToUsual, ClipToUsualInPlace
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, set_grads, train, values
from defaults import DEFAULTS
from fast.comparison import EVENTS, ROUNDING, UNUSUAL, assert_same, both, noise, short_pieces
from hypothesis import given
from hypothesis import strategies as st
from table import PIECES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override
from versions import needs_compiler

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    Scaling,
    SpikeAwareClip,
    Transform,
)

CLIPS: dict[str, Any] = {
    "global": lambda: ClipNorm(0.3, dim="global"),
    "per tensor": lambda: ClipNorm(0.2),
    "no limit": lambda: ClipNorm(torch.inf, dim="global"),
    "per row": lambda: ClipNorm(0.1, dim=0),
    "l1": lambda: ClipNorm(1.0, 1),
    "per output": lambda: AdaptiveGradientClip(0.05),
    "per matrix of the last dimensions": lambda: ClipNorm(0.1, dim=(-1, -2), min_size=6),
    "linf": lambda: ClipNorm(0.01, "linf"),
    "linf of all": lambda: ClipNorm(0.01, "linf", dim="global"),
    "at least 2": lambda: ClipNorm(0.15, min_size=2),
    "value": lambda: ClipValue(0.01),
    "normalize": lambda: Normalize(0.5),
    "centralize": lambda: Centralize(),
    "norm ema": lambda: ClipNormByEMA(0.7),
    "norm ema joint": lambda: ClipNormByEMA(0.7, tensorwise=False, ema_init="update"),
    "normalize ema": lambda: NormalizeByEMA(0.7, ema_init="update"),
    "norm growth": lambda: ClipNormGrowth(mul=1.1),
    "norm growth joint": lambda: ClipNormGrowth(add=0.1, mul=None, parameterwise=False),
    "value ema": lambda: ClipValueByEMA(0.7),
    "value ema from update": lambda: ClipValueByEMA(0.7, "update", ClipValue(0.5)),
    "spike aware": lambda: SpikeAwareClip(1.5, 0.9, warmup_steps=2),
    "formula": lambda: ClipToUsual(1.1, 0.7),
    "formula and change": lambda: ClipToUsualInPlace(1.1, 0.7),
    "max ema": lambda: ClipByMaxEMA(0.8),
    "value growth": lambda: ClipValueGrowth(),
    "value growth by add": lambda: ClipValueGrowth(add=0.01, mul=None, min_value=None, max_decay=None),
    "value growth by both": lambda: ClipValueGrowth(add=0.01, mul=1.2),
}
RULES: dict[str, Any] = {
    "AdamW": lambda: [AdamW(0.01)],
    "AdamW amsgrad": lambda: [AdamW(0.01, amsgrad=True)],
    "Adam loop": lambda: [Adam(0.01, fused=False)],
    "SGD": lambda: [SGD(0.1)],
    "SGD momentum": lambda: [SGD(0.1, 0.9)],
    "none": list,
}


def is_no_vector(param):  # pickled with the optimizer
    return param.ndim != 1


cases = {
    "clips": st.lists(st.sampled_from(sorted(CLIPS)), max_size=3, unique=True),
    "rule": st.sampled_from(sorted(RULES)),
    "shapes": st.lists(st.sampled_from(PIECES), min_size=1, max_size=7),
    "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    "events": st.lists(st.sampled_from(["none", "shared", *EVENTS, *UNUSUAL]), min_size=3, max_size=6),
    "scoped": st.booleans(),
}


@given(**cases)
def test_fast_equals_readable(**case):
    compare(**case)


@short_pieces
def compare(clips, rule, shapes, dtype, events, scoped):
    def make() -> list[Transform]:
        transforms = [CLIPS[name]() for name in clips]
        if scoped and transforms:
            transforms[0] = transforms[0].only(is_no_vector)
        return [*transforms, *RULES[rule]()] or [ClipNorm(0.3)]

    fast, readable = both(make, shapes, dtype)
    for number, event in enumerate(events):
        if event == "double" and dtype != torch.float32:
            continue
        if event.startswith("reload") and "double" in events[:number]:  # checkpoints keep the dtypes of state
            continue
        if "amsgrad" in rule and event in ("inf", "nan"):  # torch's kernel leaves NaN out of the largest square
            continue
        for run, other in ((fast, readable), (readable, fast)):
            run.step(noise(shapes, number, event), event, other)
        assert_same(fast, readable, ROUNDING[dtype])


class Half(Scaling):
    """Half of each tensor, by one number that is expanded."""

    def __init__(self):
        super().__init__({})

    @override
    def factors(self, measured, updates, step):
        return torch.full((), 0.5, dtype=torch.float64).expand(len(updates))


def test_one_factor_of_an_author_multiplies_short_and_long_tensors_once():
    shapes = PIECES
    fast, readable = both(lambda: [Half(), SGD(0.1, 0.9)], shapes)
    for number in range(3):
        for run in (fast, readable):
            run.step(noise(shapes, number))
        assert_same(fast, readable, ROUNDING[torch.float32])


def test_parameters_drop_out_one_by_one():
    shapes = PIECES
    fast, readable = both(lambda: [ClipNormByEMA(0.5), ClipValueGrowth(), AdamW(0.01)], shapes)
    for number in range(6):
        gone = number % len(shapes)
        for run in (fast, readable):
            run.step([None] * gone + noise(shapes, number)[gone:])
        assert_same(fast, readable, ROUNDING[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global", "value ema"])
def test_rounding_does_not_add_up(name):
    shapes = [(3, 5), (7,), (40, 30)]
    # torch rounds 1 - lr * weight_decay to float32, in its loop too: with decay it is 1.4e-5 from float64 in the end
    runs = list(both(lambda: [CLIPS[name](), AdamW(1e-3, weight_decay=0.0)], shapes))
    for number in range(500):
        for run in runs:
            run.step(noise(shapes, number))
    fast, readable = (nn.utils.parameters_to_vector(run.params).double() for run in runs)
    assert (fast - readable).norm() <= 5e-6 * readable.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # before torch 2.13
def test_the_fast_way_takes_no_memory_of_the_size_of_the_parameters():
    params = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(2)]  # 4 MiB each
    following = (ClipValueByEMA(), ClipNormGrowth(), ClipByMaxEMA(), SpikeAwareClip(warmup_steps=1))
    for transform in (ClipNorm(1, dim="global"), ClipValue(0.1), Centralize(), AdaptiveGradientClip(), *following):
        optimizer = Modular(params, transform, AdamW())
        train(optimizer, params, [[torch.randn_like(p) for p in params]] * 2)
        set_grads(params, [torch.randn_like(p) for p in params])
        with torch.profiler.profile(profile_memory=True) as profiler:
            optimizer.step()
        allocated = [event.cpu_memory_usage for event in profiler.events() or [] if event.cpu_memory_usage > 0]
        assert max(allocated, default=0) < 2 * 2**20, transform


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # before torch 2.13
@pytest.mark.parametrize("transform", [ClipNorm(1), ClipNormByEMA(), ClipNorm(1, ord=3)], ids=str)
def test_gradients_that_vanish_take_no_memory_of_the_size_of_the_parameters(transform):
    params = [nn.Parameter(torch.randn(256, 256)) for _ in range(40)]  # 10 MiB in all, 512 KiB each in float64
    optimizer = Modular(params, transform, AdamW())
    train(optimizer, params, [[torch.randn_like(p) * 1e-25 for p in params]] * 2)
    set_grads(params, [torch.randn_like(p) * 1e-25 for p in params])  # squares of which are 0 in float32
    with torch.profiler.profile(profile_memory=True) as profiler:
        optimizer.step()
    events: Any = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert max(accumulate(nbytes for _, nbytes in changes)) < 2 * 2**20


@pytest.mark.slow
@needs_compiler
def test_a_compiled_step_is_one_graph_and_follows_a_schedule():
    params = parameters()
    optimizer = Modular(params, ClipNorm(0.3, dim="global"), AdamW(torch.tensor(0.01)))
    train(optimizer, params, [[torch.zeros_like(p) for p in params]])  # makes the state
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number, row in enumerate(gradients(params, 20)):
            set_grads(params, row)
            optimizer.param_groups[0]["lr"].fill_(0.01 / (number + 1))
            step()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert [float(optimizer.state[param]["adam/step"]) for param in params] == [21.0] * 4


@pytest.mark.parametrize("default", DEFAULTS)
def test_long_tensors_under_another_default_of_the_process(default):
    params, others = ([nn.Parameter(torch.ones(size)) for size in (3, 70001)] for _ in range(2))
    rows = [[torch.ones(3), torch.ones(70001)]] * 2
    optimizer, other = (Modular(p, ClipNormGrowth(), ClipNorm(0.1, dim="global"), AdamW()) for p in (params, others))
    train(other, others, rows)
    with DEFAULTS[default]():
        train(optimizer, params, rows)
    assert_equal(params, others)


def test_a_step_in_inference_mode_does_not_break_those_after_it():
    """In the readable way its state belongs to inference mode, as that of torch.optim does."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = Modular([weight], ClipNorm(1), AdamW())
    with torch.inference_mode():
        train(optimizer, [weight], [[torch.ones(2)]])
    train(optimizer, [weight], [[torch.ones(2)]] * 2)
    assert weight.tolist() == pytest.approx([1 - 3e-3] * 2, abs=1e-4)


class Halves(ClipValue):
    @override
    def change(self, x, result, state, setting, at):
        torch.mul(x, 0.5, out=result)
        return torch.zeros(())


class Negates(ClipValueGrowth):
    @override
    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return -tensor


class Still(Adam):
    @override
    def apply_tensors(self, updates, step):
        return [torch.zeros_like(update) for update in updates]


class Doubled(LR):
    @override
    def apply_tensors(self, updates, step):
        return [2 * update for update in super().apply_tensors(updates, step)]


@pytest.mark.parametrize(
    ("chain", "expected"),
    [([Halves(1.0), SGD(1.0)], -1.5), ([Negates(), SGD(1.0)], 3.0), ([Still()], 0.0), ([Doubled(0.5)], -3.0)],
    ids=["change", "apply_tensor", "apply_tensors of a rule", "apply_tensors of LR"],
)
@pytest.mark.parametrize("fast", [True, False])
def test_what_a_subclass_overrides_is_used(chain, expected, fast):
    weight = nn.Parameter(torch.zeros(2))
    train(Modular([weight], *chain, fast=fast), [weight], [[torch.full((2,), 3.0)]])
    assert weight.tolist() == [expected] * 2


@pytest.mark.parametrize("clip", [ClipValue(1), ClipValueByEMA(), ClipValueGrowth()], ids=repr)
def test_an_elementwise_clip_behind_a_norm_clip_does_not_wait_for_the_device(clip):
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(3, device="cuda"))]
        optimizer = Modular(params, ClipNorm(1), clip, AdamW())
        train(optimizer, params, [[torch.empty(3, device="cuda")]] * 2)
        assert all(value.device.type == "cuda" for value in optimizer.metrics().values())


def test_a_setting_that_the_dtype_cannot_hold_changes_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = Modular([{"params": [param]} for param in params], ClipValueGrowth(), AdamW())
    rows = [[torch.ones(3), torch.ones(2)]] * 3
    train(optimizer, params, rows[:2])
    optimizer.param_groups[1]["min_value"] = 1e39
    before = values(params)
    with pytest.raises(RuntimeError):
        train(optimizer, params, rows[2:])
    assert_equal(params, before)
    assert {float(optimizer.state[p]["adam/step"]) for p in params} == {2.0}


@pytest.mark.parametrize("whole", [True, False], ids=["kernel", "tensor by tensor"])
def test_a_kernel_that_raises_leaves_the_count_of_steps(whole, monkeypatch):
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3) if whole else torch.ones(3, 2).t())]
    optimizer = Modular(params, ClipNorm(0.1), AdamW())
    grads = [torch.ones(2, 3), torch.ones_like(params[1]).contiguous()]
    train(optimizer, params, [grads])
    before = [optimizer.state_dict()["state"], values(params)]

    def fails(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "_fused_adamw_", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        train(optimizer, params, [grads])
    assert_same_checkpoint(optimizer.state_dict()["state"], before[0])
    assert_equal(params, before[1])
    assert float(optimizer.state[params[0]]["adam/step"]) == 1.0
