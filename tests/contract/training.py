"""A small training run that every contract repeats in its own way."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from table import SHAPES
from torch import Tensor, nn

from torchzero_clip import Modular


class Model(nn.Module):
    """Parameters with the given values."""

    def __init__(self, initial: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(value.clone() for value in initial)


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [nn.Parameter(value.to(dtype)) for value in values]


def fill(layer: nn.Module, seed: int) -> nn.Module:
    """Give a layer the parameters of a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return layer


def gradients(params: Iterable[Tensor], steps: int, seed: int = 1) -> list[list[Tensor]]:
    """One list of gradients per step, of sizes around the limits of the entries."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(p.shape, p.dtype) for p in params]
    scales = [10.0 ** (k % 3 - 1) for k in range(steps)]
    return [
        [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for shape, dtype in shapes]
        for scale in scales
    ]


def set_grads(params: Sequence[Tensor], row: Sequence[Tensor]) -> None:
    for param, grad in zip(params, row, strict=True):
        param.grad = grad.clone()


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Iterable[Sequence[Tensor]]) -> None:
    for row in grads:
        set_grads(params, row)
        optimizer.step()


def trained(*chain: Any, steps: int = 3) -> Modular:
    """A chain after some steps."""
    params = parameters()
    optimizer = Modular(params, *chain)
    train(optimizer, params, gradients(params, steps))
    return optimizer


def stepped(chain: Any, grad: list[float], start: float = 0.0) -> tuple[nn.Parameter, Modular]:
    """One parameter after one step on a gradient."""
    param = nn.Parameter(torch.full((len(grad),), start))
    param.grad = torch.tensor(grad)
    optimizer = Modular([param], chain)
    optimizer.step()
    return param, optimizer


def values(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def through_file(state: Any) -> Any:
    """What a checkpoint is after it was saved and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Bitwise, NaN equal to NaN."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


def assert_same_state(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
    """Bitwise equal settings and state, of the same keys and dtypes."""
    assert_same_checkpoint(first.state_dict(), second.state_dict())


def assert_same_checkpoint(first: Any, second: Any) -> None:
    """Bitwise, NaN equal to NaN, of the same keys, dtypes and texts."""
    torch.testing.assert_close(_in_numbers(first), _in_numbers(second), rtol=0, atol=0, equal_nan=True)


def assert_equal_to_rounding(actual: Any, expected: Any) -> None:
    """Equal keys, dtypes and texts, and tensors that differ by a few last places of their dtypes.

    Numbers are float64, but describe tensors of other dtypes, so they may differ as float32 does.
    """
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = [actual[key] for key in expected], list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for own, other in zip(actual, expected, strict=True):
            assert_equal_to_rounding(own, other)
    elif isinstance(expected, Tensor) and (expected.is_floating_point() or expected.is_complex()):
        is_number = not expected.ndim and expected.dtype == torch.float64
        most = 32 * torch.finfo(torch.float32 if is_number else expected.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=most, atol=most, equal_nan=True)
    else:
        assert actual == expected


def _in_numbers(value: Any) -> Any:
    """The same with texts as numbers, which `torch.testing.assert_close` compares."""
    if isinstance(value, str):
        return [float(ord(letter)) for letter in value]
    if isinstance(value, dict):
        return {key: _in_numbers(item) for key, item in value.items()}
    return [_in_numbers(item) for item in value] if isinstance(value, list | tuple) else value
