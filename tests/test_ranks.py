"""The helpers that run tests in several processes: what they return, and what becomes of errors, deaths and hangs."""

import os
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.slow


def total(number):
    tensor = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(tensor)
    return {"rank": dist.get_rank(), "total": tensor, "threads": torch.get_num_threads()}


def raises_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("a bad number")
    dist.barrier()


def dies_on_one_rank():
    print("a last word", flush=True)  # noqa: T201
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def waits_alone():
    time.sleep(ranks.LIMIT * dist.get_rank())


def test_each_rank_returns_its_result():
    found = ranks.run(total, 3, 10)
    assert [result["rank"] for result in found] == [0, 1, 2]
    assert [result["total"].item() for result in found] == [33.0] * 3
    assert [result["threads"] for result in found] == [1] * 3


@pytest.mark.parametrize(
    ("program", "message"),
    # rank 0 may fail too before anyone looks, because its connection is closed
    [(raises_on_one_rank, r"ranks, \[(0, )?1\] failed(.|\n)*a bad number"), (dies_on_one_rank, "a last word")],
)
def test_a_rank_that_fails_ends_all(program, message):
    with pytest.raises(AssertionError, match=message):
        ranks.run(program, 2)


def test_a_hang_is_a_failure_that_shows_where_each_rank_waits():
    begun = time.monotonic()
    ranks.run(total, 2, 10)
    limit = 3.0 + 2 * (time.monotonic() - begun)  # a busy machine needs longer to start processes
    where = r"of 2 ranks, \[0, 1\] still run(.|\n)*rank 0(.|\n)*in barrier(.|\n)*rank 1(.|\n)*in waits_alone"
    with pytest.raises(AssertionError, match=where):
        ranks.run(waits_alone, 2, limit=limit)


def test_a_program_returns_its_exit_code_and_what_it_printed():
    code = "import os, sys; print('out', os.environ['WORD']); print('err', file=sys.stderr); sys.exit(3)"
    done = ranks.run_program([sys.executable, "-c", code], WORD="a word")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out a word\n", "err\n")


def test_a_program_that_hangs_is_a_failure_that_shows_where_its_processes_wait(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import subprocess, sys, time
def waits_for_another():
    subprocess.run([sys.executable, __file__, "other"])
def waits():
    print("begun", flush=True)
    time.sleep(1000)
waits() if sys.argv[1:] else waits_for_another()
"""
    )
    with pytest.raises(AssertionError, match=r"still ran\nbegun\n(.|\n)*") as error:
        ranks.run_program([sys.executable, program], limit=5.0)
    assert "in waits\n" in str(error.value)
    assert "in waits_for_another\n" in str(error.value)


def test_a_script_returns_what_it_printed_and_its_error_is_a_failure(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1])\nassert sys.argv[1] == 'good', 'a bad word'\n")
    assert ranks.run_script(script, "good") == "__main__ good\n"
    with pytest.raises(AssertionError, match="a bad word"):
        ranks.run_script(script, "bad")
