"""A record as a table, and through the writers of others."""

import csv
import importlib
import math
import sys

import pytest
import torch
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Recorder, SkipStep


@pytest.fixture
def recorder():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([("w", weight)], SkipStep(max_norm=100), ClipNorm(2.0), SGD(0.1))
    found = Recorder(optimizer)
    for size in (1.0, 4.0, 1000.0):
        weight.grad = torch.full((1,), size)
        optimizer.report_loss(size / 2)
        optimizer.step()
    return found


EXPECTED = {
    "step": [0, 1, 2],
    "norm": [1.0, 4.0, 1000.0],
    "loss": [0.5, 2.0, 500.0],
    "share_clipped": [0.0, 1.0, math.nan],
    "skipped": [False, False, True],
}


def test_without_pandas_it_is_a_dict_of_lists(recorder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert str(recorder.frame()) == str(EXPECTED)
    assert recorder.frame(transforms=True)["reason"] == ["", "", "skip_step"]
    assert recorder.frame(transforms=True)["clip_norm/limit"] == [2.0, 2.0, 2.0]


@pytest.mark.filterwarnings("ignore")
def test_with_pandas_it_is_a_data_frame(recorder):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = recorder.frame()
    pandas.testing.assert_frame_equal(frame, pandas.DataFrame(EXPECTED, index=[0, 1, 2]))
    assert frame.loc[2].norm == 1000.0


def test_csv(recorder, tmp_path):
    recorder.to_csv(tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["norm"]) for row in rows] == EXPECTED["norm"]
    assert rows[2]["reason"] == "skip_step"
    assert float(rows[1]["clip_norm/factor"]) == 0.5


class Writer:
    def __init__(self):
        self.calls = []

    def add_scalar(self, name, value, step):
        self.calls.append((name, value, step))

    def log(self, values, step):
        self.calls.append((values, step))


def test_tensorboard(recorder):
    writer = Writer()
    recorder.to_tensorboard(writer, since=1)
    assert ("gradients/norm", 4.0, 1) in writer.calls
    assert ("gradients/skipped", 1.0, 2) in writer.calls
    assert ("clip_norm/factor", 0.5, 1) in writer.calls
    assert not [call for call in writer.calls if call[2] == 0]
    assert not [call for call in writer.calls if math.isnan(call[1])]


def test_a_folder_is_no_writer(recorder):
    with pytest.raises(TypeError, match="SummaryWriter"):
        recorder.to_tensorboard("logs")


def test_wandb(recorder):
    run = Writer()
    recorder.to_wandb(run)
    assert [step for _, step in run.calls] == [0, 1, 2]
    assert run.calls[2][0]["gradients/loss"] == 500.0
    assert "clip_norm/factor" not in run.calls[2][0]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_the_writer_of_torch(recorder, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        recorder.to_tensorboard(writer)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("gradients/norm")] == EXPECTED["norm"]
