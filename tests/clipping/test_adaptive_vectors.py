"""The worked cases of the adaptive limits, in ``adaptive.json``."""

import json
from pathlib import Path

import pytest
import torch

from torchzero_clip import (
    LR,
    AdaGC,
    AdaptiveGradientClip,
    AutoClip,
    ClipByMaxEMA,
    ClipNormGrowth,
    ClipRMS,
    GradientStabilizer,
    Modular,
    SkipStep,
    SoftSpectralClip,
    SpikeAwareClip,
    ZClip,
)

CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "adaptive.json").read_text())["cases"]}
METHODS = {
    "agc": AdaptiveGradientClip,
    "autoclip": AutoClip,
    "zclip": ZClip,
    "adagc": AdaGC,
    "spam": SpikeAwareClip,
    "stable_spam_clip": ClipByMaxEMA,
    "gradient_stabilizer": GradientStabilizer,
    "clip_rms": ClipRMS,
    "soft_spectral": SoftSpectralClip,
    "norm_growth": lambda mul: ClipNormGrowth(mul=mul, min_value=1e-8, max_decay=None),
    "skip_zscore": SkipStep,
}
OTHERS = {"quantile_clipper", "auto_s"}  # norm clippers of samples
TOLERANCE = {"norm_growth": 1e-7, "soft_spectral": 1e-5}


def tensor(values):
    return torch.tensor(numbers(values), dtype=torch.float64)


def numbers(value):
    return float(value) if isinstance(value, str) else [numbers(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["method"] not in OTHERS])
def test_worked_cases(name, fast):
    case = CASES[name]
    transform = METHODS[case["method"]](**case["settings"])
    first = [tensor(grad) for grad in case["steps"][0]["grads"]]
    weights = [tensor(p) for p in case["params"]] if case["params"] else [torch.zeros_like(grad) for grad in first]
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Modular(params, transform, LR(1.0), nonfinite="propagate", fast=fast)
    for now, expected in zip(case["steps"], case["expected"], strict=True):
        skipped = optimizer.metrics().get("skipped_steps", torch.tensor(0)).item()
        for param, weight, grad in zip(params, weights, now["grads"], strict=True):
            param.data, param.grad = weight.clone(), tensor(grad)
        if "loss" in now:
            optimizer.report_loss(numbers(now["loss"]))
        optimizer.step()
        if "grads" in expected:
            for param, weight, result in zip(params, weights, expected["grads"], strict=True):
                tolerance = TOLERANCE.get(case["method"], 1e-9)
                torch.testing.assert_close(
                    weight - param.data, tensor(result), rtol=tolerance, atol=tolerance / 1e3, equal_nan=True
                )
        if "skipped" in expected:
            assert (optimizer.metrics()["skipped_steps"].item() > skipped) == expected["skipped"]
