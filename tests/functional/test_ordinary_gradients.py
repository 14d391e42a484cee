"""Ordinary gradients take a path of their own, with the results of the way that takes gradients of every kind."""

import math
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchzero_clip.functional.grads as module
from torchzero_clip import clip_grad_norm_, clip_grad_value_, normalize_grads_
from torchzero_clip.functional.ordinary_gradients import ordinary_gradients

SHAPES = [(), (1,), (3,), (4, 3), (2, 3, 4, 5), (7, 293), (1500,), (65537,)]
ORDINARY = {
    "normal": lambda normal: normal,
    "constant": torch.ones_like,
    "zeros": torch.zeros_like,
    "with inf": lambda normal: normal.where(normal < normal.max(), -math.inf),
    "with NaN": lambda normal: normal.where(normal > normal.min(), math.nan),
}
ODD = {
    "empty": lambda normal: normal.flatten()[:0],
    "float64": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "complex": lambda normal: torch.complex(normal, -normal),
    "negated": lambda normal: torch.complex(normal, -normal).conj().imag,
    "transposed": lambda normal: torch.stack([normal, -normal]).movedim(0, -1),
    "expanded": lambda normal: normal.flatten()[:1].expand(5),
    "sparse": lambda normal: torch.stack([normal, torch.zeros_like(normal)]).to_sparse(),
}
SCALES = [1e4, 1e-14, 1e-30, 1e-42, 1e19, 1e34]
NUMBERS = st.sampled_from([0.0, 1e-30, 0.3, 1.0, 7.0, 1e30, math.inf])


class Drawn(NamedTuple):
    """A list of gradients that can be made several times."""

    seed: int
    scale: float
    kinds: list[tuple[str, tuple[int, ...], float]]

    def params(self):
        generator, params = torch.Generator().manual_seed(self.seed), []
        for kind, shape, scale in self.kinds:
            normal = torch.randn(shape, generator=generator) * (self.scale * scale)
            if kind == "twice" and params:
                params.append(params[-1])
                continue
            grad = (ORDINARY | ODD).get(kind, ORDINARY["normal"])(normal)
            if kind == "shared" and params and params[-1].grad is not None:
                grad = params[-1].grad
            params.append(nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)))
            params[-1].grad = None if kind == "none" else grad
        return params


normal = st.sampled_from(["normal", "normal", "constant"])
any_kind = st.sampled_from([*ORDINARY, *ODD, "none", "twice", "shared"])
scales = st.sampled_from([1.0, 1.0, 0.1, 1e-6])
drawn_lists = st.builds(
    Drawn,
    st.integers(0, 2**20),
    st.one_of(st.just(1.0), st.just(1e-3), st.sampled_from(SCALES)),
    st.one_of(
        *(
            st.lists(st.tuples(kinds, st.sampled_from(SHAPES), scales), min_size=1, max_size=5)
            for kinds in (normal, normal, st.one_of(normal, normal, normal, any_kind))
        )
    ),
)


@st.composite
def calls(draw):
    """A function with its arguments."""
    options = {
        "ord": draw(st.sampled_from([2, 2, 2, 2, 2, 2, 2, "l2", 1, math.inf, "std"])),
        "dim": draw(st.sampled_from([None, None, None, "global", "global", "global", 0, ()])),
        "min_size": draw(st.integers(0, 4)),
    }
    limit, floor = draw(NUMBERS), draw(NUMBERS.filter(math.isfinite))
    kind = draw(
        st.sampled_from(["value", "normalize", "clip", "clip", "clip to a tensor", "scale up", "clip or raise"])
    )
    if kind == "value":
        return lambda params: clip_grad_value_(params, limit)
    if kind == "normalize":
        return lambda params: normalize_grads_(params, floor, **options)
    if kind == "scale up":
        return lambda params: clip_grad_norm_(params, max(limit, floor), min_norm=floor, **options)
    if kind == "clip to a tensor":
        return lambda params: clip_grad_norm_(params, torch.tensor(limit, dtype=torch.float64), **options)
    return lambda params: clip_grad_norm_(params, limit, **options, error_if_nonfinite=kind == "clip or raise")


def outcome(call, params):
    try:
        return call(params)
    except RuntimeError as error:
        return str(error)


def assert_close(params, others, **tolerance):
    for param, other in zip(params, others, strict=True):
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(param.grad, other.grad, equal_nan=True, check_stride=False, **tolerance)


def the_long_way():
    return patch.multiple(module, scale_ordinary_=lambda *_: None, ordinary_gradients=lambda _: None)


@given(drawn_lists, calls())
def test_results_are_those_of_the_way_for_every_gradient(drawn, call):
    params, others = drawn.params(), drawn.params()
    with the_long_way():
        expected = outcome(call, others)
    found = outcome(call, params)
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        assert_close(params, drawn.params(), rtol=0, atol=0)
        return
    if expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    is_ordinary = ordinary_gradients(params) is not None
    # two norms within 1e-6, and one rounding; the smallest numbers of float32 are 1.4e-45 apart
    assert_close(params, others, **({"rtol": 1.2e-6, "atol": 1.5e-45} if is_ordinary else {"rtol": 0, "atol": 0}))


CALLS = {
    "global": lambda params: clip_grad_norm_(params, 1.0, dim="global"),
    "each": lambda params: clip_grad_norm_(params, torch.tensor(1.0), min_norm=0.5),
    "normalized": lambda params: normalize_grads_(params, 2.0),
    "value": lambda params: clip_grad_value_(params, 0.5),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_ordinary_gradients_need_nothing_of_the_long_way(call):
    """Also those of scalars, from a generator or with names, beside parameters without one."""
    drawn = Drawn(0, 1.0, [("normal", shape, 1.0) for shape in SHAPES] + [("none", (2,), 1.0)])
    expected = drawn.params()
    call(expected)
    with patch.multiple(module, with_gradients=None, gradients=None, measure_over_processes=None, opened=None):
        for form in (iter, lambda given: [(f"weight{i}", param) for i, param in enumerate(given)]):
            params = drawn.params()
            call(form(params))
            assert_close(params, expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1024, 1025, 4099, 16384, 65536, 70001, 300_000])
@pytest.mark.parametrize("dim", [None, "global"])
def test_norms_of_equal_elements_are_right_to_1e_6(size, dim):
    """A float32 sum of equal squares errs by 1e-5 after 16,000 of them, because each is rounded alike."""
    for value in torch.linspace(0.5, 1.5, 12).tolist():
        params = [nn.Parameter(torch.zeros(n)) for n in (size, 7)]
        params[0].grad, params[1].grad = torch.full((size,), value), torch.full((7,), 1e-6)
        exact = params[0].grad.double().norm().item()
        assert clip_grad_norm_(params, 1.0, dim=dim).item() == pytest.approx(exact, rel=1e-6)
        assert params[0].grad.double().norm().item() == pytest.approx(1.0, rel=1e-6)
