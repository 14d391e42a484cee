"""The first fast step of an elementwise transform tries it out, so that an author's mistake is seen at once."""

import math

import pytest
import torch
from contract.training import train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
)
from torchzero_clip.fast import fast, trial


class Halves(Elementwise):
    """Halves the elements, and stores them."""

    keys = ("last",)

    def __init__(self):
        super().__init__({})

    @override
    def formula(self, x, state, setting):
        return x / 2, (x,)

    @override
    def change(self, x, result, state, setting, at):
        (last,) = state
        at = at.only_finite(x.abs())
        at.put(x, last)
        at.write(x / 2, x, result)
        return at.count(torch.ne(x, 0))


class ForgetsResult(Halves):
    formula = Halves.formula

    @override
    def change(self, x, result, state, setting, at):
        at.put(x, state[0])
        return at.count(torch.ne(x, 0))


class ForgetsResultWithoutFormula(Elementwise):
    def __init__(self):
        super().__init__({})

    @override
    def change(self, x, result, state, setting, at):
        return at.count(torch.ne(x.clamp(-1, 1), x))


class WritesPartOfResult(ForgetsResultWithoutFormula):
    @override
    def change(self, x, result, state, setting, at):
        result.copy_(x)
        result[-1:] = torch.nan
        return x.new_zeros(())


class ForgetsState(Halves):
    formula = Halves.formula

    @override
    def change(self, x, result, state, setting, at):
        at.write(x / 2, x, result)
        return at.count(torch.ne(x, 0))


class ForgetsStart(ClipValueGrowth):
    """Limits the first update, too."""

    formula, start = ClipValueGrowth.formula, ClipValueGrowth.start

    @override
    def change(self, x, result, state, setting, at):
        at.clamp(x, -1.0, 1.0, result)
        return at.count(x.abs() > 1)


class Thirds(Halves):
    formula = Halves.formula

    @override
    def change(self, x, result, state, setting, at):
        at.only_finite(x.abs()).put(x, state[0])
        at.write(x / 3, x, result)
        return at.count(torch.ne(x, 0))


class WritesToX(ForgetsResultWithoutFormula):
    @override
    def change(self, x, result, state, setting, at):
        result.copy_(x.clamp_(-1, 1))
        return x.new_zeros(())


class FormulaInPlace(Halves):
    @override
    def formula(self, x, state, setting):
        return x / 2, (state[0].lerp_(x, 0.5),)


class FormulaWithNaN(Halves):
    @override
    def formula(self, x, state, setting):
        return x.sqrt(), (x,)


class Usual(Elementwise):
    """Limits elements to the average of their magnitudes."""

    keys = ("average",)
    keeps_statistics = True

    def __init__(self, beta=0.9):
        super().__init__({"beta": beta})

    def moved(self, at, finite):
        """The elements whose state changes."""
        return finite

    def put(self, average, size, setting, at):
        at.lerp_(average, size, 1 - setting["beta"])

    def hits(self, size, average):
        return torch.gt(size, average, out=size)

    @override
    def change(self, x, result, state, setting, at):
        (average,) = state
        size = torch.abs(x, out=at.memory("size", x))
        self.put(average, size, setting, self.moved(at, at.only_finite(size)))
        finite = at.only_finite(size)
        finite.clamp(x, -average, average, result)
        return finite.count(self.hits(size, average))


class WithFormula(Usual):
    @override
    def formula(self, x, state, setting):
        average = state[0].lerp(x.abs(), 1 - setting["beta"])
        return x.clamp(-average, average), (average,)

    change = Usual.change


class StoresInf(Usual):
    """It moves the state of all elements of the tensor."""

    @override
    def moved(self, at, finite):
        return at


class StoresInfOfFormula(WithFormula, StoresInf):
    change, formula = Usual.change, WithFormula.formula


class StoresUnusable(Usual):
    """It moves the state by torch itself, for tensors that are not usable too."""

    @override
    def put(self, average, size, setting, at):
        average.lerp_(size.nan_to_num(posinf=0.0).where(size < torch.inf, average), 1 - setting["beta"])


class StoresUnusableOfFormula(WithFormula, StoresUnusable):
    change, formula = Usual.change, WithFormula.formula


class ChangesOnly(WithFormula):
    """A subclass that overrides only ``change``."""

    @override
    def change(self, x, result, state, setting, at):
        state[0].lerp_(x.abs(), 1 - setting["beta"])
        at.write(x, x, result)
        return x.new_zeros(())


class ForgetsResultInASubclass(WithFormula):
    @override
    def change(self, x, result, state, setting, at):
        return x.new_zeros(())


class CountsAll(WithFormula):
    @override
    def hits(self, size, average):
        return torch.ones_like(size)


class CountsNone(WithFormula):
    @override
    def hits(self, size, average):
        return torch.zeros_like(size)


class DiffersInOne(Halves):
    formula = Halves.formula

    @override
    def change(self, x, result, state, setting, at):
        count = super().change(x, result, state, setting, at)
        result.clamp_(max=1.6)
        return count


class Centers(Halves):
    """Its formula depends on the shape of the tensor."""

    @override
    def formula(self, x, state, setting):
        return x - x.mean(), (x,)


class StoresTheMean(Halves):
    @override
    def formula(self, x, state, setting):
        return x.minimum(state[0]), (x.mean().expand_as(x),)


class StartsAtTheMean(Halves):
    """Its first state depends on the shape."""

    formula = Halves.formula

    @override
    def start(self, x, setting):
        return (x.abs().mean().expand_as(x),)


class StateWithNaN(Halves):
    @override
    def formula(self, x, state, setting):
        return x / 2, (state[0] / 0,)


REST = (
    r"\.change changes the state 'average' of elements that do not take part, such as those .* at\.only_finite\(size\)"
)
SHAPE = r"\.formula computes other numbers from halves of a tensor than from the whole\. It must treat each element"
WRONG = {
    StoresInf: r"StoresInf\(\)" + REST,
    StoresInfOfFormula: REST,
    StoresUnusable: REST,
    StoresUnusableOfFormula: REST,
    ChangesOnly: r"ChangesOnly\(\)" + REST,
    ForgetsResultInASubclass: r"ForgetsResultInASubclass\(\)\.change gives NaN for finite elements",
    CountsAll: r"formula differ\. Change computes the count \[11\], and the formula \[10\]\. Correct one",
    CountsNone: r"formula differ\. Change computes the count \[0\], and the formula \[12\]\. Correct one",
    DiffersInOne: r"Change computes elements \[1\.6\], and the formula \[1\.65\]\. Correct",
    Centers: r"Centers\(\)" + SHAPE,
    StoresTheMean: SHAPE,
    StartsAtTheMean: SHAPE,
    ForgetsResult: r"ForgetsResult\(\)\.change gives NaN for finite elements\. Write every element to result, for",
    ForgetsResultWithoutFormula: r"WithoutFormula\(\)\.change gives NaN for finite elements\. Write every element",
    WritesPartOfResult: r"change gives NaN for finite elements\. Write every element to result",
    ForgetsState: r"differ\. Change computes state 'last' \[0, 0, 0, \.\.\.\], and the formula \[-2\.9, ",
    ForgetsStart: r"differ\. Change computes elements \[-1, -1, -1, \.\.\.\], and the formula \[-2\.9, ",
    Thirds: r"Thirds\(\)\.change and its formula differ\. .* Correct one of the two methods, or delete change",
    WritesToX: r"WritesToX\(\)\.change changes x in place\. Write the new elements to result",
    FormulaInPlace: r"FormulaInPlace\(\)\.formula changes its arguments in place\. Compute new tensors, for example",
    StateWithNaN: r"StateWithNaN\(\)\.formula gives NaN in the state 'last' for finite elements$",
    FormulaWithNaN: r"FormulaWithNaN\(\)\.formula gives NaN for finite elements$",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_mistake_is_named_before_parameters_and_state_change(kind, dtype):
    params = [nn.Parameter(torch.ones(200_000, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))]
    transform = kind()
    optimizer = Modular(params, transform, AdamW(0.1))
    grads = [torch.full_like(param, 3.0) for param in params]
    for _ in range(2):  # also the second time
        with pytest.raises(RuntimeError, match=WRONG[kind]):
            train(optimizer, params, [grads])
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))
    values = [v for s in optimizer.state.values() for k, v in s.items() if k.startswith(transform.name)]
    assert all(bool((value == 0).all()) for value in values)


@pytest.mark.parametrize("make", [Usual, WithFormula, lambda: Usual(0.0), lambda: WithFormula(1.0)])
def test_a_correct_change_passes_the_trial(make):
    weight = nn.Parameter(torch.zeros(3))
    train(Modular([weight], make(), SGD(1.0)), [weight], [[torch.ones(3)]] * 2)
    assert weight.isfinite().all()


def test_a_change_that_rounds_otherwise_than_the_formula_may_count_otherwise():
    class Rounds(Elementwise):
        def __init__(self):
            super().__init__({})

        @override
        def formula(self, x, state, setting):
            return x * (1 + 1e-6), ()

        @override
        def change(self, x, result, state, setting, at):
            result.copy_(x)
            return x.new_zeros(())

    weight = nn.Parameter(torch.zeros(3))
    train(Modular([weight], Rounds(), SGD(1.0)), [weight], [[-torch.ones(3)]])
    assert weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function",
    [torch.tanh, torch.exp, torch.erf, nn.functional.gelu, nn.functional.dropout, torch.bernoulli, torch.randn_like],
    ids=lambda function: function.__name__,
)
def test_a_formula_of_elements_passes_the_trial(function, dtype):
    """Random formulas draw other numbers for halves of a tensor."""

    class Applies(Elementwise):
        def __init__(self):
            super().__init__({})

        @override
        def formula(self, x, state, setting):
            return function(x.sigmoid()), ()

    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    torch.manual_seed(0)
    expected = -function(torch.full((3,), 0.5, dtype=dtype))
    torch.manual_seed(0)
    train(Modular([weight], Applies(), SGD(1.0)), [weight], [[torch.zeros(3, dtype=dtype)]])
    torch.testing.assert_close(weight.data, expected)


def test_the_readable_way_names_a_forgotten_result():
    weight = nn.Parameter(torch.ones(3))
    optimizer = Modular([weight], ForgetsResultWithoutFormula(), SGD(1.0), fast=False)
    with pytest.raises(RuntimeError, match=r"change gives NaN for finite elements. Write every element to result"):
        train(optimizer, [weight], [[torch.ones(3)]])
    assert weight.tolist() == [1.0, 1.0, 1.0]
    train(Modular([weight], ForgetsResult(), SGD(1.0), fast=False), [weight], [[torch.ones(3)]])  # by its formula


class Random(Elementwise):
    """Draws random numbers."""

    def __init__(self):
        super().__init__({})

    @override
    def formula(self, x, state, setting):
        return x * torch.rand_like(x), ()

    @override
    def change(self, x, result, state, setting, at):
        torch.mul(x, torch.rand_like(x), out=result)
        return at.count(torch.ne(result, x))


def test_the_trial_draws_no_random_numbers_of_the_step():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(3))
    train(Modular([weight], Random(), SGD(1.0)), [weight], [[-torch.ones(3)]])
    assert torch.equal(weight, expected)


class ForgetsSometimes(Elementwise):
    """Forgets the result with some arguments, settings or dtypes."""

    def __init__(self, mode="clips", limit=1.0):
        super().__init__({"limit": limit})
        self.mode = mode

    @override
    def change(self, x, result, state, setting, at):
        if self.mode == "clips" and setting["limit"] is not None and x.dtype == torch.float32:
            torch.clamp(x, -setting["limit"], setting["limit"], out=result)
        return x.new_zeros(())


@pytest.mark.parametrize(
    ("transforms", "options"),
    [
        ([ForgetsSometimes(), ForgetsSometimes("forgets")], {}),
        ([ForgetsSometimes().only("a"), ForgetsSometimes("forgets").only("b")], {}),
        ([ForgetsSometimes()], {"limit": None}),
        ([ForgetsSometimes()], {"dtype": torch.float64}),
    ],
    ids=["arguments", "scopes", "settings", "dtypes"],
)
def test_each_transform_is_tried_with_each_dtype_and_with_settings_of_none(transforms, options):
    dtype = options.pop("dtype", torch.float32)
    params = [nn.Parameter(torch.ones(200_000)), nn.Parameter(torch.ones(200_000, dtype=dtype))]
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])], **options}]
    optimizer = Modular(groups, *transforms, SGD(1.0))
    with pytest.raises(RuntimeError, match=r"^ForgetsSometimes\(.*\.change gives NaN for finite elements"):
        train(optimizer, params, [[torch.full_like(param, 3.0) for param in params]])
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)


def test_each_transform_is_tried_once_for_each_optimizer_and_dtype(monkeypatch):
    tried = []
    monkeypatch.setattr(fast, "try_out", lambda transform, setting, dtype: tried.append((type(transform), dtype)))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        params = [nn.Parameter(torch.zeros(3, dtype=dtype))]
        optimizer = Modular(params, ClipNorm(1), Usual(1.0), Halves(), ClipValue(2.0), Usual(2.0), AdamW())
        train(optimizer, params, [[torch.ones(3, dtype=dtype)]] * 3)
    wide = [torch.float32, torch.float32, torch.float64]
    assert tried == [(kind, dtype) for dtype in wide for kind in (Usual, Halves, ClipValue, Usual)]
    tried.clear()
    params = [nn.Parameter(torch.zeros(3))]
    optimizer = Modular(params, Halves(), SGD(0.1))
    train(optimizer, params, [[torch.ones(3)]])
    params[0].data = params[0].data.double()
    train(optimizer, params, [[torch.ones(3, dtype=torch.float64)]])
    assert tried == [(Halves, torch.float32), (Halves, torch.float64)]


@pytest.mark.parametrize(
    "transform",
    [
        ClipValue(math.inf),
        ClipValue(0.0),
        ClipValueByEMA(1.0),
        ClipValueGrowth(0.0, None, None, None),
        ClipValueGrowth(0.1, 0.5, 2.0, 1.0),
        SpikeAwareClip(1e30, 0.0, warmup_steps=1),
        SpikeAwareClip(1e-30, 1.0, warmup_steps=2),
        ClipByMaxEMA(0.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ours_pass_the_trial_at_the_ends_of_their_settings(transform, dtype):
    trial.try_out(transform, transform.defaults, dtype)


def test_there_is_no_trial_on_fake_tensors(monkeypatch):
    monkeypatch.setattr(trial, "_steps", None)
    with FakeTensorMode():
        trial.try_out(Halves(), {}, torch.float32)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_limit_in_a_tensor_is_not_tried(limit, fast):
    param = nn.Parameter(torch.zeros(3))
    optimizer = Modular([param], ClipValue(torch.tensor(limit)), SGD(1.0), fast=fast)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.isnan().all()
