"""Random runs, to which the same happens as to another: what may happen between two steps, and what is compared."""

import copy
import pickle
import random
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from torchzero_clip import (
    SGD,
    AdaGC,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    AutoClip,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    GradientStabilizer,
    Modular,
    Normalize,
    NormalizeByEMA,
    Recorder,
    SkipStep,
    WeightDecay,
    ZClip,
)

LIMITS = [1e-3, 0.1, 1.0, 1e3, 0.0]
CLIPS = {
    "global": lambda draw: ClipNorm(draw.choice(LIMITS), dim="global"),
    "each": lambda draw: ClipNorm(draw.choice(LIMITS)),
    "rows": lambda draw: ClipNorm(draw.choice(LIMITS), dim=0, inverse_dims=draw.random() < 0.5),
    "linf": lambda draw: ClipNorm(draw.choice(LIMITS), ord="linf", dim=draw.choice([None, "global"])),
    "mean": lambda draw: ClipNorm(draw.choice(LIMITS), ord="mad"),
    "std": lambda draw: Normalize(1.0, ord="std"),
    "normalize": lambda draw: Normalize(0.5, dim=draw.choice([None, "global"])),
    "growth": lambda draw: ClipNormGrowth(add=draw.choice([None, 0.1]), parameterwise=draw.random() < 0.7),
    "no growth": lambda draw: ClipNormGrowth(mul=None),
    "ema": lambda draw: ClipNormByEMA(0.5, tensorwise=draw.random() < 0.7, max_ema_growth=draw.choice([None, 1.5])),
    "normalize by ema": lambda draw: NormalizeByEMA(0.5, ema_init=draw.choice(["zeros", "update"])),
    "adagc": lambda draw: AdaGC(warmup_steps=draw.choice([0, 3, 6])),
    "zclip": lambda draw: ZClip(warmup_steps=draw.choice([2, 4])),
    "autoclip": lambda draw: AutoClip(50.0),
    "stabilizer": lambda draw: GradientStabilizer(),
    "units": lambda draw: AdaptiveGradientClip(0.1),
    "rms": lambda draw: ClipRMS(0.01),
    "schedule": lambda draw: ClipNorm(Falling(draw.choice(LIMITS)), dim=draw.choice(["global", None])),
    "none": lambda draw: None,
}


class Falling:
    """A setting that is a function of the step, and has no value for one step."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: int) -> float:
        if step == 9:
            raise ValueError("no value of step 9")
        return self.value / (1 + step)


RULES = {
    "adamw": lambda draw: [AdamW(0.01, amsgrad=draw.random() < 0.3)],
    "adam": lambda draw: [Adam(0.01)],
    "l2": lambda draw: [WeightDecay(0.1), Adam(0.01)],
    "momentum": lambda draw: [SGD(0.01, 0.9, nesterov=draw.random() < 0.5)],
    "sgd": lambda draw: [SGD(0.1)],
    "scheduled": lambda draw: [AdamW(Falling(0.01)), *draw.choice([[], [SkipStep(max_norm=30.0)]])],
}
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 3, 3), (17, 9), (300,), (70_000,), (0,)]
DTYPES = [torch.float32] * 7 + [torch.float64, torch.bfloat16]


class Run:
    """A chain on parameters of its own, with what happens to them."""

    def __init__(self, seed: str, clip: str, rule: str, *, planned: bool) -> None:
        draw = random.Random(seed)
        torch.manual_seed(draw.randrange(2**30))
        self.dtype = draw.choice(DTYPES)
        shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 6))]
        self.params = [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(self.dtype)) for shape in shapes]
        self.planned = planned
        self.seen = []
        self.scheduler = None
        groups = [{"params": self.params}]
        if len(shapes) > 1 and draw.random() < 0.5:
            cut = draw.randint(1, len(shapes) - 1)
            groups = [{"params": self.params[:cut]}, {"params": self.params[cut:], "lr": draw.choice([0.01, 0.003])}]
        chain = [CLIPS[clip](draw), *RULES[rule](draw)]
        skips = {"nonfinite": "skip", "max_consecutive_skips": 2}
        kinds = [{}, {}, {}, {"nonfinite": "skip"}, skips, {"nonfinite": "raise"}]
        options = draw.choice(kinds) | {name: draw.random() < 0.2 for name in ("keep_grads", "maximize")}
        self.take(Modular(groups, *filter(None, chain), **options))

    def take(self, optimizer: Modular) -> None:
        self.optimizer = optimizer

    def groups(self) -> Sequence[MutableMapping[str, Any]]:
        """The settings of each group."""
        return self.optimizer.param_groups

    def copy(self, twin: Callable[[Any], Any]) -> None:
        """Go on with a copy."""
        self.params, optimizer = twin((self.params, self.optimizer))
        self.take(optimizer)

    def fill(self, scale: float, draw: random.Random) -> None:
        """New gradients, in the same memory or in memory of their own."""
        torch.manual_seed(draw.randrange(2**30))
        reuse = draw.random() < 0.5
        for param in self.params:
            grad = (torch.randn(param.shape, dtype=torch.float64) * scale).to(param.dtype)
            if reuse and param.grad is not None and param.grad.is_contiguous() and param.grad.shape == grad.shape:
                param.grad.detach().copy_(grad)
            else:
                param.grad = grad

    def step(self, draw: random.Random, *, closure: bool) -> str | None:
        """The error of the step."""
        if not self.planned:  # a load makes new plans
            self.optimizer.runner.fast_way.learn = lambda walk, options: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if closure:
                    assert self.optimizer.step(lambda: 0.5) == 0.5
                else:
                    self.optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if self.scheduler is not None:
            self.scheduler.step()
        return None

    def facts(self, *, metrics: bool) -> dict:
        """All that a user can see, as tensors and values by name."""
        facts = {f"param {i}": param.detach() for i, param in enumerate(self.params)}
        facts |= {f"grad {i}": param.grad for i, param in enumerate(self.params)}
        for i, param in enumerate(self.params):
            facts |= {f"state {i} {key}": value for key, value in self.optimizer.state.get(param, {}).items()}
        for i, group in enumerate(self.optimizer.param_groups):
            facts |= {f"group {i} {key}": value for key, value in group.items() if key != "params"}
            facts[f"group {i}"] = [next((k for k, p in enumerate(self.params) if p is q), -1) for q in group["params"]]
        facts |= {f"seen {i}": value for i, value in enumerate(self.seen)}
        optimizer = self.optimizer
        facts["said"] = optimizer.skipped_by, optimizer.steps_taken, str(optimizer.bad_gradients)
        facts |= recorded(self)
        return facts | ({f"metric {key}": value for key, value in self.optimizer.metrics().items()} if metrics else {})


def recorded(run: Run) -> dict:
    """What a recorder has recorded."""
    listener: Any = run.optimizer.runner.listener
    if listener is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = listener.record(run.optimizer.param_groups)
    numbers = {"norm": record.norm, "loss": record.loss, "layers": record.layer_norms, **record.metrics}
    return {f"recorded {name}": value for name, value in numbers.items()} | {"reasons": record.reasons}


def one(run: Run, draw: random.Random) -> nn.Parameter:
    return draw.choice(run.params)


def group(run: Run, draw: random.Random) -> MutableMapping[str, Any]:
    return draw.choice(run.groups())


def spoil(value: float):
    def event(run: Run, draw: random.Random) -> None:
        param = one(run, draw)
        if param.numel() and param.grad is not None:
            param.grad.view(-1)[draw.randrange(param.numel())] = value

    return event


def scaled(factor: float):
    def event(run: Run, draw: random.Random) -> None:
        for param in run.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    return event


def setting(**choices: list):
    """Write a setting to a group, where it has one."""

    def event(run: Run, draw: random.Random) -> None:
        chosen, (key, values) = group(run, draw), draw.choice(list(choices.items()))
        if key in chosen:
            chosen[key] = draw.choice(values)

    return event


def tensor_rate(run: Run, draw: random.Random) -> None:
    group(run, draw)["lr"] = torch.tensor(0.02)


def missing(run: Run, draw: random.Random) -> None:
    one(run, draw).grad = None


def frozen(run: Run, draw: random.Random) -> None:
    param = one(run, draw)
    param.requires_grad_(not param.requires_grad)


def expanded(run: Run, draw: random.Random) -> None:
    param = one(run, draw)
    param.grad = torch.full((), 0.3, dtype=param.dtype).expand(param.shape)


def overlapping(run: Run, draw: random.Random) -> None:
    param = one(run, draw)
    if param.grad is not None:
        param.grad = torch.cat([param.grad.reshape(-1)] * 2)[param.numel() :].view(param.shape)


def same_memory(run: Run, draw: random.Random) -> None:
    if len(run.params) > 1 and run.params[0].shape == run.params[1].shape:
        run.params[1].grad = run.params[0].grad


def new_data(run: Run, draw: random.Random) -> None:
    param = one(run, draw)
    param.data = param.data.clone()


def other_layout(run: Run, draw: random.Random) -> None:
    param = one(run, draw)
    if param.ndim == 2:
        param.data = param.data.t().contiguous().t()
    elif param.ndim == 4:
        param.data = param.data.contiguous(memory_format=torch.channels_last)


def other_dtype(run: Run, draw: random.Random) -> None:
    for param in run.params:
        param.data = param.data.double()
        param.grad = param.grad.double()


def loaded(run: Run, draw: random.Random) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def copied(run: Run, draw: random.Random) -> None:
    twin = copy.deepcopy if draw.random() < 0.5 else lambda x: pickle.loads(pickle.dumps(x))
    grads = [param.grad for param in run.params]
    run.scheduler = None
    run.copy(twin)
    for param, grad in zip(run.params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def state_of(run: Run, draw: random.Random) -> tuple[dict, str | None]:
    state = run.optimizer.state.get(one(run, draw), {})
    return state, draw.choice(sorted(state)) if state else None


def replaced_state(run: Run, draw: random.Random) -> None:
    state, key = state_of(run, draw)
    if key is not None:
        state[key] = state[key].clone()


def moved_state(run: Run, draw: random.Random) -> None:
    state, key = state_of(run, draw)
    if key is not None:
        state[key].data = state[key].data.clone()


def changed_number(run: Run, draw: random.Random) -> None:
    state, key = state_of(run, draw)
    if key is not None and not state[key].ndim:
        state[key].fill_(draw.choice([0.0, 1.0, 3.0, torch.inf, torch.nan]) if "step" not in key else 7.0)


def deleted_state(run: Run, draw: random.Random) -> None:
    run.optimizer.state.pop(one(run, draw), None)


def foreign_state(run: Run, draw: random.Random) -> None:
    state, key = state_of(run, draw)
    if key is not None:
        state["mine"] = torch.zeros(draw.choice([(), (3,)]))


def swapped(run: Run, draw: random.Random) -> None:
    groups = run.optimizer.param_groups
    if len(groups) > 1 and len(groups[0]["params"]) > 1:
        groups[1]["params"].insert(0, groups[0]["params"].pop())


def reordered(run: Run, draw: random.Random) -> None:
    run.optimizer.param_groups[0]["params"].reverse()


def replaced_groups(run: Run, draw: random.Random) -> None:
    run.optimizer.param_groups = [dict(old) for old in run.optimizer.param_groups]


def added(run: Run, draw: random.Random) -> None:
    param = nn.Parameter(torch.ones(3, dtype=run.params[0].dtype))
    param.grad = torch.ones_like(param)
    run.params.append(param)
    run.optimizer.add_param_group({"params": [param]})


def hooked(run: Run, draw: random.Random) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: run.seen.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: run.seen.append("after"))


def scheduled(run: Run, draw: random.Random) -> None:
    if run.scheduler is None:
        run.scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)


def attribute(run: Run, draw: random.Random) -> None:
    transform = draw.choice(list(run.optimizer.transforms.values()))
    if hasattr(transform, "fused"):
        transform.fused = draw.choice([None, False, True])


def option(run: Run, draw: random.Random) -> None:
    name = draw.choice(["maximize", "keep_grads", "fast"])
    setattr(run.optimizer.runner, name, not getattr(run.optimizer.runner, name))


def listened(run: Run, draw: random.Random) -> None:
    if run.optimizer.runner.listener is None:
        Recorder(run.optimizer)


def counted(run: Run, draw: random.Random) -> None:
    """Write a counter of the optimizer, as a loader may."""
    chosen, key = group(run, draw), draw.choice(["schedule_step", "skipped_steps", "consecutive_skips"])
    if key in chosen:
        chosen[key] = draw.randrange(20)


def reported(run: Run, draw: random.Random) -> None:
    run.optimizer.report_loss(draw.random())


RATES = [0.0, 1e-3, 0.02]
EVENTS = {
    **{f"a {value}": spoil(value) for value in (torch.inf, torch.nan)},
    **{f"times {factor}": scaled(factor) for factor in (0.0, 1e-25, 1e-30, 1e25, 1e32)},
    "settings": setting(lr=RATES, max_norm=[0.0, 0.5, 2], weight_decay=RATES, momentum=[0.0, 0.5], mul=[1.1, None]),
    "betas": setting(betas=[(0.8, 0.99), [0.5, 0.9]], beta=[0.9, 0.0], max_ema_growth=[None, 1.1]),
    "tensor": tensor_rate,
    "invalid": setting(lr=[-1.0, torch.nan, "x"], betas=[(2.0, 0.9)], max_norm=[-1.0], momentum=[-1.0], mul=[0.0]),
    **{
        event.__name__: event
        for event in (
            missing,
            frozen,
            expanded,
            overlapping,
            same_memory,
            new_data,
            other_layout,
            other_dtype,
            loaded,
            copied,
            replaced_state,
            moved_state,
            changed_number,
            deleted_state,
            foreign_state,
            swapped,
            reordered,
            replaced_groups,
            added,
            hooked,
            scheduled,
            attribute,
            option,
            listened,
            counted,
            reported,
        )
    },
}


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    return type(one) is type(other) and (one == other or one != one)


def bits(tensor: torch.Tensor) -> bytes:
    """The values, where one NaN is like another."""
    return torch.nan_to_num(tensor.detach().double(), nan=12345.0).contiguous().numpy().tobytes()
