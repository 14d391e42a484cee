"""Whole random runs on the simulated device, each of which is taken in two ways that have to agree to the bit."""

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pretended.device import numbers, on_cuda
from torch import Tensor, nn

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    AutoClip,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    GradientStabilizer,
    Modular,
    Normalize,
    NormalizeByEMA,
    Recorder,
    RMSprop,
    SkipStep,
    SpikeAwareClip,
    ZClip,
    before_step,
)

CLIPS: dict[str, Callable[[random.Random], Any]] = {
    "joint": lambda draw: ClipNorm(draw.choice([0.0, 0.5, 1.0, 1e3]), dim="global"),
    "each": lambda draw: ClipNorm(draw.choice([0.1, 1.0])),
    "rows": lambda draw: ClipNorm(0.5, dim=0),
    "linf": lambda draw: ClipNorm(0.5, "linf"),
    "rms": lambda draw: ClipRMS(0.1),
    "normalize": lambda draw: Normalize(dim=draw.choice([None, "global"])),
    "growth": lambda draw: ClipNormGrowth(parameterwise=draw.random() < 0.7),
    "ema": lambda draw: ClipNormByEMA(0.5, tensorwise=draw.random() < 0.7, max_ema_growth=draw.choice([None, 1.5])),
    "adagc": lambda draw: AdaGC(warmup_steps=draw.choice([0, 3, 6])),
    "zclip": lambda draw: ZClip(warmup_steps=draw.choice([2, 4])),
    "autoclip": lambda draw: AutoClip(50.0, 8),
    "stabilizer": lambda draw: GradientStabilizer(),
    "none": lambda draw: None,
}
RULES: dict[str, Callable[[random.Random], Any]] = {
    "adamw": lambda draw: AdamW(0.01, amsgrad=draw.random() < 0.3),
    "adam": lambda draw: Adam(0.01),
    "momentum": lambda draw: SGD(0.01, 0.9, nesterov=draw.random() < 0.5),
    "sgd": lambda draw: SGD(0.1),
}
HOSTS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
}
"""Optimizers of torch that take the step of a rule."""
LONG_LINKS: dict[str, Callable[[random.Random], Any]] = {
    **CLIPS,
    "value": lambda draw: ClipValue(draw.choice([1e-3, 0.5])),
    "value ema": lambda draw: ClipValueByEMA(),
    "value growth": lambda draw: ClipValueGrowth(),
    "max ema": lambda draw: ClipByMaxEMA(),
    "spikes": lambda draw: SpikeAwareClip(),
    "adaptive": lambda draw: AdaptiveGradientClip(0.1),
    "centralize": lambda draw: Centralize(),
    "normalize ema": lambda draw: NormalizeByEMA(),
    "scoped": lambda draw: ClipNorm(0.3).only(lambda param: param.ndim > 1),
    "scoped ema": lambda draw: ClipNormByEMA(0.5).only(lambda param: param.ndim > 0),
    "difference": lambda draw: ClipNorm(0.5, target="update_difference"),
}
MORE_RULES: dict[str, Callable[[random.Random], Any]] = {
    **RULES,
    "rmsprop": lambda draw: RMSprop(0.01),
    "lr": lambda draw: LR(0.01),
    "not fused": lambda draw: AdamW(0.01, fused=False),
}
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 3, 3), (17, 9), (300,), (70_000,)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
SPOILT = {"inf": torch.inf, "nan": torch.nan}
FACTORS = {"zeros": 0.0, "spike": 100.0, "huge": 1e30, "tiny": 1e-30}
EVENTS = [*SPOILT, *FACTORS, "load", "missing", "settings", "replaced", "closure"]


class Run:
    """An optimizer on the device, with what happens to it. Runs of one seed are the same until their ways differ."""

    def __init__(self, seed: str, make: Callable[[random.Random, list[Any]], tuple[Any, Any]]) -> None:
        draw = random.Random(seed)
        dtype, shapes = draw.choice(DTYPES), [draw.choice(SHAPES) for _ in range(draw.randint(1, 5))]
        generator = torch.Generator().manual_seed(draw.randrange(2**30))
        values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        self.params = [nn.Parameter(on_cuda(value)) for value in values]
        groups: list[Any] = [{"params": self.params}]
        if len(shapes) > 1 and draw.random() < 0.4:
            cut = draw.randint(1, len(shapes) - 1)
            groups = [{"params": self.params[:cut]}, {"params": self.params[cut:], "lr": 0.003}]
        self.recorder: Recorder | None = None
        self.optimizer, self.chain = make(draw, groups)  # the second has the metrics

    def fill(self, event: str | None, draw: random.Random) -> None:
        """New gradients, which an event may spoil."""
        generator = torch.Generator().manual_seed(draw.randrange(2**30))
        reuse, scale = draw.random() < 0.5, 10 ** draw.uniform(-1, 0.3) * FACTORS.get(event or "", 1.0)
        spoilt = draw.choice(self.params)
        for param in self.params:
            grad = (torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale).to(param.dtype)
            if event in SPOILT and param is spoilt:
                grad.view(-1)[draw.randrange(grad.numel())] = SPOILT[event]
            if reuse and param.grad is not None:
                numbers(param.grad).copy_(grad)
            else:
                param.grad = on_cuda(grad)

    def happen(self, event: str | None, draw: random.Random) -> None:
        """What happens beside the gradients."""
        optimizer, param = self.optimizer, draw.choice(self.params)
        if event == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event == "missing":
            param.grad = None
        elif event == "recorder" and self.chain.runner.listener is None:
            self.recorder = Recorder(optimizer)
        elif event == "settings":
            groups = draw.choice([optimizer, self.chain]).param_groups
            key, values = draw.choice([("lr", [0.0, 0.02]), ("max_norm", [0.5, 2.0]), ("weight_decay", [0.0, 0.1])])
            value = draw.choice(values)
            for group in groups:
                group.update({key: value} if key in group else {})
        elif event == "replaced" and optimizer.state.get(param):
            state = optimizer.state[param]
            for key in [key for key, value in state.items() if isinstance(value, Tensor)][:1]:
                state[key] = on_cuda(numbers(state[key]))

    def answers(self) -> tuple[Any, ...]:
        """What the host reads when it is asked."""
        chain, groups = self.chain, self.optimizer.state_dict()["param_groups"]
        saved = [group.get("before_step", {}).get("settings", group) for group in groups]
        counts = [(group.get("skipped_steps"), group.get("consecutive_skips")) for group in saved]
        return chain.skipped_by, chain.steps_taken, str(chain.bad_gradients), counts

    def facts(self, *, asks: bool) -> dict[str, Any]:
        """What a user can see; if he ``asks``, also what the optimizer computes when it is asked."""
        facts: dict[str, Any] = {f"param {i}": param for i, param in enumerate(self.params)}
        facts |= {f"grad {i}": param.grad for i, param in enumerate(self.params) if param.grad is not None}
        for i, param in enumerate(self.params):
            held = self.optimizer.state.get(param, {})
            facts |= {f"state {i} {key}": value for key, value in {**held, **held.get("before_step", {})}.items()}
            facts.pop(f"state {i} before_step", None)
        for key, value in self.chain.runner.chain_state.values.items():
            facts |= {f"chain {key}": value} if isinstance(value, Tensor) else {}
        if asks:
            facts["answers"] = self.answers()
            # metrics of a skipped step are those of the gates only, if the host has decided
            shown = {} if self.chain.skipped_by else self.chain.metrics()
            facts |= {f"metric {key}": value for key, value in shown.items()}
        return {key: bits(value) if isinstance(value, Tensor) else value for key, value in facts.items()}


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """The values of a tensor, where one NaN is like another."""
    values = torch.nan_to_num(numbers(tensor).double(), nan=12345.0)
    return tensor.dtype, tensor.shape, values.contiguous().numpy().tobytes()


def agree(seed: str, runs: list[Run], steps: int, events: list[str], often: float) -> None:
    """Take the same steps with both runs, and compare all that a user sees after each."""
    happening, log = random.Random(f"events {seed}"), []
    for _ in range(steps):
        event = happening.choice(events) if happening.random() < often else None
        asks, seed_of_draw = happening.random() < 0.3, happening.randrange(2**30)
        log.append(event)
        facts, errors = [], []
        for run in runs:
            draw = random.Random(seed_of_draw)
            run.fill(event, draw)
            run.happen(event, draw)
            errors.append(error_of(partial(run.optimizer.step, *[lambda: 0.5] * (event == "closure"))))
            facts.append(run.facts(asks=asks))
        assert errors[0] == errors[1], (seed, log, errors)
        different = [key for key in {**facts[0], **facts[1]} if facts[0].get(key) != facts[1].get(key)]
        assert not different, (seed, log, different)


GATES: dict[str, Callable[[random.Random], tuple[list[Any], dict[str, Any]]]] = {
    "nonfinite": lambda draw: ([], {"nonfinite": "skip"}),
    "ratio": lambda draw: ([SkipStep(max_ratio=draw.choice([3.0, 10.0]), beta=0.5)], {}),
    "norm": lambda draw: ([SkipStep(max_norm=draw.choice([3.0, 30.0]))], {"nonfinite": "skip"}),
    "scoped": lambda draw: ([SkipStep(max_norm=9.0).only(lambda p: p.numel() > 1)], {"nonfinite": "skip"}),
    "two gates": lambda draw: ([SkipStep(max_ratio=4.0), SkipStep(max_norm=50.0)], {"nonfinite": "skip"}),
}


def decisions_are_those_of_the_host(clips: list[str], repeats: int = 1, most_gates: int = 2) -> None:
    """Clips with gates, rules and optimizers: the device decides in one run, and the host in the other one."""
    late = 0
    for clip in clips:
        gates = random.Random(clip).sample(sorted(GATES), min(most_gates, len(GATES)))
        for gate, repeat in [(gate, repeat) for gate in gates for repeat in range(repeats)]:
            rule = random.Random(f"{clip} {gate} {repeat}").choice(sorted(RULES))
            seed = f"{clip} {gate} {rule} {repeat}"

            def make(draw: random.Random, groups: list[Any], clip: str = clip, gate: str = gate, rule: str = rule):
                (gates, options), transform, taken_by = GATES[gate](draw), CLIPS[clip](draw), RULES[rule](draw)
                transforms = [*gates, *([] if transform is None else [transform])]
                draw.shuffle(transforms)
                if transforms and rule in HOSTS and draw.random() < 0.5:
                    host = HOSTS[rule](groups)
                    return host, before_step(host, *transforms, **options)
                options |= {name: draw.random() < 0.2 for name in ("keep_grads", "maximize")}
                optimizer = Modular(groups, *transforms, taken_by, **options)
                return optimizer, optimizer

            late += decided_late(seed, make, [*EVENTS, *["recorder"] * (gate == "norm")])
    assert late > 3 * len(clips)


def decided_late(seed: str, make: Callable[[random.Random, list[Any]], tuple[Any, Any]], events: list[str]) -> int:
    """Let the device decide in one run and the host in the other one. Return how often the device has decided."""
    runs = [Run(seed, make) for _ in range(2)]
    runs[1].chain.runner._host_reasons = lambda: ["this run is the oracle"]
    agree(seed, runs, 24, events, 0.35)
    assert runs[0].answers() == runs[1].answers(), seed
    assert runs[1].chain.runner.decisions is None
    return runs[0].chain.runner._posting


def ordinary_decisions_are_those_of_the_host(seeds: range) -> None:
    """Random chains of up to three transforms, most of which follow no plan, with rules of which some cannot refuse."""
    late = 0
    for number in seeds:
        draw = random.Random(f"ordinary {number}")
        gate = draw.choice(sorted(GATES))
        links = [draw.choice(sorted(LONG_LINKS)) for _ in range(draw.randint(1, 3))]
        rule, is_before = draw.choice(sorted(MORE_RULES)), draw.random() < 0.3

        def make(
            draw: random.Random,
            groups: list[Any],
            gate: str = gate,
            links: Sequence[str] = tuple(links),
            rule: str = rule,
            is_before: bool = is_before,
        ) -> tuple[Any, Any]:
            gates, options = GATES[gate](draw)
            transforms = [transform for link in links if (transform := LONG_LINKS[link](draw)) is not None]
            transforms = [*gates, *transforms]
            draw.shuffle(transforms)
            if is_before and transforms and rule in HOSTS:
                host = HOSTS[rule](groups)
                return host, before_step(host, *transforms, **options)
            options |= {name: draw.random() < 0.2 for name in ("keep_grads", "maximize")}
            optimizer = Modular(groups, *transforms, MORE_RULES[rule](draw), **options)
            return optimizer, optimizer

        events = [*EVENTS, *["recorder"] * (number % 3 == 0)]
        late += decided_late(f"{number} {gate} {links} {rule}", make, events)
    assert late > 4 * len(seeds)


def error_of(step: Callable[[], Any], *, quiet: bool = True) -> str | None:
    """The error of a step, and no warnings if it has to be ``quiet``."""
    try:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            step()
    except RuntimeError as error:
        return str(error)
    return None


def planned_steps_are_the_ordinary_ones() -> None:
    """Each clip with some rules, with and without plans."""
    steps_by_plan = 0
    for clip in CLIPS:
        for rule in random.Random(clip).sample(sorted(RULES), 2):
            seed = f"{clip} {rule}"

            def make(draw: random.Random, groups: list[Any], clip: str = clip, rule: str = rule) -> tuple[Any, Any]:
                transform = CLIPS[clip](draw)
                if transform is not None and rule in HOSTS and draw.random() < 0.5:
                    host = HOSTS[rule](groups)
                    return host, before_step(host, transform)
                options: dict[str, Any] = {name: draw.random() < 0.2 for name in ("keep_grads", "maximize")}
                optimizer = Modular(groups, *filter(None, [transform, RULES[rule](draw)]), **options)
                return optimizer, optimizer

            runs = [Run(seed, make) for _ in range(2)]
            runs[1].chain.runner.fast_way.learn = lambda *_: None
            agree(seed, runs, 16, EVENTS, 0.25)
            steps_by_plan += runs[0].chain.runner.fast_way._uses
    assert steps_by_plan > 50
