"""A limit found from norms: the cases of the definition, and its doubts."""

import math

import pytest
import torch

from torchzero_clip import Chain, ClipNorm, Modular, Recorder
from torchzero_clip.recorder.numbers import joined_norms, median_of, medians, quantile
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
    assert (found.spikes, found.trend, found.confidence, found.reason) == (spikes, "settled", "high", "")


@pytest.mark.parametrize("seed", range(3))
def test_a_drift_is_growing_and_its_mirror_falling(seed):
    drift = torch.linspace(1, 8, 1000, dtype=torch.float64)
    found = suggest(lognormal(seed) * drift)
    assert found.trend == "growing"
    assert "too low" in str(found)
    assert suggest(lognormal(seed) * drift.flip(0)).trend == "falling"


def test_the_limit_by_hand():
    norms = torch.tensor([float(10 + k % 4) for k in range(40)], dtype=torch.float64)
    found = suggest(norms, 0.25)
    assert found.limit == quantile(norms, 0.75) == 12.25  # position 29.25 between 12 and 13, linear


def test_few_norms_are_refused_and_not_counted_twice():
    with pytest.raises(ValueError, match="at least 20 norms that are finite and above 0, got 19"):
        suggest(torch.cat([torch.ones(19), torch.tensor([0.0, torch.nan, torch.inf])]).double())


@pytest.mark.parametrize(
    ("norms", "reason"),
    [
        (lambda: lognormal(0, 50), "50 norms are too few"),
        (lambda: torch.linspace(1, 100, 1000, dtype=torch.float64), "still changed in the first half"),
        (lambda: lognormal(0).clamp(max=1.2), "something else probably clipped them before"),
    ],
)
def test_doubts(norms, reason):
    found = suggest(norms())
    assert found.confidence == "low"
    assert reason in found.reason
    assert reason in str(found)


def test_a_single_largest_norm_is_no_sign_of_another_clip():
    assert suggest(lognormal(0, 20), 0.1).confidence == "high"


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
    text = str(suggest(spiked(lognormal(0), 3)))
    assert 'ClipNorm(1.619, dim="global") would have clipped 1% of the 997 usual steps, whose median norm is' in text
    assert "The limit would also have clipped 3 spikes: norms above" in text
    assert text.endswith("Confidence: high.")


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
