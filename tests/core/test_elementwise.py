"""An author's elementwise transform runs by pieces, and joined tensors give the numbers of each tensor alone."""

import pytest
import torch
from fast.comparison import assert_same, both, noise
from test_pages_for_authors import shown
from torch import nn
from typing_extensions import override

from torchzero_clip import (
    SGD,
    AdamW,
    ClipByMaxEMA,
    ClipNorm,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Elementwise,
    Modular,
    SpikeAwareClip,
    Transform,
)
from torchzero_clip.core.elements import Elements
from torchzero_clip.functional.scratch import Scratch

SHAPES = [(3, 5), (7,), (), (300, 1000)]
CLIP, _ = shown("write_a_transform.md", "ClipToUsual")
IN_PLACE, _ = shown("write_a_transform.md", "ClipToUsualInPlace")
EVENTS = ["zero", "none", "inf", "nan", "missing", "huge", "tiny", "none"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [CLIP, IN_PLACE], ids=lambda kind: kind.__name__)
def test_the_fast_way_of_an_author_equals_the_readable_one(kind, dtype):
    fast, readable = both(lambda: [kind(1.0, 0.7), SGD(0.1)], SHAPES, dtype)
    clipped = []
    for step, event in enumerate(EVENTS):
        for run in (fast, readable):
            run.step(noise(SHAPES, step, event))
        assert_same(fast, readable, 1e-5, 1e-6)
        clipped.append(float(fast.optimizer.metrics()[f"{kind(1.0).name}/clipped"]))
    assert max(clipped) > 0.05


class Shrink(Elementwise):
    """Divides each element by the average of its magnitudes. The rates are one setting, a tuple."""

    keeps_statistics = True
    keys = ("average",)

    def __init__(self, betas=(0.9, 1.0)):
        super().__init__({"betas": betas})

    def change(self, x, result, state, setting, at):
        beta, most = setting["betas"]
        (average,) = state
        size = torch.abs(x, out=at.memory("size", x))
        finite = at.only_finite(size)
        finite.begin_(average, size)
        finite.lerp_(average, size, 1 - beta)
        new = torch.div(x, average.clamp(min=most), out=at.memory("new", x))
        count = at.count(torch.ne(new, x, out=size))
        at.write(new, x, result)
        return count


@pytest.mark.slow
def test_a_result_that_is_no_clip_is_the_same_in_both_ways():
    fast, readable = both(lambda: [ClipNorm(1e3), Shrink(), SGD(0.1)], SHAPES, torch.float32)
    for step, event in enumerate(EVENTS):
        for run in (fast, readable):
            run.step(noise(SHAPES, step, event))
        assert_same(fast, readable, 1e-5, 1e-6)


class Doubles(ClipValue):
    @override
    def change(self, x, result, state, setting, at):
        torch.mul(x, 2.0, out=result)
        return torch.zeros(())


@pytest.mark.parametrize("fast", [True, False])
def test_an_inf_that_a_transform_makes_of_a_finite_element_enters_no_statistic(fast):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Modular([weight], Doubles(1.0), ClipValueByEMA(0.5), SGD(1.0), fast=fast)
    for first in (1.0, 3e38):
        weight.grad = torch.tensor([first, 1.0])
        optimizer.step()
    assert optimizer.state[weight]["clip_value_by_ema/ema"].tolist() == [1.0, 1.5]


TRANSFORMS = [
    ClipValue(0.5),
    ClipValueByEMA(0.9),
    ClipValueByEMA(0.9, "update"),
    ClipValueGrowth(),
    ClipValueGrowth(0.1, max_decay=None),
    ClipValueGrowth(0.1, None, None),
    SpikeAwareClip(2.0, 0.9),
    ClipByMaxEMA(),
    CLIP(1.0),
    IN_PLACE(1.0),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_joined_tensors_with_flags_for_each_element_are_those_of_each_tensor(transform):
    """So CUDA calls it; here it runs on CPU."""
    torch.manual_seed(0)
    sizes = torch.tensor([6, 10, 3, 8])
    usable, started = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    xs = [torch.randn(size) for size in sizes]
    xs[0][:2] = torch.tensor([torch.inf, torch.nan])
    states = [[torch.rand(size) for _ in transform.keys] for size in sizes]
    numbers = [torch.tensor([1.0, 0.5, torch.inf, 0.3]), torch.tensor([0.5, 0.2, 1.0, 1.0])]
    numbers = numbers if isinstance(transform, ClipByMaxEMA) else []

    def spread(vector):
        return vector.repeat_interleave(sizes)

    x, result = torch.cat(xs), torch.empty(int(sizes.sum()))
    joined = [torch.cat([state[k] for state in states]) for k in range(len(transform.keys))]
    flags = (usable, started) if transform.keeps_statistics and not numbers else (None, None)
    at = Elements(*flags, scratch=Scratch(), spread=spread)
    count = transform.change(x, result, [*joined, *map(spread, numbers)], transform.defaults, at)
    counts, copies = 0, [value.clone() for value in xs]
    for i, (value, state) in enumerate(zip(copies, states, strict=True)):
        at = Elements(*(None if flag is None else flag[i] for flag in flags))
        counts += transform.change(value, value, [*state, *(v[i] for v in numbers)], transform.defaults, at)
    torch.testing.assert_close(result, torch.cat(copies), rtol=0, atol=0, equal_nan=True)
    for k, whole in enumerate(joined):
        torch.testing.assert_close(whole, torch.cat([state[k] for state in states]), rtol=0, atol=0)
        assert whole.isfinite().all()
    assert float(count) == float(counts) > 0
    if flags[0] is not None:  # what is not usable passes
        torch.testing.assert_close(result[16:], x[16:], rtol=0, atol=0)


def test_a_limit_beyond_the_range_of_the_dtype_limits_no_finite_element():
    x, result = torch.tensor([3e38, -torch.inf]), torch.empty(2)
    Elements().clamp(x, -1e39, 1e39, result)
    assert torch.equal(result, x)


def test_state_is_declared_by_keys_and_statistics():
    class Plain(Elementwise):
        @override
        def change(self, x, result, state, setting, at):
            return torch.zeros(())

    class Keyed(Plain):
        keys = ("average",)

    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert (Plain({}).has_state(), Plain({}).init_state(param, {})) == (False, {})
    assert Keyed({}).has_state()
    assert Keyed({}).init_state(param, {})["average"].dtype == torch.float32
    assert CLIP().init_state(param, {}).keys() == {"average", "started"}


def test_names_of_memory_are_those_of_the_author():
    scratch, x = Scratch(), torch.ones(4)
    of_optimizer = scratch.memory("blocks", 4, x).fill_(1.0)
    Elements(scratch=scratch).memory("blocks", x).fill_(2.0)
    assert of_optimizer.tolist() == [1.0] * 4


class Wrong(Elementwise):
    """An author's mistake: ``change`` returns no number."""

    def __init__(self, returned):
        super().__init__({})
        self.returned = returned

    @override
    def change(self, x, result, state, setting, at):
        torch.mul(x, 2.0, out=result)
        return self.returned


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("returned", [None, 3, torch.zeros(2)], ids=["None", "int", "vector"])
def test_a_change_that_returns_no_number_is_named_before_the_parameters_change(fast, returned):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Modular([weight], Wrong(returned), AdamW(0.1), fast=fast)
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"Wrong\(.*\)\.change returned .* instead of the number of elements"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]


class Forgets(Elementwise):
    """An author's mistake: ``change`` writes some elements only."""

    keys = ("average",)
    keeps_statistics = True

    def __init__(self, written):
        super().__init__({})
        self.written = written

    @override
    def change(self, x, result, state, setting, at):
        result.view(-1)[: self.written].copy_(x.view(-1)[: self.written])
        return x.new_zeros(())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("written", [0, 2])
def test_a_change_that_forgets_elements_is_named_before_the_parameters_change(fast, written):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Modular([weight], Forgets(written), AdamW(0.1), fast=fast)
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"change gives NaN for finite elements. Write every element to result, for"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert {key: value.tolist() for key, value in optimizer.state[weight].items()} in (
        {},
        {"forgets/average": [0.0] * 3, "forgets/started": 0.0},
    )


class Raises(Elementwise):
    """A formula that raises for tensors of one size."""

    keys = ("average",)

    def __init__(self, size):
        super().__init__({})
        self.size = size

    @override
    def formula(self, x, state, setting):
        if x.numel() == self.size:
            raise ValueError("no such size")
        return x * 2, (state[0] + x,)


def test_a_formula_that_raises_starts_only_the_statistics_that_have_a_value():
    weights = [nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]
    transform = Raises(3)
    optimizer = Modular(weights, transform, SGD(1.0), fast=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="no such size"):
        optimizer.step()
    assert [optimizer.state[weight]["raises/started"].item() for weight in weights] == [1.0, 0.0, 0.0]
    assert [optimizer.state[weight]["raises/average"][0].item() for weight in weights] == [1.0, 0.0, 0.0]
    assert not any(weight.any() for weight in weights)


class Numbered(Elementwise):
    """Its state is one number, which the fast way cannot cut into pieces."""

    keys = ("count",)

    def __init__(self):
        super().__init__({})

    @override
    def init_state(self, param, setting):
        return {"count": torch.zeros(())}

    @override
    def possible_state(self, param, setting):
        return self.init_state(param, setting)

    @override
    def change(self, x, result, state, setting, at):
        torch.mul(x, state[0].add_(1), out=result)
        return x.new_zeros(())


@pytest.mark.parametrize("fast", [True, False])
def test_state_of_another_shape_is_left_to_the_readable_way(fast):
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    optimizer = Modular(weights, Numbered(), SGD(1.0), fast=fast)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert [weight.tolist() for weight in weights] == [[-3.0] * 3, [-3.0] * 2]


class Breaks(Transform):
    """Any error in mid-step, such as one of memory."""

    def __init__(self):
        super().__init__({})
        self.breaks = True

    @override
    def apply_tensors(self, updates, step):
        if self.breaks:
            raise RuntimeError("out of memory")
        return updates


@pytest.mark.parametrize(
    "make", [ClipValueGrowth, lambda: ClipValueByEMA(0.9, "update"), SpikeAwareClip], ids=["growth", "ema", "spike"]
)
def test_an_error_elsewhere_leaves_no_statistic_that_has_started_without_a_value(make):
    states = []
    for fast in (True, False):
        weights = {name: nn.Parameter(torch.zeros(2)) for name in "ab"}
        breaks = Breaks().only("b")
        optimizer = Modular(list(weights.items()), make().only("a"), breaks, SGD(1.0), fast=fast)
        for weight in weights.values():
            weight.grad = torch.tensor([1.0, -2.0])
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        assert weights["a"].grad.tolist() == [1.0, -2.0]
        breaks.breaks = False
        optimizer.step()
        states.append([*optimizer.state[weights["a"]].values(), *weights.values()])
    torch.testing.assert_close(*states)


class Halved(ClipValueByEMA):
    @override
    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return super().apply_tensor(tensor, param, grad, loss, state, setting) / 2


@pytest.mark.parametrize("fast", [True, False])
def test_a_subclass_may_go_on_from_what_its_base_makes_of_a_tensor(fast):
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for weight, clip, lr in zip(weights, (Halved(), ClipValueByEMA()), (2.0, 1.0), strict=True):
        optimizer = Modular([weight], clip, SGD(lr), fast=fast)
        for grad in ([1.0, 2.0, -3.0], [5.0, 1.0, -9.0], [0.5, 7.0, 1.0]):
            weight.grad = torch.tensor(grad)
            optimizer.step()
    assert weights[0].tolist() == weights[1].tolist() != [-6.5, -10.0, 11.0]
