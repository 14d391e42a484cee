"""Settings of the process that results must not depend on: each a function that returns a context."""

from contextlib import contextmanager

import torch


@contextmanager
def _dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS = {
    "float64 by default": lambda: _dtype(torch.float64),
    "bfloat16 by default": lambda: _dtype(torch.bfloat16),
    "another device by default": lambda: _device("meta"),
    "in a context of another device": lambda: torch.device("meta"),
}
