"""Planned steps are the ordinary ones: whole random runs, with anything that may happen between two steps."""

import random
import weakref

import pytest
import torch
from contract.training import gradients, parameters, set_grads, train, values
from engine.test_walk import calls_of
from fast.comparison import short_pieces
from fast.runs import CLIPS, EVENTS, RULES, Run, same
from modular.test_origin import model, step, warnings_of
from torch import nn

from torchzero_clip import SGD, Adam, AdamW, ClipNorm, ClipNormByEMA, Modular, Scaling
from torchzero_clip.fast.door import FastWay
from torchzero_clip.fast.plan import Plan


@short_pieces
def compare(seed: str, clip: str, rule: str, steps: int) -> None:
    """Run a chain with plans and without them."""
    runs = [Run(seed, clip, rule, planned=planned) for planned in (True, False)]
    events, log = random.Random(f"events {seed}"), []
    for _ in range(steps):
        name = events.choice([*EVENTS, "closure"]) if events.random() < 0.2 else None
        scale, seed_of_draw, reads = 10 ** events.uniform(-2, 1), events.randrange(2**30), events.random() < 0.5
        log.append(name)
        results, errors = [], []
        for run in runs:
            draw = random.Random(seed_of_draw)
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
            results.append(run.facts(metrics=reads))
        assert errors[0] == errors[1], (seed, log, errors)
        assert list(results[0]) == list(results[1]), (seed, log, set(results[0]) ^ set(results[1]))
        different = [key for key in results[0] if not same(results[0][key], results[1][key])]
        assert not different, (seed, log, {key: (results[0][key], results[1][key]) for key in different[:2]})


@pytest.fixture
def planned(monkeypatch):
    """Counts the steps that followed a plan."""
    taken = []
    begin = FastWay.planned

    def counted(self, *args):
        results = begin(self, *args)
        taken.append(results is not None)
        return results

    monkeypatch.setattr(FastWay, "planned", counted)
    return taken


@pytest.mark.quick_cases(3)
@pytest.mark.filterwarnings("ignore:a max_norm of 0")
@pytest.mark.parametrize("clip", CLIPS)
def test_plans_change_no_bit(clip):
    for rule in ("adamw", "momentum"):
        compare(f"{clip} {rule} 0", clip, rule, 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a max_norm of 0")
@pytest.mark.parametrize(
    ("clip", "rule"),
    [(clip, rule) for i, clip in enumerate(CLIPS) for j, rule in enumerate(RULES) if (i + j) % 8 == 0],
)
def test_plans_change_no_bit_in_many_runs(clip, rule, planned):
    compare(f"{clip} {rule} 1", clip, rule, 24)
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
    """Says nothing of plans, and its kernel may be another one in each step."""

    def kernel(self, rest, step):
        return super().kernel(rest, step)


class PureRule(OwnRule):
    """Promises that its kernel is the same one for the same settings."""

    pure = True


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


@pytest.mark.parametrize("closes", [False, True], ids=["reported loss", "closure"])
@pytest.mark.parametrize("make", [lambda: Own(0.5, dim="global"), lambda: Half(0.5, dim="global"), Lossy])
def test_scalings_of_other_authors_are_planned_too(make, closes, planned):
    runs = []
    for fast in (True, False):
        params = parameters(torch.float64)
        optimizer = Modular(params, make(), SGD(0.1), fast=fast)
        for k, row in enumerate(gradients(params, 8)):
            set_grads(params, row)
            if closes:
                assert optimizer.step(lambda k=k: 0.25 * k) == 0.25 * k
                continue
            optimizer.report_loss(0.25 * k)
            optimizer.step()
        runs.append(values(params))
    assert planned[-1]
    for ours, expected in zip(*runs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


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
        pytest.param([ClipNorm(1.0), OwnRule()], id="a rule that is not pure"),
        pytest.param([ClipNorm(1.0), ClipNorm(2.0), AdamW()], id="two clips"),
        pytest.param([AdamW(), ClipNorm(1.0)], id="a clip after the rule"),
        pytest.param([ClipNorm(1.0).only(lambda p: p.ndim > 1), AdamW()], id="a scope"),
        pytest.param([ClipNorm(1.0, target="grad"), AdamW()], id="a target"),
        pytest.param([ClipNorm(1.0, target="update_difference"), AdamW()], id="another target"),
        pytest.param([ClipNorm(1.0)], id="no rule"),
    ],
)
def test_what_is_never_planned(chain, planned):
    params = parameters()
    train(Modular(params, *chain), params, gradients(params, 8))
    assert planned == []


def test_a_rule_of_another_author_that_is_pure_is_planned(planned):
    params = parameters()
    train(Modular(params, ClipNorm(1.0), PureRule(0.1)), params, gradients(params, 8))
    assert planned[-1]


class ByNumber(Scaling):
    """Says a factor for a joint norm, which is ``wrong`` times that of `factors`."""

    pure = True

    def __init__(self, wrong=1.0):
        self.wrong = wrong
        super().__init__({"limit": 0.5}, dim="global")

    def factors(self, measured, updates, step):
        return measured.by_norm(lambda norms: (0.5 / norms).clamp(max=1.0))

    def factor(self, norm, setting):
        return self.wrong * min(1.0, setting["limit"] / norm)


def test_the_factor_of_another_author_is_called_with_numbers(planned):
    runs = []
    for fast in (True, False):
        params = parameters()
        optimizer = Modular(params, ByNumber(), SGD(0.1), fast=fast)
        train(optimizer, params, gradients(params, 12))
        runs.append(values(params))
    assert planned[-1]
    for ours, expected in zip(*runs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8)


def test_a_factor_that_is_not_that_of_factors_is_refused_before_a_change():
    params = parameters()
    optimizer = Modular(params, ByNumber(0.5), SGD(0.1))
    train(optimizer, params, gradients(params, 3))
    before = values(params)
    with pytest.raises(RuntimeError, match=r"ByNumber.*factor returned .* and its factors .*delete factor"):
        train(optimizer, params, gradients(params, 1))
    assert all(map(torch.equal, values(params), before))


def test_without_the_guard_of_torch_there_is_no_plan(planned, monkeypatch):
    monkeypatch.setattr("torchzero_clip.fast.compared.native_guard", lambda tensors: None)
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
    original = ClipNorm.factors

    def patched(*args):
        calls.append(None)
        return original(clip, *args[-3:])

    monkeypatch.setattr(clip, "factors", patched)
    train(optimizer, params, gradients(params, 8))
    assert len(calls) == 8


def test_calls_of_a_planned_step():
    params = parameters(shapes=[(4, 3), (3,)])
    optimizer = Modular(params, ClipNorm(1.0, dim="global"), AdamW())
    train(optimizer, params, gradients(params, 5))
    assert 10 < len(calls_of(optimizer.step)) <= 26


def test_planned_steps_move_and_measure_long_averages_together(planned):
    params = parameters(shapes=[(70_000,)])
    optimizer = Modular(params, ClipNormByEMA(), AdamW())
    train(optimizer, params, gradients(params, 5))
    assert "_lerped" in {code.co_name for code in calls_of(optimizer.step)}
    assert planned[-1]


def test_planned_steps_count():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), AdamW())
    for count, row in enumerate(gradients(params, 12), 1):
        train(optimizer, params, [row])
        assert (optimizer.skipped_by, optimizer.steps_taken) == ((), count)
    assert optimizer.runner.fast_way._uses >= 4


@pytest.mark.parametrize("steps", [1, 7, 20, 40])
def test_planned_steps_leave_the_search_to_zero_grad(steps):
    module = model()
    optimizer = Modular(module, ClipNorm(1, dim="global"), Adam())
    for _ in range(steps):
        step(module, optimizer, Modular.zero_grad)
    assert (optimizer.runner.fast_way.plan is not None) == (steps > 3)
    module.append(nn.Linear(1, 1))
    texts = warnings_of(lambda: [step(module, optimizer, Modular.zero_grad) for _ in range(2 * steps + 2)])
    assert len(texts) == 1
    assert "the module has a gradient of '2.weight' and of 1 more parameters" in texts[0]


@pytest.mark.parametrize("first", ["walk", "gradient_norms"])
def test_the_walk_of_a_planned_step_has_its_norms_in_either_order(first):
    params = parameters()
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    train(optimizer, params, gradients(params, 5))
    runner = optimizer.runner
    step = runner._planned(optimizer.param_groups, optimizer.state, runner.reported.loss)
    getattr(step, first)
    assert step.walk.gradient_norms is step.gradient_norms
    expected = torch.cat([param.grad.double().flatten() for param in params]).norm()
    torch.testing.assert_close(step.gradient_norms.total(), expected, rtol=1e-6, atol=0)
