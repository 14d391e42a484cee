"""Transforms before an optimizer of torch are the chain with its rule: random runs, with anything between two steps."""

import copy
import itertools
import random
from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import gradients, parameters, through_file, train
from fast.comparison import short_pieces
from fast.runs import CLIPS, DTYPES, EVENTS, SHAPES, Run, same, setting
from torch import nn

from torchzero_clip import LR, AdamW, ClipNorm, ClipValue, Modular, Recorder, before_step
from torchzero_clip.checkpoints.identity import IDENTITY
from torchzero_clip.core.chain import flatten
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.other_optimizer.before_step import BeforeStep


def without_rule(make):
    """The transforms of a chain that do not take the step."""
    return [t for t in flatten([make()]) if not isinstance(t, UpdateRule | LR)]


def is_allowed(chain):
    try:
        before_step(torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))]), *chain)
    except (TypeError, ValueError):  # it changes parameters, or no transform is left
        return False
    return True


FRONTS = {
    **{name: make for name, make in CLIPS.items() if name != "none"},
    "schedule": lambda draw: ClipNorm(lambda step: 1.0 / (1 + step), dim="global"),
    "schedule and values": lambda draw: [ClipNorm(lambda step: 0.5 + step), ClipValue(0.01)],
    **{
        f"entry {entry}": lambda draw, make=entry.make: without_rule(make)
        for entry in ENTRIES
        if is_allowed(without_rule(entry.make))
    },
}
ANY, LAST = list(FRONTS), ["global", "autoclip", "each", "ema"]  # the variance of limited norms is rounding only
NEW = ["entry ClipValueByEMA-tfm", "entry LimitRMS", "entry ClipByWeights", "entry ClipToUsual"]
"""Transforms that return other tensors than they get."""
FRONTS |= {
    f"several {k}": lambda draw: [FRONTS[draw.choice(names)](draw) for names in (draw.choice([ANY, NEW]), LAST)]
    for k in range(16)
}
OF_RULE = ("lr", "initial_lr", "betas", "eps", "weight_decay", "adam/", "weight_decay_2/", IDENTITY, "params")


class Joint(ChainMap):
    """The settings of the transforms and of the optimizer. A value is written where the key is."""

    def __setitem__(self, key, value):
        next(owner for owner in self.maps if key in owner)[key] = value


class Whole(Run):
    """A chain with its rule."""

    def __init__(self, seed, name, kind, *, dtypes=DTYPES, planned=True, fast=True):
        draw = random.Random(seed)
        torch.manual_seed(draw.randrange(2**30))
        dtype, shapes = draw.choice(dtypes), [draw.choice(SHAPES) for _ in range(draw.randint(1, 6))]
        self.params = [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]
        self.planned, self.fast = planned, fast
        self.seen, self.scheduler, self.recorder = [], None, None
        groups = [{"params": self.params[:]}]
        if len(shapes) > 1 and draw.random() < 0.5:
            cut = draw.randint(1, len(shapes) - 1)
            groups = [{"params": self.params[:cut]}, {"params": self.params[cut:], "lr": draw.choice([0.01, 0.003])}]
        self.rule = {"lr": 0.01, "amsgrad": draw.random() < 0.2, "weight_decay": draw.choice([0.0, 0.01]), **kind}
        self.options = {**draw.choice([{}] * 4 + [{"nonfinite": "skip"}]), "fast": fast}
        seed_of_front = draw.getrandbits(30)
        self.transforms = lambda: list(flatten([FRONTS[name](random.Random(seed_of_front))]))
        self.start(groups)

    def start(self, groups):
        rule = {key: value for key, value in self.rule.items() if key not in ("fused", "foreach")}
        self.take(Modular(groups, *self.transforms(), AdamW(**rule), **self.options))

    def take(self, optimizer):
        self.optimizer = self.chain = optimizer

    def restart(self, saved):
        """Go on with a new optimizer that has loaded a checkpoint."""
        self.start([{"params": list(group["params"])} for group in self.optimizer.param_groups])
        self.optimizer.load_state_dict(saved)
        self.scheduler = self.recorder = None

    def step(self, draw, *, closure):
        for param in self.params:
            if not param.requires_grad:  # optimizers of torch step with the gradients of frozen parameters too
                param.grad = None
        if not self.planned:
            self.chain.runner.fast_way.learn = lambda walk, options: None
        planned, self.planned = self.planned, True
        error = super().step(draw, closure=closure)
        self.planned = planned
        return error

    def of_rule(self, param):
        state = self.optimizer.state.get(param, {})
        return {key.removeprefix("adam/"): value for key, value in state.items() if key.startswith("adam/")}

    def facts(self, *, metrics):
        facts = {f"param {i}": param.detach() for i, param in enumerate(self.params)}
        for g, group in enumerate(self.optimizer.param_groups):
            settings = self.chain.param_groups[g].items()
            facts |= {f"group {g} {key}": value for key, value in settings if not key.startswith(OF_RULE)}
            for i, param in enumerate(group["params"]):
                facts |= {f"rule {g} {i} {key}": value for key, value in self.of_rule(param).items()}
                state = self.chain.state.get(param, {})
                facts |= {f"state {g} {i} {k}": value for k, value in state.items() if not k.startswith("adam/")}
        facts |= {f"seen {i}": value for i, value in enumerate(self.seen)}
        facts["skipped"] = self.chain.metrics().get("skipped_steps", torch.tensor(0)).item()
        if self.recorder is not None:
            facts["recorded"] = self.recorder.record().norm
        return facts | ({f"metric {key}": value for key, value in self.chain.metrics().items()} if metrics else {})

    def has_metrics(self):
        return bool(set(self.chain.metrics()) - {"skipped_steps"})


class Before(Whole):
    """The transforms of a chain before an optimizer of torch."""

    def start(self, groups):
        self.take(torch.optim.AdamW(groups, **self.rule))

    def take(self, optimizer):
        self.optimizer, self.handle = optimizer, before_step(optimizer, *self.transforms(), **self.options)

    @property
    def chain(self):
        followed = self.handle._followed
        return SimpleNamespace(
            runner=followed.runner,
            param_groups=followed.param_groups,
            state=followed.state,
            metrics=self.handle.metrics,
        )

    def groups(self):
        pairs = zip(self.handle.param_groups, self.optimizer.param_groups, strict=True)
        return [Joint(of_handle, of_rule) for of_handle, of_rule in pairs]

    def copy(self, twin):
        """A copy has no transforms."""
        saved = self.optimizer.state_dict()
        super().copy(twin)
        self.optimizer.load_state_dict(saved)

    def restart(self, saved):
        """The checkpoint is loaded before the transforms stand there."""
        groups = [{"params": list(group["params"])} for group in self.optimizer.param_groups]
        optimizer = torch.optim.AdamW(groups, **self.rule)
        optimizer.load_state_dict(saved)
        self.take(optimizer)
        self.scheduler = self.recorder = None

    def of_rule(self, param):
        state = self.optimizer.state.get(param, {})
        return {key: value for key, value in state.items() if key != "before_step"}


def filed(run, draw):
    run.optimizer.load_state_dict(through_file(run.optimizer.state_dict()))


def restarted(run, draw):
    run.restart(through_file(run.optimizer.state_dict()))


def removed(run, draw):
    """Remove the handle, and make another that goes on."""
    saved = copy.deepcopy(run.optimizer.state_dict())
    if isinstance(run, Before):
        if run.recorder is not None:
            run.recorder.close()
        run.handle.remove()
        run.take(run.optimizer)
    elif run.recorder is not None:
        run.recorder.close()
    run.recorder = None
    run.optimizer.load_state_dict(saved)


def doubled(run, draw):
    """As by ``model.double()``, with a checkpoint of before."""
    for param in run.params:
        param.data = param.data.double()
        param.grad = None if param.grad is None else param.grad.double()
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def deleted_group(run, draw):
    groups = run.optimizer.param_groups
    if len(groups) > 1:
        for param in groups.pop(draw.randrange(len(groups)))["params"]:
            run.optimizer.state.pop(param, None)  # state_dict of torch raises KeyError for it


def turned_groups(run, draw):
    run.optimizer.param_groups.reverse()


def exchanged_group(run, draw):
    """One goes and another comes, so that there are as many as before."""
    if len(run.optimizer.param_groups) > 1:
        deleted_group(run, draw)
        EVENTS["added"](run, draw)


def exchanged(run, draw):
    """Another parameter takes the place of one."""
    params = draw.choice(run.optimizer.param_groups)["params"]
    k = draw.randrange(len(params))
    param = nn.Parameter(params[k].detach().clone() + 1)
    param.grad = torch.ones_like(param)
    place = next(i for i, other in enumerate(run.params) if other is params[k])
    run.optimizer.state.pop(params[k], None)
    run.params[place] = params[k] = param


def recorded(run, draw):
    if run.recorder is None and any(param.numel() for param in run.params):
        run.recorder = Recorder(run.optimizer)


def tensor_rate(run, draw):
    draw.choice(run.groups())["lr"] = torch.tensor(0.02, dtype=torch.float64)


def reported(run, draw):
    (run.handle if isinstance(run, Before) else run.optimizer).report_loss(draw.random())


KEPT = (
    *[f"a {value}" for value in (torch.inf, torch.nan)],
    *[f"times {factor}" for factor in (0.0, 1e-25, 1e-30, 1e25, 1e32)],
    *("betas", "missing", "frozen", "expanded", "overlapping", "same_memory", "new_data"),
    *("loaded", "copied", "swapped", "reordered", "replaced_groups", "added", "hooked", "scheduled"),
)
HAPPENS = {
    **{name: EVENTS[name] for name in KEPT},
    "settings": setting(lr=[1e-3, 0.02], max_norm=[0.0, 0.5, 2], weight_decay=[0.0, 0.02], mul=[1.1, None]),
    "invalid": setting(max_norm=[-1.0], mul=[0.0], beta=[2.0]),
    **{
        event.__name__: event
        for event in (
            *(filed, restarted, removed, doubled, deleted_group, turned_groups),
            *(exchanged_group, exchanged, recorded, reported, tensor_rate),
        )
    },
}


@short_pieces
def compare(seed, runs, steps, is_same, happens=HAPPENS):
    """Let the same happen to both runs."""
    events, log = random.Random(f"events {seed}"), []
    for _ in range(steps):
        name = events.choice([*happens, "closure"]) if events.random() < 0.3 else None
        scale, seed_of_draw, reads = 10 ** events.uniform(-2, 1), events.randrange(2**30), events.random() < 0.5
        log.append(name)
        errors = []
        for run in runs:
            draw = random.Random(seed_of_draw)
            run.fill(scale, draw)
            kept = [dict(group) for group in run.groups()]
            if name in happens:
                happens[name](run, draw)
            errors.append(run.step(draw, closure=name == "closure"))
            if name == "invalid":
                for group, before in zip(run.groups(), kept, strict=True):
                    group.update(before)
        reads = reads and all(run.has_metrics() for run in runs)  # copies of a Modular have those of before
        facts = [run.facts(metrics=reads) for run in runs]
        assert errors[0] == errors[1], (seed, log, errors)
        assert set(facts[0]) == set(facts[1]), (seed, log, set(facts[0]) ^ set(facts[1]))
        different = [key for key in facts[0] if not is_same(key, facts[0][key], facts[1][key])]
        assert not different, (seed, log, {key: (facts[0][key], facts[1][key]) for key in different[:2]})


def near(key, one, other):
    """Equal up to rounding in float64, which for parameters is a millionth of the smallest learning rate."""
    if not isinstance(one, torch.Tensor):
        return same(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    largest = other[other.isfinite()].abs().amax().item() if other.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=0, atol=1e-9 if key.startswith("param") else 1e-9 * largest, equal_nan=True)


def equal(key, one, other):
    """Bit for bit."""
    return same(one, other)


KINDS = {"default": {}, "foreach": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True}}
JOINT = ("global", "zclip", "autoclip", "schedule", *[f"entry {entry}" for entry in ENTRIES if entry.joint])
JOINT = [name for name in FRONTS if name in JOINT and name != "entry AdaGC"]
"""One factor for all gradients: the kernel divides by it in both."""
CALM = {
    name: event
    for name, event in HAPPENS.items()
    if name.startswith(("a ", "times"))
    or name in ("betas", "new_data", "loaded", "filed", "reordered", "scheduled", "settings", "invalid")
    or name in ("recorded", "reported", "tensor_rate")
}
"""After these both steps find all tensors as the fast way needs them, so that they take the same operations."""


def is_before(kind, name, seed, steps=16):
    """Transforms before AdamW are the chain, up to rounding."""
    seed, only = f"{name} {seed}", {"dtypes": [torch.float64]}
    happens = {event: of for event, of in HAPPENS.items() if kind != "foreach" or event != "tensor_rate"}
    runs = [kind_of(seed, name, KINDS[kind], **only) for kind_of in (Before, Whole)]
    compare(seed, runs, steps, near, happens)  # torch has no foreach AdamW with a tensor as its rate


@pytest.fixture
def scaled(monkeypatch):
    """Notes for each factor of all gradients whether the optimizer takes it."""
    have_scaled, original = [], BeforeStep._multiply

    def scale(handle, grads, factor):
        original(handle, grads, factor)
        have_scaled.append(handle._has_set_grad_scale)

    monkeypatch.setattr(BeforeStep, "_multiply", scale)
    return have_scaled


pytestmark = [
    pytest.mark.filterwarnings("ignore:a max_norm of 0"),
    pytest.mark.filterwarnings("ignore:the chain decays weights twice"),
    pytest.mark.filterwarnings(r"ignore:step \d+. the gradients of"),
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("name", "kind"), list(zip(list(FRONTS)[::3], itertools.cycle(KINDS), strict=False)))
def test_before_each_adamw_of_torch_is_the_chain(name, kind):
    """Every third chain before one kind."""
    is_before(kind, name, 0)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", JOINT)
def test_one_factor_for_all_gradients_is_divided_by_the_kernel_as_in_the_chain(name, scaled):
    seed, only = f"{name} bits", {"dtypes": [torch.float32]}
    runs = [Before(seed, name, KINDS["fused"], **only), Whole(seed, name, {}, **only)]
    compare(seed, runs, 16, equal, happens=CALM)
    assert scaled == [True] * len(scaled)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", list(FRONTS)[::3])
def test_plans_change_no_bit(name):
    seed = f"{name} plans"
    runs = [Before(seed, name, KINDS["fused"], planned=planned) for planned in (True, False)]
    compare(seed, runs, 12, equal)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", list(FRONTS)[1::3])
def test_the_fast_way_is_the_readable_one(name):
    seed = f"{name} fast"
    runs = [Before(seed, name, {}, dtypes=[torch.float64], fast=fast) for fast in (True, False)]
    compare(seed, runs, 12, near)


@pytest.mark.parametrize("order", ["none", "before", "after"])
def test_a_recorder_leaves_the_factor_to_a_fused_optimizer(order, monkeypatch):
    """So that it changes no bit."""
    params = parameters()
    optimizer = torch.optim.AdamW(params, 0.01, fused=True)
    recorder = Recorder(optimizer) if order == "before" else None
    handle = before_step(optimizer, ClipNorm(0.1, dim="global"))
    recorder = Recorder(optimizer) if order == "after" else recorder
    scaled, original = [], handle._multiply
    monkeypatch.setattr(
        handle.runner.delivery, "multiply", lambda *args: (original(*args), scaled.append(optimizer.grad_scale))
    )
    train(optimizer, params, gradients(params, 6))
    assert len(scaled) == 6
    assert None not in scaled
    assert recorder is None or recorder.record().norm.tolist() == pytest.approx(
        [torch.stack([grad.norm() for grad in row]).norm().item() for row in gradients(params, 6)]
    )
