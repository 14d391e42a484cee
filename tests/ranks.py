"""Runs a function in several processes with one gloo group, under a time limit, so that a hang fails the test."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 60.0
"""Seconds."""
CONTEXT = multiprocessing.get_context("forkserver")  # what takes seconds to import is imported once
CONTEXT.set_forkserver_preload(
    [
        "torchzero_clip",
        "torch._dynamo",  # the first optimizer of a process imports it
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "pytest",  # for functions in test modules
    ]
)


def run(program: Callable[..., Any], ranks: int, *args: Any, limit: float = LIMIT, **options: Any) -> list[Any]:
    """Call ``program(*args, **options)`` in new processes with one gloo group, and return what each rank returns.

    `torch.distributed.get_rank` gives the number of the process. The first rank that raises or dies ends all of them.

    Args:
        program: A function of a module, so that it can be pickled.
        ranks: The number of processes.
        args: They are pickled, too.
        limit: After so many seconds all processes are killed.
        options: They are pickled, too.

    Raises:
        AssertionError: A rank has raised, has died, or still runs at the limit. The message has what all ranks have
            printed, their errors, and at the limit the line where each one waits.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            CONTEXT.Process(target=_rank, args=(folder, rank, ranks, partial(program, *args, **options)), daemon=True)
            for rank in range(ranks)
        ]
        end = time.monotonic() + limit
        try:
            for process in processes:
                process.start()
            running = True
            while running:
                running = any(process.exitcode is None for process in processes)
                failed = [rank for rank, process in enumerate(processes) if process.exitcode]
                assert not failed, f"of {ranks} ranks, {failed} failed\n{_output(folder)}"
                if running and time.monotonic() > end:
                    _show_where_they_wait(processes)
                    raise AssertionError(f"after {limit} s, ranks still run\n{_output(folder)}")
                time.sleep(0.01)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _output(folder: Path) -> str:
    files = sorted(folder.glob("*.txt"))
    return "\n".join(f"--- rank {path.stem}\n{path.read_text(errors='replace')}" for path in files)


def _show_where_they_wait(processes: list[Any]) -> None:
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _rank(folder: Path, rank: int, ranks: int, program: Callable[[], Any]) -> None:
    """What a process does."""
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=False)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        torch.save(program(), folder / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads now and then abort the shutdown of the interpreter, in torch 2.13 without us too
