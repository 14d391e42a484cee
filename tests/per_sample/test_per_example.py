"""Clipping of per-example gradients, against loops and optax."""

import math

import pytest
import torch
from defaults import DEFAULTS
from hypothesis import given
from hypothesis import strategies as st

from torchzero_clip import per_example_global_norm_clip, per_example_layer_norm_clip

LIMITS = st.sampled_from([0.0, 0.1, 1.0, 5.0, math.inf])


@st.composite
def trees(draw):
    count = draw(st.integers(0, 4))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))
    leaves = [torch.randn(count, *shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
    for leaf in leaves:
        leaf[: draw(st.integers(0, 1))] = 0
    return leaves


def loop(leaves, limit):
    """Sums and the count, one example after the other."""
    sums, count = [torch.zeros_like(leaf.sum(0)) for leaf in leaves], 0
    for i in range(leaves[0].shape[0]):
        norm = math.sqrt(math.fsum(x * x for leaf in leaves for x in leaf[i].flatten().tolist()))
        factor = 1.0 if norm <= limit else limit / norm
        count += factor < 1
        sums = [total + factor * leaf[i] for total, leaf in zip(sums, leaves, strict=True)]
    return sums, count


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@given(trees(), LIMITS)
def test_global_equals_a_loop(leaves, limit):
    sums, count = per_example_global_norm_clip(leaves, limit)
    expected, expected_count = loop(leaves, limit)
    close(sums, expected)
    assert count.item() == expected_count


@given(trees(), LIMITS, st.booleans())
def test_layers_equal_a_loop(leaves, limit, uniform):
    sums, counts = per_example_layer_norm_clip(leaves, limit, uniform)
    sizes = [math.prod(leaf.shape[1:]) for leaf in leaves]
    for leaf, size, total, count in zip(leaves, sizes, sums, counts, strict=True):
        share = 1 / len(leaves) if uniform else size / max(sum(sizes), 1)
        (expected,), expected_count = loop([leaf], limit * math.sqrt(share) if share else 0.0)
        close(total, expected)
        assert count.item() == expected_count


@given(trees(), st.floats(0.01, 10), st.booleans())
def test_no_example_adds_more_than_the_limit(leaves, limit, uniform):
    """But for rounding, which is a relative 1e-12 in float64."""
    for i in range(leaves[0].shape[0]):
        one = [leaf[i : i + 1] for leaf in leaves]
        for sums in (per_example_global_norm_clip(one, limit)[0], per_example_layer_norm_clip(one, limit, uniform)[0]):
            assert math.sqrt(sum(total.square().sum().item() for total in sums)) <= limit * (1 + 1e-12)


def test_trees_keep_their_structure():
    grads = {"a": [torch.ones(2, 3)], "b": (torch.ones(2), {"c": torch.ones(2, 1)})}
    sums, count = per_example_global_norm_clip(grads, 1.0)
    assert sums["a"][0].shape == (3,)
    assert sums["b"][1]["c"].shape == (1,)
    assert count.item() == 2
    sums, counts = per_example_layer_norm_clip(grads, 1.0)
    assert [counts["a"][0].item(), counts["b"][0].item(), counts["b"][1]["c"].item()] == [2, 2, 2]


def test_nothing_at_all():
    assert per_example_global_norm_clip([], 1.0) == ([], 0)
    assert per_example_layer_norm_clip([], 1.0) == ([], [])


@pytest.mark.parametrize(("bad", "limit", "expected", "count"), [
    (math.nan, 1.0, [math.nan, 1.0], 0), (math.inf, 1.0, [math.nan, 0.0], 1), (math.inf, math.inf, [math.inf, 1.0], 0),
])  # fmt: skip
def test_non_finite_examples(bad, limit, expected, count):
    (total,), counted = per_example_global_norm_clip([torch.tensor([[bad, 1.0]])], limit)
    torch.testing.assert_close(total, torch.tensor(expected), equal_nan=True)
    assert counted.item() == count


@pytest.mark.parametrize(
    ("dtype", "value", "tolerance"),
    [
        (torch.float16, 4096, 1e-3),
        (torch.bfloat16, 1e30, 1e-2),
        (torch.float32, 1e20, 1e-6),
        (torch.float32, 1e38, 1e-6),
    ],
)
def test_norms_neither_overflow_nor_vanish(dtype, value, tolerance):
    for sign in (1, -1):
        leaf = torch.full((3, 100), value if sign == 1 else 1 / value, dtype=dtype)
        (total,), _ = per_example_global_norm_clip([leaf], leaf[0].double().norm().item() / 2)
        assert total.dtype == dtype
        torch.testing.assert_close(total.double(), 1.5 * leaf[0].double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("grads", "limit", "error", "message"),
    [
        ([torch.ones(2, 3), torch.ones(3)], 1.0, ValueError, r"the same number of examples .* got shapes \[\(2, 3\)"),
        ([torch.ones(2), torch.ones(())], 1.0, ValueError, "the same number of examples"),
        ([torch.ones(2)], -1.0, ValueError, "norm_clip must be >= 0, got -1.0"),
        ([torch.ones(2)], math.nan, ValueError, "norm_clip must be >= 0, got nan"),
        ([torch.ones(2, dtype=torch.int64)], 1.0, TypeError, "floating point tensors, got a leaf of torch.int64"),
        ([None, 3.0], 1.0, TypeError, "floating point tensors, got a leaf of"),
    ],
)
def test_bad_arguments(grads, limit, error, message):
    for clip in (per_example_global_norm_clip, per_example_layer_norm_clip):
        with pytest.raises(error, match=message):
            clip(grads, limit)
    with pytest.raises(TypeError, match="uniform must be True or False"):
        per_example_layer_norm_clip([torch.ones(2)], 1.0, 1)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_equals_optax(seed):
    optax = pytest.importorskip("optax", reason="optax is not installed")
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3), (5, 2, 3), (5,), (5, 2, 2, 2)][: 1 + seed % 4]
    leaves = [torch.randn(shape, generator=generator) * 10 ** (seed % 3 - 1) for shape in shapes]
    leaves[0][0] = 0
    arrays = [leaf.numpy() for leaf in leaves]
    for limit in (0.5, 2.0, 1000.0):
        sums, count = per_example_global_norm_clip(leaves, limit)
        expected, expected_count = optax.per_example_global_norm_clip(arrays, limit)
        results = [(sums, [count], expected, [expected_count])]
        for uniform in (True, False):
            found = per_example_layer_norm_clip(leaves, limit, uniform)
            results.append((*found, *optax.per_example_layer_norm_clip(arrays, limit, uniform=uniform)))
        for sums, counts, expected, expected_counts in results:
            assert [c.item() for c in counts] == [int(c) for c in expected_counts]
            for total, e in zip(sums, expected, strict=True):
                torch.testing.assert_close(total, torch.tensor(e.tolist()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("default", DEFAULTS)
def test_defaults_of_the_process_do_not_matter(default):
    leaves = [torch.randn(5, 3), torch.randn(5)]

    def results():
        layers = [per_example_layer_norm_clip(leaves, 1.0, uniform=uniform) for uniform in (True, False)]
        return [per_example_global_norm_clip(leaves, 1.0), per_example_global_norm_clip([], 1.0), *layers]

    expected = results()
    with DEFAULTS[default]():
        torch.testing.assert_close(results(), expected, rtol=0, atol=0)


def test_autocast_rounds_nothing():
    grads = [torch.randn(16, 30), torch.randn(16, 8, 9)]
    expected, _ = per_example_global_norm_clip(grads, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, _ = per_example_global_norm_clip(grads, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))
