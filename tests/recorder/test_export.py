"""A record as a table, and through the writers of others."""

import csv
import importlib
import math
import sys

import pytest
import torch
from recorder.records import column, made
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Recorder, SkipStep
from torchzero_clip.recorder.data import Ratios


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
    "reason": ["", "", "skip_step"],
}


def test_without_pandas_the_error_names_the_way_out(recorder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"frame\(\) needs pandas: pip install pandas, or call rows\(\)"):
        recorder.frame()
    assert len(recorder.rows()) == 3


def test_rows_are_dicts_with_the_columns_of_frame(recorder):
    rows = recorder.rows()
    assert str(rows) == str([{name: values[k] for name, values in EXPECTED.items()} for k in range(3)])
    rows = recorder.rows(transforms=True)
    assert [row["reason"] for row in rows] == ["", "", "skip_step"]
    assert [row["clip_norm/limit"] for row in rows] == [2.0, 2.0, 2.0]
    assert made([]).rows(transforms=True) == []


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


@pytest.mark.slow
@pytest.mark.parametrize("begin", ['{"kind": "run", "version": 1', ' \n{"kind":"run"'])
def test_no_export_writes_over_the_file_of_a_recorder(begin, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    record = made([1.0] * 30)
    path = tmp_path / "run.jsonl"
    path.write_text(begin)
    (tmp_path / "link").symlink_to(path)
    for place in (path, str(path), tmp_path / "link", tmp_path / "." / "run.jsonl"):
        for export in (record.to_csv, record.plot, record.suggest_max_norm().plot):
            with pytest.raises(ValueError, match=r"is the file of a Recorder. Choose another path"):
                export(place)
    assert path.read_text() == begin
    (tmp_path / "run.csv").write_text("an older table")
    record.to_csv(tmp_path / "run.csv")
    assert (tmp_path / "run.csv").read_text().startswith("step,norm")


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


LAYERS = made(
    [5.0, math.inf, 1.0],
    ("0.weight", "0.bias"),
    layer_steps=[0, 1],
    layer_norms=column([[3.0, 4.0], [-1.0, math.inf]]),
    ratios=[Ratios(0, column([10.0, 0.0]), column([0.5, 1.0])), Ratios(2, column([4.0, 2.0]), column([-1.0, 1.0]))],
)
OF_LAYERS = {
    0: {"layers/0.weight/norm": 3.0, "layers/0.bias/norm": 4.0, "layers/0.weight/update_ratio": 0.05},
    1: {"layers/0.bias/norm": math.inf},
    2: {"layers/0.bias/update_ratio": 0.5},
}


def test_layers_are_written_in_the_steps_for_which_they_are_known():
    run, writer = Writer(), Writer()
    LAYERS.to_wandb(run)
    LAYERS.to_tensorboard(writer)
    assert [step for _, step in run.calls] == [0, 1, 2]
    for values, step in run.calls:
        found = {name: value for name, value in values.items() if name.startswith("layers/")}
        assert found == OF_LAYERS[step]
        assert {call[:2] for call in writer.calls if call[2] == step} == set(values.items())


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
