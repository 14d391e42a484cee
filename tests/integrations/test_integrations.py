"""What the integrations do without any trainer installed."""

import sys

import pytest
import torch
from ranks import run_program
from torch import nn

from torchzero_clip import Centralize, ClipNorm, Modular, before_step, integrations
from torchzero_clip.integrations import metrics, numbers, unwrapped


class Wrapper:
    def __init__(self, inner, name):
        setattr(self, name, inner)


def test_the_optimizer_is_found_under_wrappers():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Modular([weight], ClipNorm(1))
    wrapped = Wrapper(Wrapper(optimizer, "_optimizer"), "optimizer")
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert unwrapped(wrapped) is unwrapped(optimizer) is optimizer
    assert {name: value.item() for name, value in metrics(wrapped).items()} == pytest.approx(
        {"clip_norm/norm": 5.0, "clip_norm/factor": 0.2, "clip_norm/clipped": 1.0}
    )


def test_numbers_are_the_metrics_in_their_order():
    params = [nn.Parameter(torch.randn(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    optimizer = Modular(params, ClipNorm(0.1), Centralize(), ClipNorm(0.2, ord=1), nonfinite="skip")
    assert numbers(optimizer) == {"skipped_steps": 0.0}
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    found = numbers(Wrapper(optimizer, "optimizer"))
    assert list(found.items()) == [(name, value.item()) for name, value in optimizer.metrics().items()]
    assert len(found) == 7
    assert all(type(value) is float for value in found.values())


def test_a_wrapper_that_passes_for_a_modular_is_opened():
    """Lightning's wrapper is of a class derived from that of the optimizer, without its attributes."""
    optimizer = Modular([nn.Parameter(torch.zeros(2))], ClipNorm(1))
    fake = object.__new__(type("LightningModular", (Modular,), {}))
    vars(fake)["_optimizer"] = optimizer
    assert unwrapped(fake) is optimizer


def test_an_optimizer_with_transforms_before_its_steps_has_their_metrics():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    handle = before_step(optimizer, ClipNorm(1))
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    wrapped = Wrapper(Wrapper(optimizer, "_optimizer"), "optimizer")
    expected = {"clip_norm/norm": 5.0, "clip_norm/factor": pytest.approx(0.2), "clip_norm/clipped": 1.0}
    for given in (wrapped, optimizer, handle):
        assert unwrapped(given) is handle
        assert numbers(given) == expected
        assert metrics(given).keys() == expected.keys()
    handle.remove()
    assert numbers(handle) == expected
    with pytest.raises(TypeError, match=r"got SGD, which has no transforms: call before_step on it"):
        numbers(wrapped)


class Slots:
    __slots__ = ("optimizer",)


def test_wrappers_with_slots_and_circles():
    optimizer = Modular([nn.Parameter(torch.zeros(2))], ClipNorm(1))
    slots = Slots()
    slots.optimizer = optimizer
    assert unwrapped(slots) is optimizer
    optimizer.optimizer = "a name"  # an attribute of a Modular hides nothing
    assert unwrapped(optimizer) is optimizer
    circle = Wrapper(None, "optimizer")
    circle.optimizer = Wrapper(circle, "_optimizer")
    with pytest.raises(TypeError, match="got Wrapper"):
        unwrapped(circle)


def test_other_optimizers_are_refused():
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    with pytest.raises(TypeError, match="optimizer must be a Modular or a wrapper of one, got Adam"):
        metrics(Wrapper(adam, "optimizer"))
    with pytest.raises(TypeError, match="got int"):
        metrics(3)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("TrainerCallback", "huggingface", "transformers"), ("LightningCallback", "lightning", "lightning")],
)
def test_a_missing_package_is_named(name, module, package, monkeypatch):
    missing = {package, *(name for name in sys.modules if name.startswith(f"{package}."))}
    for absent in missing | ({"pytorch_lightning"} if package == "lightning" else set()):
        monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.delitem(sys.modules, f"torchzero_clip.integrations.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"{name} needs {package}: pip install {package}"):
        getattr(integrations, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'Callback'"):
        integrations.Callback  # noqa: B018


@pytest.mark.slow
def test_importing_the_package_imports_neither_the_compiler_nor_trainers():
    code = (
        "import sys, torch, torchzero_clip, torchzero_clip.integrations; "
        "heavy = {'torch._dynamo', 'torch.distributed.tensor', 'transformers', 'lightning', 'accelerate'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
