"""Runs a function in several processes with one gloo group, or a program, under a time limit: a hang fails the test."""

import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 480.0
"""Seconds. A busy machine needs many times what a quiet one needs, and a test that hangs ends within ten minutes."""
CONTEXT = multiprocessing.get_context("forkserver")  # what takes seconds to import is imported once
PRELOADED = [
    "torchzero_clip",
    "torch._dynamo",  # the first optimizer of a process imports it
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "pytest",  # for functions in test modules
]
CONTEXT.set_forkserver_preload(PRELOADED)


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
                    waiting = show_where_they_wait(processes)
                    raise AssertionError(f"after {limit} s, of {ranks} ranks, {waiting} still run\n{_output(folder)}")
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


def show_where_they_wait(processes: list[Any]) -> list[int]:
    """Let each process that still runs write its line into its output, and return the numbers of these processes."""
    waiting = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in waiting:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(2.0)
    return waiting


def run_program(
    command: list[Any], limit: float = LIMIT, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its exit code and what it printed. At the limit all its processes are killed.

    Raises:
        AssertionError: The command still runs at the limit. The message has what it has printed, and the lines where
            its Python processes wait.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _show_and_end(process.pid)
        output, errors = process.communicate(timeout=10)
        raise AssertionError(f"after {limit} s, {command} still ran\n{output}\n{errors}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _show_and_end(group: int) -> None:
    """Let the processes of a group print where they wait, and end: one after the other, so that lines stay whole."""
    folder = Path("/proc")
    listed = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else [group]
    for pid in listed:
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group:
                os.kill(pid, signal.SIGABRT)  # faulthandler prints
                time.sleep(0.3)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGABRT)  # those that are not listed


def run_script(script: Path, *args: str, limit: float = LIMIT) -> str:
    """Run a Python program, and return what it printed. It and its processes find torch already imported.

    Raises:
        AssertionError: The program has failed, or still runs at the limit. The message has what it has printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = CONTEXT.Process(target=_script, args=(folder, script, args))
        process.start()
        try:
            process.join(limit)
            if process.exitcode is None:
                show_where_they_wait([process])
            assert process.exitcode == 0, f"{script} ended with {process.exitcode} in {limit} s\n{_output(folder)}"
        finally:
            process.kill()
            process.join()
        return (folder / "out.txt").read_text()


def _script(folder: Path, script: Path, args: tuple[str, ...]) -> None:
    """What the process of a program does."""
    for name, stream in (("out", sys.stdout), ("errors", sys.stderr)):
        file = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
    shows_where_it_waits(file)
    warnings.simplefilter("ignore")
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    start = spawn.start_processes
    spawn.start_processes = lambda *own, **options: start(*own, **{**options, "start_method": "fork"})
    sys.argv = [str(script), *args]
    runpy.run_path(str(script), run_name="__main__")


def refused(call: Callable[[], object]) -> str:
    """The message of the error that a call raises; empty if it raises none."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def shows_where_it_waits(file: Any) -> None:
    """`show_where_they_wait` makes this process write its line into ``file``."""
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


def _rank(folder: Path, rank: int, ranks: int, program: Callable[[], Any]) -> None:
    """What a process does."""
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    shows_where_it_waits(output)
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
