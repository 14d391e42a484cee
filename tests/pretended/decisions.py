"""Steps about which the device decides: late errors, replays, errors of the optimizer behind, and who prevents it."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pretended.device import DEVICE, Graph, Posted, numbers, on_cuda
from pretended.runs import bits
from torch import Tensor, nn

from torchzero_clip import (
    LR,
    SGD,
    AdamW,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Gate,
    Modular,
    Recorder,
    RMSprop,
    SkipStep,
    ZClip,
    before_step,
)
from torchzero_clip.engine.device_decisions import MOST_LATE, DeviceDecisions

WARM = 8
"""Steps after which the device decides."""


def params_of(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(on_cuda(torch.ones(5 + k))) for k in range(count)]


def fill(params: list[nn.Parameter], value: float = 1.0, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * value
        if param.grad is None:
            param.grad = on_cuda(grad)
        else:
            numbers(param.grad).copy_(grad)


def warm(optimizer: Any, params: list[nn.Parameter], steps: int = WARM) -> None:
    for k in range(steps):
        fill(params, seed=k)
        optimizer.step()


def bad_steps(optimizer: Any, params: list[nn.Parameter], count: int, value: float) -> None:
    for _ in range(count):
        fill(params, value)
        optimizer.step()


class Never(Posted):
    """Does not arrive before somebody waits for it."""

    def arrived(self) -> bool:
        return False


@contextmanager
def sent_by(kind: type[Posted]) -> Iterator[None]:
    kept, DeviceDecisions.send = DeviceDecisions.send, kind
    try:
        yield
    finally:
        DeviceDecisions.send = kept


def errors_are_late_and_say_so() -> None:
    """At most 16 steps, before a further step is counted, with the number of the step."""
    for kind in (Posted, Never):
        with sent_by(kind):
            params = params_of()
            optimizer = Modular(params, ClipNorm(1.0), AdamW(), nonfinite="skip", max_consecutive_skips=3)
            warm(optimizer, params)
            assert optimizer.host_decides == ()
            before = [bits(param) for param in params]
            with pytest.raises(RuntimeError, match="max_consecutive_skips allows 3") as caught:
                bad_steps(optimizer, params, 100, torch.nan)
            bad = int(optimizer.metrics()["skipped_steps"])
            said = re.match(r"(\d+) steps in a row were skipped at step (\d+)\.", str(caught.value))
            assert said is not None
            in_a_row, at_step = map(int, said.groups())
            assert at_step == WARM + in_a_row
            assert 3 < in_a_row <= bad <= 3 + 1 + MOST_LATE
            assert optimizer.steps_taken == WARM
            assert [bits(param) for param in params] == before
            saved = copy.deepcopy(optimizer.state_dict())
            warm(optimizer, params, 20)  # which raise no more, because these steps are taken
            assert optimizer.steps_taken == WARM + 20
            bad_steps(optimizer, params, 4, torch.nan)
            saved["param_groups"][0]["consecutive_skips"] = 0
            optimizer.load_state_dict(saved)  # of a time before these skips
            warm(optimizer, params, 20)
            assert optimizer.steps_taken == WARM + 40


def skips_without_a_limit_warn() -> None:
    """Once, and again after twice as many."""
    params = params_of()
    optimizer = Modular(params, SkipStep(max_norm=100.0), AdamW())
    warm(optimizer, params)
    with pytest.warns(UserWarning, match="steps in a row were skipped at step") as caught:
        bad_steps(optimizer, params, 100, 1e3)
    assert len(caught) == 2
    assert optimizer.skipped_by == ("skip_step",)


CHAINS: list[Callable[[], tuple[list[Any], dict[str, Any]]]] = [
    lambda: ([ClipNorm(1.0, dim="global"), AdamW(0.1)], {"nonfinite": "skip"}),
    lambda: ([SkipStep(max_ratio=5.0), ClipNorm(0.5), AdamW(0.1)], {"nonfinite": "skip"}),
    lambda: ([SkipStep(max_ratio=5.0), ZClip(warmup_steps=2), SGD(0.1, 0.9)], {}),
    lambda: ([SkipStep(max_norm=9.0), ClipNormGrowth(), AdamW(0.1)], {"nonfinite": "skip"}),
    lambda: ([SkipStep(max_norm=9.0), ClipNorm(0.5), ClipValue(0.01), AdamW(0.1)], {"nonfinite": "skip"}),
    lambda: ([SkipStep(max_norm=9.0), ClipNorm(1.0).only(lambda p: p.numel() > 5), SGD(0.1, 0.9)], {}),
]


def replays_decide_anew() -> None:
    """Parameters, state, metrics and answers of replays are those of steps."""
    for make in CHAINS:
        found = []
        for captured in (True, False):
            params, draw, graph = params_of(), random.Random(1), None
            chain, options = make()
            optimizer = Modular(params, *chain, **options)
            warm(optimizer, params)
            for k in range(30):
                fill(params, draw.choice([1.0, 1.0, 0.5, 50.0, torch.nan, torch.inf]), seed=k)
                if captured and graph is not None:
                    graph.replay()
                elif captured:
                    graph = Graph(optimizer.step)
                else:
                    optimizer.step()
            state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
            shown = optimizer.metrics()
            tensors = [*params, *state, *(shown[name] for name in sorted(shown))]
            said = optimizer.skipped_by, optimizer.steps_taken, str(optimizer.bad_gradients)
            found.append(([bits(tensor) for tensor in tensors], said, optimizer.param_groups[0]["consecutive_skips"]))
        assert found[0] == found[1]
        assert found[0][1][1] < WARM + 30


def an_error_of_the_optimizer_undoes_the_step() -> None:
    """Counts and state of gates are as before, and the optimizer has no ``found_inf``."""
    params = params_of()
    optimizer = torch.optim.AdamW(params, fused=True)
    handle = before_step(optimizer, SkipStep(max_ratio=5.0), ClipNorm(1.0), nonfinite="skip")
    warm(optimizer, params)
    assert handle.host_decides == ()
    fill(params, torch.nan)
    optimizer.step()
    assert handle.skipped_by == ("skip_step", "nonfinite")
    assert "found_inf" not in vars(optimizer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("the device is lost")

    state = handle.runner.chain_state.values
    before = {key: bits(value) for key, value in state.items() if isinstance(value, Tensor)}
    said = handle.steps_taken, handle.skipped_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", fail)
        fill(params, 0.5)
        with pytest.raises(ValueError, match="the device is lost"):
            optimizer.step()
    assert "found_inf" not in vars(optimizer)
    assert before == {key: bits(value) for key, value in state.items() if isinstance(value, Tensor)}
    assert said == (handle.steps_taken, handle.skipped_steps)
    warm(optimizer, params, 1)
    assert handle.steps_taken == WARM + 1


def an_error_of_the_kernel_undoes_the_count() -> None:
    """In a step by a plan, as in others."""
    params = params_of()
    optimizer = Modular(params, SkipStep(max_ratio=5.0), ClipNorm(1.0), AdamW(), nonfinite="skip")
    warm(optimizer, params)
    assert optimizer.host_decides == ()
    before = [bits(param) for param in params]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", lambda *_, **__: 1 / 0)
        fill(params, 0.5)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert (optimizer.steps_taken, float(optimizer.metrics()["skipped_steps"])) == (WARM, 0)
    assert before == [bits(param) for param in params]
    warm(optimizer, params, 1)
    assert optimizer.steps_taken == WARM + 1


class Own(Gate):
    """Does not implement `Gate.record`."""

    pure = True

    def __init__(self) -> None:
        super().__init__({})

    def refuses(self, norm: Tensor, step: Any) -> Tensor:
        return norm > 1e6

    def accept(self, norm: Tensor, step: Any) -> None:
        pass


class Inheriting(SkipStep):
    """Overrides what is stored, and inherits `record`, which would not store it."""

    pure = True

    def accept(self, norm: Tensor, step: Any) -> None:
        super().accept(norm, step)


def the_chain_says_why_the_host_decides() -> None:
    """Each reason is named, and the step waits once."""
    cases: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "does not implement Gate.record": ([Own(), AdamW()], {}),
        "or is not pure": ([Inheriting(max_norm=1e6), AdamW()], {}),
        "reads losses": ([SkipStep(sigma=6.0), AdamW()], {}),
        "raises in the same step": ([AdamW()], {"nonfinite": "raise"}),
        "functions of the step": ([AdamW(lambda step: 0.1)], {"nonfinite": "skip"}),
        "may change its state": ([ClipNormGrowth(mul=None), AdamW()], {"nonfinite": "skip"}),
        "RMSprop() may change its state": ([ClipNorm(1.0), ClipNorm(2.0), RMSprop()], {"nonfinite": "skip"}),
        "no update rule": ([ClipNorm(1.0), ClipNorm(2.0), LR(0.1)], {"nonfinite": "skip"}),
    }
    for reason, (chain, options) in cases.items():
        params = params_of()
        optimizer = Modular(params, *chain, **options)
        warm(optimizer, params)
        assert any(reason in said for said in optimizer.host_decides), (reason, optimizer.host_decides)
        DEVICE.counts.clear()
        warm(optimizer, params, 1)
        assert len(DEVICE.counts.waits) + len(DEVICE.counts.copies) == 1, reason
    params = params_of()
    optimizer = Modular(params, AdamW(), nonfinite="skip")
    warm(optimizer, params)
    assert optimizer.host_decides == ()
    Recorder(optimizer)
    assert optimizer.host_decides == ()
    assert Modular(params_of(), AdamW()).host_decides == ()


def optimizers_that_cannot_refuse_are_named() -> None:
    """Those without a fused kernel, and those whose gradients a later hook reads."""
    for make, reason in (
        (lambda params: torch.optim.AdamW(params, foreach=True), "needs fused=True in all groups"),
        (lambda params: torch.optim.RMSprop(params), "RMSprop has no kernel that can refuse a step"),
    ):
        params = params_of()
        optimizer: Any = make(params)
        handle = before_step(optimizer, SkipStep(max_norm=1e6), ClipNorm(1.0))
        warm(optimizer, params)
        assert any(reason in said for said in handle.host_decides), handle.host_decides
    params = params_of()
    optimizer = torch.optim.SGD(params, 0.1, fused=True)
    handle = before_step(optimizer, SkipStep(max_norm=1e6), ClipNorm(1.0))
    warm(optimizer, params)
    assert handle.host_decides == ()
    vars(optimizer)["found_inf"] = on_cuda(torch.zeros(()))
    assert handle.host_decides[0] == "a gradient scaler decides too"
    del vars(optimizer)["found_inf"]
    optimizer.register_step_pre_hook(lambda *_: None)
    assert any("no later hook" in said for said in handle.host_decides)
    for make in (
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
    ):
        params = params_of()
        optimizer = make(params)
        handle = before_step(optimizer, SkipStep(max_norm=1e6), ClipNorm(1.0))
        warm(optimizer, params[1:])
        assert handle.host_decides == ()
        fill(params)
        assert handle.host_decides == ("the optimizer takes the first step of a parameter",)


CHECKS: dict[str, Callable[[], None]] = {
    "late errors": errors_are_late_and_say_so,
    "late warnings": skips_without_a_limit_warn,
    "replays decide": replays_decide_anew,
    "errors behind": an_error_of_the_optimizer_undoes_the_step,
    "errors of kernels": an_error_of_the_kernel_undoes_the_count,
    "reasons": the_chain_says_why_the_host_decides,
    "optimizers behind": optimizers_that_cannot_refuse_are_named,
}
