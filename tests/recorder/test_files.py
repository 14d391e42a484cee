"""The file of a record: what is written, when, and how it is read again."""

import copy
import gc
import json
import math
import multiprocessing
import os
import pickle
import resource
import sys
import textwrap
import time
import warnings
from contextlib import suppress

import pytest
import torch
from ranks import CONTEXT, LIMIT, run_program
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Recorder, SkipStep, read_record
from torchzero_clip.recorder import output
from torchzero_clip.recorder.files import append, encoded


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def start(path, **given):
    params = [("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(torch.zeros(3)))]
    optimizer = Modular(params, SkipStep(max_norm=100), ClipNorm(1.0), SGD(0.1), nonfinite="skip")
    return optimizer, Recorder(optimizer, path=path, **given)


def run(optimizer, count, start=0, sizes=None):
    for step in range(start, start + count):
        for param in optimizer.param_groups[0]["params"]:
            generator = torch.Generator().manual_seed(step)
            param.grad = torch.rand(param.shape, generator=generator) + 1
            param.grad *= (sizes or {}).get(step, 1.0)
        optimizer.report_loss(float(step))
        optimizer.step()


def lines(path):
    # a process that sees half of what another one writes ends that line, which leaves an empty one
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_full_rings_are_appended(path):
    optimizer, recorder = start(path, keep=10)
    run(optimizer, 9)
    assert path.read_bytes() == b""
    run(optimizer, 12, start=9)
    assert [row["step"] for row in lines(path) if row["kind"] == "step"] == list(range(20))
    recorder.flush()
    recorder.flush()
    assert [row["step"] for row in lines(path) if row["kind"] == "step"] == list(range(21))
    assert [row["kind"] for row in lines(path)].count("run") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_first_steps")
@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_what_is_read_is_what_was_written(path):
    optimizer, recorder = start(path, keep=300, ratios_every=50)
    run(optimizer, 250, sizes={120: 20.0, 200: 1000.0, 210: torch.inf})
    recorder.close()
    record, kept = read_record(path), recorder.record()
    assert record.steps == kept.steps
    assert record.reasons == kept.reasons
    assert {i for i, reason in enumerate(record.reasons) if reason} == {200, 210}
    assert math.isnan(record.norm[210])
    rest = [i for i in range(250) if i != 210]
    assert torch.equal(record.norm[rest], kept.norm[rest])
    assert torch.equal(record.loss, kept.loss)
    assert set(record.metrics) == set(kept.metrics)
    assert torch.equal(record.metrics["clip_norm/factor"].nan_to_num(), kept.metrics["clip_norm/factor"].nan_to_num())
    assert record.layer_steps == [0, 50, 100, 120, 150, 200, 210]
    assert record.spikes() == kept.spikes() == [120, 200, 210]
    assert str(record.suggest_max_norm()) == str(kept.suggest_max_norm())
    assert [(block.first, block.last) for block in record.blocks] == [(0, 99), (100, 199), (200, 249)]
    column = kept.layer_norms[:100, 0]
    assert record.blocks[0].median[0] == column.quantile(0.5)
    assert record.blocks[0].maximum[0] == column.max()
    assert [ratio.step for ratio in record.ratios] == [0, 50, 100, 150]  # 200 was skipped
    worst = record.worst(step=120)
    assert [layer.name for layer in worst] == [layer.name for layer in recorder.worst(step=120)]
    assert worst[0].ratio == pytest.approx(recorder.worst(step=120)[0].ratio, rel=0.1)
    with pytest.raises(ValueError, match="does not have the layers of step 5"):
        record.worst(step=5)
    with pytest.raises(ValueError, match="scope must be 'joint'"):
        record.suggest_max_norm(scope="parameter")
    with pytest.raises(ValueError, match="scope must be one of 'joint', 'parameter'"):
        record.suggest_max_norm(scope="layer")


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(path):
    optimizer, recorder = start(path, keep=10)
    run(optimizer, 20)
    saved = recorder.state_dict()
    run(optimizer, 30, start=20, sizes=dict.fromkeys(range(20, 50), 5.0))
    recorder.close()
    optimizer, recorder = start(path, keep=10)
    recorder.load_state_dict(saved)
    run(optimizer, 15, start=20)
    recorder.close()
    record = read_record(path)
    assert record.steps == list(range(35))
    assert record.norm.max() < 10
    assert record.loss.tolist() == [float(step) for step in range(35)]
    assert [block.last for block in record.blocks] == [9, 19, 29, 34]


@pytest.fixture
def no_first_steps(monkeypatch):
    """Layers of the first steps are not written."""
    monkeypatch.setattr(output, "WITH_LAYERS", 0)


@pytest.mark.usefixtures("no_first_steps")
@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_of_a_long_series_of_bad_steps_only_the_first_keep_their_layers(path):
    optimizer, recorder = start(path)
    with pytest.warns(UserWarning, match="20 steps in a row were skipped"):
        run(optimizer, 110, sizes=dict.fromkeys([*range(20, 45), 50], torch.inf))
    recorder.close()
    assert read_record(path).layer_steps == [0, *range(20, 30), 50, 100]
    assert len([reason for reason in read_record(path).reasons if reason]) == 26


def test_layers_that_are_added_later(path):
    optimizer, recorder = start(path)
    run(optimizer, 3)
    optimizer.add_param_group({"params": [("c", nn.Parameter(torch.zeros(1)))]})
    run(optimizer, 3, start=3, sizes={5: 1000.0})
    recorder.close()
    record = read_record(path)
    assert record.layers == ["a", "b", "c"]
    assert record.steps == list(range(6))
    assert record.blocks[0].median[2] == -1


@pytest.mark.slow
def test_the_end_of_the_process_writes_the_rest_and_a_kill_loses_one_ring(tmp_path):
    """Three forks of one program, because torch takes seconds to import."""
    program = textwrap.dedent(
        """
        import os, signal, sys, torch
        from torchzero_clip import ClipNorm, Modular, Recorder
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = Modular([("w", weight)], ClipNorm(1.0))
        for how in ("ended", "raised", "killed"):
            child = os.fork()
            if child == 0:
                break
            os.waitpid(child, 0)
        else:
            sys.exit()
        Recorder(optimizer, path=f"{sys.argv[1]}/{how}.jsonl", keep=10)
        for step in range(25):
            weight.grad = torch.ones(1)
            optimizer.step()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise RuntimeError
        """
    )
    done = run_program([sys.executable, "-c", program, tmp_path])
    assert done.returncode == 0, done.stderr
    ended, raised, killed = (read_record(tmp_path / f"{how}.jsonl").steps for how in ("ended", "raised", "killed"))
    assert ended == raised == list(range(25))
    assert killed == list(range(20))


def test_a_recorder_that_nobody_holds_writes_when_its_optimizer_goes(path):
    optimizer, _ = start(path)
    run(optimizer, 3)
    del optimizer, _
    gc.collect()
    assert read_record(path).steps == [0, 1, 2]


def test_jobs_that_are_killed_after_each_checkpoint_lose_no_step(tmp_path):
    path, saved = tmp_path / "run.jsonl", None
    for job in range(4):
        optimizer, recorder = start(path, keep=30)
        if saved is not None:
            recorder.load_state_dict(saved)
        run(optimizer, 25, start=25 * job)
        saved = recorder.state_dict()
        recorder._recording.output.log = None  # the process is killed
    assert read_record(path).steps == list(range(85))  # the last job wrote its tenth step


def test_a_copy_writes_no_file(path):
    optimizer, recorder = start(path)
    run(optimizer, 5)
    for copied in (copy.deepcopy(recorder), pickle.loads(pickle.dumps(recorder._recording))):
        copied.flush()
        copied.close()
    assert path.read_bytes() == b""
    run(optimizer, 5, start=5)
    recorder.close()
    assert read_record(path).steps == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "spike", "end"), [(10, 105, 120), (100, 205, 210), (1000, 1005, 1010)])
def test_the_layers_of_a_spike_are_written_however_few_steps_come_with_it(path, keep, spike, end):
    optimizer, recorder = start(path, keep=keep)
    run(optimizer, end, sizes={spike: 20.0})
    recorder.close()
    assert read_record(path).spikes() == [spike]
    assert read_record(path).worst(step=spike)[0].ratio > 10


@pytest.mark.usefixtures("no_first_steps")
def test_a_spike_that_is_known_only_later_gets_its_layers(path):
    optimizer, recorder = start(path)
    run(optimizer, 12, sizes={7: 20.0})
    recorder.flush()
    assert read_record(path).layer_steps == [0]
    run(optimizer, 90, start=12)
    recorder.close()
    assert read_record(path).layer_steps == [0, 7, 100]


@pytest.mark.parametrize(("every", "keep"), [(2, 1000), (35, 1000), (35, 25), (35, 1)])
def test_a_jump_is_named_and_a_layer_that_is_not_used_in_each_step_is_not(path, every, keep):
    """The last use of b is further back than what is written, read or stored."""
    a, b, c = params = [nn.Parameter(torch.zeros(1)) for _ in "abc"]

    def begun():
        optimizer = Modular([*zip("abc", params, strict=True)], SGD(0.1))
        return optimizer, Recorder(optimizer, keep=keep, path=path, ratios_every=2)

    def run(optimizer, first, end):
        for step in range(first, end):
            sizes = 1.0, float(step == 1 or step % every == every - 1), 0.1 if step in (69, 139) else 1e-3
            a.grad, b.grad, c.grad = (torch.full((1,), size) for size in sizes)
            optimizer.step()

    optimizer, recorder = begun()
    run(optimizer, 0, 75)
    saved = recorder.state_dict()
    recorder.close()
    optimizer, recorder = begun()
    recorder.load_state_dict(saved)
    run(optimizer, 75, 150)
    optimizer.add_param_group({"params": [("d", nn.Parameter(torch.zeros(1)))]})
    run(optimizer, 150, 185)
    recorder.flush()
    for record in (recorder, read_record(path)):
        assert [sign[:3] for sign in record.early_signs()] == [(step, "c", "norm") for step in (69, 139)]
    assert len(recorder.record().early_signs()) == (2 if keep == 1000 else 0)


def fails_halfway(error):
    """An `os.write` that writes half of the data, and then raises."""
    write, called = os.write, []

    def half(file, data):
        called.append(len(data))
        if len(called) > 1:
            raise error
        return write(file, data[: len(data) // 2])

    return half


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["full", "interrupt"])
def test_a_flush_that_fails_loses_nothing(path, monkeypatch, error):
    optimizer, recorder = start(path, keep=10)
    run(optimizer, 15)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails_halfway(error))
        with pytest.raises(type(error)):
            recorder.flush()
    assert path.read_bytes() == before
    run(optimizer, 5, start=15)
    recorder.close()
    assert read_record(path).steps == list(range(20))


def test_a_half_line_stays_if_another_process_has_written_behind_it(path, monkeypatch):
    optimizer, recorder = start(path)
    run(optimizer, 10)
    other = encoded([{"kind": "of another process"}], "other")

    def half_and_other(file, data):
        monkeypatch.undo()
        os.write(file, data[: len(data) // 2])
        append(path, other)
        raise OSError("disk full")

    run(optimizer, 5, start=10)
    monkeypatch.setattr(os, "write", half_and_other)
    with pytest.raises(OSError, match="disk full"):
        recorder.flush()
    assert path.read_bytes().endswith(b"\n" + other)
    recorder.close()
    with pytest.warns(UserWarning, match="1 line is broken or belongs to an unknown run, and was left out"):
        assert read_record(path).steps == list(range(15))


def test_a_disk_that_stays_full_gives_one_warning(path, monkeypatch):
    optimizer, recorder = start(path, keep=10)

    def fails(file, data):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        with pytest.warns(UserWarning, match="no space left") as caught:
            run(optimizer, 30)
    assert len(caught) == 1
    run(optimizer, 10, start=30)
    recorder.close()
    assert read_record(path).steps == list(range(30, 40))  # the ring had no room for more


@pytest.mark.slow
def test_a_file_that_reaches_the_limit_of_its_size_has_whole_lines(path):
    """The kernel writes what fits, and then fails, as on a full disk."""
    process = CONTEXT.Process(target=reach_the_limit, args=(path,))
    process.start()
    process.join(LIMIT)
    process.kill()
    process.join()
    assert process.exitcode == 0
    assert path.read_bytes().endswith(b"\n")
    steps = read_record(path).steps
    assert steps == list(range(len(steps)))
    assert len(steps) > 20


def reach_the_limit(path):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([("w", weight)], ClipNorm(1.0))
    recorder = Recorder(optimizer, path=path, flush_every=7)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            weight.grad = torch.ones(1)
            optimizer.step()
        with suppress(OSError):
            recorder.close()
    assert ["could not be written" in str(warning.message) for warning in caught].count(True) == 1


def test_paths(tmp_path, monkeypatch):
    for wrong in ("/proc/run.jsonl", "x" * 300):
        with pytest.raises(ValueError, match="cannot be written"):
            start(tmp_path / wrong if wrong[0] == "x" else wrong)
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    optimizer, recorder = start("relative.jsonl", keep=10)
    run(optimizer, 10)
    monkeypatch.chdir(tmp_path / "y")
    run(optimizer, 10, start=10)
    (tmp_path / "x" / "relative.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.warns(UserWarning, match="was replaced or shortened"):
        run(optimizer, 10, start=20)
    recorder.close()
    assert read_record(tmp_path / "moved.jsonl").steps == list(range(20))
    assert read_record(tmp_path / "x" / "relative.jsonl").steps == list(range(20, 30))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore")
def test_a_fork_does_not_write(path):
    optimizer, recorder = start(path)
    run(optimizer, 5)
    child = os.fork()
    if not child:
        recorder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.read_bytes() == b""


def test_a_new_recorder_takes_over_the_file_of_an_older_one(path):
    first, older = start(path)
    run(first, 5)
    second, newer = start(path)
    before = [param.clone() for param in first.param_groups[0]["params"]]
    with pytest.raises(RuntimeError, match="another Recorder of this process now writes to path="):
        run(first, 1, start=5)
    assert all(torch.equal(a, b) for a, b in zip(before, first.param_groups[0]["params"], strict=True))
    assert older.step == 5
    older.close()
    run(first, 1, start=5)
    with pytest.warns(UserWarning, match="already has a record"):
        run(second, 10)
    newer.close()
    with pytest.warns(UserWarning, match=r"also has run '\w+' \(steps 0 to 4\)") as caught:
        assert read_record(path).steps == list(range(10))
    other = str(caught[0].message).split("'")[1]
    assert read_record(path, run=other).steps == list(range(5))


def test_only_the_first_process_touches_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    optimizer, recorder = start(tmp_path / "missing" / "run.jsonl")
    run(optimizer, 20)
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def records(path, barrier, index):
    """In a fork: wait for the others, then record a few steps."""
    barrier.wait(LIMIT)
    optimizer, recorder = start(path)
    run(optimizer, 12)
    recorder.close()
    assert recorder.step == 12 + 0 * index


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_ranks", [True, False])
def test_processes_on_one_fresh_path(tmp_path, has_ranks, monkeypatch):
    context = multiprocessing.get_context("fork")
    start(tmp_path / "first.jsonl")  # the first optimizer of a process imports a lot
    for k in range(8):
        path, barrier = tmp_path / f"{k}.jsonl", context.Barrier(4)
        processes = []
        for index in range(4):
            if has_ranks:
                monkeypatch.setenv("RANK", str(index))
            processes.append(context.Process(target=records, args=(path, barrier, index)))
            processes[-1].start()
        end = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * 4, f"exit codes; None still ran after {LIMIT} s"
        runs = {row["id"] for row in lines(path) if row["kind"] == "run"}
        assert len(runs) == (1 if has_ranks else 4)
        for name in runs:
            assert read_record(path, run=name).steps == list(range(12))


def test_the_reading_of_a_file_knows_joint_limits(path):
    weight = nn.Parameter(torch.zeros(2))
    chain = [
        ClipNorm(9.0, 1, dim="global"),
        ClipNorm(2.0, dim="global").only("w"),
        ClipNorm(3.0, dim="global"),
        SGD(0.1),
    ]
    optimizer = Modular([("w", weight)], *chain)
    recorder = Recorder(optimizer, path=path)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert recorder.record().limits().tolist() == [3.0]
    recorder.close()
    assert read_record(path).limits().tolist() == [3.0]
