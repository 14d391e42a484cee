"""The calls of a step in the fast way, beside those of the readable one."""

import pytest
from engine.test_readable import logged
from engine.test_walk import calls_of_a_step

from torchzero_clip import AdamW, ClipNorm


@pytest.mark.parametrize(("fast", "most", "functions", "each"), [(True, 170, 112, 1), (False, 275, 115, 10)])
def test_the_walk_is_short(fast, most, functions, each):
    calls, more = calls_of_a_step(2, fast=fast), calls_of_a_step(102, fast=fast)
    assert 50 < len(calls) <= most
    assert len(set(calls)) <= functions
    assert (len(more) - len(calls)) / 100 <= each


def test_the_logs_see_the_fast_way():
    log = logged(lambda: [ClipNorm(0.5), AdamW()], fast=True)
    assert log.fused == {"_fused_adamw_.default"}
    assert "Fast.finish" in log.frames
