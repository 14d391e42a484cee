"""Planned steps are the ordinary ones: whole random runs, with anything that may happen between two steps."""

import copy
import itertools
import pickle
import random
import warnings
import weakref

import pytest
import torch
from contract.training import gradients, parameters, set_grads, train, values
from engine.test_walk import calls_of
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
    Scaling,
    WeightDecay,
    ZClip,
)
from torchzero_clip.fast.plan import Plan

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
    "none": lambda draw: None,
}
RULES = {
    "adamw": lambda draw: [AdamW(0.01, amsgrad=draw.random() < 0.3)],
    "adam": lambda draw: [Adam(0.01)],
    "l2": lambda draw: [WeightDecay(0.1), Adam(0.01)],
    "momentum": lambda draw: [SGD(0.01, 0.9, nesterov=draw.random() < 0.5)],
    "sgd": lambda draw: [SGD(0.1)],
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
        options = draw.choice([{}] * 8 + [{"nonfinite": "skip"}, {"keep_grads": True}, {"maximize": True}])
        self.take(Modular(groups, *filter(None, chain), **options))

    def take(self, optimizer: Modular) -> None:
        self.optimizer = optimizer

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
            self.optimizer._fast_way.learn = lambda walk, executor: None
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
        found = {f"param {i}": param.detach() for i, param in enumerate(self.params)}
        found |= {f"grad {i}": param.grad for i, param in enumerate(self.params)}
        for i, param in enumerate(self.params):
            found |= {f"state {i} {key}": value for key, value in self.optimizer.state.get(param, {}).items()}
        for i, group in enumerate(self.optimizer.param_groups):
            found |= {f"group {i} {key}": value for key, value in group.items() if key != "params"}
            found[f"group {i}"] = [next((k for k, p in enumerate(self.params) if p is q), -1) for q in group["params"]]
        found |= {f"seen {i}": value for i, value in enumerate(self.seen)}
        return found | ({f"metric {key}": value for key, value in self.optimizer.metrics().items()} if metrics else {})


def one(run: Run, draw: random.Random) -> nn.Parameter:
    return draw.choice(run.params)


def group(run: Run, draw: random.Random) -> dict:
    return draw.choice(run.optimizer.param_groups)


def spoil(value: float):
    def event(run: Run, draw: random.Random) -> None:
        param = one(run, draw)
        if param.numel():
            param.grad.view(-1)[draw.randrange(param.numel())] = value

    return event


def scaled(factor: float):
    def event(run: Run, draw: random.Random) -> None:
        for param in run.params:
            param.grad.mul_(factor)

    return event


def setting(**choices: list):
    """Write a setting to a group, where it has one."""

    def event(run: Run, draw: random.Random) -> None:
        own, (key, values) = group(run, draw), draw.choice(list(choices.items()))
        if key in own:
            own[key] = draw.choice(values)

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
    run.params, optimizer = twin((run.params, run.optimizer))
    for param, grad in zip(run.params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    run.take(optimizer)


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
    run.optimizer.param_groups = [dict(own) for own in run.optimizer.param_groups]


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
    setattr(run.optimizer, name, not getattr(run.optimizer, name))


def listened(run: Run, draw: random.Random) -> None:
    if run.optimizer.listener is None:
        Recorder(run.optimizer)


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


def compare(seed: str, clip: str, rule: str, steps: int) -> None:
    """Run a chain with plans and without them."""
    runs = [Run(seed, clip, rule, planned=planned) for planned in (True, False)]
    events, log = random.Random(f"events {seed}"), []
    for _ in range(steps):
        name = events.choice([*EVENTS, "closure"]) if events.random() < 0.2 else None
        scale, own, reads = 10 ** events.uniform(-2, 1), events.randrange(2**30), events.random() < 0.5
        log.append(name)
        found, errors = [], []
        for run in runs:
            draw = random.Random(own)
            run.fill(scale, draw)
            kept = [dict(group) for group in run.optimizer.param_groups]
            try:
                if name in EVENTS:
                    EVENTS[name](run, draw)
            except (ValueError, RuntimeError) as error:
                run.seen.append(str(error)[:30])
            errors.append(run.step(draw, closure=name == "closure"))
            if name == "invalid":
                for group, before in zip(run.optimizer.param_groups, kept, strict=True):
                    group.update(before)
            found.append(run.facts(metrics=reads))
        assert errors[0] == errors[1], (seed, log, errors)
        assert list(found[0]) == list(found[1]), (seed, log, set(found[0]) ^ set(found[1]))
        different = [key for key in found[0] if not same(found[0][key], found[1][key])]
        assert not different, (seed, log, {key: (found[0][key], found[1][key]) for key in different[:2]})


@pytest.fixture
def planned(monkeypatch):
    """Counts the steps that followed a plan."""
    taken = []
    repeat = Plan.repeat

    def counted(self, *args):
        found = repeat(self, *args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Plan, "repeat", counted)
    return taken


@pytest.mark.quick_cases(3)
@pytest.mark.filterwarnings("ignore:a max_norm of 0")
@pytest.mark.parametrize("clip", CLIPS)
def test_plans_change_no_bit(clip):
    for rule in ("adamw", "momentum"):
        compare(f"{clip} {rule} 0", clip, rule, 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a max_norm of 0")
@pytest.mark.parametrize(("clip", "rule"), list(itertools.product(CLIPS, RULES)))
def test_plans_change_no_bit_in_many_runs(clip, rule, planned):
    for seed in range(1, 3):
        compare(f"{clip} {rule} {seed}", clip, rule, 24)
    assert not (rule == "l2" and any(planned))  # the kernels have no weight decay before Adam


def chain_of(clip, rule):
    """With the first choice of each argument."""
    draw = random.Random()
    draw.choice, draw.random = lambda values: values[0], lambda: 0.4
    return [*filter(None, [CLIPS[clip](draw)]), *RULES[rule](draw)]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "l2"])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_fifth_step_follows_a_plan(clip, rule, planned):
    params = parameters()
    optimizer = Modular(params, *chain_of(clip, rule))
    train(optimizer, params, gradients(params, 7))
    assert len(planned) >= 3
    assert all(planned)


class Own(ClipNorm):
    """Says nothing of plans."""


class OwnRule(SGD):
    """Says nothing of plans."""


class Half(ClipNorm):
    """Overrides the factors, and inherits the factor of a number, which is another one."""

    def factors(self, measured, updates, step):
        return torch.full_like(measured.vector, 0.5)


class Checked(ClipNorm):
    """Has a check with an effect."""

    seen = []
    checks = {"max_norm": lambda name, value: Checked.seen.append(value)}


class Lossy(Scaling):
    """Multiplies by the loss."""

    def __init__(self):
        super().__init__({}, dim="global")

    def factors(self, measured, updates, step):
        return torch.full_like(measured.vector, float(step.loss))


@pytest.mark.parametrize("make", [lambda: Own(0.5, dim="global"), lambda: Half(0.5, dim="global"), Lossy])
def test_scalings_of_other_authors_are_planned_too(make, planned):
    runs = []
    for fast in (True, False):
        params = parameters(torch.float64)
        optimizer = Modular(params, make(), SGD(0.1), fast=fast)
        for k, row in enumerate(gradients(params, 8)):
            set_grads(params, row)
            optimizer.report_loss(0.25 * k)
            optimizer.step()
        runs.append(values(params))
    assert planned[-1]
    for own, expected in zip(*runs, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=0)


def test_checks_of_other_authors_run_once_in_every_planned_step(planned):
    params = parameters()
    optimizer = Modular(params, Checked(0.5), AdamW())
    train(optimizer, params, gradients(params, 5))
    assert planned[-1]
    Checked.seen.clear()
    train(optimizer, params, gradients(params, 1))
    assert Checked.seen == [0.5]


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param([ClipNorm(1.0), OwnRule()], id="a subclass of a rule"),
        pytest.param([ClipNorm(1.0), ClipNorm(2.0), AdamW()], id="two clips"),
        pytest.param([AdamW(), ClipNorm(1.0)], id="a clip after the rule"),
        pytest.param([ClipNorm(1.0).only(lambda p: p.ndim > 1), AdamW()], id="a scope"),
        pytest.param([ClipNorm(1.0, target="grad"), AdamW()], id="a target"),
        pytest.param([ClipNorm(lambda step: 1.0), AdamW()], id="a schedule"),
        pytest.param([ClipNorm(1.0)], id="no rule"),
    ],
)
def test_what_is_never_planned(chain, planned):
    params = parameters()
    train(Modular(params, *chain), params, gradients(params, 8))
    assert planned == []


def test_without_the_guard_of_torch_there_is_no_plan(planned, monkeypatch):
    monkeypatch.setattr("torchzero_clip.fast.plan.native_guard", lambda tensors: None)
    params = parameters()
    train(Modular(params, ClipNorm(1.0), AdamW()), params, gradients(params, 8))
    assert planned == []


def test_a_plan_holds_no_tensor_of_a_step(planned):
    params = parameters()
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    train(optimizer, params, gradients(params, 8))
    grads = [weakref.ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert planned[-1]
    assert [grad() for grad in grads] == [None] * len(grads)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_plans_become_rare_where_gradients_come_and_go(period, planned, monkeypatch):
    made = []
    of = Plan.of
    monkeypatch.setattr(Plan, "of", lambda *args: made.append(None) or of(*args))
    params = parameters()
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    for k, row in enumerate(gradients(params, 120)):
        set_grads(params, row)
        if k % (period + 1) == period:
            params[0].grad = None
        optimizer.step()
    assert len(made) < 8
    assert len(planned) - sum(planned) < 8


def test_metrics_are_ordinary_tensors_whoever_reads_them():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    train(optimizer, params, gradients(params, 8))
    with torch.inference_mode():
        optimizer.metrics()
    assert not any(value.is_inference() for value in optimizer.metrics().values())


def test_factors_that_are_patched_are_called(planned, monkeypatch):
    params, calls = parameters(), []
    clip = ClipNorm(1.0, dim="global")
    optimizer = Modular(params, clip, AdamW())
    train(optimizer, params, gradients(params, 6))
    assert planned[-1]
    own = ClipNorm.factors

    def patched(*args):
        calls.append(None)
        return own(clip, *args[-3:])

    monkeypatch.setattr(clip, "factors", patched)
    train(optimizer, params, gradients(params, 8))
    assert len(calls) == 8


def test_calls_of_a_planned_step():
    params = parameters(shapes=[(4, 3), (3,)])
    optimizer = Modular(params, ClipNorm(1.0, dim="global"), AdamW())
    train(optimizer, params, gradients(params, 5))
    assert 10 < len(calls_of(optimizer.step)) <= 30


def test_planned_steps_count():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), AdamW())
    for count, row in enumerate(gradients(params, 12), 1):
        train(optimizer, params, [row])
        assert (optimizer.skipped_by, optimizer.steps_taken) == ((), count)
    assert optimizer._fast_way._uses >= 4
