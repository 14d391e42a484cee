"""The readable way is an oracle: it calls no fused kernel, lets nothing wait, and runs no code of the fast way."""

import sys
from pathlib import Path

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import assert_equal, gradients, parameters, set_grads
from torch.utils._python_dispatch import TorchDispatchMode

import torchzero_clip
from torchzero_clip import Adam, ClipNorm, Modular, Wrap

FAST = str(Path(torchzero_clip.__file__).parent / "fast")


class Log(TorchDispatchMode):
    """The operations that are dispatched, and the functions of `fast` that are entered."""

    def __init__(self):
        super().__init__()
        self.fused, self.frames = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_fused" in func.__name__:
            self.fused.add(func.__name__)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        sys.setprofile(self._enter)
        return super().__enter__()

    def __exit__(self, *error):
        sys.setprofile(None)
        return super().__exit__(*error)

    def _enter(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FAST):
            self.frames.add(frame.f_code.co_qualname)


def logged(make, *, fast, dtype=torch.float32):
    params = parameters(dtype)
    optimizer = Modular(params, make(), fast=fast)
    with Log() as log:
        for row in gradients(params, 3):
            set_grads(params, row)
            optimizer.step()
    return log


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_the_readable_way_calls_no_kernel_and_nothing_of_the_fast_way(entry, dtype):
    log = logged(entry.make, fast=False, dtype=dtype)
    assert not log.frames
    assert not log.fused or entry.name == "ClipNorm+Wrap"


def test_only_a_users_wrap_reaches_a_kernel_in_the_readable_way():
    log = logged(lambda: [ClipNorm(0.5), Wrap(torch.optim.Adam, fused=True)], fast=False)
    assert log.fused == {"_fused_adam_.default"}
    assert not log.frames


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_has_no_meaning_in_the_readable_way(fused, amsgrad):
    """All three are the definition, which equals torch's optimizer up to rounding."""
    params, theirs, usual = parameters(), parameters(), parameters()
    optimizer = Modular(params, Adam(0.1, fused=fused, amsgrad=amsgrad), fast=False)
    defined = Modular(usual, Adam(0.1, amsgrad=amsgrad), fast=False)
    torchs = torch.optim.Adam(theirs, 0.1, amsgrad=amsgrad)
    for row in gradients(params, 20):
        for its_params, each in ((params, optimizer), (theirs, torchs), (usual, defined)):
            set_grads(its_params, row)
            each.step()
    assert_equal(params, usual)
    torch.testing.assert_close(params, theirs, rtol=1e-5, atol=1e-6)
