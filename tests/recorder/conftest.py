"""A slow machine writes no file early: here the time limit of a flush counts in its own test only."""

import math

import pytest


@pytest.fixture(autouse=True)
def _no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchzero_clip.recorder.output.SECONDS", math.inf)
