"""What holds on the pretended CUDA device. `test_pretended` runs each check in a process of its own."""

import gc
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipping.test_adaptive_vectors import CASES as ADAPTIVE
from clipping.test_adaptive_vectors import METHODS, OTHERS, TOLERANCE
from clipping.test_adaptive_vectors import tensor as adaptive_tensor
from contract.entries import ENTRIES, Entry
from contract.test_vectors import CASES
from contract.training import gradients, parameters
from pretended import captures, decisions, no_float64, per_sample, recorded, worked
from pretended.costs import costs_are_bounded, warm_costs_are_bounded
from pretended.device import CPU, CUDA, DEVICE, Graph, install, numbers, on_cuda, pretended
from pretended.runs import (
    CLIPS,
    decisions_are_those_of_the_host,
    ordinary_decisions_are_those_of_the_host,
    planned_steps_are_the_ordinary_ones,
)
from pretended.several_devices import PLACES, numbers_are_those_of_the_cpu
from torch import Tensor, nn

from torchzero_clip import LR, AdamW, ClipNorm, Modular, SkipStep

DTYPES = [torch.float32, torch.bfloat16]
"""Of the entries. The worked cases have float64."""
Chain = Callable[[], Any]


def params_of(values: list[Tensor], place: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(PLACES[place](value)) for value in values]


DISTINCT = [entry for entry in ENTRIES if not entry.varies]


def agree(actual: list[Tensor], expected: list[Tensor], what: object, dtype: torch.dtype) -> None:
    """Up to rounding: a quarter of the digits of the dtype are left to sums in another order."""
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.05}[dtype]
    pairs = [(numbers(a).double(), e.double()) for a, e in zip(actual, expected, strict=True)]
    sizes = [e[e.isfinite()].abs().amax().item() for _, e in pairs if e.isfinite().any()]
    for a, e in pairs:
        atol = tolerance * max([1e-30, *sizes])
        torch.testing.assert_close(a, e, rtol=tolerance, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}")


def worked_cases() -> None:
    """A third of those of ``vectors.json`` for transforms and functions."""
    for case in CASES[::3]:
        if case["kind"] in ("transform", "function"):
            worked.run(case, torch.float64, agree)


def adaptive_cases(fast: bool) -> None:
    """Those of ``adaptive.json``."""
    for name, case in ADAPTIVE.items():
        if case["method"] in OTHERS:
            continue
        first = [adaptive_tensor(grad) for grad in case["steps"][0]["grads"]]
        weights = [adaptive_tensor(p) for p in case["params"]] if case["params"] else list(map(torch.zeros_like, first))
        params = params_of(weights, CUDA)
        optimizer = Modular(params, METHODS[case["method"]](**case["settings"]), LR(1.0), fast=fast)
        for given, expected in zip(case["steps"], case["expected"], strict=True):
            for param, weight, grad in zip(params, weights, given["grads"], strict=True):
                with torch.no_grad():
                    param.copy_(weight)
                param.grad = on_cuda(adaptive_tensor(grad))
            if "loss" in given:
                optimizer.report_loss(float(given["loss"]))
            optimizer.step()
            tolerance = TOLERANCE.get(case["method"], 1e-9)
            for param, weight, result in zip(params, weights, expected.get("grads", params), strict=True):
                if "grads" in expected:
                    moved, wanted = weight - numbers(param), adaptive_tensor(result)
                    close = {"rtol": tolerance, "atol": tolerance / 1e3, "equal_nan": True}
                    torch.testing.assert_close(moved, wanted, **close, msg=lambda m, name=name: f"{name}: {m}")


def trained(entry: Entry, dtype: torch.dtype, place: torch.device, *, fast: bool) -> list[Tensor]:
    """The parameters and the state of floating point numbers after some steps."""
    params = params_of([p.detach() for p in parameters(dtype)], place)
    optimizer = Modular(params, entry.make(), fast=fast)
    for k, row in enumerate(gradients(params, 6)):
        for param, grad in zip(params, row, strict=True):
            param.grad = PLACES[place](numbers(grad) * (torch.inf if k == 3 and param.ndim == 1 else 1.0))
        optimizer.step()
    state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
    return [numbers(x) for x in (*params, *(v for v in state if v.is_floating_point()))]


def entries_agree(dtype: torch.dtype) -> None:
    """The fast way, the readable way and the CPU, also with a gradient that is not finite in one step.

    Each entry that does not vary another one takes the fast way in float32 or bfloat16. In float32, half of
    them take the readable way too.
    """
    for entry in DISTINCT[DTYPES.index(dtype) :: 2]:
        expected = trained(entry, dtype, CPU, fast=False)
        for fast in (True, False) if entry in DISTINCT[::4] else (True,):
            agree(trained(entry, dtype, CUDA, fast=fast), expected, (entry.name, fast), dtype)


def parts_of_long_tensors_agree() -> None:
    """As if tensors of more than 4 elements were too long for one piece."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FACTOR_BLOCK", "ALONE", "ELSEWHERE"):
            patch.setattr(f"torchzero_clip.fast.pieces.{name}", 4)
        entries_agree(torch.bfloat16)


def metrics_are_those_of_the_cpu() -> None:
    """Of each entry, after a few steps of two matrices, which are measured together, and of all kinds of tensors."""
    of_kinds = [p.detach() for p in parameters(torch.float32)]
    for entry, weights in itertools.product(ENTRIES, ([torch.ones(3, 4), torch.ones(4, 3)], of_kinds)):
        shown: list[dict[str, Tensor]] = []
        for place in (CUDA, CPU):
            params = params_of(weights, place)
            optimizer = Modular(params, entry.make())
            for row in gradients(params, 4):
                for param, grad in zip(params, row, strict=True):
                    param.grad = PLACES[place](numbers(grad))
                optimizer.step()
            shown.append({name: numbers(value) for name, value in sorted(optimizer.metrics().items())})
        assert shown[0].keys() == shown[1].keys(), entry.name
        for name, expected in shown[1].items():
            agree([shown[0][name]], [expected], (entry.name, name), torch.float32)


def steps_do_not_wait(dtype: torch.dtype) -> None:
    """A warm step neither waits for the device nor copies, except once for a policy about which the host decides."""
    for entry in DISTINCT if dtype == torch.float32 else DISTINCT[::3]:
        params = params_of([p.detach() for p in parameters(dtype)], CUDA)
        optimizer = Modular(params, entry.make())
        for row in gradients(params, 4):
            for param, grad in zip(params, row, strict=True):
                param.grad = on_cuda(numbers(grad))
            DEVICE.counts.clear()
            optimizer.step()
        if not entry.looks:
            assert (DEVICE.counts.waits, DEVICE.counts.copies) == ([], []), entry.name
        elif "SkipStep" in entry.name:
            waits = len(DEVICE.counts.waits) + len(DEVICE.counts.copies)
            assert waits == (len(optimizer.host_decides) > 0), (entry.name, DEVICE.counts.waits)


def recorded_steps_replay() -> None:
    """What a CUDA graph would repeat is what the next step would compute."""
    for entry in [e for e in DISTINCT if not e.looks][::3]:
        found = []
        for captured in (True, False):
            params = params_of([p.detach() for p in parameters(torch.float32)], CUDA)
            optimizer, graph = Modular(params, entry.make()), None
            rows = gradients(params, 8)
            for param, grad in zip(params, rows[0], strict=True):
                param.grad = on_cuda(numbers(grad))
            for k, row in enumerate(rows):
                for param, grad in zip(params, row, strict=True):
                    numbers(param.grad).copy_(numbers(grad))
                if not captured or k < 4:
                    optimizer.step()
                elif graph is None:
                    graph = Graph(optimizer.step)
                else:
                    graph.replay()
            shown = {name: numbers(value) for name, value in optimizer.metrics().items()}
            found.append([*(numbers(p) for p in params), *(shown[name] for name in sorted(shown))])
        if entry.name != "schedules":  # numbers of the host are part of a graph
            agree(found[0], found[1], entry.name, torch.float32)


def checkpoints_load_without_waiting_for_each_parameter() -> None:
    """The check of a checkpoint waits as often for 20 parameters as for 5, at most once."""
    for entry in DISTINCT[1::3]:
        waits = []
        for count in (5, 20):
            params = params_of([torch.ones(3, 4 + k % 3) for k in range(count)], CUDA)
            optimizer = Modular(params, entry.make())
            for param in params * 2:
                param.grad = on_cuda(torch.full(param.shape, 0.1))
            optimizer.step()
            saved = optimizer.state_dict()
            DEVICE.counts.clear()
            optimizer.load_state_dict(saved)
            waits.append(len(DEVICE.counts.waits))
        assert waits[0] == waits[1] <= 1, (entry.name, waits)


def captures_are_refused_where_a_step_waits() -> None:
    """A policy decides on the host, so a step with one cannot be captured: the error names it."""
    cases = {
        "SkipStep": ([SkipStep(1.0), AdamW()], {}),
        "nonfinite='skip'": ([ClipNorm(1), AdamW()], {"nonfinite": "skip"}),
    }
    for name, (chain, options) in cases.items():
        params = params_of([p.detach() for p in parameters()], CUDA)
        optimizer = Modular(params, *chain, **options)
        for param in params:
            param.grad = on_cuda(torch.ones(param.shape))
        before = [numbers(p).clone() for p in params]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchzero_clip.engine.nonfinite.is_capturing", lambda: True)
            with pytest.raises(RuntimeError, match=name):
                optimizer.step()
        assert all(map(torch.equal, map(numbers, params), before))


CHECKS: dict[str, Callable[[], None]] = {
    "worked cases": worked_cases,
    "adaptive cases": lambda: adaptive_cases(True),
    "adaptive cases, readable": lambda: adaptive_cases(False),
    **{f"entries, {dtype}": lambda dtype=dtype: entries_agree(dtype) for dtype in DTYPES},
    "entries, in parts": parts_of_long_tensors_agree,
    **{f"no waiting, {dtype}": lambda dtype=dtype: steps_do_not_wait(dtype) for dtype in DTYPES},
    "metrics": metrics_are_those_of_the_cpu,
    "replay": recorded_steps_replay,
    "loading": checkpoints_load_without_waiting_for_each_parameter,
    "captures are refused": captures_are_refused_where_a_step_waits,
    "several devices": lambda: numbers_are_those_of_the_cpu(agree),
    **{name: lambda name=name: no_float64.run(name, agree) for name in no_float64.CHECKS},
    "plans": planned_steps_are_the_ordinary_ones,
    "decisions": lambda: decisions_are_those_of_the_host(sorted(CLIPS)),
    "ordinary decisions": lambda: ordinary_decisions_are_those_of_the_host(range(24)),
    **decisions.CHECKS,
    **recorded.CHECKS,
    **captures.CHECKS,
    "costs": costs_are_bounded,
    "warm costs": warm_costs_are_bounded,
    **{name: lambda check=check: check(agree) for name, check in per_sample.CHECKS.items()},
}


GROUPS: dict[str, list[str]] = {}
"""The checks of each process. There are few, because each takes seconds to start."""
for _name in CHECKS:
    _homes = {"no float64": no_float64.CHECKS, "backward": per_sample.CHECKS, "captured": captures.CHECKS}
    _group = next((home for home, checks in _homes.items() if _name in checks), "numbers")
    GROUPS.setdefault(_name if _name in ("costs", "several devices") else _group, []).append(_name)


def failure(check: str) -> str:
    """The traceback of a check; "" if it passes."""
    torch.manual_seed(0)
    try:
        with pretended():
            CHECKS[check]()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    install()
    gc.freeze()  # what is imported is left out when all tensors on the device are looked for
    for _name in GROUPS[sys.argv[1]]:
        print(json.dumps([_name, failure(_name)]), flush=True)  # noqa: T201
