"""Starts programs in several processes, each under a time limit, and kills them if asked to."""

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import CONTEXT, LIMIT, show_where_they_wait, shows_where_it_waits

import torchzero_clip

PACKAGE = Path(torchzero_clip.__file__).parent


@dataclass(frozen=True)
class Place:
    """Where a program runs.

    Args:
        rank: The number of the process.
        folder: The folder of this launch, for what the processes return.
        is_killed: The program stops at `wait_for_the_kill`.
    """

    rank: int
    folder: Path
    is_killed: bool

    def wait_for_the_kill(self) -> None:
        """Wait until the process is killed; no effect in launches without a kill."""
        if self.is_killed:
            (self.folder / f"{self.rank}.reached").touch()
            time.sleep(LIMIT)


def launch(
    folder: Path, program: Callable[..., Any], *args: Any, ranks: int = 2, killed_by: signal.Signals | None = None
) -> list[Any]:
    """Run ``program(place, *args)`` in new processes with one gloo group, and return what each one returns.

    With ``killed_by``, all processes get this signal when all have reached the place where they wait for it.
    """
    is_killed = killed_by is not None
    folder.mkdir(parents=True)
    places = [Place(rank, folder, is_killed) for rank in range(ranks)]
    processes = [CONTEXT.Process(target=_run, args=(place, ranks, program, args), daemon=True) for place in places]
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.start()
        while not all((folder / f"{rank}.{'reached' if is_killed else 'pt'}").exists() for rank in range(ranks)):
            if time.monotonic() > end:
                waiting = show_where_they_wait(processes)
                raise AssertionError(f"after {LIMIT} s, of {ranks} ranks, {waiting} still run\n{_errors(folder)}")
            assert not any(process.exitcode for process in processes), _errors(folder)
            time.sleep(0.02)
        for process in processes:
            if killed_by is not None:
                os.kill(process.pid, killed_by)
            process.join(max(end - time.monotonic(), 0))
        assert {process.exitcode for process in processes} == {-(killed_by or 0)}, _errors(folder)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [] if is_killed else [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _errors(folder: Path) -> str:
    return "\n".join(f"--- rank {path.stem}\n{path.read_text()}" for path in sorted(folder.glob("*.txt")))


def _run(place: Place, ranks: int, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What a process does. Its result has the warnings of the package, which no launch expects."""
    torch.set_num_threads(1)
    numbers = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    warned: list[str] = []

    def show(message: Any, category: Any, filename: str, *_: Any) -> None:
        if Path(filename).is_relative_to(PACKAGE):
            warned.append(f"{filename}: {message}")

    output = (place.folder / f"{place.rank}.txt").open("w")
    shows_where_it_waits(output)
    try:
        warnings.simplefilter("always")
        warnings.showwarning = show
        dist.init_process_group("gloo", init_method=f"file://{place.folder}/store", rank=place.rank, world_size=ranks)
        torch.save({"warned": warned, **program(place, *args)}, place.folder / f"{place.rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc(file=output)
        output.flush()
        os._exit(1)
    os._exit(0)  # gloo's threads now and then abort the shutdown of the interpreter, in torch 2.13 without us too
