"""The file of a record, read again: which lines count, which run is read, and files that are wrong."""

import json
import time
import tracemalloc

import pytest
from recorder.records import run_line, step_line

from torchzero_clip import read_record

OLD = '{"kind": "run", "version": 1, "start": 0, "by": "parameter", "joint": [], "layers": ["a", "b"]}'


def step(number, name=None, norm=1.0, **more):
    return step_line(number, norm=norm, **more, **({} if name is None else {"run": name}))


def steps(numbers, name, norm=1.0):
    return [step(number, name, norm) for number in numbers]


@pytest.fixture
def write(tmp_path):
    def written(*lines, end="\n"):
        path = tmp_path / "run.jsonl"
        path.write_text("\n".join(lines) + end)
        return path

    return written


def test_a_file_without_ids_is_read(write):
    path = write(
        OLD, *[step(k, norm=1.0) for k in range(5)], OLD.replace('"start": 0', '"start": 3'), step(3, norm=9.0)
    )
    assert read_record(path).norm.tolist() == [1.0, 1.0, 1.0, 9.0]


def test_the_run_of_the_last_line_is_read_and_the_other_one_is_named(write):
    mixed = [line for pair in zip(steps(range(4), "x", 1.0), steps(range(4), "y", 2.0), strict=True) for line in pair]
    path = write(run_line("x"), run_line("y"), *mixed)
    with pytest.warns(UserWarning, match=r"also has run 'x' \(steps 0 to 3\): pass run= to read another one"):
        assert read_record(path).norm.tolist() == [2.0] * 4
    assert read_record(path, run="x").norm.tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="has no run 'z': it has 'x', 'y'"):
        read_record(path, run="z")


def test_a_run_has_the_steps_of_those_that_it_resumed(write):
    lines = [run_line("x"), *steps(range(10), "x", 1.0), run_line("y", 6, "x"), *steps(range(6, 9), "y", 2.0)]
    assert read_record(write(*lines)).norm.tolist() == [1.0] * 6 + [2.0] * 3
    lines += [run_line("z", 4, "y"), *steps(range(4, 6), "z", 3.0)]
    path = write(*lines)
    assert read_record(path).norm.tolist() == [1.0] * 4 + [3.0] * 2
    assert read_record(path, run="y").steps == list(range(9))
    # a process that is still alive goes on with the first run
    path = write(*lines, step(10, "x", 7.0))
    assert read_record(path).norm.tolist() == [1.0] * 10 + [7.0]


def test_a_run_may_resume_one_that_is_not_in_the_file_or_itself(write):
    assert read_record(write(run_line("y", 6, "x"), *steps(range(6, 9), "y"))).steps == [6, 7, 8]
    assert read_record(write(run_line("x", 0, "y"), run_line("y", 2, "x"), *steps(range(3), "x"))).steps == [0, 1, 2]


def test_a_late_loss_replaces_that_of_its_step(write):
    late = [
        '{"kind": "loss", "run": "x", "step": 1, "loss": 5.0}',
        '{"kind": "loss", "run": "x", "step": 7, "loss": 1}',
    ]
    loss = read_record(write(run_line("x"), *steps(range(3), "x"), *late)).loss
    assert loss.isnan().tolist() == [True, False, True]
    assert loss[1] == 5.0


def test_lines_that_are_not_json_are_counted_and_left_out(write):
    broken = ["nonsense", "[1, 2]", "[" * 100_000, '{"kind": 3}', step(1, "x")[:30]]
    path = write(run_line("x"), step(0, "x"), *broken, step(1, "x"))
    with pytest.warns(UserWarning, match="5 lines are broken or belong to an unknown run, and were left out"):
        assert read_record(path).steps == [0, 1]


@pytest.mark.parametrize("end", ["", "\n"])
def test_kinds_of_lines_that_are_unknown_are_left_out(write, end):
    path = write(run_line("x"), '{"kind": "tree", "step": "a"}', step(0, "x"), '{"kind": "note"}', end=end)
    assert read_record(path).steps == [0]


def test_an_incomplete_last_line_is_left_out_without_a_warning(write):
    assert read_record(write(run_line("x"), step(0, "x"), step(1, "x")[:30], end="")).steps == [0]
    for whole in (run_line("x"), OLD):
        for count in range(1, len(whole)):
            assert read_record(write(whole[:count], end="")).steps == []


@pytest.mark.parametrize("line", ["nonsense", '{"kind": "sun', '{"a": 1}', "3", "[", '"', "\x00\ufffd"])
def test_a_file_of_something_else_is_refused(write, line):
    with pytest.raises(ValueError, match=r"run.jsonl, line 1: .*(not written by a Recorder|must come first)"):
        read_record(write(line, end="\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (step("3"), "line 2: 'step' is missing"),
        (step(True), "line 2: 'step' is"),
        (step(-1), "line 2: the number of a step is out of range"),
        (step(10**17), "line 2: the number of a step is out of range"),
        ('{"kind": "step", "step": 3}', "line 2: 'norm' is missing"),
        (step(3, metrics={"a": "b"}), "must be numbers"),
        ('{"kind": "layers", "step": 3, "norms": [1.0]}', "line 2: it has 1 numbers for 2 layers"),
        ('{"kind": "layers", "step": 3, "norms": [1.0, "x"]}', "line 2: it must have numbers only"),
        ('{"kind": "layers", "step": 3, "norms": [1, 2], "jumps": ["x"]}', "line 2: its jumps must be names of layers"),
        ('{"kind": "layers", "step": 3, "norms": [1, 2], "jumps": 1}', "line 2: 'int' object is not iterable"),
        (step(3, norm=10**400), "line 2: int too"),
        (OLD.replace('"version": 1', '"version": 2'), "version 2 cannot be read"),
    ],
)
def test_wrong_entries_are_named(write, line, message):
    path = write(OLD, line, step(0))
    with pytest.raises(ValueError, match=message) as error:
        read_record(path)
    assert str(path) in str(error.value)


def test_bad_files(tmp_path, write):
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="line 1: a line of the kind 'run' must come first"):
        read_record(write(step(0), step(0)))
    path = tmp_path / "other.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not written by a Recorder"):
        read_record(path)
    path.write_text("")
    assert read_record(path).steps == []


def test_lines_of_a_run_without_a_head_are_left_out(write):
    path = write(run_line("x"), step(0, "x"), step(7, "other"), step(1, "x"))
    with pytest.warns(UserWarning, match="1 line is broken or belongs to an unknown run, and was left out"):
        assert read_record(path).steps == [0, 1]


def test_a_first_line_that_was_cut_does_not_hide_the_next_run(write):
    whole = run_line("x")
    for count in range(1, len(whole)):
        path = write(whole[:count], run_line("y"), *steps(range(3), "y"))
        with pytest.warns(UserWarning, match="1 line is broken or belongs to an unknown run, and was left out"):
            assert read_record(path).steps == [0, 1, 2]


def test_a_flipped_byte_costs_one_line(write):
    path = write(run_line("x"), *steps(range(3), "x"))
    data = bytearray(path.read_bytes())
    place = data.index(b'"step": 1')
    data[place] = 0xFF
    path.write_bytes(data)
    with (
        pytest.warns(UserWarning, match="1 line is broken or belongs to an unknown run, and was left out"),
        pytest.warns(UserWarning, match="of steps 0 to 2, 1 was lost"),
    ):
        assert read_record(path).steps == [0, 2]


def test_lost_steps_are_counted(write):
    path = write(run_line("x"), *steps([0, 1, 5, 6, 9], "x"))
    with pytest.warns(UserWarning, match="of steps 0 to 9, 5 were lost"):
        assert read_record(path).steps == [0, 1, 5, 6, 9]


@pytest.mark.slow
def test_many_resumes_are_read_in_moments(write):
    lines = [line for k in range(3000) for line in (run_line(f"r{k}", k, f"r{k - 1}" if k else None), step(k, f"r{k}"))]
    begin = time.perf_counter()
    assert read_record(write(run_line("z"), *steps(range(1), "z"), *lines), run="r2999").steps == list(range(3000))
    assert time.perf_counter() - begin < 20  # quadratic reading takes minutes


@pytest.mark.slow
def test_a_long_file_is_read_in_moments(write):
    path = write(run_line("x"), *[step(k, "x", metrics={"clip_norm/limit": 1.0}) for k in range(20_000)])
    begin = time.perf_counter()
    assert len(read_record(path).steps) == 20_000
    assert time.perf_counter() - begin < 20  # quadratic reading takes minutes


def test_lines_for_steps_that_are_not_there_are_left_out(write):
    path = write(OLD, '{"kind": "layers", "step": 5, "norms": [1.0, 2.0]}')
    assert read_record(path).layer_steps == []
    with pytest.raises(ValueError, match="does not have the layers of any step"):
        read_record(path).worst()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        lambda: [
            line
            for k in range(2000)
            for line in (
                run_line("x", k, layers=[f"{k}.{i}" for i in range(100)]),
                step(k, "x"),
                json.dumps({"kind": "layers", "run": "x", "step": k, "norms": [1.0] * 100}),
            )
        ],
        lambda: [run_line("x"), *[step(k, "x", metrics={f"{k}.{i}": 1.0 for i in range(20)}) for k in range(5000)]],
    ],
    ids=["layers", "metrics"],
)
def test_a_hostile_file_takes_memory_of_its_size(write, lines):
    path = write(*lines())
    tracemalloc.start()
    with pytest.raises(ValueError, match="other layers or metrics in every line"):
        read_record(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * path.stat().st_size
