"""The recipe of private training: its accountant, its calibration, its draw, its adaptive limit, and two processes.

It needs the extra `private`, in an environment of its own: .ci/run makes it.
"""

import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_program

from torchzero_clip import ClippingResult, ConstantFlatClipper, PrivateGradientClipper

pytest.importorskip("dp_accounting", reason="the extra private is not installed, or needs its own environment")
from dp_accounting.rdp import rdp_privacy_accountant

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

RECIPE = Path(__file__).parents[1] / "examples" / "private_training.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("private_training", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# by RDPAccountant of Opacus 1.6, with the same orders; at fractional orders, dp-accounting has a larger bound
OPACUS = {(1.0, 0.01, 1000): 2.107753075451561, (0.8, 0.05, 300): 10.730101312738118, (2.0, 0.2, 50): 3.869536914952152}
ORDERS = range(2, 64)


@pytest.mark.parametrize("case", OPACUS)
def test_renyi_accounting_is_that_of_opacus_and_loss_distributions_are_tighter(recipe, case):
    multiplier, rate, steps = case
    accountant = rdp_privacy_accountant.RdpAccountant([*ORDERS])
    accountant.compose(recipe.steps_of({multiplier: steps}, rate))
    by_renyi = accountant.get_epsilon(1e-5)
    assert by_renyi == pytest.approx(OPACUS[case], rel=1e-9)
    assert 0.8 * by_renyi < recipe.epsilon({multiplier: steps}, rate, 1e-5) < by_renyi


def test_epsilon_of_one_release_of_all_samples_is_the_closed_form(recipe):
    found = recipe.epsilon({2.0: 1}, 1.0, 1e-5)

    def cdf(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    assert cdf(1 / 4 - 2 * found) - math.exp(found) * cdf(-1 / 4 - 2 * found) == pytest.approx(1e-5, rel=1e-2)


def test_several_noise_multipliers_compose(recipe):
    one, both = recipe.epsilon({1.0: 20}, 0.1, 1e-5), recipe.epsilon({1.0: 10, 1.5: 10}, 0.1, 1e-5)
    assert recipe.epsilon({1.5: 20}, 0.1, 1e-5) < both < one
    assert recipe.epsilon({1.0: 10, 1.0000001: 10}, 0.1, 1e-5) == pytest.approx(one, rel=1e-3)


def test_calibration_meets_its_target(recipe):
    multiplier = recipe.calibrated(2.0, 0.05, 100, 1e-5)
    assert recipe.epsilon({multiplier: 100}, 0.05, 1e-5) <= 2.0
    assert recipe.epsilon({multiplier * 0.99: 100}, 0.05, 1e-5) > 2.0


def test_the_draw_takes_each_sample_by_itself(recipe):
    counts = torch.zeros(500)
    sizes = []
    for _ in range(400):
        drawn = recipe.draw(500, 0.1)
        counts[drawn] += 1
        sizes.append(float(len(drawn)))
    assert counts.sum().item() == sum(sizes)
    assert (counts / 400).mean().item() == pytest.approx(0.1, abs=6 * math.sqrt(0.09 / 200_000))
    assert torch.tensor(sizes).var().item() == pytest.approx(45, rel=6 * math.sqrt(2 / 400))  # Poisson sampling
    assert counts.var().item() == pytest.approx(36, rel=6 * math.sqrt(2 / 500))
    assert len(recipe.draw(500, 0.0)) == 0
    assert len(recipe.draw(500, 1.0)) == 500


def made():
    model = torch.nn.Linear(2, 1)
    return PrivateGradientClipper(model, ConstantFlatClipper(1.0), noise_multiplier=1.0, expected_batch_size=100)


def result(norms):
    norms = torch.tensor(norms)
    return ClippingResult(norms, torch.ones_like(norms), norms.isnan(), {})


def test_the_limit_that_adapts_splits_the_noise(recipe):
    clipper = made()
    recipe.QuantileLimit(clipper, 1.0, count_noise=2.0)
    # two releases of sensitivities 1 and 1/2 are one with the squares of multipliers added as 1 / (1/a + 1/b)
    assert clipper.noise_multiplier**-2 + (0.5 / 2.0) ** 2 == pytest.approx(1.0)
    for count_noise in (0.5, 0.1):
        with pytest.raises(ValueError, match=r"count_noise must be above 0\.5"):
            recipe.QuantileLimit(clipper, 1.0, count_noise=count_noise)


def test_the_limit_that_adapts_moves_towards_the_quantile(recipe, monkeypatch):
    noises = []
    monkeypatch.setattr(random.SystemRandom, "gauss", lambda self, mean, std: noises.append(std) or 0.0)
    clipper = made()
    limit = recipe.QuantileLimit(clipper, 1.0, count_noise=3.0)
    limit.add(result([0.5] * 60 + [2.0] * 40 + [math.nan]))
    limit.step()
    share = (60 - 101 / 2) / 100 + 0.5
    assert clipper.norm_clipper.flat_value == pytest.approx(math.exp(0.2 * (0.5 - share)))
    limit.step()  # no samples: the share is one half whatever the draw
    assert clipper.norm_clipper.flat_value == pytest.approx(math.exp(0.2 * (0.5 - share)))
    assert noises == [3.0, 3.0]


@pytest.mark.slow
def test_the_recipe_learns_within_its_epsilon(recipe):
    multiplier = recipe.calibrated(3.0, recipe.RATE, 100, recipe.DELTA)
    for quantile in (False, True):
        accuracy, clipper = recipe.train(100, multiplier, quantile)
        assert accuracy > 0.85
        assert sum(clipper.releases.values()) == 100
        assert (clipper.releases == {multiplier: 100}) != quantile


@pytest.mark.slow
def test_the_recipe_runs_and_two_processes_have_the_same_model():
    command = [sys.executable, "-W", "ignore", RECIPE, "--steps", "20"]
    done = run_program(command, PYTHONPATH=str(RECIPE.parents[1]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("for epsilon 3.0 at delta 1e-05")
    assert float(lines[1].split()[-1]) == pytest.approx(3.0, rel=1e-2)
    assert lines[-1].endswith("the same model: True")
