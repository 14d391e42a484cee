"""Names of gradients that are not finite, in one process; `contract/test_bad_gradients` has several."""

import math

import pytest
import torch

from torchzero_clip.functional.bad import BadGradients, bad_gradients, labels


def test_labels_are_names_and_positions_tell_equal_names_apart():
    first, second, third, fourth = (torch.zeros(2, k) for k in range(4))
    named = [("weight", first), ("bias", second), (None, third), ("bias", fourth), ("weight", first)]
    found = labels("parameter", named)
    expected = ["weight", "bias (parameter 1)", "parameter 2 of shape (2, 2)", "bias (parameter 3)"]
    assert [found[tensor] for tensor in (first, second, third, fourth)] == expected
    assert len(found) == 4


@pytest.mark.parametrize(("count", "more"), [(10, ""), (12, " and 2 more")])
def test_at_most_ten_names_are_listed(count, more):
    bad = bad_gradients({f"p{k}": math.nan if k % 2 else math.inf for k in range(count)}, [], None, torch.device("cpu"))
    assert bad == BadGradients(tuple(f"p{k}" for k in range(10)), count, {})
    assert bad.listed == f"p0, p1, p2, p3, p4, p5, p6, p7, p8, p9{more}"
    assert bad.beside == ""


def test_the_three_largest_norms_are_listed_in_order_of_six_digits():
    norms = {"a": 1.0, "b": 3.0, "c": math.nan, "d": 3.0000001, "e": 4.0, "f": 0.5}
    bad = bad_gradients(norms, [], None, torch.device("cpu"))
    assert list(bad.largest.items()) == [("e", 4.0), ("b", 3.0), ("d", 3.0)]
    assert bad.names == ("c",)
    assert bad.beside == ". The largest norms of other gradients: 4 (e), 3 (b), 3 (d)"
