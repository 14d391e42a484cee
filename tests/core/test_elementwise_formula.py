"""Elementwise transforms that are formulas: what the optimizer does around them, in both ways of a step."""

import math
import re

import pytest
import torch
from clipping.statistics import outputs
from contract.entries import ENTRIES, ClipToUsual, ClipToUsualInPlace, Mul
from contract.training import set_grads, train
from test_pages_for_authors import DOCS, shown
from torch import nn
from typing_extensions import override
from versions import needs_compiler

from torchzero_clip import (
    SGD,
    AdamW,
    ClipByMaxEMA,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Elementwise,
    Modular,
    SpikeAwareClip,
)
from torchzero_clip.core.elements import Elements
from torchzero_clip.core.step import Step
from torchzero_clip.functional.scratch import Scratch

both_ways = pytest.mark.parametrize("fast", [True, False], ids=["fast", "readable"])


class Formula(Elementwise):
    """A base for formulas without settings."""

    def __init__(self):
        super().__init__({})


@both_ways
@pytest.mark.parametrize(
    ("make", "gradients", "expected"),
    [
        (lambda: ClipValue(5.0), [4, 8, math.inf, math.nan], [4, 5, 5, math.nan]),
        (lambda: ClipValueByEMA(0.5), [4, 8], [2, 5]),
        (lambda: ClipValueByEMA(0.5, "update"), [4, 8], [4, 6]),
        (lambda: ClipValueGrowth(), [4, 8], [4, 6]),
        (lambda: ClipValueGrowth(add=1.0), [4, 8], [4, 5]),
        (lambda: ClipValueGrowth(add=3.0, mul=None), [4, 8], [4, 7]),
        (lambda: ClipValueGrowth(mul=0.5), [4, 8], [4, 2]),
        (lambda: ClipValueGrowth(), [4, 0.5, 8], [4, 0.5, 3]),
        (lambda: ClipValueGrowth(max_decay=None), [4, 0.5, 8], [4, 0.5, 0.75]),
        (lambda: ClipValueGrowth(min_value=None), [0, 1, 0, 1], [0, 1, 0, 0.75]),
        (lambda: ClipValueGrowth(), [4, math.inf, 8], [4, math.inf, 6]),
        (lambda: SpikeAwareClip(1.0, 0.5, warmup_steps=1), [4, 8], [4, math.sqrt(8)]),
        (lambda: SpikeAwareClip(1.0, 0.5, warmup_steps=3), [4, 8, 9], [4, 8, 6]),
        (lambda: ClipByMaxEMA(0.5), [4, 8], [4, 20 / 3]),
        (lambda: ClipToUsual(0.5, 0.5), [0, 4, 8], [0, 4, 3]),
    ],
)
def test_numbers_by_hand(make, gradients, expected, fast):
    results, _ = outputs(make(), [[[float(number)]] for number in gradients], fast=fast)
    assert [row[0][0] for row in results] == pytest.approx(expected, rel=1e-12, nan_ok=True)


@both_ways
def test_the_first_example_of_the_page_starts_from_zeros(fast):
    clip, _ = shown("write_a_transform.md", "ClipToUsual")
    results, optimizer = outputs(clip(2.0, 0.5), [[[4.0, 0.0]], [[8.0, 1.0]], [[math.inf, 1.0]]], fast=fast)
    assert results == [[[4.0, 0.0]], [[8.0, 1.0]], [[math.inf, 1.0]]]
    (state,) = optimizer.state.values()
    assert state["clip_to_usual/average"].tolist() == [5.0, 0.5]
    results, _ = outputs(clip(0.5, 0.5), [[[4.0]], [[8.0]]], fast=fast)
    assert results == [[[1.0]], [[2.5]]]


@both_ways
def test_with_the_start_of_the_page_the_first_update_passes(fast):
    clip, _ = shown("write_a_transform.md", "ClipToUsual")
    page = (DOCS / "write_a_transform.md").read_text()
    (lines,) = re.findall(r"^```python\n(def start.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 2
    members = {}
    exec(lines, members)
    results, _ = outputs(type("Starts", (clip,), {"start": members["start"]})(0.5, 0.5), [[[4.0]], [[8.0]]], fast=fast)
    assert results == [[[4.0]], [[3.0]]]


class ClipToLast(Elementwise):
    """Clips each element to ``factor`` times its last magnitude."""

    keys = ("last",)

    def __init__(self, factor):
        super().__init__({"factor": factor})

    @override
    def start(self, x, setting):
        return (x.abs(),)

    @override
    def formula(self, x, state, setting):
        limit = setting["factor"] * state[0].clamp(min=1e-4)
        new = x.clamp(-limit, limit)
        return new, (new.abs(),)


@both_ways
def test_what_start_returns_is_the_state_after_the_first_update_which_passes(fast):
    results, optimizer = outputs(ClipToLast(1.5), [[[0.0], [4.0]], [[2.0], [-8.0]], [[4.0], [1.0]]], fast=fast)
    assert results == [[[0.0], [4.0]], [[2.0], [-6.0]], [[3.0], [1.0]]]
    assert [state["clip_to_last/last"].tolist() for state in optimizer.state.values()] == [[3.0], [1.0]]


class Delays(Formula):
    """Returns its state as the new elements, the old elements as state, and exchanges two tensors of state."""

    keys = ("last", "one", "two")

    @override
    def start(self, x, setting):
        return x, x, -x

    @override
    def formula(self, x, state, setting):
        last, one, two = state
        return last, (x, two, one)


@both_ways
def test_a_formula_may_return_what_it_got(fast):
    results, optimizer = outputs(Delays(), [[[1.0], [2.0, 3.0]], [[4.0], [5.0, 6.0]], [[7.0], [8.0, 9.0]]], fast=fast)
    assert results == [[[1.0], [2.0, 3.0]], [[1.0], [2.0, 3.0]], [[4.0], [5.0, 6.0]]]
    states = [[state[f"delays/{key}"].tolist() for key in Delays.keys] for state in optimizer.state.values()]
    assert states == [[[7.0], [1.0], [-1.0]], [[8.0, 9.0], [2.0, 3.0], [-2.0, -3.0]]]


@both_ways
@pytest.mark.parametrize("make", [lambda: ClipToUsual(1.0, 0.5), lambda: ClipValueByEMA(0.5, "update")])
def test_an_element_that_an_earlier_transform_makes_inf_passes_and_keeps_its_state(make, fast):
    weight = nn.Parameter(torch.zeros(2))
    transform = make()
    optimizer = Modular([weight], Mul(2.0), transform, SGD(1.0), fast=fast)
    for first in (1.0, 3e38):
        weight.data.zero_()
        weight.grad = torch.tensor([first, 1.5])
        optimizer.step()
    assert weight.tolist() == [-math.inf, -3.0]
    (key,) = transform.keys
    assert optimizer.state[weight][f"{transform.name}/{key}"].tolist() == [2.0, 3.0]


def test_a_formula_with_state_keeps_statistics_unless_the_class_says_otherwise():
    class Plain(Elementwise):
        @override
        def formula(self, x, state, setting):
            return x, tuple(state)

    class Keyed(Plain):
        keys = ("average",)

    class Says(Plain):
        keys = ("average",)
        keeps_statistics = False

    class Changes(Elementwise):
        keys = ("average",)

        @override
        def change(self, x, result, state, setting, at):
            return x.new_zeros(())

    kinds = [Plain, Keyed, type("Derived", (Keyed,), {}), Says, type("SaysToo", (Says,), {}), Changes]
    assert [kind.keeps_statistics for kind in kinds] == [False, True, True, False, False, False]
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert [set(kind({}).init_state(param, {})) for kind in kinds[:4]] == [
        set(),
        {"average", "started"},
        {"average", "started"},
        {"average"},
    ]


class HalvesByFormula(ClipValueGrowth):
    @override
    def formula(self, x, state, setting):
        return x / 2, tuple(state)


class StartsAtOne(ClipValueGrowth):
    @override
    def start(self, x, setting):
        return (torch.ones_like(x),)


class DoublesByChange(ClipValueGrowth):
    @override
    def change(self, x, result, state, setting, at):
        torch.mul(x, 2.0, out=result)
        return at.count(torch.ones_like(x))


@both_ways
@pytest.mark.parametrize(
    ("kind", "expected"), [(HalvesByFormula, [4, 4]), (StartsAtOne, [4, 1.5]), (DoublesByChange, [8, 16])]
)
def test_a_subclass_that_overrides_one_method_is_followed_in_both_ways(kind, expected, fast):
    results, _ = outputs(kind(), [[[4.0]], [[8.0]]], fast=fast)
    assert [row[0][0] for row in results] == expected
    assert not kind.keeps_finite


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", [ClipToUsual, ClipToUsualInPlace])
def test_a_compiled_step_with_a_formula_is_one_graph(kind):
    params, others = ([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))] for _ in range(2))
    optimizer, other = (Modular(each, kind(0.9, 0.5), SGD(0.1)) for each in (params, others))
    rows = [[torch.full_like(p, scale) for p in params] for scale in (1.0, 3.0, torch.inf, 0.5)]
    train(other, others, rows)
    train(optimizer, params, rows[:1])
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    for row in rows[1:]:
        set_grads(params, row)
        step()
    torch.testing.assert_close(params, others)


def acts_on_elements(made):
    return isinstance(made, Elementwise) and made.acts_with(made.defaults)


def assert_traced(call, *tensors):
    """In one graph, with the results of a call that is not compiled."""
    torch._dynamo.reset()
    copies, others = ([tensor.clone() for tensor in tensors] for _ in range(2))
    result = torch.compile(call, backend="eager", fullgraph=True)(*copies)
    torch.testing.assert_close((result, copies), (call(*others), others))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("entry", [e for e in ENTRIES if acts_on_elements(e.make())], ids=str)
def test_every_change_and_every_formula_is_one_graph_and_counts_in_rows(entry):
    transform, x = entry.make(), torch.linspace(-3, 3, 12).view(3, 4)
    setting, state = transform.defaults, transform.init_state(x, transform.defaults)
    norm = torch.ones(1, dtype=torch.float64)
    step = Step([x], [x], None, [state], [setting], transform.init_global_state(), gradient_norms=norm)
    flags = transform.flags([x], step, None)
    for by_formula in {not transform.has_change, transform.has_formula}:
        numbers = (flags.of_formula() if by_formula else flags).numbers
        arguments = [x, torch.empty_like(x), *(state[key] for key in transform.keys), *(n[0].float() for n in numbers)]
        for flag in (None, torch.tensor(True)):

            def call(x, result, *state_and_numbers, flag=flag, by_formula=by_formula):
                at = Elements(flag, flag, finite=flag is None, scratch=Scratch())
                return transform.counted(x, result, state_and_numbers, setting, at, by_formula=by_formula)

            assert_traced(call, *arguments)
            # the compiler computes sums over rows in the loop that changes the elements
            copies = [tensor.clone() for tensor in arguments]
            assert call(*copies).tolist() == (copies[1] != x).sum(-1).tolist()


class Returns(Formula):
    """An author's mistake: a formula or a start that returns something else."""

    keys = ("average",)

    def __init__(self, new, first=None):
        super().__init__()
        self.new, self.first = new, first

    @override
    def formula(self, x, state, setting):
        return self.new(x)

    @override
    def start(self, x, setting):
        return None if self.first is None else self.first(x)


@both_ways
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda: Returns(lambda x: x), r"\.formula returned a tensor of shape .*write `return new, \(new_average,\)`"),
        (lambda: Returns(lambda x: None), r"\.formula returned NoneType\. "),
        (lambda: Returns(lambda x: (x, (x.sum(),))), r"\.formula returned .* of torch\.float32 and .* shape \(\) of"),
        (
            lambda: Returns(lambda x: (x > 0, (x,))),
            r"\.formula returned .* torch\.bool .* the shape and the dtype of x: ",
        ),
        (lambda: Returns(lambda x: (x.half(), (x,))), r"\.formula returned a tensor of shape .* of torch\.float16 and"),
        (
            lambda: Returns(lambda x: (x, (x.double(),))),
            r"\.formula returned .* and a tensor of .* of torch\.float64\. ",
        ),
        (lambda: Returns(lambda x: (x, ())), r"\.formula returned a tensor of shape"),
        (
            lambda: Returns(lambda x: (x, x)),
            r"\.formula returned .* Return the new elements and a tuple of the new state",
        ),
        (lambda: Returns(lambda x: (x, (x,)), lambda x: x), r"\.start returned a .* Return a tuple of the first state"),
        (lambda: Returns(lambda x: (x, (x,)), lambda x: 0.0), r"\.start returned 0\.0 \(float\)\. .*`return \(new_av"),
        (lambda: Returns(lambda x: (x, (x,)), lambda x: ()), r"\.start returned nothing\. "),
    ],
)
def test_what_a_formula_has_to_return_is_said_before_parameters_and_state_change(transform, message, fast):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Modular([weight], transform(), AdamW(0.1), fast=fast)
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=rf"^Returns\(.*{message}"):
        optimizer.step()
    assert weight.tolist() == [1.0] * 3
    assert optimizer.state[weight].get("returns/average", torch.zeros(3)).tolist() == [0.0] * 3


class DiffersFromLast(Formula):
    keys = ("last",)
    keeps_statistics = False

    @override
    def formula(self, x, state, setting):
        return x - state[0], (x,)


@both_ways
def test_without_statistics_elements_that_are_not_finite_keep_their_state_too(fast):
    results, optimizer = outputs(DiffersFromLast(), [[[1.0, 2.0]], [[3.0, math.inf]], [[4.0, 6.0]]], fast=fast)
    assert results == [[[1.0, 2.0]], [[2.0, math.inf]], [[1.0, 4.0]]]
    (state,) = optimizer.state.values()
    assert state["differs_from_last/last"].tolist() == [4.0, 6.0]


class InPlace(Formula):
    keys = ("average",)

    @override
    def formula(self, x, state, setting):
        average = state[0].lerp_(x.abs(), 0.5)
        return x.clamp(-average, average), (average,)


class StartsInPlace(Formula):
    keys = ("average",)

    @override
    def formula(self, x, state, setting):
        return x, (state[0] + x,)

    @override
    def start(self, x, setting):
        return (x.abs_(),)


class Misspells(Formula):
    @override
    def formula(self, x, state, setting):
        return x * setting["factr"], ()


@both_ways
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InPlace, r"^InPlace\(\)\.formula changes its arguments in place\. Compute new tensors"),
        (StartsInPlace, r"^StartsInPlace\(\)\.start changes its arguments in place\. Compute new tensors"),
        (Misspells, r"^Misspells\(\)\.formula looked up 'factr', which does not exist"),
    ],
)
def test_a_mistake_in_a_formula_is_explained_before_parameters_and_state_change(kind, message, fast):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Modular([weight], kind(), SGD(0.1), fast=fast)
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert weight.tolist() == [1.0] * 3
    assert optimizer.state[weight].get("in_place/average", torch.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("keys", [("last", "last"), ("started",)])
def test_keys_that_would_share_an_entry_are_refused(keys):
    with pytest.raises(TypeError, match="they must differ, also from 'started'"):
        type("Shares", (Formula,), {"keys": keys})


def test_a_formula_with_other_arguments_is_refused_when_the_class_is_made():
    with pytest.raises(
        TypeError, match=r"Other\.formula takes \(self, x, state\): write def formula\(self, x, state, "
    ):
        type("Other", (Formula,), {"formula": lambda self, x, state: (x, ())})


def test_a_class_with_neither_formula_nor_change_is_named_when_the_optimizer_is_made():
    with pytest.raises(TypeError, match=r"Formula\(\) changes no elements: its class has neither formula\(self"):
        Modular([nn.Parameter(torch.zeros(2))], Formula())
