"""The helper that runs tests in several processes: what it returns, and what becomes of errors, deaths and hangs."""

import os
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
    time.sleep(60 * dist.get_rank())


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
    with pytest.raises(AssertionError, match=r"still run(.|\n)*rank 1(.|\n)*in waits_alone"):
        ranks.run(waits_alone, 2, limit=4.0)
