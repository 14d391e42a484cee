"""Each thing that a plan compares: a step after it has changed is the one that an optimizer without plans takes."""

import warnings

import pytest
import torch
from contract.training import gradients, parameters, set_grads, train
from fast.runs import recorded, same
from torch import nn

from torchzero_clip import (
    SGD,
    AdamW,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Normalize,
    Recorder,
    SkipStep,
    step_in_backward,
)
from torchzero_clip.fast import kernels, plan, repeated


def joint(limit=0.5):
    return ClipNorm(limit, dim="global")


class Fixed(ClipNorm):
    """Has another factor."""

    def factors(self, measured, updates, step):
        return torch.full_like(measured.vector, 0.25)


class Run:
    """An optimizer after enough steps for a plan."""

    def __init__(self, chain, groups, dtype, options, planned):
        self.params = parameters(dtype, [(3, 4), (5,), (2, 3), (5,)])
        parts = [{"params": self.params}]
        if groups:
            parts = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.5, **groups}]
        self.optimizer = Modular(parts, *chain(), **options)
        if not planned:
            self.optimizer.runner.fast_way.learn = lambda walk, options: None
        self.optimizer.report_loss(0.5)
        train(self.optimizer, self.params, gradients(self.params, 8))

    def step(self, seed):
        """The error of a step."""
        row = gradients(self.params, 1, seed)[0]
        for param, grad in zip(self.params, row, strict=True):
            if param.grad is None or param.grad.shape == grad.shape:
                param.grad = grad.clone()
        return self.take()

    def take(self):
        try:
            self.optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def facts(self):
        facts = {f"param {i}": param.detach() for i, param in enumerate(self.params)}
        facts |= {f"grad {i}": param.grad for i, param in enumerate(self.params)}
        states = [self.optimizer.state.get(param, {}) for param in self.params]
        facts |= {f"state {i} {key}": value for i, state in enumerate(states) for key, value in state.items()}
        for g, group in enumerate(self.optimizer.param_groups):
            facts |= {f"group {g} {key}": value for key, value in group.items() if key != "params"}
        facts |= {f"metric {key}": value for key, value in self.optimizer.metrics().items()}
        return facts | recorded(self) | {"by": self.optimizer.skipped_by, "taken": self.optimizer.steps_taken}


def state(run, i=1):
    return run.optimizer.state[run.params[i]]


def group(run, g=-1):
    return run.optimizer.param_groups[g]


def swap(run):
    run.optimizer.param_groups[1]["params"].insert(0, run.optimizer.param_groups[0]["params"].pop())


def strided(run):
    run.params[0].grad = torch.arange(12.0, dtype=run.params[0].dtype).view(4, 3).t()


def other_shape(run):
    state(run)["adam/exp_avg"] = torch.zeros(7)


def strided_state(run):
    state(run, 0)["adam/exp_avg"] = state(run, 0)["adam/exp_avg"].t().contiguous().t()


def frozen(run):
    run.params[1].requires_grad_(False)


def changed_class(run):
    run.optimizer.transforms["clip_norm"].__class__ = Fixed


def bad_gradient(run):
    run.params[1].grad[0] = torch.inf


def list_in_place(run):
    group(run)["betas"] = [0.8, 0.9]
    run.take()
    group(run)["betas"][0] = 2.0


def large(run):
    run.params[1].grad.mul_(1e6)


def same_but(**written):
    return lambda run: group(run).update(written)


def option(name, value):
    return lambda run: setattr(run.optimizer, name, value)


JOINT, EACH = lambda: [joint(), AdamW(0.1)], lambda: [ClipNorm(0.5), AdamW(0.1)]
MOMENTUM = lambda: [joint(), SGD(0.1, 0.0)]  # noqa: E731
GROWTH = lambda: [ClipNormGrowth(), AdamW(0.1)]  # noqa: E731
TENSOR = lambda: [joint(), AdamW(torch.tensor(0.1))]  # noqa: E731
SKIP, LIMITED = {"nonfinite": "skip"}, {"nonfinite": "skip", "max_consecutive_skips": 1}
CASES = {
    # what has changed: the chain, whether there is a second group, options, the change
    "maximize": (JOINT, None, {}, option("maximize", True)),
    "keep_grads": (JOINT, None, {}, option("keep_grads", True)),
    "fast": (JOINT, None, {}, option("fast", False)),
    "a parameter in the next group": (JOINT, {"max_norm": 2.0}, {}, swap),
    "no state": (JOINT, None, {}, lambda run: run.optimizer.state.pop(run.params[1])),
    "foreign state": (JOINT, None, {}, lambda run: state(run).update(mine=torch.zeros(3))),
    "missing state": (JOINT, None, {}, lambda run: state(run).pop("adam/exp_avg")),
    "strides of a gradient": (JOINT, None, {}, strided),
    "a shape of state": (JOINT, None, {}, other_shape),
    "strides of state": (JOINT, None, {}, strided_state),
    "a frozen parameter": (JOINT, None, {}, frozen),
    "a number of state": (GROWTH, None, {}, lambda run: state(run).update({"clip_norm_growth/prev": torch.zeros(3)})),
    "a step count": (JOINT, None, {}, lambda run: state(run)["adam/step"].data.fill_(70)),
    "another step count": (JOINT, None, {}, lambda run: state(run).update({"adam/step": torch.tensor(70.0)})),
    "memory of a step count": (
        JOINT,
        None,
        {},
        lambda run: setattr(state(run)["adam/step"], "data", torch.tensor(7.0)),
    ),
    "an attribute": (JOINT, None, {}, lambda run: setattr(run.optimizer.transforms["adam"], "fused", False)),
    "a class": (JOINT, None, {}, changed_class),
    "factors of an author": (lambda: [Fixed(0.5, dim="global"), AdamW(0.1)], None, {}, lambda run: None),
    "a setting that nobody reads": (JOINT, None, {}, same_but(max_nrom=1.0)),
    "a kind of step": (MOMENTUM, None, {}, same_but(momentum=0.9)),
    "a rate": (JOINT, {}, {}, same_but(lr=0.01)),
    "a limit": (JOINT, None, {}, same_but(max_norm=0.01)),
    "a limit of one group": (JOINT, {"max_norm": 0.5}, {}, same_but(max_norm=0.01)),
    "a tensor in place": (TENSOR, None, {}, lambda run: group(run)["lr"].fill_(0.3)),
    "a list in place": (JOINT, None, {}, list_in_place),
    "a tiny limit": (JOINT, None, {}, same_but(max_norm=1e-42)),
    "a tiny limit for each": (EACH, None, {}, same_but(max_norm=1e-42)),
    "a limit of 0": (JOINT, None, {}, same_but(max_norm=0.0)),
    "an infinite gradient": (JOINT, None, SKIP, bad_gradient),
    "an infinite gradient for each": (EACH, None, SKIP, bad_gradient),
    "an infinite gradient raises": (JOINT, None, {"nonfinite": "raise"}, bad_gradient),
    "infinite gradients": (JOINT, None, LIMITED, lambda run: (bad_gradient(run), run.take())),
    "a count of skips": (JOINT, None, SKIP, same_but(skipped_steps=5)),
    "a gate": (lambda: [SkipStep(max_norm=99.0), joint(), AdamW()], None, {}, large),
    "a gate that stores": (lambda: [SkipStep(max_ratio=9.0), *EACH()], None, {}, lambda run: None),
    "keep_grads for each": (EACH, None, {"keep_grads": True}, lambda run: None),
    "keep_grads from the start": (JOINT, None, {"keep_grads": True}, lambda run: None),
    "up": (JOINT, None, {"maximize": True}, lambda run: None),
    "up for each": (EACH, None, {"maximize": True, "keep_grads": True}, lambda run: None),
    "a recorder": (JOINT, None, SKIP, lambda run: Recorder(run.optimizer)),
    "a recorder for each": (EACH, None, {}, lambda run: Recorder(run.optimizer)),
    "a recorder without a clip": (lambda: [AdamW()], None, {}, lambda run: Recorder(run.optimizer)),
    "a recorder and a gate": (lambda: [SkipStep(max_norm=9.0), AdamW()], None, {}, lambda run: Recorder(run.optimizer)),
}


@pytest.mark.filterwarnings("ignore:a max_norm of 0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_plan_sees(case, dtype):
    chain, groups, options, change = CASES[case]
    runs = [Run(chain, groups, dtype, options, planned) for planned in (True, False)]
    assert [run.optimizer.runner.fast_way.plan is not None for run in runs] == [True, False]
    outcomes = []
    for run in runs:
        said = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            change(run)
            said += [run.take(), *(run.step(seed) for seed in (5, 6))]
        outcomes.append([said, [str(w.message) for w in caught], run.facts()])
    (said, caught, facts), (expected, warned, others) = outcomes
    assert (said, caught, list(facts)) == (expected, warned, list(others))
    assert not [key for key in facts if not same(facts[key], others[key])]


def test_a_plan_for_some_parameters_sees_that_one_has_moved_to_the_next_group():
    runs = []
    for planned in (True, False):
        params = parameters(shapes=[(5,)] * 5)
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}]
        optimizer = Modular(groups, joint(), AdamW(0.1))
        if not planned:
            optimizer.runner.fast_way.learn = lambda walk, options: None
        for k, row in enumerate(gradients(params, 12)):
            set_grads(params, row)
            params[0].grad = None
            if k == 8:
                assert (optimizer.runner.fast_way.plan is not None) == planned
                optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
            optimizer.step()
        runs.append(params)
    assert all(map(same, *([param.detach() for param in params] for params in runs)))


def test_an_empty_parameter_has_no_norm_to_join():
    runs = []
    for planned in (True, False):
        params = parameters(shapes=[(300,), (0,), (17, 9), (3000,)])
        optimizer = Modular(params, joint(), AdamW(0.1))
        if not planned:
            optimizer.runner.fast_way.learn = lambda walk, options: None
        train(optimizer, params, gradients(params, 8))
        runs.append([*(param.detach() for param in params), *optimizer.metrics().values()])
    assert all(map(same, *runs))


@pytest.mark.parametrize("chain", [JOINT, EACH])
def test_step_counts_go_back_if_a_planned_step_fails(chain, monkeypatch):
    run = Run(chain, None, torch.float32, {}, planned=True)
    recorder = Recorder(run.optimizer)
    run.step(3)
    before, kept = state(run)["adam/step"].item(), run.optimizer.metrics()

    def fails(*args):
        raise MemoryError("no memory")

    monkeypatch.setattr(repeated, "run_kernel", fails)
    assert run.step(4) == "MemoryError: no memory"
    assert state(run)["adam/step"].item() == before
    assert recorder.record().reasons == ["", "error"]
    assert run.optimizer.metrics() == kept
    monkeypatch.setattr(repeated, "run_kernel", kernels.run_kernel)
    assert run.step(5) is None


@pytest.mark.parametrize("chain", [JOINT, lambda: [Normalize(0.5), AdamW()]])
def test_no_plan_is_made_where_none_can_be_used(chain, monkeypatch):
    made, of = [], plan.Plan.of
    monkeypatch.setattr(plan.Plan, "of", lambda *args: made.append(of(*args)) or made[-1])
    params = parameters()
    optimizer = Modular(params, *chain())
    for row in gradients(params, 12):
        set_grads(params, row)
        optimizer.state.clear()
        optimizer.step()
    assert set(made) == {None}
    module = nn.Linear(3, 2)
    optimizer = Modular(module.parameters(), *EACH())
    step_in_backward(optimizer)
    train(optimizer, list(module.parameters()), gradients(module.parameters(), 12))
    assert set(made) == {None}
