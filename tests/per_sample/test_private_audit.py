"""An audit of private releases in one run: no alarm for right ones, and alarms for those that break the guarantee."""

import pytest

pytest.importorskip("scipy")
from per_sample.audit import accounted_profile, alarm, gaussian_profile, scores

SEEDS = range(5)


def alarms(profile, **settings):
    return [alarm(*scores(seed, **settings), profile) for seed in SEEDS]


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 2.0])
def test_right_releases_raise_no_alarm(noise_multiplier):
    assert not any(alarms(gaussian_profile(noise_multiplier), noise_multiplier=noise_multiplier))


@pytest.mark.parametrize("broken", [{"told": 1.5}, {"twice": True}], ids=str)
def test_too_little_noise_and_a_sample_counted_twice_raise_alarms(broken):
    assert all(alarms(gaussian_profile(1.0), **broken))


@pytest.fixture(scope="module")
def drawn():
    pytest.importorskip("dp_accounting", reason="the extra private is not installed, or needs its own environment")
    return accounted_profile(1.0, 0.3, 5)


def test_the_profile_of_the_accountant_is_the_closed_form_where_there_is_one():
    pytest.importorskip("dp_accounting", reason="the extra private is not installed, or needs its own environment")
    assert accounted_profile(1.0, 1.0, 1) == pytest.approx(gaussian_profile(1.0), abs=1e-3)


def test_drawn_releases_raise_no_alarm(drawn):
    assert not any(alarms(drawn, rate=0.3, steps=5))


@pytest.mark.parametrize("broken", [{"twice": True}, {"rate": 0.6}], ids=str)
def test_a_sample_counted_twice_and_twice_the_rate_raise_alarms(drawn, broken):
    assert all(alarms(drawn, **{"rate": 0.3, "steps": 5, **broken}))
