"""What a record prints; and a record as a table, in rows and in a frame of pandas."""

import math
import sys
from pathlib import Path

import pytest
import torch
from recorder.records import column, made
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Recorder, SkipStep


def test_a_long_record_prints_in_one_short_text():
    record = made([1.0] * 5000, layers=("weight", "bias"), metrics={"clip_norm/factor": column([0.5] * 5000)})
    assert repr(record) == (
        "Record of 5,000 steps, from 0 to 4,999, and 2 layers. Vectors with a number for each step: "
        "norm, loss, metrics['clip_norm/factor']. "
        'To read it: rows(), frame(), spikes(), worst(step=...), plot("norms.png").'
    )


def test_a_record_without_steps_prints():
    assert repr(made([])).startswith("Record of 0 steps, and 1 layer. ")


def test_the_methods_that_a_record_prints_exist():
    for method in ("rows", "frame", "spikes", "worst", "plot"):
        assert f"{method}(" in repr(made([1.0]))
        assert callable(getattr(made([1.0]), method))


def test_the_line_of_the_readme_prints_an_empty_list_above_the_table_of_worst(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = [line for line in readme.split("\n") if "recorder.spikes()" in line]
    exec(line, {"recorder": made([1.0] * 100)})
    first, head, row = capsys.readouterr().out.strip().split("\n")
    assert first == "[]"
    assert head.index("norm") + len("norm") == row.index("1") + 1


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
    "limit": [math.nan] * 3,
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
    assert recorder.frame(transforms=True).loc[1, "clip_norm/factor"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("begin", ['{"kind": "run", "version": 1', ' \n{"kind":"run"'])
def test_no_picture_is_written_over_the_file_of_a_recorder(begin, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    record = made([1.0] * 30)
    path = tmp_path / "run.jsonl"
    path.write_text(begin)
    (tmp_path / "link").symlink_to(path)
    for place in (path, str(path), tmp_path / "link", tmp_path / "." / "run.jsonl"):
        for plot in (record.plot, record.suggest_max_norm().plot):
            with pytest.raises(ValueError, match=r"is the file of a Recorder. Choose another path"):
                plot(place)
    assert path.read_text() == begin
