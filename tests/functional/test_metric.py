"""What `ord` stands for."""

import math

import pytest
import torch

from torchzero_clip.functional.metric import Metric, parse_ord


@pytest.mark.parametrize(
    ("order", "metric"),
    [
        *((f"l{p}", Metric("norm", float(p))) for p in (0, 1, 2, 3, 4)),
        ("linf", Metric("norm", math.inf)),
        (2, Metric("norm", 2.0)),
        (-0.5, Metric("norm", -0.5)),
        (-math.inf, Metric("norm", -math.inf)),
        (torch.tensor(3), Metric("norm", 3.0)),
        ("mad", Metric("mad", 1.0)),
        ("std", Metric("std")),
        ("var", Metric("var")),
        ("sum", Metric("sum")),
    ],
)
def test_what_is_accepted(order, metric):
    assert parse_ord(order) == metric


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ("l5", ValueError, r"one of 'l0', 'l1', .*, got 'l5'$"),
        ("global", ValueError, r"got 'global'; joint norms are dim='global'$"),
        (math.nan, ValueError, "ord must not be NaN"),
        (True, TypeError, "got True"),
        (None, TypeError, "got None"),
        (torch.ones(1), TypeError, r"got tensor\(\[1\.\]\)"),
    ],
)
def test_what_is_refused(order, error, message):
    with pytest.raises(error, match=message):
        parse_ord(order)


@pytest.mark.parametrize("order", ["l0", "l1", "l2", "linf", -1, "mad", "std", "var", "sum"])
def test_properties_are_those_of_the_numbers(order):
    """The degree, and whether zeros count, as a loop finds them."""
    metric, numbers = parse_ord(order), torch.tensor([3.0, -1.0, 2.0, 6.0], dtype=torch.float64)
    functions = {
        "norm": lambda x: torch.linalg.vector_norm(x, metric.p),
        "mad": lambda x: x.abs().mean(),
        "std": lambda x: x.std(),
        "var": lambda x: x.var(),
        "sum": lambda x: x.sum(),
    }
    value = functions[metric.kind]
    if order != "l0":  # which counts elements
        assert value(2 * numbers).item() == pytest.approx(2**metric.degree * value(numbers).item())
    with_zeros = torch.cat([numbers, numbers.new_zeros(4)])
    assert metric.counts_zeros == (value(with_zeros) != value(numbers)).item()
    assert value(numbers[: metric.min_size]).isfinite()
    if metric.is_power:
        norm = torch.linalg.vector_norm(numbers, metric.p)
        assert metric.of_norm(norm, 4).item() == pytest.approx(value(numbers).item())
    assert metric.root(9.0) == (3.0 if order == "var" else 9.0)
