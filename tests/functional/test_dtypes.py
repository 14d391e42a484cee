"""The widest dtype of a device, asked once, and arithmetic where it is float32."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torchzero_clip import set_norm_dtype
from torchzero_clip.functional import dtypes
from torchzero_clip.functional.dtypes import bias_correction, is_narrow, moved, power_of_two, squarable, widened, widest

META = torch.device("meta")


@pytest.fixture
def narrow(monkeypatch):
    """The meta device, as if it had no float64."""
    monkeypatch.setattr(dtypes, "_has_float64", {"meta": False})


def test_a_device_with_float64_keeps_it():
    assert widest(torch.device("cpu")) == torch.float64
    assert widened(torch.ones(2)).dtype == torch.float64
    assert not is_narrow(torch.ones(2))


@pytest.mark.usefixtures("narrow")
def test_a_device_without_float64_has_float32():
    half = torch.ones(2, dtype=torch.bfloat16, device=META)
    assert widest(META) == torch.float32
    assert widened(half).dtype == torch.float32
    assert is_narrow(half)
    assert moved(torch.ones(2, dtype=torch.float64), META).dtype == torch.float32
    assert moved(torch.ones(2, dtype=torch.int64), META).dtype == torch.int64


def test_a_device_is_asked_once(monkeypatch):
    asked = []

    def zeros(*_, device, **__):
        asked.append(device)
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(dtypes, "_has_float64", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    assert [widest(META) for _ in range(3)] == [torch.float32] * 3
    assert asked == [META]


def test_a_device_without_memory_says_nothing(monkeypatch):
    def zeros(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dtypes, "_has_float64", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError):
        widest(META)
    assert dtypes._has_float64 == {}


def test_fake_tensors_say_nothing_of_a_device(monkeypatch):
    monkeypatch.setattr(dtypes, "_has_float64", {})
    with FakeTensorMode():
        assert widest(torch.device("cuda")) == torch.float64
        assert widened(torch.ones(2, device="cuda")).dtype == torch.float64
    assert dtypes._has_float64 == {}


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999, 1 - 1e-6])
@pytest.mark.parametrize("count", [1, 2, 1000, 2**24])
def test_bias_corrections_have_all_digits_in_float32(beta, count):
    expected = 1 - beta**count
    assert bias_correction(beta, torch.tensor([count], dtype=torch.float64)).item() == expected
    assert math.isclose(bias_correction(beta, torch.tensor([float(count)])).item(), expected, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("number", "power"),
    [
        *((near * 2.0**k, k) for k in (-126, -125, -1, 0, 1, 24, 126, 127) for near in (1.0, 1.9999999)),
        *((number, -126) for number in (0.0, 2.0**-149, 3e-41)),
        *((number, 127) for number in (math.inf, math.nan, torch.finfo(torch.float32).max)),
    ],
)
def test_the_power_of_two_at_most_a_number(number, power):
    found = power_of_two(torch.tensor([[number]]))
    assert found.tolist() == [[2.0**power]]
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_squares_of_the_largest_norms_are_finite(dtype):
    norms = torch.full((100,), squarable(torch.ones(1, dtype=dtype)), dtype=dtype)
    assert norms.square().sum().isfinite()


def test_the_dtype_of_norms_is_chosen_for_a_kind_of_device(monkeypatch):
    monkeypatch.setattr(dtypes, "_has_float64", {})
    set_norm_dtype("meta", torch.float32)
    assert widest(META) == torch.float32
    assert is_narrow(torch.ones(2, device=META))
    assert not is_narrow(torch.ones(2))
    set_norm_dtype("meta", torch.float64)
    assert widest(META) == torch.float64


@pytest.mark.parametrize(
    ("device_type", "dtype", "error", "text"),
    [
        ("cpu", torch.float32, ValueError, "device_type must not be 'cpu'"),
        ("cuda", torch.float16, ValueError, "dtype"),
        ("gpu", torch.float32, ValueError, "device_type must be a kind of device"),
        ("cuda:0", torch.float32, ValueError, "without a number"),
        (META, torch.float32, TypeError, "device_type"),
    ],
)
def test_wrong_kinds_and_dtypes_raise(device_type, dtype, error, text):
    with pytest.raises(error, match=text):
        set_norm_dtype(device_type, dtype)
