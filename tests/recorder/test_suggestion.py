"""A limit found from norms: the cases of the definition, and its doubts."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder.records import made

from torchzero_clip import Chain, ClipNorm, Modular, Recorder, read_record
from torchzero_clip.recorder.arithmetic import effective_count, joined_norms, median_of, medians, quantile, share_range
from torchzero_clip.recorder.series import levels
from torchzero_clip.recorder.suggestion import Series, suggested


def lognormal(seed, count=1000):
    return torch.exp(0.2 * torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def suggest(norms, share=0.01):
    return suggested({"joint": norms}, share, "joint")


def spiked(norms, count):
    order = torch.randperm(len(norms), generator=torch.Generator().manual_seed(count))
    norms[order[:count]] *= 50
    return norms


def with_bad_values(norms):
    norms[[5, 600]] = torch.nan
    norms[300] = torch.inf
    return norms


def begins_high(norms):
    norms[:200] *= torch.linspace(10, 1, 200, dtype=torch.float64)
    return norms


CASES = {
    "plain": (lambda norms: norms, 0),
    "3 spikes": (lambda norms: spiked(norms, 3), 3),
    "50 spikes": (lambda norms: spiked(norms, 50), 50),
    "not finite": (with_bad_values, 0),
    "begins high": (begins_high, 0),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_the_limit_is_that_of_usual_norms(case, seed):
    change, spikes = CASES[case]
    found = suggest(change(lognormal(seed)))
    assert 1.5 <= found.limit <= 1.75
    assert (found.spikes, found.answer) == (spikes, "enough" if found.confidence == "high" else "too few")


@pytest.mark.parametrize("seed", range(3))
def test_norms_that_rise_or_fall_drift(seed):
    drift = torch.linspace(1, 2, 1000, dtype=torch.float64)
    for factor in (drift, drift.flip(0)):
        found = suggest(lognormal(seed) * factor, 0.1)
        assert (found.answer, found.confidence) == ("drifting", "low")
        assert "Confidence: low (norms that drift), because" in str(found)
        assert "A limit that adapts follows such norms: ZClip(max_norm=None). The confidence says" in str(found)


def test_the_limit_by_hand():
    norms = torch.tensor([float(10 + k % 4) for k in range(40)], dtype=torch.float64)
    found = suggest(norms, 0.25)
    assert found.limit == quantile(norms, 0.75) == 12.25  # position 29.25 between 12 and 13, linear


def test_few_norms_are_refused_and_not_counted_twice():
    with pytest.raises(ValueError, match="at least 20 norms that are finite and above 0, got 19"):
        suggest(torch.cat([torch.ones(19), torch.tensor([0.0, torch.nan, torch.inf])]).double())


def changed(seed, rows, factor, count=1000):
    """Lognormal norms, of which some are multiplied."""
    norms = lognormal(seed, count)
    norms[rows] *= factor
    return norms


EVERY = torch.arange(1000)
DOUBTS = {
    "too few": (lambda: lognormal(0, 50), 0.01, "low", "are too few to find the norm that 1% of them exceed"),
    "3 above": (lambda: lognormal(0, 300), 0.01, "medium", "exceed: record about 6,000 more steps"),
    "1 above": (lambda: lognormal(0, 100), 0.01, "medium", "exceed: record about 6,000 more steps"),
    "constant": (lambda: torch.ones(100).double(), 0.1, "low", "the limit is as large as the largest usual norm"),
    "line": (lambda: torch.linspace(1, 100, 1000), 0.1, "low", "still changed in the first half"),
    "growing": (lambda: lognormal(0) * torch.linspace(1, 3, 1000), 0.1, "low", "still changed in the first half"),
    "clipped": (lambda: lognormal(0).clamp(max=1.2), 0.1, "low", "probably clipped the gradients before"),
    "3 equal": (
        lambda: changed(0, EVERY % 400 == 100, 0).add(2.5 * (EVERY % 400 == 100)),
        0.25,
        "medium",
        "3 of 1,000 norms are equal",
    ),
    "NaN": (lambda: changed(0, EVERY % 50 == 0, math.nan), 0.25, "medium", "20 of 1,000 norms are inf or NaN"),
    "70% NaN": (lambda: changed(0, EVERY % 10 < 7, math.nan), 0.1, "low", "700 of 1,000 norms are inf or NaN"),
    "infinite": (lambda: changed(0, EVERY % 5 == 0, math.inf), 0.1, "low", "200 of 1,000 norms are inf or NaN"),
    "zeros": (lambda: changed(0, EVERY % 16 == 0, 0), 0.25, "medium", "63 of 1,000 norms are 0"),
    "spikes": (lambda: changed(0, EVERY % 4 == 0, 50), 0.1, "low", "250 of 1,000 norms are spikes"),
    "6% spikes": (lambda: changed(0, EVERY % 16 == 0, 7), 0.1, "low", "63 of 1,000 norms are spikes"),
    "ends with spikes": (
        lambda: changed(0, EVERY > 989, 9),
        0.1,
        "low",
        "the last 10 norms are all spikes, inf or NaN",
    ),
    "ends with NaN": (lambda: changed(0, EVERY > 989, math.nan), 0.1, "low", "the last 10 norms are all spikes"),
    "alternating": (lambda: changed(0, EVERY % 2 == 0, 8), 0.1, "low", "the norms have two levels: 50% are near"),
    "1e-6": (lambda: changed(0, EVERY % 10 > 0, 1e-6), 0.1, "low", "90% are near 9.987e-07, and 10% near 0.999"),
    "outweighed": (lambda: changed(0, EVERY % 100 == 0, 5e4), 0.1, "low", "so a few large norms outweigh all others"),
    "alike": (
        lambda: lognormal(0, 40).repeat_interleave(25),
        0.1,
        "medium",
        "which tell as much as about 33 independent",
    ),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_each_doubt_lowers_the_confidence_and_is_printed(case):
    norms, share, confidence, reason = DOUBTS[case]
    found = suggest(norms().double(), share)
    assert found.confidence == confidence
    assert reason in found.reason
    assert re.search(rf"Confidence: {confidence} \([a-z ]+\), because {re.escape(found.reason)}\. ", str(found))


@pytest.mark.parametrize(
    "norms",
    [
        lambda: changed(0, EVERY % 100 == 0, math.nan),  # 1%
        lambda: changed(0, EVERY % 20 == 0, 0),  # 5%
        lambda: changed(0, EVERY % 20 == 0, 3.5),  # 5% spikes
        lambda: changed(0, EVERY > 990, 9),  # nine spikes at the end
        lambda: torch.cat([lognormal(0, 998), torch.full((2,), 2.5)]),
        lambda: (lognormal(0) * 10).round(),  # many norms are equal, also below the largest
    ],
)
def test_borders_are_no_doubts(norms):
    assert suggest(norms().double(), 0.25).reason == ""


def test_a_norm_of_a_step_without_gradients_does_not_count():
    found = suggest(changed(0, EVERY % 2 == 0, -1), 0.5)
    assert (found.confidence, len(found.series["joint"].norms)) == ("high", 500)


UNIMODAL = {
    "lognormal": lambda n: torch.randn(n).mul(0.3).exp(),
    "wide lognormal": lambda n: torch.randn(n).mul(2).exp(),
    "gamma": lambda n: torch.distributions.Gamma(torch.tensor(0.5), 1.0).sample((n,)),
    "exponential": lambda n: torch.rand(n).log().neg(),
    "t": lambda n: torch.distributions.StudentT(1.5).sample((n,)).abs(),
    "uniform": lambda n: torch.rand(n),
    "trend": lambda n: torch.randn(n).mul(0.2).exp() * torch.linspace(1, 4, n),
    "decay": lambda n: torch.randn(n).mul(0.2).exp() / torch.linspace(0.1, 1, n),
    "steps of 1/8": lambda n: torch.randn(n).mul(0.3).exp().mul(8).round().clamp(min=1),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", UNIMODAL)
def test_norms_of_one_level_do_not_have_two(name):
    torch.manual_seed(0)
    found = [levels(UNIMODAL[name](n).double()) for n in (100, 300, 1000) for _ in range(30)]
    assert found == [[]] * 90


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "wide lognormal", "gamma", "t"])
def test_noise_is_hardly_ever_a_drift(name):
    torch.manual_seed(0)
    answers = [suggest(UNIMODAL[name](100).double(), 0.1).answer for _ in range(50)]
    assert answers.count("drifting") <= 2


def test_two_levels_by_hand():
    norms = torch.tensor([1.0, 2.0, 3.0] * 30 + [40.0, 50.0, 60.0] * 10).double()
    assert levels(norms) == [(pytest.approx(2), 0.75), (pytest.approx(50), 0.25)]
    assert levels(torch.tensor([1.0, 2.0, 3.0] * 39 + [40.0, 50.0, 60.0] * 2).double()) == []  # 4.9%
    assert levels(torch.tensor([1.0] * 50 + [1.99] * 50).double()) == []
    assert len(levels(torch.tensor([1.0] * 50 + [2.01] * 50).double())) == 2


@pytest.mark.parametrize("count", [100, 300, 1000])
@pytest.mark.parametrize("at", [(1.0, 3.0, 9.0), (1.0, 10.0, 100.0), (1.0, 3.0, 9.0, 27.0)])
def test_three_and_four_levels_are_found(at, count):
    torch.manual_seed(0)
    for _ in range(10):
        norms = torch.tensor(at, dtype=torch.float64)[torch.arange(count) % len(at)] * torch.randn(count).mul(0.1).exp()
        assert levels(norms) == [(pytest.approx(x, rel=0.2), pytest.approx(1 / len(at), abs=0.01)) for x in at]
    assert suggest(norms, 0.1).confidence == "low"


def test_two_levels_that_overlap_are_found_in_most_series():
    torch.manual_seed(0)
    found = [levels(torch.randn(300).mul(0.5).exp().double() * 10 ** (torch.rand(300) < 0.5)) for _ in range(50)]
    assert sum(len(of_series) == 2 for of_series in found) > 35


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 99), st.sampled_from(["plain", "spikes", "levels", "growing"]), st.floats(-30, 30))
def test_the_scale_changes_only_numbers(seed, kind, exponent):
    norms, scale = lognormal(seed, 200), 10.0**exponent
    norms *= {"spikes": 30.0, "levels": 5.0}.get(kind, 1.0) ** (torch.arange(200) % {"levels": 2}.get(kind, 50) == 0)
    norms *= torch.linspace(1, 4 if kind == "growing" else 1, 200)
    one, other = suggest(norms, 0.1), suggest(norms * scale, 0.1)
    assert other.limit == pytest.approx(one.limit * scale, rel=1e-12)
    shares = [share for choice in one.choices for share in choice[2:]]
    assert [share for choice in other.choices for share in choice[2:]] == pytest.approx(shares, rel=1e-9)
    assert without_numbers(other) == without_numbers(one)


def without_numbers(suggestion):
    return re.sub(r"\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?", "#", str(suggestion))


def binomial_tail(count, least, chance):
    """The probability of at least so many successes."""
    return sum(math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(least, count + 1))


@pytest.mark.parametrize(
    ("above", "count"), [(1, 100), (0, 20), (10, 100), (50, 100), (10, 1000), (500, 1000), (19, 20)]
)
def test_the_range_of_the_share_is_that_of_an_order_statistic(above, count):
    low, high = share_range(above, count, count)
    assert binomial_tail(count, above + 1, high) == pytest.approx(0.975, abs=1e-3)
    assert (low == 0) if above == 0 else (binomial_tail(count, above + 1, low) == pytest.approx(0.025, abs=1e-3))


def test_the_range_of_one_percent_of_100_norms():
    low, high = share_range(1, 100, 100)
    assert (round(low, 4), round(high, 4)) == (0.0024, 0.0545)
    assert share_range(1, 100, 10)[1] > 0.14


def autoregressive(count, r):
    values = torch.randn(count, dtype=torch.float64).tolist()
    for i in range(1, count):
        values[i] = r * values[i - 1] + (1 - r * r) ** 0.5 * values[i]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_the_range_has_the_future_share_in_95_of_100_records(r):
    torch.manual_seed(0)
    hits = 0
    for _ in range(100):
        values = autoregressive(300, r)
        limit = quantile(values, 0.9)
        low, high = share_range(30, 300, effective_count(values))
        hits += low <= 0.5 * math.erfc(limit / math.sqrt(2)) <= high
    assert hits >= 90


@pytest.mark.parametrize(("r", "part"), [(0.0, 1.0), (0.5, 1 / 3), (0.9, 1 / 19)])
def test_the_effective_count_of_autoregressive_values(r, part):
    torch.manual_seed(0)
    assert effective_count(autoregressive(20000, r)) == pytest.approx(20000 * part, rel=0.15)
    assert effective_count(torch.full((30,), 0.1).double()) == 30


@pytest.mark.parametrize("independent", [10, 15, 40])
def test_the_effective_count_of_short_series_is_not_too_large(independent):
    torch.manual_seed(0)
    counts = [effective_count(autoregressive(300, (300 - independent) / (300 + independent))) for _ in range(60)]
    assert median_of(torch.tensor(counts)) == pytest.approx(independent, rel=0.25)


def test_choices_by_hand():
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    found = suggest((1000.0 + order).double(), 0.1)
    assert [(c.name, round(c.limit, 6), c.share) for c in found.choices] == [
        ("joint", 1989.01, 0.01),  # between the norms number 989 and 990 of 0 to 999
        ("joint", 1899.1, 0.1),
        ("joint", 1499.5, 0.5),
    ]
    assert all(c.low < c.share < c.high for c in found.choices)
    assert [round(c.share, 3) for c in suggest((1000.0 + order).double(), 0.25).choices] == [0.01, 0.1, 0.25, 0.5]
    assert found.choices[1].limit == found.limit


def test_equal_norms_at_the_limit_are_not_counted_as_clipped():
    found = suggest(lognormal(0).clamp(max=1.1), 0.1)
    assert [choice.share for choice in found.choices] == [0.0, 0.0, 0.5]
    assert 'ClipNorm(1.1, dim="global") would have clipped 0% of the 1,000 usual steps' in str(found)


def test_a_record_tells_steps_without_gradients_from_gradients_that_are_not_finite():
    norms = lognormal(0, 200).tolist() + [math.nan] * 50
    layers = torch.tensor(norms, dtype=torch.float64)[:, None]
    assert "50 of 250 norms are inf or NaN" in made(norms, layer_norms=layers).suggest_max_norm(0.1).reason
    assert "NaN" not in made(norms, layer_norms=layers.nan_to_num(nan=-1.0)).suggest_max_norm(0.1).reason
    refused = made(norms, layer_norms=layers, reasons=[""] * 200 + ["found_inf"] * 50)
    assert "NaN" not in refused.suggest_max_norm(0.1).reason


@pytest.mark.filterwarnings("ignore:step 200")
def test_a_file_tells_them_apart_too(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], ClipNorm(1.0))
    recorder = Recorder(optimizer, path=tmp_path / "run.jsonl")
    for norm in [*lognormal(0, 200).tolist(), *[math.nan] * 30, *lognormal(1, 60).tolist(), *[None] * 10]:
        weight.grad = None if norm is None else torch.full((1,), norm)
        optimizer.step()
    recorder.close()
    for record in (recorder, read_record(tmp_path / "run.jsonl")):
        assert "30 of 290 norms are inf or NaN" in record.suggest_max_norm(0.1).reason


def test_the_share_is_a_number():
    """The tests of the command line have shares that are out of range."""
    with pytest.raises(TypeError, match="share_clipped"):
        suggest(lognormal(0), "1%")


def test_spikes_of_constant_norms_are_those_above_twice_the_median():
    norms = torch.ones(100, dtype=torch.float64)
    norms[[50, 60]] = torch.tensor([1.99, 2.01], dtype=torch.float64)
    series = Series.of(norms)
    assert math.isclose(series.spike_limit, 2.0)
    assert series.spikes.nonzero().flatten().tolist() == [60 - series.start]


def test_it_prints_sentences_with_numbers():
    norms = changed(0, [5, 600], math.nan)
    norms[700] = 0
    text = str(suggest(spiked(norms, 3)))
    assert 'ClipNorm(1.619, dim="global") would have clipped 1% of the 994 usual steps, whose median norm is' in text
    assert "Norms that are 0 (1) or inf or NaN (2) are left out." in text
    assert "The limit would also have clipped 3 spikes above 3.225, of which the largest is 65.69." in text
    assert "\nSide by side: 1.619 clips 1% (0.55% to 1.8%), 1.288 clips 10% (8.4% to 12%), " in text
    why = "994 norms are too few to find the norm that 1% of them exceed: record about 5,000 more steps"
    assert f"\nConfidence: medium (too few norms), because {why}. The confidence says how well the record" in text


def recorded(scope_norms, groups):
    """A recorder that saw these norms: a row for each step, a column for the parameter of each group."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in groups]
    optimizer = Modular([{"params": [p], **group} for p, group in zip(params, groups, strict=True)], ClipNorm(1.0))
    recorder = Recorder(optimizer)
    for row in scope_norms:
        for param, norm in zip(params, row, strict=True):
            param.grad = norm.float().view(1)
        optimizer.step()
    return recorder


def test_scopes():
    norms = torch.stack([lognormal(0, 200), 10 * lognormal(1, 200)], dim=1)
    recorder = recorded(norms, [{"name": "a"}, {"name": "b"}])
    joint = recorder.suggest_max_norm()
    assert math.isclose(joint.limit, suggest(norms.float().double().square().sum(1).sqrt()).limit, rel_tol=1e-6)
    assert repr(joint.transform()).startswith("ClipNorm(")
    assert "dim='global'" in repr(joint.transform())
    each = recorder.suggest_max_norm(scope="parameter")
    assert 10 < each.limit < 20
    assert each.transform().slicing.dim is None
    group = recorder.suggest_max_norm(scope="group")
    assert set(group.limit) == {"a", "b"}
    assert math.isclose(group.limit["a"], suggest(norms[:, 0]).limit, rel_tol=1e-6)
    chain = group.transform()
    assert isinstance(chain, Chain)
    weights = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    optimizer = Modular([{"params": [w], "name": n} for w, n in zip(weights, "ab", strict=True)], chain)
    for weight in weights:
        weight.grad = torch.full((1,), 1000.0)
    optimizer.step()
    assert [-w.item() for w in weights] == pytest.approx([group.limit["a"], group.limit["b"]])


def test_groups_without_names_are_refused():
    recorder = recorded(torch.ones(20, 2), [{}, {}])
    with pytest.raises(ValueError, match='write "name" into each param group'):
        recorder.suggest_max_norm(scope="group")
    with pytest.raises(ValueError, match="scope"):
        recorder.suggest_max_norm(scope="layer")


def test_numbers():
    values = torch.tensor([3.0, 1.0, 2.0, 10.0], dtype=torch.float64)
    assert median_of(values) == 2.5
    assert quantile(values, 1.0) == 10
    rows = torch.tensor([[3.0, 4.0], [-1.0, 4.0], [-1.0, -1.0], [torch.inf, 1.0], [1e200, 1e200], [torch.nan, 1.0]])
    joint = joined_norms(rows.double()).tolist()
    assert joint[:2] == [5.0, 4.0]
    assert math.isnan(joint[2])
    assert math.isinf(joint[3])
    assert math.isnan(joint[5])
    big = joined_norms(torch.tensor([[1e200, 1e200]], dtype=torch.float64))
    assert math.isclose(big.item(), math.sqrt(2) * 1e200)
    columns = torch.tensor([[1.0, -1.0, torch.nan], [4.0, -1.0, 5.0], [2.0, -1.0, torch.inf], [3.0, -1.0, 6.0]])
    found = medians(columns.double()).tolist()
    assert found[0] == 2.5
    assert math.isnan(found[1])
    assert found[2] == 5.5
    assert medians(torch.zeros(0, 2, dtype=torch.float64)).isnan().all()


def falling(count, seed):
    """Norms that fall to a tenth over a third of the run."""
    generator = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(count, generator=generator)).exp() * (1 + 9 * torch.exp(-3 * torch.arange(count) / count))


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_among_norms_that_still_change_is_listed_and_is_not_used_for_the_limit(seed):
    norms = falling(300, seed)
    clean = suggested({"joint": norms.double()}, 0.01, "joint")
    assert clean.series["joint"].start > 60
    assert not any(spike < clean.series["joint"].start for spike in made(norms.tolist()).spikes())
    norms[60] *= 50
    assert 60 in made(norms.tolist()).spikes()
    assert suggested({"joint": norms.double()}, 0.01, "joint").spikes == clean.spikes


def spreading(seed, first, last):
    spread = torch.linspace(first, last, 1000, dtype=torch.float64)
    return torch.exp(spread * torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("seed", range(6))
def test_a_spread_that_grows_or_shrinks_is_a_drift(seed):
    """The limit of 1% would clip 8% to 10% of the next steps, or none."""
    found = suggest(spreading(seed, 0.1, 0.4))
    assert (found.answer, found.confidence) == ("drifting", "low")
    assert found.reason.startswith("large norms become more frequent")
    assert suggest(spreading(seed, 0.2, 0.2)).answer != "drifting"
    assert suggest(spreading(seed, 0.4, 0.1)).answer != "enough"


@pytest.mark.parametrize(("r", "least", "most"), [(0.0, 0, 0), (0.5, 0, 0), (0.9, 0, 2), (0.97, 9, 10), (0.995, 9, 10)])
def test_few_independent_norms_are_low(r, least, most):
    torch.manual_seed(0)
    found = [suggest((0.2 * autoregressive(1000, r)).exp(), 0.5) for _ in range(10)]
    low = [f for f in found if f.confidence == "low"]
    assert least <= len(low) <= most
    assert all(f.answer != "enough" for f in low)


BEGINS = {  # what the first norms are multiplied by
    "even": lambda place, steps: torch.ones_like(place),
    "falling": lambda place, steps: 1 + 9 * torch.exp(-3 * place),
    "falling fast": lambda place, steps: 1 + 30 * torch.exp(-30 * place),
    "falling at once": lambda place, steps: 1 + 20 * torch.exp(-steps / 2),
    "falling on": lambda place, steps: torch.exp(-3 * place),
}


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("count", [60, 100, 300, 1000])
def test_a_spike_in_the_first_eight_steps_is_named_when_later_norms_allow_it(begin, count):
    for at in range(8):
        steps = torch.arange(count)
        generator = torch.Generator().manual_seed(at)
        noise = (0.3 * torch.randn(count, generator=generator)).exp()
        norms = noise * BEGINS[begin](steps / count, steps)
        norms[at] *= 500
        assert at in made(norms.tolist()).spikes()


def test_first_norms_that_fall_are_not_spikes():
    for seed in range(20):
        assert not any(step < 20 for step in made(falling(300, seed).tolist()).spikes())


def test_skipped_steps_are_listed_with_the_spikes():
    reasons = ["skip_step" if step in (3, 150) else "" for step in range(200)]
    assert made(lognormal(0, 200).tolist(), reasons=reasons).spikes() == [3, 150]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_trend_does_not_count_as_dependence(seed):
    found = suggest(lognormal(seed) * torch.linspace(1, 1.08, 1000), 0.1)
    assert found.answer != "drifting"
    assert found.series["joint"].independent > 600


@pytest.mark.parametrize(("share", "count", "more"), [(0.01, 300, 20_000), (0.1, 40, 4000)])
def test_a_longer_record_has_enough_norms(share, count, more):
    for seed in range(5):
        assert "more steps" in suggest(lognormal(seed, count), share).reason
    assert [suggest(lognormal(seed, more), share).answer for seed in range(5)].count("enough") >= 4


@pytest.mark.parametrize("unit", [1.0, 1.1, 3e-9, 7e12])
def test_equal_norms_do_not_drift(unit):
    assert suggest(torch.full((200,), unit, dtype=torch.float64), 0.1).answer == "enough"


def right_and_chance(seed, count, slope, r):
    """Whether the later norms of a series have about the share that was asked, and the probability of it.

    The norms have a lognormal distribution around a line, ``slope`` standard deviations in each quarter of the record.
    """
    torch.manual_seed(seed)
    later = count + count // 4
    norms = (0.2 * (autoregressive(later, r) + slope * torch.arange(later) / (count / 4))).exp()
    found = suggest(norms[:count], 0.1)
    share = float((norms[count:] > found.limit).double().mean())
    return 0.05 <= share <= 0.2, found.series["joint"].chance(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "r"), [(300, 0.0), (1000, 0.0), (1000, 0.5)])
def test_the_probability_is_how_often_the_limit_is_right_if_all_slopes_are_as_likely(count, r):
    slopes = torch.linspace(-1, 1, 100).tolist()
    found = [right_and_chance(seed, count, slope, r) for seed, slope in enumerate(slopes)]
    right, chances = (sum(column) / len(found) for column in zip(*found, strict=True))
    assert abs(right - chances) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("r", [0.0, 0.3])
def test_of_records_with_enough_norms_95_of_100_have_a_right_limit(r):
    slopes = torch.linspace(-0.25, 0.25, 80).tolist()
    found = [right_and_chance(seed, 2000, slope, r) for seed, slope in enumerate(slopes)]
    sure = [is_right for is_right, chance in found if chance >= 0.95]
    assert len(sure) > 10
    assert sum(sure) >= 0.95 * len(sure)


def test_of_several_groups_one_that_drifts_decides():
    steady, drifting = lognormal(0), lognormal(1) * torch.linspace(1, 3, 1000)
    found = suggested({"a": steady, "b": drifting}, 0.1, "group")
    assert (found.answer, found.confidence) == ("drifting", "low")
    assert found.reason.startswith("in 'b' ")


def trained(lr, steps, **options):
    """A linear model on noise, whose updates are measured in every tenth step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    recorder = Recorder(optimizer, model=model, ratios_every=10)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(16, 8)) - torch.randn(16, 1)).square().mean().backward()
        optimizer.step()
    return recorder


@pytest.mark.parametrize("scope", ["joint", "parameter"])
def test_a_frozen_run_is_named(scope):
    frozen = trained(0.0, 200).suggest_max_norm(0.1, scope)
    assert (
        "the run is frozen, since 20 of the 20 steps whose updates were measured changed no parameter" in frozen.reason
    )
    assert frozen.confidence == "low"
    assert "frozen" not in trained(1e-3, 200).suggest_max_norm(0.1, scope).reason


@pytest.mark.parametrize(("every", "confidence"), [(50, "high"), (8, "low")])
def test_skipped_steps_are_named_and_above_a_tenth_they_make_the_confidence_low(every, confidence):
    reasons = ["skip_step" if step % every == 0 else "" for step in range(2000)]
    reasons[1] = "nonfinite"
    found = made(lognormal(0, 2000).tolist(), reasons=reasons).suggest_max_norm(0.1)
    count = 2000 // every
    named = f"{count + 1} of 2,000 steps were skipped (skip_step {count}, nonfinite 1)"
    assert f"\n{named}. Their norms count.\n" in str(found)
    assert found.confidence == confidence
    assert (named in found.reason) == (confidence == "low")


RECORDED = json.loads((Path(__file__).parent / "norms.json").read_text())  # of benchmarks.limit_draws
ANSWERS = {
    "34: an RNN on text": "enough",
    "7: corrupt batches of text": "too few",
    "9: an autoencoder whose norms fall": "drifting",
    "digits that a network memorizes": "drifting",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answers_for_recorded_trainings(name):
    found = suggest(torch.tensor(RECORDED[name]["recorded"], dtype=torch.float64), 0.1)
    assert found.answer == ANSWERS[name]
    if found.answer == "enough":
        later = RECORDED[name]["later"]
        assert 0.05 <= sum(norm > found.limit for norm in later) / len(later) <= 0.2
