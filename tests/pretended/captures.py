"""Captured steps on the pretended device: what they compute, when they are captured, and who is refused."""

import copy
import gc
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pretended.decisions import fill
from pretended.device import CUDA, DEVICE, Graph, OnCuda, numbers, on_cuda
from pretended.runs import bits, error_of
from torch import Tensor, nn

from benchmarks.device.rows import captured_cases
from benchmarks.device.steps import WARM_UP
from torchzero_clip import (
    SGD,
    AdaGC,
    AdamW,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    Modular,
    Recorder,
    SkipStep,
    TensorwiseTransform,
    Wrap,
    ZClip,
    before_step,
    captured,
    step_in_backward,
)
from torchzero_clip.other_optimizer.before_step import BeforeStep, chain_of
from torchzero_clip.other_optimizer.captured import CapturedStep

MODULES = ("engine.nonfinite", "engine.walk", "functional.choice", "modular.runner", "other_optimizer.before_step")
"""Where the package asks whether a graph is captured."""


class Recorded(Graph):
    """A graph that is recorded as CUDA does it: no operation is carried out, which the device is told by this copy."""

    made = 0

    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        assert device == CUDA
        Recorded.made += 1
        gc.collect()
        alive = [tensor for tensor in gc.get_objects() if type(tensor) is OnCuda]
        storages = {t.kept.untyped_storage().data_ptr(): t.kept.untyped_storage() for t in alive}
        before = {address: storage.clone() for address, storage in storages.items() if storage.nbytes()}
        DEVICE.counts.clear()
        with pytest.MonkeyPatch.context() as patch:
            for module in MODULES:
                patch.setattr(f"torchzero_clip.{module}.is_capturing", lambda: True)
            super().__init__(call)
        assert not DEVICE.counts.waits
        assert not DEVICE.counts.copies
        for address, values in before.items():
            storages[address].copy_(values)


@contextmanager
def recorded() -> Iterator[None]:
    """Steps are captured by the pretended device within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedStep, "capture", staticmethod(Recorded))
        yield


LIMITS = {"clip_norm": "max_norm", "clip_rms": "max_rms", "clip_value": "value"}
"""The setting of each clip whose limit may change in each step."""


def _joint(limit: Any = 1.0) -> ClipNorm:
    return ClipNorm(limit, dim="global")


def _modular(make: Callable[[], list[Any]], **options: Any) -> Callable[[list[Any]], Any]:
    return lambda params: Modular(params, *make(), **options)


def _before(kind: Any, make: Callable[[], list[Any]], *, options: Any = None, **more: Any) -> Callable[[Any], Any]:
    def start(params: list[Any]) -> Any:
        optimizer = kind(params, lr=0.01, capturable=True, **more)
        if transforms := make():
            before_step(optimizer, *transforms, **(options or {}))
        return optimizer

    return start


STARTS: dict[str, Callable[[list[Any]], Any]] = {
    "joint": _modular(lambda: [_joint(), AdamW(0.01)]),
    "gate": _modular(lambda: [SkipStep(max_ratio=5.0), _joint(), AdamW(0.01)], nonfinite="skip"),
    "each": _modular(lambda: [ClipNorm(0.5), SGD(0.01, 0.9)], nonfinite="skip"),
    "two clips": _modular(lambda: [ClipNorm(0.5), _joint(), AdamW(0.01)]),
    "elements": _modular(lambda: [ClipRMS(1.0), ClipValue(1.0), AdamW(0.01)]),
    "growth": _modular(lambda: [SkipStep(max_norm=90.0), ClipNormGrowth(), AdamW(0.01)]),
    "ema": _modular(lambda: [ClipNormByEMA(0.5), AdamW(0.01)], nonfinite="skip"),
    "zclip": _modular(lambda: [ZClip(warmup_steps=2), AdamW(0.01)], nonfinite="skip"),
    "function": _modular(lambda: [_joint(lambda k: 1.0 + k / 50), AdamW(lambda k: 0.01 / (1 + k))]),
    "before, gate": _before(
        torch.optim.AdamW, lambda: [SkipStep(max_ratio=5.0), _joint()], options={"nonfinite": "skip"}, fused=True
    ),
    "before, adagc": _before(torch.optim.AdamW, lambda: [AdaGC(warmup_steps=3)], fused=True),
    "before, ema": _before(torch.optim.Adam, lambda: [ClipNormByEMA(0.5)], foreach=True),
    "before, nadam": _before(torch.optim.NAdam, lambda: [_joint()]),
    "adamw": _before(torch.optim.AdamW, list, fused=True),
    "rmsprop": _before(torch.optim.RMSprop, list),
}


def params_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(on_cuda(torch.randn(shape, generator=generator))) for shape in ((7,), (3, 4), (50,))]


class Run:
    """Steps with spikes, NaN, a schedule of the rate, changed limits, and a resume."""

    def __init__(self, start: Callable[[list[Any]], Any], *, is_captured: bool, by_tensors: bool) -> None:
        self.start, self.is_captured, self.by_tensors = start, is_captured, by_tensors
        self.params = params_of()
        self.begin(None)

    def begin(self, saved: Any) -> None:
        self.optimizer = self.start(self.params)
        self.handle = next((h for h in map(_owner, self.optimizer._optimizer_step_pre_hooks.values()) if h), None)
        self.chain: Any = self.optimizer if self.handle is None else self.handle
        if saved is not None:
            self.optimizer.load_state_dict(saved)
        self.may_skip = hasattr(self.chain, "runner") and self.chain.runner.policy.may_skip
        self.step = captured(self.optimizer) if self.is_captured else self.optimizer.step

    def take(self, k: int, draw: random.Random) -> None:
        event = draw.choice(["nan", "spike"]) if draw.random() < 0.15 and self.may_skip else None
        generator = torch.Generator().manual_seed(k)
        for i, param in enumerate(self.params):
            grad = torch.randn(param.shape, generator=generator) * {"spike": 100.0}.get(event or "", 1.0)
            if event == "nan" and i == 1:
                grad[0, 0] = torch.nan
            if param.grad is None:
                param.grad = on_cuda(grad)
            else:
                numbers(param.grad).copy_(grad)
        groups = [group for owner in (self.optimizer, self.chain) for group in getattr(owner, "param_groups", [])]
        for group in groups:
            self.set(group, "lr", torch.float32, 0.01 / (1 + k / 30))
            for name in LIMITS.keys() & getattr(self.chain, "transforms", {}).keys():
                self.set(group, LIMITS[name], torch.float64, 1.0 + k / 100)
            if k == 60 and "betas" in group:
                group["betas"] = (0.8, 0.99)
        self.step()

    def set(self, group: Any, key: str, dtype: torch.dtype, value: float) -> None:
        if "schedule_step" in group or not isinstance(group.get(key), float | Tensor):
            return
        if not self.by_tensors:
            group[key] = value
        elif isinstance(group[key], Tensor):
            numbers(group[key]).fill_(value)
        else:
            group[key] = on_cuda(torch.tensor(value, dtype=dtype))

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {f"param {i}": param for i, param in enumerate(self.params)}
        for i, param in enumerate(self.params):
            held = self.optimizer.state.get(param, {})
            facts |= {f"state {i} {key}": value for key, value in {**held, **held.get("before_step", {})}.items()}
            facts.pop(f"state {i} before_step", None)
        if self.chain is self.optimizer and not isinstance(self.optimizer, Modular):
            return {key: value for key, value in facts.items() if isinstance(value, Tensor)}
        facts |= {f"metric {key}": value for key, value in self.chain.metrics().items()}
        facts["answers"] = self.chain.skipped_by, self.chain.steps_taken, str(self.chain.bad_gradients)
        return facts


def _owner(hook: Any) -> Any:
    owner = getattr(hook, "__self__", None)
    return owner if hasattr(owner, "runner") else None


def _trained(name: str, *, is_captured: bool, by_tensors: bool, steps: int) -> list[dict[str, Any]]:
    run, draw, found = Run(STARTS[name], is_captured=is_captured, by_tensors=by_tensors), random.Random(1), []
    for k in range(steps):
        if k == steps // 2:
            run.begin(copy.deepcopy(run.optimizer.state_dict()))
        run.take(k, draw)
        if k % 20 == 19:
            found.append({k: bits(v) if isinstance(v, Tensor) else v for k, v in run.facts().items()})
            found[-1]["values"] = [numbers(param).clone() for param in run.params]
    return found


def captured_steps_are_the_ordinary_ones(names: list[str], steps: int) -> None:
    """With the same tensors to the bit, and with floats to 1e-6. Most steps are replays."""
    for name in names:
        Recorded.made = 0
        with recorded():
            replays, take = 0, CapturedStep._replay

            def counted(step: CapturedStep, graph: Any, take: Any = take) -> None:
                nonlocal replays
                replays += 1
                take(step, graph)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CapturedStep, "_replay", counted)
                found = [_trained(name, is_captured=True, by_tensors=t, steps=steps) for t in (False, True)]
        assert 4 <= Recorded.made <= 8, (name, Recorded.made)
        assert replays > steps, (name, replays)  # of both runs
        expected = [_trained(name, is_captured=False, by_tensors=t, steps=steps) for t in (False, True)]
        for one, other in zip(found[0], expected[0], strict=True):
            for a, b in zip(one["values"], other["values"], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            assert one.get("answers") == other.get("answers"), name
        for k, (one, other) in enumerate(zip(found[1], expected[1], strict=True)):
            facts = {key: other[key] for key in other if key != "values"}
            if name != "function":  # its rates are numbers, for which tensors stand in captured steps only
                assert facts.keys() == one.keys() - {"values"}
                different = [key for key in facts if one[key] != facts[key]]
                assert not different, (name, k, different)


def _set(key: str, value: Any) -> Callable[[Any, list[Any]], None]:
    def change(optimizer: Any, params: list[Any]) -> None:
        for group in optimizer.param_groups:
            group[key] = value

    return change


def _before_later(optimizer: Any, params: list[Any]) -> None:
    before_step(optimizer, SkipStep(max_ratio=50.0), _joint(0.5), nonfinite="skip")


def _before_anew(optimizer: Any, params: list[Any]) -> None:
    handle = chain_of(optimizer)
    assert isinstance(handle, BeforeStep)
    handle.remove()
    before_step(optimizer, _joint(0.125))


def _of_scaler(**values: float) -> Callable[[Any, list[Any]], None]:
    def change(optimizer: Any, params: list[Any]) -> None:
        for name, value in values.items():
            setattr(optimizer, name, on_cuda(torch.tensor(value)))

    return change


def _another_step(optimizer: Any, params: list[Any]) -> None:
    """An ordinary step in between, without a gradient, so that it follows no plan."""
    kept, params[1].grad = params[1].grad, None
    optimizer.step()
    params[1].grad = kept


def _replace(place: str) -> Callable[[Any, list[Any]], None]:
    def change(optimizer: Any, params: list[Any]) -> None:
        if place == "grad":
            params[0].grad = on_cuda(numbers(params[0].grad) * 2)
        elif place == "missing":
            params[1].grad = None
        elif place == "data":
            params[0].data = on_cuda(numbers(params[0]) * 2)
        else:
            key = next(key for key in optimizer.state[params[2]] if key.endswith("exp_avg"))
            optimizer.state[params[2]][key] = on_cuda(torch.zeros(params[2].shape))

    return change


def _load(optimizer: Any, params: list[Any]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for key, value in saved["state"][0].items():
        saved["state"][0][key] = value * 0.5 if isinstance(value, Tensor) and value.ndim else value
    optimizer.load_state_dict(saved)


def _attribute(optimizer: Any, params: list[Any]) -> None:
    optimizer.transforms["clip_norm"].dim = optimizer.transforms["clip_norm"].dim
    optimizer.transforms["clip_norm"].note = "an attribute that was not there"


CHANGES: dict[str, Callable[[Any, list[Any]], object]] = {
    "betas": _set("betas", (0.5, 0.75)),
    "eps": _set("eps", 0.5),
    "weight decay": _set("weight_decay", 0.5),
    "rate": _set("lr", 0.5),
    "rate in a tensor": lambda optimizer, params: _set("lr", on_cuda(torch.tensor(0.5)))(optimizer, params),
    "limit": _set("max_norm", 0.125),
    "limit in a tensor": lambda optimizer, params: _set("max_norm", on_cuda(torch.tensor(0.125)))(optimizer, params),
    "gradient": _replace("grad"),
    "missing": _replace("missing"),
    "parameter": _replace("data"),
    "state": _replace("state"),
    "frozen": lambda optimizer, params: params[0].requires_grad_(False),
    "load": _load,
    "attribute": _attribute,
    "maximize": lambda optimizer, params: setattr(optimizer, "maximize", True),
    "group": lambda optimizer, params: optimizer.add_param_group({"params": params_of(5)[:1], "lr": 0.25}),
}


def _gated(params: list[Any]) -> Any:
    return Modular(params, SkipStep(max_ratio=50.0), _joint(0.5), AdamW(2**-7))


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "lr": 0.125}, {"params": params[1:], "weight_decay": 0.25}]


def _limit_of_a_group(optimizer: Any, params: list[Any]) -> None:
    chain = chain_of(optimizer)
    assert chain is not None
    chain.param_groups[1]["max_norm"] = 0.125


def _eps_in_a_tensor(params: list[Any]) -> Any:
    return torch.optim.AdamW([{"params": params, "eps": torch.tensor(1e-8)}], capturable=True, foreach=True)


_adamw = _before(torch.optim.AdamW, list, fused=True)
_before_gated = _before(torch.optim.AdamW, lambda: [SkipStep(max_ratio=50.0), _joint(0.5)], fused=True)
_before_joint = _before(torch.optim.AdamW, lambda: [_joint(0.5)], fused=True)
OTHERS: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any, list[Any]], object]]] = {
    "before_step": (_adamw, _before_later),
    "another before_step": (_before_gated, _before_anew),
    "grad_scale": (_adamw, _of_scaler(grad_scale=4.0)),
    "found_inf": (_adamw, _of_scaler(grad_scale=1.0, found_inf=1.0)),
    "grad_scale before": (_before_joint, _of_scaler(grad_scale=4.0)),
    "found_inf before": (_before_gated, _of_scaler(found_inf=1.0)),
    "another step": (_before_joint, _another_step),
    "another step, gate": (_before_gated, _another_step),
    "eps in place": (_eps_in_a_tensor, lambda optimizer, _: optimizer.param_groups[0]["eps"].fill_(0.5)),
    "groups": (lambda params: _gated(_groups(params)), _limit_of_a_group),
    "groups before": (lambda params: _before_joint(_groups(params)), _limit_of_a_group),
    "all frozen": (
        _modular(lambda: [_joint(), AdamW(0.01)]),
        lambda _, params: [p.requires_grad_(False) for p in params],
    ),
}
"""What is done to optimizers of other kinds."""


def nothing_freezes() -> None:
    """What is changed after a capture acts in the next step."""
    for name, (start, change) in {**{name: (_gated, change) for name, change in CHANGES.items()}, **OTHERS}.items():
        found = []
        for is_captured in (True, False):
            params, made = params_of(), Recorded.made
            optimizer = start(params)
            with recorded():
                step = captured(optimizer) if is_captured else optimizer.step
                for k in range(30):
                    fill(params, seed=k)
                    if k == 20:
                        assert Recorded.made == made + is_captured
                        change(optimizer, params)
                    step()
            held = [param for group in optimizer.param_groups for param in group["params"]]
            chain = chain_of(optimizer)
            shown = {} if chain is None else chain.metrics()
            found.append([numbers(value).clone() for value in (*held, *(shown[key] for key in sorted(shown)))])
            found[-1].append(torch.tensor([] if chain is None else [chain.steps_taken, len(chain.skipped_by)]))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def _recorded_run(params: list[Any]) -> Any:
    optimizer = Modular(params, AdamW())
    Recorder(optimizer)
    return optimizer


def _in_backward(params: list[Any]) -> Any:
    optimizer = Modular(params, AdamW())
    step_in_backward(optimizer)
    return optimizer


def _hooked(params: list[Any]) -> Any:
    optimizer = torch.optim.AdamW(params, capturable=True)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _functions(params: list[Any]) -> Any:
    return Modular(params, SkipStep(max_norm=9.0), AdamW(lambda step: 0.1))


def _wrapped(params: list[Any]) -> Any:
    return Modular(params, Wrap(torch.optim.AdamW))


REFUSED: dict[str, Callable[[list[Any]], Any]] = {
    r"a Recorder sees each step .*close\(\)": _recorded_run,
    r"steps in the backward.*remove\(\)": _in_backward,
    r"raises in the same step.*Write nonfinite=.skip": lambda params: Modular(params, AdamW(), nonfinite="raise"),
    r"reads losses.*max_ratio": lambda params: Modular(params, SkipStep(sigma=6.0), AdamW()),
    r"functions of the step, with a gate.*schedulers of torch": _functions,
    r"Wrap runs the code.*before_step": _wrapped,
    r"on several devices": lambda params: Modular([*params, nn.Parameter(torch.ones(3))], AdamW()),
    r"needs capturable=True in all groups$": lambda params: torch.optim.AdamW(params),
    r"no such argument: use Modular": lambda params: torch.optim.SGD(params, 0.1),
    r"a hook of its steps. Remove": _hooked,
}


def who_cannot_be_captured_is_named() -> None:
    """With the way out, when `captured` is called, or in the step after which it became so."""
    for text, start in REFUSED.items():
        with pytest.raises(ValueError, match=text):
            captured(start(params_of()))
    params = params_of()
    optimizer = Modular(params, _joint(), AdamW())
    with recorded():
        step = captured(optimizer)
        for k in range(20):
            fill(params, seed=k)
            step()
        recorder = Recorder(optimizer)
        before = [bits(param) for param in params]
        for _ in range(2):
            with pytest.raises(ValueError, match="a Recorder sees each step"):
                step()
        assert before == [bits(param) for param in params]
        recorder.close()
        step()
        assert optimizer.steps_taken == 21


def useless_captures_end() -> None:
    """A setting that changes now and then, and gradients that never stay, give one warning each."""
    params, made = params_of(), Recorded.made
    optimizer = Modular(params, _joint(), AdamW())
    with recorded(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = captured(optimizer)
        for k in range(120):
            optimizer.param_groups[0]["betas"] = (0.9, 0.99 - (k // 8) / 100)
            fill(params, seed=k)
            step()
    said = [str(w.message) for w in caught]
    assert len(said) == 1, said
    assert re.search(r"captured 3 times.*fewer than 10 times each, because 'betas' of param group 0 changed", said[0])
    assert Recorded.made == made + 3
    assert optimizer.steps_taken == 120
    params = params_of()
    step = captured(Modular(params, _joint(), AdamW()))
    kept = []
    with recorded(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(120):
            kept.append([param.grad for param in params])
            for param in params:
                param.grad = None
            fill(params, seed=k)
            step()
    assert len(caught) == 1
    assert re.search(r"no step was captured in 50 steps.*set_to_none=False", str(caught[0].message))


def steps_without_gradients_do_not_count() -> None:
    """They are not taken, so they are not captured, and functions of the step stay where they are."""
    for may_have in (False, True):
        params = params_of()
        optimizer = Modular(params, _joint(), AdamW(lambda step: 0.01 / (1 + step)))
        with recorded():
            step = captured(optimizer)
            for k in range(30):
                if may_have:
                    fill([param.requires_grad_(False) for param in params], seed=k)
                step()
        assert optimizer.steps_taken == optimizer.param_groups[0]["schedule_step"] == 0
        assert optimizer.param_groups[0]["lr"] == 0.01


class TimesLoss(TensorwiseTransform):
    """Multiplies by the loss, if there is one."""

    each_alone = False

    def __init__(self) -> None:
        super().__init__({})

    def apply_tensor(self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Any, state: Any, setting: Any) -> Tensor:
        return tensor if loss is None else tensor * loss


def losses_do_not_freeze() -> None:
    """A step with a loss is not captured if a transform of a user may read it, reported or of a closure."""
    for by_closure in (False, True):
        found = []
        for is_captured in (True, False):
            params, made = params_of(), Recorded.made
            optimizer = Modular(params, TimesLoss(), SGD(0.01))
            with recorded():
                step: Any = captured(optimizer) if is_captured else optimizer.step
                for k in range(60):
                    fill(params, seed=k)
                    loss = on_cuda(torch.tensor(1.0 + k / 8))
                    if k < 20 or k >= 40:
                        step()
                    elif by_closure:
                        assert step(lambda loss=loss: loss) is loss
                    else:
                        optimizer.report_loss(loss)
                        step()
            assert Recorded.made == made + 2 * is_captured, (Recorded.made, made, is_captured, by_closure)
            found.append([numbers(param).clone() for param in params])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Halved(TensorwiseTransform):
    """Multiplies by a half. It is pure, so it gets no loss."""

    each_alone, pure = False, True

    def __init__(self) -> None:
        super().__init__({})

    def apply_tensor(self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Any, state: Any, setting: Any) -> Tensor:
        assert loss is None
        return tensor * 0.5


def pure_transforms_of_users_are_captured() -> None:
    """A step with a loss is captured if all transforms promise not to read it, whoever wrote them."""
    params, made = params_of(), Recorded.made
    optimizer = Modular(params, Halved(), SGD(0.01))
    with recorded():
        step: Any = captured(optimizer)
        for k in range(30):
            fill(params, seed=k)
            optimizer.report_loss(on_cuda(torch.tensor(1.0 + k / 8)))
            step()
    assert Recorded.made == made + 1, (Recorded.made, made)


def failed_captures_end() -> None:
    """With one warning, and nothing is lost: numbers stay in the groups, and all steps are taken."""
    found = []
    for is_captured in (True, False):
        params = params_of()
        optimizer = STARTS["before, gate"](params)

        def fails(call: Callable[[], object], device: torch.device) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("torchzero_clip.modular.runner.Runner.step", lambda *_: {}["no step"])
                try:
                    call()
                except KeyError:
                    raise RuntimeError("operation not permitted when stream is capturing") from None

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(CapturedStep, "capture", staticmethod(fails))
            step = captured(optimizer) if is_captured else optimizer.step
            for k in range(20):
                fill(params, seed=k)
                optimizer.param_groups[0]["lr"] = 0.01 / (k + 1)
                step()
        said = [str(w.message) for w in caught]
        assert len(said) == is_captured, said
        assert not said or re.search(r"could not be captured. .*ordinary from now on. operation not permitted", said[0])
        assert isinstance(optimizer.param_groups[0]["lr"], float)
        chain = chain_of(optimizer)
        assert chain is not None
        assert chain.steps_taken == 20
        found.append([numbers(param).clone() for param in params])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def late_errors_come_with_replays() -> None:
    """At most 16 steps late, before a further step is counted."""
    params = params_of()
    optimizer = Modular(params, _joint(), AdamW(), nonfinite="skip", max_consecutive_skips=3)
    with recorded():
        step = captured(optimizer)
        for k in range(20):
            fill(params, seed=k)
            step()
        before = [bits(param) for param in params]
        bad = next(filter(None, (error_of(lambda: (fill(params, torch.nan), step())) for _ in range(30))))
        assert re.search(r"steps in a row were skipped at step 2\d\.", bad)
        assert [bits(param) for param in params] == before
        assert optimizer.steps_taken == 20
        assert 3 < int(optimizer.metrics()["skipped_steps"]) <= 20


def a_replay_is_one_call() -> None:
    """No launch beside the graph, except to write a rate, and no wait. A closure returns its loss."""
    for name in ("joint", "gate", "before, gate", "adamw"):
        params = params_of()
        optimizer = STARTS[name](params)
        with recorded():
            step = captured(optimizer)
            for k in range(20):
                fill(params, seed=k)
                step()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Recorded, "replay", lambda graph: None)
                fill(params)
                DEVICE.counts.clear()
                step()
                assert not DEVICE.counts.launches, name
                optimizer.param_groups[0]["lr"] = 0.5
                step()
                assert dict(DEVICE.counts.launches) == {"fill_": 1}, name
                assert not [*DEVICE.counts.waits, *DEVICE.counts.copies]
            assert step(lambda: 7.0) == 7.0
            optimizer.param_groups[0]["lr"] = -1.0
            with pytest.raises(ValueError, match="lr must be >= 0"):
                step()
            optimizer.param_groups[0]["lr"] = 0.5
            made = Recorded.made
            step.release()
            for _ in range(20):
                step()
            assert Recorded.made == made


def timed_steps_of_the_benchmark_are_replays() -> None:
    """Those of this package, with gradients that are new tensors in the same memory."""
    for case in captured_cases():
        if case.name.startswith("torch"):
            continue
        params, replayed = params_of(), list[Graph]()
        fill(params)
        buffers = [param.grad for param in params]
        with recorded(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorded, "replay", lambda graph, replayed=replayed: replayed.append(graph))
            step = case.make(params).step
            for k in range(2 * WARM_UP):
                for param, buffer in zip(params, buffers, strict=True):
                    assert buffer is not None
                    param.grad = buffer.detach()
                if k == WARM_UP:
                    replayed.clear()
                step()
        assert len(replayed) == WARM_UP, case.name


LONG = ["joint", "gate", "before, gate"]
CHECKS: dict[str, Callable[[], None]] = {
    "captured, long runs": lambda: captured_steps_are_the_ordinary_ones(LONG, 200),
    "captured, runs": lambda: captured_steps_are_the_ordinary_ones([name for name in STARTS if name not in LONG], 80),
    "captured, changes": nothing_freezes,
    "captured, refused": who_cannot_be_captured_is_named,
    "captured, useless": useless_captures_end,
    "captured, no gradients": steps_without_gradients_do_not_count,
    "captured, losses": losses_do_not_freeze,
    "captured, pure transforms of users": pure_transforms_of_users_are_captured,
    "captured, failed": failed_captures_end,
    "captured, late errors": late_errors_come_with_replays,
    "captured, one call": a_replay_is_one_call,
    "captured, benchmark": timed_steps_of_the_benchmark_are_replays,
}
