"""What is sent while a run lives: which points, which layers, and what happens if the logger fails."""

import math

import pytest
import torch
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Recorder, SkipStep


class Writer:
    """Records calls, as a `SummaryWriter` gets them."""

    def __init__(self):
        self.points = {}

    def add_scalar(self, name, value, step):
        self.points.setdefault(step, {})[name] = value


class Run:
    """Like a run of Weights & Biases, whose ``log`` stores a row unless it is told not to commit it."""

    def __init__(self):
        self.rows, self.axes = [], {}

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, values):
        self.rows.append(values)


class Logger:
    def __init__(self):
        self.points = {}

    def log_metrics(self, metrics, step):
        self.points[step] = metrics


class Accelerator:
    def __init__(self):
        self.points = {}

    def log(self, values, step):
        self.points[step] = values


class Trackio:
    """A run of Trackio."""

    def __init__(self):
        self.points = {}

    def log(self, metrics, step=None):
        self.points[step] = metrics


def recorded(log, count=30, sizes=None, **given):
    params = [("a", nn.Parameter(torch.ones(1))), ("b", nn.Parameter(torch.ones(1)))]
    optimizer = Modular(params, SkipStep(max_norm=1e3), ClipNorm(4.0, dim="global"), SGD(0.5))
    recorder = Recorder(optimizer, log=log, **({"flush_every": 10, "ratios_every": 10} | given))
    for step in range(count):
        for name, param in params:
            param.grad = torch.full((1,), (sizes or {}).get((name, step), 3.0 if name == "a" else 4.0))
        optimizer.step()
    return recorder


def test_a_point_sums_up_the_steps_since_the_last_one():
    points = {}
    recorded(points.__setitem__, sizes={("b", 5): 40.0, ("a", 17): 1e6})
    assert sorted(points) == [9, 19, 29]
    first, second, third = points.values()
    assert first["gradients/norm"] == 5.0
    assert first["gradients/largest_norm"] == pytest.approx(math.hypot(3, 40))
    assert first["gradients/limit"] == 4.0
    assert "gradients/loss" not in first
    assert first["gradients/share_clipped"] == 1.0
    assert [point["gradients/skipped"] for point in points.values()] == [0, 1, 0]
    assert third["gradients/largest_norm"] == 5.0
    # both layers have updates; in step 0, a moves by 0.5 * 3 * 4 / 5
    assert first["layers/a/update_ratio"] == pytest.approx(1.2)
    assert second["layers/a/norm"] == pytest.approx(1e6)
    assert third["layers/b/norm"] == 4.0


def test_the_mean_loss_is_sent():
    points = {}
    weight = nn.Parameter(torch.ones(1))
    optimizer = Modular([weight], SGD(0.1))
    recorder = Recorder(optimizer, log=points.__setitem__, flush_every=5, log_every=5)
    for step in range(5):
        weight.grad = torch.ones(1)
        if step != 3:
            recorder.report_loss(float(step))
        optimizer.step()
    assert points[4]["gradients/loss"] == (0 + 1 + 2 + 4) / 4


def test_a_layer_that_stood_out_stays():
    points = {}
    params = [(str(k), nn.Parameter(torch.ones(1))) for k in range(40)]
    optimizer = Modular(params, SGD(0.1))
    recorder = Recorder(optimizer, log=points.__setitem__, flush_every=10, ratios_every=0)
    for step in range(60):
        for k, (_, param) in enumerate(params):
            param.grad = torch.full((1,), 40.0 if (k, step) == (30, 25) else 1.0 + (k + 7 * step) % 40 / 100)
        optimizer.step()
    names = {end: [name for name in point if name.startswith("layers/")] for end, point in points.items()}
    assert names[9] == []  # there is no usual norm yet
    assert {end: "layers/30/norm" in own for end, own in names.items()} == {
        **dict.fromkeys((9, 19), False),
        **dict.fromkeys((29, 39, 49, 59), True),
    }
    assert points[29]["layers/30/norm"] == 40.0
    assert max(map(len, names.values())) <= 4  # the three largest of each point come and go
    assert recorder.step == 60


@pytest.mark.slow
def test_of_many_layers_few_are_sent_and_those_that_stand_out_most_are_always_among_them():
    points = {}
    params = [(f"{k}", nn.Parameter(torch.ones(1))) for k in range(100)]
    optimizer = Modular(params, SGD(0.1))
    recorder = Recorder(optimizer, log=points.__setitem__, flush_every=10, ratios_every=0)
    for step in range(400):
        for k, (_, param) in enumerate(params):
            param.grad = torch.full((1,), 50.0 + step if step % 100 == k else 1.0)
        optimizer.step()
    assert max(len(point) for point in points.values()) <= 4 + 20 + 3
    assert points[399]["layers/99/norm"] == 449.0
    assert recorder.step == 400


def test_a_step_without_gradients_is_not_infinite():
    points = {}
    weight = nn.Parameter(torch.ones(1))
    optimizer = Modular([weight], SGD(0.1))
    recorder = Recorder(optimizer, log=points.__setitem__, flush_every=5, log_every=5)
    for step in range(10):
        weight.grad = None if step % 2 else torch.full((1,), 2.0)
        optimizer.step()
    assert points[9]["gradients/largest_norm"] == points[9]["gradients/norm"] == 2.0
    assert recorder.step == 10


@pytest.mark.parametrize("kind", [Writer, Logger, Accelerator, Trackio])
def test_loggers(kind):
    log = kind()
    recorded(log)
    assert sorted(log.points) == [9, 19, 29]
    assert log.points[29]["gradients/norm"] == 5.0


def test_weights_and_biases_gets_one_row_at_a_time():
    log = Run()
    recorder = recorded(log, 100, flush_every=50)
    assert [row["gradients/step"] for row in log.rows] == [9, 59]
    recorder.close()
    assert [row["gradients/step"] for row in log.rows] == [9, 59, 99]
    assert log.axes == {"gradients/*": "gradients/step", "layers/*": "gradients/step"}


def test_points_are_sent_no_more_often_than_steps_are_written():
    calls = []
    recorder = recorded(lambda step, values: calls.append(step), 35, flush_every=100, log_every=3)
    assert calls == [2, 5, 8]
    recorder.flush()
    assert calls == [*range(2, 35, 3)]
    recorder.close()
    assert calls == [*range(2, 35, 3), 34]


def test_a_logger_that_fails_warns_once_and_training_goes_on():
    def log(step, values):
        raise ConnectionError("offline")

    with pytest.warns(UserWarning, match="log= raised an error, and training continues") as caught:
        recorder = recorded(log)
    assert len(caught) == 1
    assert recorder.step == 30


def test_a_logger_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="log must be a run of Weights & Biases"):
        recorded("wandb")


def test_only_the_first_process_sends(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    points = {}
    recorded(points.__setitem__)
    assert points == {}


@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_norms_that_are_not_finite_are_inf():
    points = {}
    recorded(points.__setitem__, sizes={("a", 3): math.nan})
    assert points[9]["gradients/largest_norm"] == math.inf
    assert points[9]["gradients/norm"] == 5.0


@pytest.mark.slow
def test_a_point_of_many_steps_is_sent():
    calls = []
    recorder = recorded(lambda step, values: calls.append(step), 1100, flush_every=100, log_every=500)
    assert calls == [499, 999]
    calls.clear()
    recorder = recorded(lambda step, values: calls.append(step), 50, keep=5, log_every=10, flush_every=100)
    assert calls[0] == 4
    assert recorder.step == 50


def test_a_logger_may_close_the_recorder():
    calls, recorders = [], []

    def log(step, values):
        calls.append(step)
        if step == 19:
            recorders[0].close()

    params = [nn.Parameter(torch.ones(1))]
    optimizer = Modular(params, SGD(0.1))
    recorders.append(Recorder(optimizer, log=log, flush_every=50))
    for _ in range(60):
        params[0].grad = torch.ones(1)
        optimizer.step()
    assert calls == [9, 19, 29, 39, 49, 59]


def test_a_number_that_is_logged_has_the_name_of_the_column_in_which_it_is_read():
    points = {}
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([("w", weight)], ClipNorm(2.0, dim="global"), SGD(0.1))
    recorder = Recorder(optimizer, log=points.__setitem__, log_every=1, ratios_every=1)
    for size in (1.0, 4.0):
        weight.grad = torch.full((1,), size)
        recorder.report_loss(size / 2)
        optimizer.step()
    recorder.close()
    for step, row in enumerate(recorder.rows()):
        for name in ("norm", "loss", "limit", "share_clipped", "skipped"):
            assert points[step][f"gradients/{name}"] == float(row[name])
        assert math.isfinite(row["limit"])
    assert "layers/w/update_ratio" in points[1]  # the name of the number in `early_signs`
