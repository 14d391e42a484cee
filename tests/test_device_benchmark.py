"""The program that measures steps on a GPU: what it writes, and what it leaves out."""

import json
import math
import sys

import pytest
import torch

from benchmarks.device import __main__ as program
from benchmarks.device import meter, rows, steps, tables
from benchmarks.device.run import Run


@pytest.mark.slow
def test_it_measures_right_numbers_and_writes_tables_on_a_cpu(tmp_path, monkeypatch):
    words = ["--parts", "right", "steps", "norms", "--sets", "tiny", "--rounds", "1", "--device", "cpu"]
    words += ["--rows", 'ClipNorm(1, dim="global"), AdamW()', 'ClipNorm(1, dim="global"), float32', "--seconds", "300"]
    monkeypatch.setattr(sys, "argv", ["device", *words, "--out", str(tmp_path)])
    program.main()
    saved = json.loads((tmp_path / "device.json").read_text())
    assert saved["errors"] == {}
    assert saved["left out"] == ["norms: on a CPU they are always float64"]
    (check,) = saved["results"]["Numbers"].values()
    assert check["right"]
    assert 0 < check["difference"] < 1e-6
    measured = saved["results"]["tiny, float32"]
    assert list(measured) == [rows.CLIP_AND_FUSED, rows.GLOBAL_CLIP]
    base, ours = measured.values()
    assert base["wall ratio"] == base["host ratio"] == 1
    assert all(row[key] > 0 for row in (base, ours) for key in ("host", "wall", "device", "held", "wall ratio"))
    page = (tmp_path / "device.md").read_text()
    assert f"| `{rows.GLOBAL_CLIP}` | {ours['device']:.3g} (" in page


def test_an_error_in_one_row_leaves_the_others(tmp_path):
    run = Run(100, tmp_path / "saved.json")
    run.attempt("table", "broken", lambda: {"wall": 1 / 0})
    run.attempt("table", "good", lambda: {"wall": 2.0, "wall ratio": 0.5})
    run.attempt("table", "late", lambda: {"wall": 3.0}, end=0.0)
    run.attempt("table", "long", lambda: {"wall": 3.0}, need=1000)
    assert run.results == {"table": {"good": {"wall": 2.0, "wall ratio": 0.5}}}
    assert run.errors == {"table: broken": "ZeroDivisionError: division by zero"}
    assert run.left_out == ["table: late", "table: long"]
    page = tables.page(run)
    assert "| `good` | 2 (0.50) |" in page
    assert "* table: broken: ZeroDivisionError" in page
    assert "* table: late" in page


def test_rounds_in_which_the_device_woke_up_early_do_not_count():
    assert steps.medians([math.nan, 2.0, 6.0], [1.0, 1.0, 2.0]) == (4.0, 2.5)
    assert steps.medians([2.0, 6.0], [math.nan, 2.0]) == (4.0, 3.0)
    assert steps.medians([math.nan], [1.0]) == (None, None)


class Queue:
    """Stands in for a GPU that sleeps until ``awake``, and takes a millisecond for each step."""

    def __init__(self, monkeypatch, *, awake):
        self.done, self.recorded, self.steps = awake, 0, 0
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def record(self):
        self.recorded += 1

    def query(self):
        return self.done

    def elapsed_time(self, _):
        return float(self.steps)

    def step(self):
        self.steps += 1


@pytest.mark.parametrize(("awake", "expected"), [(False, 1.0), (True, math.nan)])
def test_the_time_of_the_device_counts_only_if_it_slept_meanwhile(monkeypatch, awake, expected):
    queue = Queue(monkeypatch, awake=awake)
    found = meter.Meter("cuda").on_device(queue.step, 0.1)
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert (queue.recorded, queue.steps) == (2, 1)


def test_a_captured_step_is_replayed_after_warm_steps(monkeypatch):
    log = []

    class Stream:
        def wait_stream(self, _):
            log.append("wait")

        def __enter__(self):
            log.append("side")

        def __exit__(self, *_):
            log.append("main")

    class Graph(Stream):
        def replay(self):
            log.append("replay")

    for name, stand_in in {"Stream": Stream, "current_stream": Stream, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = rows.Captured(lambda: log.append("step"))
    for _ in range(rows.WARM_UP + 2):
        step()
    ordinary = ["wait", "side", "step", "main", "wait"]
    assert log == [*(ordinary * rows.WARM_UP), "side", "step", "main", "replay", "replay"]
