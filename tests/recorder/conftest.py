"""No time limit for flushes, so slow machines write no file early. The test of the limit restores it."""

import math

import pytest


@pytest.fixture(autouse=True)
def _no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchzero_clip.recorder.output.SECONDS", math.inf)
