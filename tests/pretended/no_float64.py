"""A device that refuses float64, as GPUs of Apple do: the numbers are those of the CPU to float32's digits."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from clipping.test_adaptive_vectors import CASES as ADAPTIVE
from clipping.test_adaptive_vectors import METHODS, OTHERS
from clipping.test_adaptive_vectors import tensor as adaptive_tensor
from contract.entries import ENTRIES
from contract.test_vectors import CASES
from contract.training import gradients, parameters
from pretended import several_devices, worked
from pretended.device import CPU, CUDA, DEVICE, numbers, on_cuda, without_float64
from pretended.several_devices import HOSTS, PLACES, STEPS, Start, before, joint, modular
from pretended.worked import Agree
from torch import Tensor, nn

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    AdamW,
    AutoClip,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    GradientStabilizer,
    Modular,
    Recorder,
    SkipStep,
    ZClip,
    clip_grad_norm_,
    get_total_norm,
    norm,
)

MAKES_FLOAT64 = ("TrackJointNorm", "ClipToMedian", "Adam-float64-state")
"""Entries with state that their author makes in float64, or that stand on one device."""
EXACT = 1e-5


def chains_functions_and_optimizers(agree: Agree) -> None:
    """All numbers of one device without float64, and every third of parameters in turn on it and on the CPU."""
    orders = itertools.cycle([None, "cuda first", None, None, "cpu first", None])
    for (name, start), mixed in zip(starts().items(), orders, strict=False):
        alone = several_devices.trained(start, "cpu alone")
        for order in filter(None, ("cuda alone", mixed)):
            agree(several_devices.trained(start, order), alone, (name, order), torch.float32)


def starts() -> dict[str, Start]:
    entries = [entry for entry in ENTRIES if entry.name not in MAKES_FLOAT64 and not entry.varies]
    found = {f"{e.name} {k}": start for e in entries for k, start in enumerate(several_devices.of_entry(e.make))}
    found |= {name: lambda params, act=act: act for name, act in several_devices.FUNCTIONS.items()}
    found |= several_devices.CHAINS
    return found | {f"before {n}": before(host, joint) for n, host in HOSTS.items()}


def fits_float32(values: Any) -> bool:
    """True if float32 holds all numbers of nested lists, in which None has none."""
    if isinstance(values, Tensor):
        narrow = values.float()
        return bool((narrow.isinf() == values.isinf()).all() and ((narrow == 0) == (values == 0)).all())
    return all(map(fits_float32, values or ()))


def worked_cases(agree: Agree) -> None:
    """Those of ``vectors.json`` for transforms and functions whose numbers float32 can hold."""
    cases = [case for case in CASES if case["kind"] in ("transform", "function")]
    fitting = [case for case in cases if all(map(fits_float32, worked.steps_of(case)))]
    for case in fitting:
        worked.run(case, torch.float32, agree)
    assert len(fitting) > len(CASES) / 3, len(fitting)


def adaptive_cases(agree: Agree) -> None:
    """Those of ``adaptive.json`` whose numbers float32 can hold."""
    for name, case in ADAPTIVE.items():
        if case["method"] in OTHERS:
            continue
        rows = [list(map(adaptive_tensor, given["grads"])) for given in case["steps"]]
        if not all(map(fits_float32, rows)):
            continue
        zeros = list(map(torch.zeros_like, rows[0]))
        weights = list(map(adaptive_tensor, case["params"])) if case["params"] else zeros
        params = [nn.Parameter(on_cuda(weight.float())) for weight in weights]
        optimizer = Modular(params, METHODS[case["method"]](**case["settings"]), LR(1.0))
        for row, given, expected in zip(rows, case["steps"], case["expected"], strict=True):
            for param, weight, grad in zip(params, weights, row, strict=True):
                with torch.no_grad():
                    param.copy_(weight.float())
                param.grad = on_cuda(grad.float())
            if "loss" in given:
                optimizer.report_loss(float(given["loss"]))
            before = [numbers(param).clone() for param in params]
            optimizer.step()
            if "grads" in expected:
                found = [old - numbers(param) for old, param in zip(before, params, strict=True)]
                agree(found, list(map(adaptive_tensor, expected["grads"])), name, torch.float32)


def extreme_norms(_: Agree) -> None:
    """A finite gradient has a finite norm, one that is not zero a norm that is not zero, and both are right."""
    generator = torch.Generator().manual_seed(0)
    for size, dtype in ((1e20, torch.float32), (1e-25, torch.float32), (300.0, torch.float16), (1e30, torch.bfloat16)):
        for count in (1, 3, 5000, 300_000):
            values = (torch.randn(count, generator=generator) * size).clamp(-60000, 60000) if size == 300 else None
            given = (torch.randn(count, generator=generator) * size if values is None else values).to(dtype)
            for order in (2, 1, 3, 0.5, torch.inf, 8, "std", "mad"):
                expected = norm(given.double(), order)
                if count == 1 and order == "std":
                    continue
                found = numbers(norm(on_cuda(given), order))
                if expected < torch.finfo(torch.float32).max:
                    assert math.isclose(found.item(), expected.item(), rel_tol=EXACT), (size, dtype, count, order)
            param = nn.Parameter(on_cuda(torch.zeros(count, dtype=dtype)))
            param.grad = on_cuda(given)
            total = clip_grad_norm_([param], 1.0, dim="global")
            assert math.isclose(numbers(total).item(), norm(given.double()).item(), rel_tol=EXACT)
            clipped = min(1.0, norm(given.double()).item())
            assert math.isclose(norm(numbers(param.grad).double()).item(), clipped, rel_tol=0.01)
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    assert math.isfinite(numbers(norm(on_cuda(largest))).item())


def sums_beyond_float32(_: Agree) -> None:
    """Means and deviations are right where the sum of the elements, or of their squares, leaves float32."""
    generator = torch.Generator().manual_seed(0)
    most = torch.finfo(torch.float32).max
    shapes, spreads, dtypes = ((4, 3), (4, 5000)), (0.0, 1e37), (torch.float32, torch.bfloat16)
    for shape, spread, dtype in itertools.product(shapes, spreads, dtypes):
        given = (torch.randn(shape, generator=generator) * spread + 1e38).to(dtype)
        close = functools.partial(torch.testing.assert_close, rtol=EXACT, atol=torch.finfo(dtype).eps * 2e38)
        exact = given.double()
        for order, dim in itertools.product(("std", "sum"), (None, 1)):
            expected = norm(exact, order, dim=dim).clamp(max=most)
            close(numbers(norm(on_cuda(given), order, dim=dim)).double(), expected)
        means = {None: exact.mean(), 1: exact.mean(1, keepdim=True), "global": exact.mean()}
        for (dim, mean), fast in itertools.product(means.items(), (True, False)):
            param = nn.Parameter(on_cuda(torch.zeros_like(given)))
            optimizer = Modular([param], Centralize(dim=dim), LR(1.0), fast=fast)
            for _ in range(4):  # the last ones may be planned
                with torch.no_grad():
                    param.zero_()
                param.grad = on_cuda(given)
                optimizer.step()
            close(-numbers(param).double(), exact - mean)


def joint_deviations_near_the_largest_number(agree: Agree) -> None:
    """Their sum of squares has no root in float32. Those of a constant are 0, also if its mean is rounded."""
    for shapes in ([(60, 50)], [(7,), (3, 4), (60, 50)]):
        for dim in (None, "global"):
            for largest, is_constant in ((3e38, False), (3e38, True), (0.3, True)):
                generator, found = torch.Generator().manual_seed(0), []
                rows = [torch.rand(shape, generator=generator) * 2 - 1 for shape in shapes]
                rows = [torch.full_like(row, largest) if is_constant else row * largest for row in rows]
                for place in (on_cuda, Tensor.clone):
                    params = [nn.Parameter(place(torch.zeros(row.shape))) for row in rows]
                    optimizer = Modular(params, ClipNorm(0.5, "std", dim=dim), SGD(1.0))
                    for param, row in zip(params, rows, strict=True):
                        param.grad = place(row)
                    optimizer.step()
                    found.append(params)
                agree(found[0], [numbers(param) for param in found[1]], (shapes, dim, largest), torch.float32)


def norms_beyond_float32(_: Agree) -> None:
    """Norms of a CPU that float32 cannot hold stay finite and positive beside a gradient on the device."""
    for size in (1e100, 1e-100):
        params = [nn.Parameter(on_cuda(torch.zeros(2))), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
        params[0].grad, params[1].grad = on_cuda(torch.zeros(2)), torch.full((2,), size, dtype=torch.float64)
        total = numbers(get_total_norm([param.grad for param in params])).item()
        assert 0 < total < math.inf, total
        clip_grad_norm_(params, 1.0, dim="global", error_if_nonfinite=True)
        assert params[1].grad.min() > 0


def a_record_moves(_: Agree) -> None:
    """The checkpoint of a Recorder on a CPU loads here, and back."""
    for places in ([CPU, CUDA], [CUDA, CPU]):
        saved, norms = None, []
        for place in places:
            params = [nn.Parameter(PLACES[place](torch.ones(3)))]
            optimizer = torch.optim.SGD(params)
            recorder = Recorder(optimizer)
            if saved is not None:
                recorder.load_state_dict(saved)
            for size in (1.0, 2.0):
                params[0].grad = PLACES[place](torch.tensor([2.0, 3.0, 6.0]) * size)
                optimizer.step()
            saved, norms = to_host(recorder.state_dict()), numbers(recorder.record().norm).tolist()
        assert norms == [7.0, 14.0, 7.0, 14.0], (places, norms)


def exact_norms(_: Agree) -> None:
    """The norm of integers times a power of two, if it is an integer, is exact: alone, of rows and of tensors together.

    So gradients are divided by powers of two. Inf and NaN stay what they are.
    """
    for exponent in (-149, -130, -126, -60, 0, 60, 123):
        values = torch.tensor([2.0, 3.0, 6.0]) * 2.0**exponent
        assert numbers(norm(on_cuda(values))).item() == 7 * 2.0**exponent
        rows = torch.stack([values, torch.tensor([1.0, 4.0, 8.0]) * 2.0**exponent])
        assert numbers(norm(on_cuda(rows), dim=1)).tolist() == [7 * 2.0**exponent, 9 * 2.0**exponent]
        params = [nn.Parameter(on_cuda(torch.zeros(1))) for _ in values]
        for param, value in zip(params, values, strict=True):
            param.grad = on_cuda(value.view(1))
        assert numbers(clip_grad_norm_(params, math.inf, dim="global")).item() == 7 * 2.0**exponent
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for given, expected in (([math.inf, 1.0], math.inf), ([-math.inf, math.nan], math.nan), ([0.0, 0.0], 0.0)):
            found = numbers(norm(on_cuda(torch.tensor(given, dtype=dtype)))).item()
            assert found == expected or (math.isnan(found) and math.isnan(expected)), (given, found)


def norms_take_few_launches(_: Agree) -> None:
    """The joint norm of ten tensors and their clipping, without a wait."""
    params = [nn.Parameter(on_cuda(torch.zeros(50))) for _ in range(10)]
    for param in params:
        param.grad = on_cuda(torch.ones(50))
    DEVICE.counts.clear()
    clip_grad_norm_(params, 1.0, dim="global")
    assert 0 < DEVICE.counts.launches.total() <= 160, DEVICE.counts.launches
    assert (DEVICE.counts.waits, DEVICE.counts.copies) == ([], [])


def long_norms(_: Agree) -> None:
    """Norms of many elements are right to 2e-6, alone and together."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(20_000_000, generator=generator)
    expected = norm(values.double()).item()
    assert math.isclose(numbers(norm(on_cuda(values))).item(), expected, rel_tol=2e-6)
    pieces = [nn.Parameter(on_cuda(piece)) for piece in torch.zeros(len(values)).split(10_001)]
    for param, piece in zip(pieces, values.split(10_001), strict=True):
        param.grad = on_cuda(piece)
    assert math.isclose(numbers(clip_grad_norm_(pieces, math.inf, dim="global")).item(), expected, rel_tol=2e-6)


def statistics_stay_right(agree: Agree) -> None:
    """Averages, variances, quantiles and counts after many steps, one of which is not finite and some of which jump."""
    chain = [
        lambda: SkipStep(max_ratio=50.0, sigma=6.0, window=16),
        lambda: ZClip(warmup_steps=20),
        lambda: AdaGC(warmup_steps=10),
        lambda: ClipNormByEMA(0.99),
        lambda: AutoClip(70.0, window=10),
        lambda: ClipByMaxEMA(0.99),
        GradientStabilizer,
        lambda: LR(0.1),
    ]
    found = []
    for place in (CPU, CUDA):
        generator = torch.Generator().manual_seed(2)
        params = [nn.Parameter(PLACES[place](torch.zeros(3)))]
        optimizer = Modular(params, *[make() for make in chain])
        for k in range(200):
            size = math.nan if k == 100 else 1000.0 if k % 97 == 96 else 1.0 + k / 100
            params[0].grad = PLACES[place](torch.randn(3, generator=generator) * size)
            optimizer.report_loss(1.0 + 0.1 * float(torch.rand((), generator=generator)))
            optimizer.step()
        state = [v for of_param in optimizer.state.values() for v in of_param.values() if isinstance(v, Tensor)]
        shared = optimizer.runner.chain_state.values
        # without float64, the counts of rings go back
        counts = ("skip_step/norms_stored", "skip_step/losses_stored", "auto_clip/started")
        found.append([*params, *state, *(v for k, v in shared.items() if isinstance(v, Tensor) and k not in counts)])
    agree(found[1], found[0], "statistics", torch.float32)


def counts_go_on(_: Agree) -> None:
    """The place in a ring moves on after more steps than float32 can count."""
    param = nn.Parameter(on_cuda(torch.zeros(1)))
    optimizer = Modular([param], AutoClip(50.0, window=5))
    for k in range(40):
        param.grad = on_cuda(torch.tensor([1.0 + k]))
        optimizer.step()
    state = optimizer.runner.chain_state.values
    assert sorted(numbers(state["auto_clip/ring"]).tolist()) == [36.0, 37.0, 38.0, 39.0, 40.0]
    assert numbers(state["auto_clip/started"]).item() < 10


def checkpoints_move(agree: Agree) -> None:
    """A run that began on the CPU goes on here, and back; one that stays is resumed bit for bit."""
    for entry in [e for e in ENTRIES if e.name not in MAKES_FLOAT64 and not e.varies]:
        ends = [moved(entry.make, places) for places in ([CPU, CPU], [CPU, CUDA], [CUDA, CPU], [CUDA, CUDA])]
        for end in ends[1:]:
            agree(end, ends[0], ("checkpoint", entry.name), torch.float32)
        assert all(map(torch.equal, ends[3], moved(entry.make, [CUDA])))


def moved(make: Callable[[], Any], places: list[torch.device]) -> list[Tensor]:
    """The parameters after a run in as many parts as there are places, each of which loads a checkpoint of the last."""
    rows, weights = gradients(parameters(torch.float32), STEPS), [p.detach() for p in parameters(torch.float32)]
    saved, per_part = None, STEPS // len(places)
    for part, place in enumerate(places):
        params = [nn.Parameter(PLACES[place](weight)) for weight in weights]
        optimizer = Modular(params, make())
        if saved is not None:
            optimizer.load_state_dict(saved)
        for row in rows[part * per_part : (part + 1) * per_part]:
            for param, grad in zip(params, row, strict=True):
                param.grad = PLACES[place](grad)
            optimizer.step()
        weights = [numbers(param).clone() for param in params]
        saved = to_host(optimizer.state_dict())
    return weights


def to_host(saved: Any) -> Any:
    """What ``torch.load(..., map_location="cpu")`` returns."""
    if isinstance(saved, Tensor):
        return numbers(saved).clone()
    if isinstance(saved, dict):
        return {key: to_host(value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(map(to_host, saved))
    return copy.copy(saved)


def steps_do_not_wait(_: Agree) -> None:
    """Warm steps do not wait, as with float64."""
    chains: dict[str, Start] = {
        "joint": modular(joint, AdamW),
        "each": modular(lambda: ClipNorm(1.0), lambda: SGD(0.1, 0.9)),
        "statistics": modular(ZClip, AdaGC, ClipNormByEMA, AdamW),
        "before": before(HOSTS["AdamW of lists"], joint),
    }
    for name, start in chains.items():
        params = [nn.Parameter(on_cuda(p.detach())) for p in parameters(torch.float32)]
        optimizer = start(params)
        for row in gradients(parameters(torch.float32), 4):
            for param, grad in zip(params, row, strict=True):
                param.grad = on_cuda(grad)
            DEVICE.counts.clear()
            optimizer.step()
        assert (DEVICE.counts.waits, DEVICE.counts.copies) == ([], []), name


CHECKS: dict[str, Callable[[Agree], None]] = {
    "without float64, chains": chains_functions_and_optimizers,
    "without float64, worked cases": worked_cases,
    "without float64, adaptive cases": adaptive_cases,
    "without float64, extreme norms": extreme_norms,
    "without float64, sums beyond float32": sums_beyond_float32,
    "without float64, norms beyond float32": norms_beyond_float32,
    "without float64, a record": a_record_moves,
    "without float64, exact norms": exact_norms,
    "without float64, launches": norms_take_few_launches,
    "without float64, long norms": long_norms,
    "without float64, joint deviations": joint_deviations_near_the_largest_number,
    "without float64, statistics": statistics_stay_right,
    "without float64, counts": counts_go_on,
    "without float64, checkpoints": checkpoints_move,
    "without float64, waits": steps_do_not_wait,
}


def run(name: str, agree: Agree) -> None:
    """Run one check."""
    with without_float64():
        CHECKS[name](agree)
