"""On a GPU: warm steps do not synchronize, and a step about which the GPU decides is that of the host, bit for bit."""

import random

import pytest
import torch
from torch import nn

from torchzero_clip import (
    SGD,
    AdaGC,
    AdamW,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Modular,
    Recorder,
    SkipStep,
    ZClip,
    captured,
)
from torchzero_clip import before_step as put_before

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytestmark = needs_cuda
CHAINS = {
    "joint": lambda: ([ClipNorm(0.5, dim="global")], {}),
    "each": lambda: ([ClipNorm(0.5)], {}),
    "growth": lambda: ([ClipNormGrowth()], {}),
    "ema": lambda: ([ClipNormByEMA()], {}),
    "adagc": lambda: ([AdaGC(warmup_steps=2)], {}),
    "zclip": lambda: ([ZClip(warmup_steps=2)], {}),
    "skip": lambda: ([], {"nonfinite": "skip"}),
    "skip, joint": lambda: ([ClipNorm(0.5, dim="global")], {"nonfinite": "skip", "max_consecutive_skips": 30}),
    "gate": lambda: ([SkipStep(max_ratio=10.0)], {}),
    "gate, adagc": lambda: ([SkipStep(max_ratio=10.0), AdaGC(warmup_steps=2)], {"nonfinite": "skip"}),
}
RULES = {"adamw": lambda: AdamW(0.01), "sgd": lambda: SGD(0.01, 0.9)}
SIZES = [(64, 32), (32,), (70_000,), (5, 4, 3, 3)]


def start(chain, rule, dtype, *, capturable=False):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SIZES]
    transforms, options = CHAINS[chain]()
    if rule == "before" and transforms:
        optimizer = torch.optim.AdamW(params, lr=0.01, fused=True, capturable=capturable)
        return params, optimizer, put_before(optimizer, *transforms, **options)
    optimizer = Modular(params, *transforms, RULES.get(rule, RULES["adamw"])(), **options)
    return params, optimizer, optimizer


def fill(params, draw):
    value = draw.choice([1.0, 1.0, 0.3, 100.0, torch.nan, torch.inf, 0.0])
    generator = torch.Generator("cuda").manual_seed(draw.randrange(2**30))
    for param in params:
        grad = torch.randn(param.shape, generator=generator, device="cuda") * value
        param.grad = grad.to(param.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["adamw", "sgd", "before"])
@pytest.mark.parametrize("chain", CHAINS)
def test_warm_steps_do_not_synchronize(chain, rule, dtype):
    params, optimizer, handle = start(chain, rule, dtype)
    draw = random.Random(chain)
    for _ in range(12):
        fill(params, random.Random(1))
        optimizer.step()
    assert handle.host_decides == ()
    for _ in range(12):
        fill(params, draw)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            handle.metrics()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", ["adamw", "sgd", "before"])
@pytest.mark.parametrize("chain", [name for name in CHAINS if "skip" in name or "gate" in name])
def test_the_gpu_decides_as_the_host_does(chain, rule):
    found = []
    for is_oracle in (False, True):
        params, optimizer, handle = start(chain, rule, torch.float32)
        if is_oracle:
            handle.runner._host_reasons = lambda: ["this run is the oracle"]
        draw = random.Random(chain)
        for _ in range(60):
            fill(params, draw)
            optimizer.step()
        state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
        said = handle.skipped_by, handle.steps_taken, handle.skipped_steps if rule == "before" else None
        found.append(([x.detach().cpu() for x in (*params, *state)], said, str(handle.bad_gradients)))
    assert found[0][1:] == found[1][1:]
    assert 12 < found[0][1][1] < 60
    for ours, expected in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("rule", ["adamw", "before"])
@pytest.mark.parametrize("chain", [name for name in CHAINS if "skip" in name or "gate" in name])
def test_a_recorder_does_not_synchronize_where_nothing_is_written(chain, rule):
    params, optimizer, _ = start(chain, rule, torch.float32)
    recorder, draw = Recorder(optimizer), random.Random(chain)
    for _ in range(12):
        fill(params, random.Random(1))
        optimizer.step()
    for _ in range(40):
        fill(params, draw)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert any(recorder.record().reasons)


@pytest.mark.parametrize("rule", ["adamw", "sgd", "before"])
@pytest.mark.parametrize("chain", CHAINS)
def test_captured_steps_are_the_ordinary_ones(chain, rule):
    """To the bit with rates in tensors. Replays do not synchronize."""
    found, options = [], CHAINS[chain]()[1]
    for is_captured in (True, False):
        params, optimizer, handle = start(chain, rule, torch.float32, capturable=True)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.01, device="cuda")
        step = captured(optimizer) if is_captured else optimizer.step
        draw = random.Random(chain)
        grads = [torch.zeros_like(param) for param in params]
        for k in range(100):
            fill(params, draw if options or "gate" in chain else random.Random(1))
            with torch.no_grad():
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.copy_(param.grad)
            for group in optimizer.param_groups:
                group["lr"].fill_(0.01 / (1 + k))
            is_replay = is_captured and step._graph is not None
            torch.cuda.set_sync_debug_mode("error" if is_replay else "default")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert not is_captured or step._replays > 60
        state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
        found.append(([x.detach().cpu() for x in (*params, *state)], handle.skipped_by, handle.steps_taken))
    assert found[0][1:] == found[1][1:]
    assert all(map(torch.equal, found[0][0], found[1][0]))
