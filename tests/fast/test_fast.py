"""The fast way of a step equals the readable one up to rounding, on random chains, tensors and events."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from contract.training import set_grads, through_file, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from versions import needs_compiler

from torchzero_clip import (
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
    SpikeAwareClip,
    Transform,
)

SHAPES = [(3, 5), (7,), (), (2, 3, 4, 5), (1,), (70001,), (300, 301)]
"""Among them tensors that are cut into pieces, and one of an odd size."""

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
    "max ema": lambda: ClipByMaxEMA(0.8),
    "value growth": lambda: ClipValueGrowth(),
    "value growth by add": lambda: ClipValueGrowth(add=0.01, mul=None, min_value=None, max_decay=None),
    "value growth by both": lambda: ClipValueGrowth(add=0.01, mul=1.2),
}
RULES: dict[str, Any] = {
    "AdamW": lambda: AdamW(0.01),
    "AdamW amsgrad": lambda: AdamW(0.01, amsgrad=True),
    "Adam loop": lambda: Adam(0.01, fused=False),
    "SGD": lambda: SGD(0.1),
    "SGD momentum": lambda: SGD(0.1, 0.9),
    "none": list,
}
EVENTS = (
    "none",
    "missing",
    "zero",
    "inf",
    "nan",
    "expanded",
    "shared",
    "huge",
    "tiny",
    "reload",
    "reload other",
    "pickle",
    "data",
    "double",
    "channels_last",
    "limit None",
    "lr",
)


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int, event: str) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(params):
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 1.5 ** (step % 3)
        param.grad = noise.to(param.dtype).contiguous(memory_format=memory_format(param))
        chosen = i == step % len(params)
        if chosen and event == "missing":
            param.grad = None
        elif chosen and event == "zero":
            param.grad.zero_()
        elif chosen and event in ("inf", "nan") and param.numel():
            param.grad[(-1,) * param.ndim] = float(event)
        elif chosen and event == "expanded":
            param.grad = torch.ones((), dtype=param.dtype).expand(param.shape)
        elif event in ("huge", "tiny") and chosen:
            param.grad.mul_(1e25 if event == "huge" else 1e-25)


def memory_format(param: Tensor) -> torch.memory_format:
    last = param.ndim == 4 and param.is_contiguous(memory_format=torch.channels_last) and not param.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


class Run:
    """One optimizer and its parameters, on which the same things happen as on another."""

    def __init__(self, make: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype, fast: bool) -> None:
        self.params = made(shapes, dtype)
        self.make, self.fast = make, fast
        self.optimizer = self.built()

    def built(self) -> Modular:
        half = len(self.params) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:]}]
        return Modular(groups, *self.make(), fast=self.fast)

    def step(self, number: int, event: str, other: "Run") -> None:
        optimizer = self.optimizer
        if event == "reload":
            optimizer.load_state_dict(through_file(optimizer.state_dict()))
        elif event == "reload other" and other.fast:  # a checkpoint of the fast run goes on in the readable one
            optimizer.load_state_dict(through_file(other.saved))
        elif event == "pickle":
            self.params, self.optimizer = pickle.loads(pickle.dumps((self.params, optimizer)))
        elif event == "data":
            for state in optimizer.state.values():
                for value in state.values():
                    value.data = value.data.clone()
        elif event == "double":
            for param in self.params:
                param.data = param.data.double()
        elif event == "channels_last":
            for param in self.params:
                if param.ndim == 4:
                    param.data = param.data.to(memory_format=torch.channels_last)
        elif event == "limit None":
            for group in optimizer.param_groups:
                group.update({key: None for key in ("mul", "add") if key in group})
        elif event == "lr":
            optimizer.param_groups[0]["lr"] = 0.03
        self.saved = copy.deepcopy(optimizer.state_dict())
        set_gradients(self.params, number, event)
        if event == "shared" and len(self.params) > 1:
            same = [p for p in self.params if p.shape == self.params[0].shape]
            for param in same:
                param.grad = self.params[0].grad
        self.optimizer.step()


def assert_close(a: Any, b: Any, dtype: torch.dtype, what: str) -> None:
    """Equal to some units in the last place of the largest element; metrics and numbers as float32 would be."""
    a, b = (torch.as_tensor(x).double() for x in (a, b))
    assert torch.equal(a.isfinite(), b.isfinite()), what
    a, b = a[a.isfinite()], b[b.isfinite()]
    scale = float(b.abs().max()) if b.numel() else 0.0
    tolerance = {torch.float64: 1e-6, torch.float32: 4e-6, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale + 1e-30, msg=lambda m: f"{what}: {m}")


def assert_same(fast: Run, readable: Run, dtype: torch.dtype) -> None:
    for i, (p, q) in enumerate(zip(fast.params, readable.params, strict=True)):
        assert_close(p.detach(), q.detach(), dtype, f"parameter {i}")
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert_close(p.grad, q.grad, dtype, f"gradient {i}")
    states = [run.optimizer.state_dict()["state"] for run in (fast, readable)]
    assert states[0].keys() == states[1].keys()
    for i in states[0]:
        assert states[0][i].keys() == states[1][i].keys()
        for key, value in states[0][i].items():
            assert value.dtype == states[1][i][key].dtype
            assert_close(value, states[1][i][key], dtype, f"state {key} of {i}")
    one, two = fast.optimizer.metrics(), readable.optimizer.metrics()
    assert one.keys() == two.keys()
    for key in one:
        if not key.endswith("/clipped"):
            assert_close(one[key], two[key], dtype, f"metric {key}")
        elif key.replace("clipped", "factor") not in one:  # a norm at its limit counts or not, by its rounding
            assert float(one[key]) == pytest.approx(float(two[key]), abs=0.02), key


def is_no_vector(param: Tensor) -> bool:
    return param.ndim != 1


chains = st.lists(st.sampled_from(sorted(CLIPS)), max_size=3, unique=True)
cases = {
    "clips": chains,
    "rule": st.sampled_from(sorted(RULES)),
    "shapes": st.lists(st.sampled_from(SHAPES), min_size=1, max_size=7),
    "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    "events": st.lists(st.sampled_from(EVENTS), min_size=3, max_size=6),
    "scoped": st.booleans(),
}


@settings(max_examples=20)
@given(**cases)
def test_fast_equals_readable(**case):
    compare(**case)


@pytest.mark.slow
@settings(max_examples=300)
@given(**cases)
def test_fast_equals_readable_in_many_cases(**case):
    compare(**case)


def compare(
    clips: list[str],
    rule: str,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    events: list[str],
    scoped: bool,
) -> None:
    def make() -> list[Transform]:
        transforms = [CLIPS[name]() for name in clips]
        if scoped and transforms:
            transforms[0].only(is_no_vector)
        return [*transforms, RULES[rule]()] if transforms or rule != "none" else [ClipNorm(0.3)]

    fast, readable = (Run(make, shapes, dtype, is_fast) for is_fast in (True, False))
    for number, event in enumerate(events):
        if event == "double" and dtype != torch.float32:
            continue
        if event.startswith("reload") and "double" in events[:number]:  # checkpoints keep the dtypes of state
            continue
        fast.step(number, event, readable)
        readable.step(number, event, fast)
        assert_same(fast, readable, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global", "per tensor", "norm ema", "value ema", "value growth", "norm growth"])
def test_rounding_does_not_add_up(name):
    runs = [
        Run(lambda: [CLIPS[name](), AdamW(1e-3)], [(3, 5), (7,), (40, 30)], torch.float32, fast)
        for fast in (True, False)
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        grads = [torch.randn(p.shape, generator=generator) for p in runs[0].params]
        for run in runs:
            set_grads(run.params, grads)
            run.optimizer.step()
    fast, readable = (nn.utils.parameters_to_vector(run.params).double() for run in runs)
    assert (fast - readable).norm() <= 1e-5 * readable.norm()


@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_a_saved_state_is_no_larger(save):
    sizes = []
    for fast in (True, False):
        run = Run(lambda: [ClipNormGrowth(), AdamW()], [(3, 5)] * 200, torch.float32, fast)
        train(run.optimizer, run.params, [[torch.ones_like(p) for p in run.params]] * 2)
        for saved in (run.optimizer.state_dict(), run.optimizer):
            file = io.BytesIO()
            save(saved, file)
            sizes.append(file.tell())
    assert sizes[0] <= sizes[2]
    assert sizes[1] <= sizes[3]


def test_a_state_that_was_handed_out_does_not_change():
    params = made([(3,), (2,)], torch.float32)
    optimizer = Modular(params, ClipNormGrowth(), AdamW())
    train(optimizer, params, [[torch.ones_like(p) for p in params]])
    saved = optimizer.state_dict()["state"]
    numbers = {i: float(state["adam/step"]) for i, state in saved.items()}
    saved[0]["adam/step"].fill_(9.0)  # as loaders do that write in place
    train(optimizer, params, [[torch.ones_like(p) for p in params]])
    assert numbers == {0: 1.0, 1: 1.0}
    assert [float(optimizer.state[p]["adam/step"]) for p in params] == [2.0, 2.0]
    assert float(saved[1]["adam/step"]) == 1.0


def test_parameters_drop_out_one_by_one():
    def make() -> list[Transform]:
        return [ClipNormByEMA(0.5), ClipValueGrowth(), AdamW(0.01)]

    fast, readable = (
        Run(make, [(3, 5), (7,), (2, 3, 4, 5), (70001,)], torch.float32, is_fast) for is_fast in (True, False)
    )
    for number in range(6):
        for run in (fast, readable):
            set_gradients(run.params, number, "none")
            for param in run.params[: number % 4]:
                param.grad = None
            run.optimizer.step()
        assert_same(fast, readable, torch.float32)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # before torch 2.13
def test_the_fast_way_takes_no_memory_of_the_size_of_the_parameters():
    params = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(2)]  # 4 MiB each
    following = (ClipValueByEMA(), ClipNormGrowth(), ClipByMaxEMA(), SpikeAwareClip(warmup_steps=1))
    for transform in (ClipNorm(1, dim="global"), ClipValue(0.1), Centralize(), AdaptiveGradientClip(), *following):
        optimizer = Modular(params, transform, AdamW())
        for _ in range(2):
            set_grads(params, [torch.randn_like(p) for p in params])
            optimizer.step()
        set_grads(params, [torch.randn_like(p) for p in params])
        with torch.profiler.profile(profile_memory=True) as profiler:
            optimizer.step()
        allocated = [event.cpu_memory_usage for event in profiler.events() or [] if event.cpu_memory_usage > 0]
        assert max(allocated, default=0) < 2 * 2**20, transform


@needs_compiler
def test_a_compiled_step_is_one_graph_and_follows_a_schedule():
    params = made([(3, 5), (7,)], torch.float32)
    optimizer = Modular(params, ClipNorm(0.3, dim="global"), AdamW(torch.tensor(0.01)))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()  # makes the state
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(20):
            set_gradients(params, number, "none")
            optimizer.param_groups[0]["lr"].fill_(0.01 / (number + 1))
            step()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert [float(optimizer.state[param]["adam/step"]) for param in params] == [21.0, 21.0]
