"""Runs of several processes: a run that is killed and resumed has the parameters and the file of an unbroken run."""

import importlib.util
import json
import shutil
import signal
import textwrap
from dataclasses import fields

import pytest
import torch
from ranks import CONTEXT, PRELOADED, run_script
from recorder import trainings
from recorder.launches import launch
from recorder.trainings import KILLED, SAVED, STEPS

from torchzero_clip import read_record

pytestmark = pytest.mark.slow
CONTEXT.set_forkserver_preload([*PRELOADED, "transformers.trainer", "lightning.pytorch", "accelerate"])


one_server = pytest.mark.xdist_group("processes")  # of pytest-xdist's processes, only one imports the trainers


def needs(*names):
    """The marks of a test that needs trainers."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return [pytest.mark.peers, pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")]


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_same_record(actual, expected):
    for own in fields(expected):
        a, b = getattr(actual, own.name), getattr(expected, own.name)
        if own.name in ("blocks", "ratios"):
            assert len(a) == len(b)
            for one, other in zip(a, b, strict=True):
                assert_equal(dict(enumerate(astuple(one))), dict(enumerate(astuple(other))))
        elif own.name in ("reasons", "layers", "joint"):
            assert a == b, own.name
        else:
            assert_equal(a, b)


def astuple(row):
    return tuple(row) if isinstance(row, tuple) else tuple(getattr(row, own.name) for own in fields(row))


def runs(path, may_be_cut=False):
    """The id of each run in the file, and that of the run which it resumed. All lines must be whole.

    With ``may_be_cut`` the last line may be cut: the kernel writes page by page, and SIGKILL can come between two.
    """
    text = path.read_text()
    assert may_be_cut or text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(row["id"], row["parent"]) for row in rows if row["kind"] == "run"]


JOBS = {
    "Hugging Face": (trainings.hugging_face, (False,), needs("transformers", "accelerate")),
    "Accelerate": (trainings.accelerate, (), needs("accelerate")),
    "FSDP2": (trainings.sharded, (1,), []),
    "FSDP2, nothing is written before the kill": (trainings.sharded, (100,), []),
}


@one_server
@pytest.mark.parametrize("job", [pytest.param(name, marks=marks) for name, (*_, marks) in JOBS.items()])
def test_a_run_that_is_killed_and_resumed_equals_an_unbroken_one(tmp_path, job):
    program, options, _ = JOBS[job]
    unbroken, parts = tmp_path / "unbroken", tmp_path / "parts"
    unbroken.mkdir()
    parts.mkdir()
    expected = launch(tmp_path / "1", program, unbroken, False, *options)
    launch(tmp_path / "2", program, parts, False, *options, killed_by=signal.SIGKILL)
    is_written = options != (100,)
    assert read_record(parts / "run.jsonl").steps == list(range(KILLED if is_written else 0))
    found = launch(tmp_path / "3", program, parts, True, *options)

    for rank in range(2):
        assert found[rank]["warned"] == expected[rank]["warned"] == []
        assert_equal(found[rank]["params"], expected[rank]["params"])
        assert_equal(found[rank]["norms"], expected[0]["norms"][SAVED:])
        assert found[rank]["record"].steps == list(range(STEPS))
        torch.testing.assert_close(found[rank]["record"].layer_norms, expected[0]["norms"], rtol=1e-6, atol=0)
    record, whole = read_record(parts / "run.jsonl"), read_record(unbroken / "run.jsonl")
    assert record.steps == list(range(STEPS))
    torch.testing.assert_close(record.norm, expected[0]["norms"].square().sum(1).sqrt(), rtol=1e-6, atol=0)
    assert not record.loss.isnan().any()
    assert sorted(record.layers) == sorted(f"layers.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    assert [ratio.step for ratio in record.ratios] == [0, 3, 6]
    assert_same_record(record, whole)
    *killed, (resumed, parent) = runs(parts / "run.jsonl")
    assert killed == ([(parent, None)] if is_written else [])
    assert resumed != parent
    assert len(runs(unbroken / "run.jsonl")) == 1
    if "logged" in expected[0]:
        assert record.loss.tolist() == [expected[0]["logged"][step + 1] for step in range(STEPS)]


@one_server
@pytest.mark.parametrize("program", [pytest.param(trainings.lightning, marks=needs("lightning"))])
def test_lightning_goes_on_from_an_epoch_and_from_inside_of_one(tmp_path, program):
    """A resume from the middle of an epoch has data in another order, so it is compared with one without a recorder."""
    unbroken, parts = tmp_path / "unbroken", tmp_path / "parts"
    unbroken.mkdir()
    parts.mkdir()
    expected = launch(tmp_path / "1", program, unbroken, None, True)
    launch(tmp_path / "2", program, parts, None, True, killed_by=signal.SIGKILL)
    shutil.copytree(parts, tmp_path / "copy")
    at_end = launch(tmp_path / "3", program, parts, "end-of-0.ckpt", True)
    inside = launch(tmp_path / "4", program, tmp_path / "copy", "step-6.ckpt", True)
    without = launch(tmp_path / "5", program, tmp_path / "copy", "step-6.ckpt", False)
    for found, start, path in ((at_end, 4, parts), (inside, 6, tmp_path / "copy")):
        record = read_record(path / "run.jsonl")
        norms = torch.cat([expected[0]["norms"][:start], found[0]["norms"]])
        assert record.steps == list(range(len(norms)))
        torch.testing.assert_close(record.norm, norms.square().sum(1).sqrt(), rtol=1e-6, atol=0)
        for rank in range(2):
            assert found[rank]["warned"] == []
            torch.testing.assert_close(found[rank]["record"].layer_norms, norms, rtol=1e-6, atol=0)
        (first, none), (_, parent) = runs(path / "run.jsonl")
        assert (none, parent) == (None, first)
    assert_same_record(read_record(parts / "run.jsonl"), read_record(unbroken / "run.jsonl"))
    for rank in range(2):
        assert_equal(at_end[rank]["params"], expected[rank]["params"])
        assert_equal(inside[rank]["params"], without[rank]["params"])


@one_server
@pytest.mark.parametrize("killed_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_costs_at_most_the_step_that_is_taken(tmp_path, killed_by):
    for k in range(10):
        path, taken = tmp_path / f"{k}.jsonl", tmp_path / f"{k}.taken"
        launch(tmp_path / str(k), trainings.endless, path, taken, ranks=1, killed_by=killed_by)
        assert len(runs(path, may_be_cut=killed_by is signal.SIGKILL)) == 1
        steps = read_record(path).steps
        assert steps == list(range(len(steps)))
        count = int.from_bytes(taken.read_bytes())
        assert 3 <= count <= len(steps) <= count + 1


def test_a_launch_of_torchrun_without_a_group_on_a_fresh_path(tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "run.jsonl"
    program.write_text(
        textwrap.dedent(
            """
            import os, sys, torch
            from torchzero_clip import ClipNorm, Modular, Recorder

            for rank in range(2):
                if not os.fork():  # as torchrun starts a process
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
                    break
            else:
                sys.exit(os.wait()[1] or os.wait()[1])
            weight = torch.nn.Parameter(torch.zeros(1))
            optimizer = Modular([("w", weight)], ClipNorm(1.0))
            recorder = Recorder(optimizer, path=sys.argv[1])
            for step in range(25):
                weight.grad = torch.full((1,), 1.0 + rank)
                optimizer.step()
            recorder.close()
            os._exit(0)
            """
        )
    )
    run_script(program, str(path))
    assert len(runs(path)) == 1
    record = read_record(path)
    assert record.steps == list(range(25))
    assert record.norm.tolist() == [1.0] * 25
