"""A file of a record that was replaced during a run gives one warning, and the run goes on in the new file."""

import contextlib
import os
import warnings

import pytest
import torch
from contract.training import parameters

from torchzero_clip import SGD, ClipNorm, Modular, Recorder, read_record


def removed(path):
    path.unlink()


def another(path):
    """As an editor or a synchronization replaces a file: another one, with the same lines."""
    text = path.read_text()
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def moved(path):
    path.rename(path.with_suffix(".old"))


def emptied(path):
    path.write_text("")


def shortened(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))


REPLACED = (removed, another, moved, emptied, shortened)


def made(path):
    params = parameters(shapes=[(2,), (1,)])
    optimizer = Modular([("a", params[0]), ("b", params[1])], ClipNorm(1), SGD(0.1))
    return params, optimizer, Recorder(optimizer, path=path, flush_every=5)


def run(params, optimizer, steps):
    """Take steps, and return the texts of the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("replace", REPLACED)
def test_one_warning_and_the_run_goes_on(replace, tmp_path):
    path = tmp_path / "run.jsonl"
    params, optimizer, recorder = made(path)
    assert run(params, optimizer, 20) == []
    replace(path)
    (text,) = run(params, optimizer, 20)
    assert text.startswith(f"{path} was replaced or shortened during the run")
    replace(path)
    assert run(params, optimizer, 20) == []
    recorder.close()
    # a file without its middle says so when it is read
    gap = pytest.warns(UserWarning, match="were lost") if replace is shortened else contextlib.nullcontext()
    with gap:
        record = read_record(path)
    assert record.steps[-10:] == list(range(50, 60))
    assert record.layers == ["a", "b"]


def test_a_file_to_which_another_process_appends_is_the_same_file(tmp_path):
    path = tmp_path / "run.jsonl"
    params, optimizer, recorder = made(path)
    run(params, optimizer, 10)
    with path.open("a") as file:
        file.write('{"kind": "unknown"}\n')
    assert run(params, optimizer, 30) == []
    recorder.close()


def test_a_file_that_was_replaced_before_the_first_write_is_the_file_of_the_run(tmp_path):
    path = tmp_path / "run.jsonl"
    params, optimizer, recorder = made(path)
    path.unlink()
    assert run(params, optimizer, 20) == []
    recorder.close()
    assert len(read_record(path).steps) == 20
