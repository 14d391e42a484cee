"""Private training: epsilon, the noise for a target, and the recipe, with its adaptive limit and two processes.

It needs the extra `private`, in an environment of its own: .ci/run makes it.
"""

import doctest
import importlib.util
import math
import random
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from ranks import run_program

from torchzero_clip import ClippingResult, ConstantFlatClipper, PrivateGradientClipper

pytest.importorskip("dp_accounting", reason="the extra private is not installed, or needs its own environment")
from dp_accounting.rdp import rdp_privacy_accountant

from torchzero_clip import private
from torchzero_clip.private import epsilon, noise_multiplier

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "private_training.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("private_training", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(releases=None):
    model = torch.nn.Linear(2, 1)
    clipper = PrivateGradientClipper(model, ConstantFlatClipper(1.0), noise_multiplier=1.0, expected_batch_size=100)
    clipper.load_state_dict({"releases": releases or {}})
    return clipper


def spent(releases, rate, delta=1e-5):
    return epsilon(made(releases), delta=delta, sample_rate=rate)


# by RDPAccountant of Opacus 1.6, with the same orders; at fractional orders, dp-accounting has a larger bound
OPACUS = {(1.0, 0.01, 1000): 2.107753075451561, (0.8, 0.05, 300): 10.730101312738118, (2.0, 0.2, 50): 3.869536914952152}
ORDERS = range(2, 64)


@pytest.mark.parametrize("case", OPACUS)
def test_renyi_accounting_is_that_of_opacus_and_loss_distributions_are_tighter(case):
    multiplier, rate, steps = case
    accountant = rdp_privacy_accountant.RdpAccountant([*ORDERS])
    accountant.compose(private._event(multiplier, steps, rate))
    by_renyi = accountant.get_epsilon(1e-5)
    assert by_renyi == pytest.approx(OPACUS[case], rel=1e-9)
    assert 0.8 * by_renyi < spent({multiplier: steps}, rate) < by_renyi


HISTORIES = [
    ([(1.0, 1000)], 0.01, 1e-5),
    ([(0.8, 300)], 0.05, 1e-5),
    ([(2.0, 50)], 0.2, 1e-6),
    ([(1.1, 14_000)], 0.004, 1e-5),
    ([(1.0, 10_000)], 0.001, 1e-7),
    ([(10.0, 100)], 0.5, 1e-5),
    ([(3.0, 2000)], 0.02, 1e-5),
    ([(8.0, 100)], 0.02, 1e-3),
    ([(2.0, 1_000_000)], 0.0001, 1e-6),
    ([(1.3, 100), (0.9, 50), (2.0, 300)], 0.03, 1e-5),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.parametrize(("history", "rate", "delta"), HISTORIES)
def test_epsilon_is_that_of_the_prv_accountant_of_opacus(history, rate, delta):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    accountant = accountants.PRVAccountant()
    accountant.history = [(multiplier, rate, steps) for multiplier, steps in history]
    theirs = accountant.get_epsilon(delta=delta)  # up to .01 too large
    ours = spent(dict(history), rate, delta)
    assert theirs - 0.02 <= ours <= theirs + 0.001
    assert theirs < 2 or ours == pytest.approx(theirs, rel=0.01)


def test_epsilon_of_one_release_of_all_samples_is_the_closed_form():
    found = spent({2.0: 1}, 1.0)

    def cdf(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    assert cdf(1 / 4 - 2 * found) - math.exp(found) * cdf(-1 / 4 - 2 * found) == pytest.approx(1e-5, rel=1e-2)


def test_several_noise_multipliers_compose():
    one, both = spent({1.0: 20}, 0.1), spent({1.0: 10, 1.5: 10}, 0.1)
    assert spent({1.5: 20}, 0.1) < both < one
    assert spent({1.0: 10, 1.0000001: 10}, 0.1) == pytest.approx(one, rel=1e-3)
    assert spent({1.5: 10, 1.0: 10}, 0.1) == pytest.approx(both, rel=1e-9)


def test_epsilon_counts_the_steps_as_they_were_also_from_a_checkpoint():
    clipper, resumed = made(), made()
    assert epsilon(clipper, delta=1e-5, sample_rate=0.1) == 0
    for multiplier, steps in ((1.0, 3), (1.5, 2)):
        clipper.noise_multiplier = multiplier
        for _ in range(steps):
            clipper.pre_step()
    resumed.load_state_dict(clipper.state_dict())
    resumed.pre_step()
    assert epsilon(clipper, delta=1e-5, sample_rate=0.1) == spent({1.0: 3, 1.5: 2}, 0.1)
    assert epsilon(resumed, delta=1e-5, sample_rate=0.1) == spent({1.0: 4, 1.5: 2}, 0.1)
    clipper.noise_multiplier = 0.0
    clipper.pre_step()
    assert epsilon(clipper, delta=1e-5, sample_rate=0.1) == math.inf


@pytest.mark.parametrize(
    ("target", "steps"), [(2.0, 100), (0.05, 1000), pytest.param(20.0, 300, marks=pytest.mark.slow)]
)
def test_the_noise_meets_its_target(target, steps):
    multiplier = noise_multiplier(epsilon=target, delta=1e-5, sample_rate=0.05, steps=steps)
    assert type(multiplier) is float
    assert 0.985 * target < spent({multiplier: steps}, 0.05) <= target
    assert spent({multiplier * 0.99: steps}, 0.05) > target


GIVEN = {"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 10}


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("epsilon", 0.0, ValueError, "epsilon must be > 0, got 0"),
        ("epsilon", math.inf, ValueError, "epsilon must be finite"),
        ("delta", 0.0, ValueError, "delta must be > 0, got 0"),
        ("delta", 1.0, ValueError, "delta must be below 1, got 1.0"),
        ("delta", "1e-5", TypeError, "delta must be a number"),
        ("sample_rate", 64, ValueError, r"sample_rate must be in \[0, 1\], got 64"),
        ("sample_rate", math.nan, ValueError, "sample_rate must be > 0, got nan"),
        ("steps", 0, ValueError, "steps must be >= 1, got 0"),
        ("steps", 1e3, TypeError, "steps must be an int"),
    ],
)
def test_wrong_arguments_are_named(name, value, error, match):
    with pytest.raises(error, match=match):
        noise_multiplier(**{**GIVEN, name: value})
    if name in ("delta", "sample_rate"):
        with pytest.raises(error, match=match):
            epsilon(made({1.0: 10}), **{"delta": 1e-5, "sample_rate": 0.1, name: value})


def test_epsilon_wants_a_private_clipper():
    with pytest.raises(TypeError, match=r"clipper must be of class PrivateGradientClipper, got .1.0: 3"):
        epsilon({1.0: 3}, delta=1e-5, sample_rate=0.1)


def test_the_examples_of_the_docstrings():
    failed, tried = doctest.testmod(private)
    assert (failed, tried) == (0, 7)


def test_the_block_of_the_page_runs():
    block = re.search(r"```py\n(.*?)```", (ROOT / "docs" / "private_training.md").read_text(), re.DOTALL)
    exec(compile(block[1], "private_training.md", "exec"), {"model": torch.nn.Linear(4, 1), "torch": torch})


def test_the_scripts_of_the_page_for_users_of_opacus_spend_the_same():
    text = (ROOT / "docs" / "migrating" / "opacus.md").read_text()
    theirs, ours = re.findall(r"```py\n(.*?)```", text, re.DOTALL)[:2]
    names = {}
    exec(compile(ours, "opacus.md", "exec"), names)
    assert names["clipper"].releases == {names["multiplier"]: 100}
    assert names["spent"] == pytest.approx(3.0, abs=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("opacus", reason="opacus is not installed")
        exec(compile(theirs, "opacus.md", "exec"), other := {})
    assert other["spent"] == pytest.approx(3.0, abs=0.02)
    assert other["optimizer"].noise_multiplier == pytest.approx(names["multiplier"], rel=0.01)


def result(norms):
    norms = torch.tensor(norms)
    return ClippingResult(norms, torch.ones_like(norms), norms.isnan(), {})


def test_a_limit_that_adapts_counts_in_epsilon(recipe):
    """Both releases of a step are one. The noise of the gradients alone would say much less than was spent."""
    multiplier = noise_multiplier(epsilon=3.0, delta=1e-5, sample_rate=0.05, steps=100)
    alone = (multiplier**-2 - (0.5 / 0.6) ** 2) ** -0.5  # a sample changes the count by 1/2
    clipper, other = made(), made()
    recipe.QuantileLimit(clipper, count_noise=0.6)
    clipper.noise_multiplier, other.noise_multiplier = multiplier, alone
    for each in (clipper, other):
        each._generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            each.pre_step()
    for param, twin in zip(clipper.released_params(), other.released_params(), strict=True):
        torch.testing.assert_close(param.grad, twin.grad)
    assert epsilon(other, delta=1e-5, sample_rate=0.05) == pytest.approx(0.83, abs=0.01)
    assert epsilon(clipper, delta=1e-5, sample_rate=0.05) == pytest.approx(3.0, abs=0.005)
    with pytest.raises(ValueError, match="second_noise_multiplier must be above noise_multiplier, 1"):
        recipe.QuantileLimit(clipper, count_noise=0.5)


def test_the_limit_that_adapts_moves_towards_the_quantile(recipe, monkeypatch):
    noises = []
    monkeypatch.setattr(random.SystemRandom, "gauss", lambda self, mean, std: noises.append(std) or 0.0)
    clipper = made()
    limit = recipe.QuantileLimit(clipper, count_noise=3.0)
    limit.add(result([0.5] * 60 + [2.0] * 40 + [math.nan]))
    limit.step()
    share = (60 - 101 / 2) / 100 + 0.5
    assert clipper.norm_clipper.flat_value == pytest.approx(math.exp(0.2 * (0.5 - share)))
    limit.step()  # no samples: the share is one half whatever the draw
    assert clipper.norm_clipper.flat_value == pytest.approx(math.exp(0.2 * (0.5 - share)))
    assert noises == [3.0, 3.0]


@pytest.mark.slow
def test_the_recipe_learns_within_its_epsilon(recipe):
    multiplier = noise_multiplier(epsilon=3.0, delta=recipe.DELTA, sample_rate=recipe.RATE, steps=100)
    for quantile in (False, True):
        accuracy, clipper = recipe.train(100, multiplier, quantile)
        assert accuracy > 0.85
        assert clipper.releases == {multiplier: 100}
        assert (clipper.second_noise_multiplier == math.inf) != quantile


@pytest.mark.slow
def test_the_recipe_runs_and_two_processes_have_the_same_model_or_its_shards():
    command = [sys.executable, "-W", "ignore", RECIPE, "--steps", "20"]
    done = run_program(command, PYTHONPATH=str(RECIPE.parents[1]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("for epsilon 3.0 at delta 1e-05")
    for line in lines[1:3]:
        assert float(re.search(r"epsilon ([\d.]+),", line)[1]) == pytest.approx(3.0, rel=1e-2)
    assert [line[:10] for line in lines[3:]] == ["two copies", "two shards"]
    assert all(line.endswith("the same model: True") for line in lines[3:])
