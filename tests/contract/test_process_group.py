"""Processes that hold different parameters equal one process that holds all of them."""

import math

import pytest
import ranks
import torch
from contract import process_group as programs
from contract.process_group import METRICS, OWN

from torchzero_clip import SGD, Modular

LIMIT = 300.0
UNKNOWN = {"target params"}  # a clip of parameters has no metrics that one process alone would not have


def check(found, expected, name):
    for rank, own in enumerate(found):
        for key in own["params"]:
            torch.testing.assert_close(own["params"][key], expected["params"][key], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(own["states"][key], expected["states"][key], rtol=1e-9, atol=1e-12)
        assert list(own["params"]) == list(expected["params"])[OWN[rank]]
        for key, value in expected["metrics"].items():
            torch.testing.assert_close(
                own["metrics"][key], value, rtol=1e-9, atol=1e-12, equal_nan=True, msg=f"{name} {key}"
            )
        torch.testing.assert_close(own["chain"], expected["chain"], rtol=1e-9, atol=1e-12, equal_nan=True)
        for what in ("metrics", "chain"):  # bit for bit
            torch.testing.assert_close(own[what], found[0][what], rtol=0, atol=0, equal_nan=True, msg=f"{name} {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("event", ["", "inf", "none", "zero", "range"])
def test_chains_equal_one_process(event, fast):
    options = {"fast": fast}
    expected = programs.train_all(event, options)
    found = ranks.run(programs.train_all, 3, event, options, limit=LIMIT)
    failures = []
    for name in programs.names():
        try:
            check([own[name] for own in found], expected[name], name)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)
