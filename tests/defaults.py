"""Settings of the process that results must not depend on: each a function that returns a context."""

from contextlib import contextmanager

import torch


@contextmanager
def _changed(change, value, usual):
    change(value)
    try:
        yield
    finally:
        change(usual)


DEFAULTS = {
    "float64 by default": lambda: _changed(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: _changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "another device by default": lambda: _changed(torch.set_default_device, "meta", None),
    "in a context of another device": lambda: torch.device("meta"),
}
