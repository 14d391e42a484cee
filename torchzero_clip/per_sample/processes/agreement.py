"""The processes that train one model, each with samples of its own: what they agree on, and what they add up."""

import zlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchzero_clip.compat import dtensors, flatten_dense, is_distributed, unflatten_dense
from torchzero_clip.functional.blocks import spans
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.functional.processes import device_of, gathered, gathered_texts

CALLS = "forward", "backward", "clip_and_accumulate", "pre_step"
BUCKET = 25 << 20  # bytes of sums that one all-reduce carries, as in DistributedDataParallel


class Processes:
    """The processes of a group, each with a copy or a shard of the model. Without a group, there is only this process.

    If parameters are ``sharded`` over the group, backwards communicate, so all processes must run equally many. Others
    may then be unsharded, with a copy on each process.
    """

    def __init__(self, group: ProcessGroup | None = None, *, sharded: bool = False) -> None:
        self.group = group
        self.sharded = sharded

    @property
    def is_first(self) -> bool:
        """True on the first process of the group."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def start(self, call: str, params: Mapping[str, nn.Parameter], *arguments: object) -> "Agreement":
        """The first agreement in a method of a clipper, for up to four numbers.

        The parameters, and the arguments of the clipper, must be the same on all processes.
        """
        said = [(name, tuple(param.shape), str(param.dtype)) for name, param in params.items()], arguments
        # not `hash`, which differs between processes
        digest = zlib.crc32(repr(said).encode()) if self.group is not None else 0
        return Agreement(self, params, (CALLS.index(call), digest), 4)

    def agreement(self, params: Mapping[str, nn.Parameter], width: int) -> "Agreement":
        """A later agreement in the same call, for so many numbers."""
        return Agreement(self, params, (), width)

    def device(self, params: Mapping[str, nn.Parameter]) -> torch.device:
        """A device from which the group can send."""
        return device_of(list(params.values()), self.group)

    def used(self, names: Collection[str], params: Mapping[str, nn.Parameter]) -> set[str]:
        """The names of parameters that any process has among its names."""
        with self.agreement(params, len(params)) as agreement:
            agreement.numbers = {name: name in names for name in params}
        return {name for name in params if agreement.anywhere(name)}

    def collected(
        self, sums: Iterable[tuple[str, Tensor]], params: Mapping[str, nn.Parameter], used: Collection[str]
    ) -> dict[str, Tensor]:
        """Collect the sums of this process by the names of parameters; those of shards are added up over all.

        The sums have to come in the order of ``params``.
        """
        if not self.sharded:
            return dict(sums)
        # each is added up over the processes as soon as it is made, so that only one is in memory in full
        found: dict[str, Tensor] = {}
        rest = iter(sums)
        name, value = next(rest, (None, None))
        for key in (key for key in params if key in used):  # all processes add up the same parameter at a time
            param: Any = params[key]
            dtype, partial = wide_dtype(param.dtype), [dtensors().Partial()]
            if value is not None and name == key:
                own = value.to(param.device, dtype)
                name, value = next(rest, (None, None))
            else:
                own = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if not is_distributed(param):
                found[key] = own
                continue
            whole = dtensors().DTensor.from_local(own.contiguous(), param.device_mesh, partial, run_check=False)
            found[key] = whole.redistribute(param.device_mesh, param.placements)
        if name is not None:
            raise ValueError(f"the sum of {name!r} is not in the order of the parameters, or is not in `used`")
        return found

    def added_up(
        self, sums: Mapping[str, Tensor], params: Mapping[str, nn.Parameter], used: Collection[str]
    ) -> dict[str, Tensor]:
        """Add up the sums of all processes, which all of them get. Those of shards have been added up already.

        The sums of this process may be overwritten. ``used`` names the parameters for which any process has a sum.
        """
        if self.group is None:
            return dict(sums)
        shards = {name: value for name, value in sums.items() if is_distributed(params[name])}
        found: dict[str, Tensor] = {}
        for name in (name for name in params if name in used and not is_distributed(params[name])):
            param, value, dtype = params[name], sums.get(name), wide_dtype(params[name].dtype)
            found[name] = torch.zeros_like(param, dtype=dtype) if value is None else value.to(param.device, dtype)
        for bucket in _buckets(found.values()):
            flat = flatten_dense(bucket)
            dist.all_reduce(flat, group=self.group)
            for value, part in zip(bucket, unflatten_dense(flat, bucket), strict=True):
                value.copy_(part)
        return shards | found


class Agreement:
    """A block that raises on all processes if it raises on one of them.

    Set `numbers` in the block. After it, the methods tell those of all processes, which have to enter it together.
    """

    def __init__(
        self, processes: Processes, params: Mapping[str, nn.Parameter], head: Sequence[float], width: int
    ) -> None:
        self.numbers: Mapping[Hashable, float] = {}
        """The numbers of this process, by names that are the same on all processes."""
        self._all: dict[Hashable, tuple[float, ...]] = {}  # each number, of all processes
        self._processes = processes
        self._params = params
        self._head = head
        self._width = width

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group = self._processes.group
        if group is None:
            self._all = {name: (number,) for name, number in self.numbers.items()}
            return
        if error is not None and not isinstance(error, Exception):  # an interrupt ends this process
            return
        device = self._processes.device(self._params)
        # of one length on all processes, also after an error; float64, which not all devices have, holds the digest
        row = torch.zeros(1 + len(self._head) + self._width, dtype=torch.float64, device="cpu")
        numbers = () if error is not None else self.numbers.values()
        said = [float(error is not None), *self._head, *numbers]
        row[: len(said)] = torch.tensor(said, dtype=torch.float64, device="cpu")
        rows: list[list[float]] = gathered(row.view(torch.uint8).to(device), group).cpu().view(torch.float64).tolist()
        after = 1 + len(self._head)
        if self._head:
            self._compare([row[1:after] for row in rows], group, error)
        if any(row[0] for row in rows):
            texts = gathered_texts("" if error is None else f"{type(error).__name__}: {error}", group, device)
            if error is None:
                rank = next(i for i, row in enumerate(rows) if row[0])
                name = dist.get_process_group_ranks(group)[rank]
                raise RuntimeError(f"process {name} raised {texts[rank]}\nThis process has changed nothing either")
        self._all = dict(zip(self.numbers, zip(*(row[after:] for row in rows), strict=True), strict=False))

    def of_all(self, name: Hashable) -> tuple[float, ...]:
        """One number of each process."""
        return self._all[name]

    def total(self, name: Hashable) -> int:
        """The sum of one number over the processes."""
        return int(sum(self.of_all(name)))

    def anywhere(self, name: Hashable) -> bool:
        """True if one number is not 0 on a process."""
        return any(self.of_all(name))

    def largest(self, name: Hashable) -> float:
        """The largest of one number."""
        return max(self.of_all(name))

    def _compare(self, heads: Sequence[Sequence[float]], group: ProcessGroup, error: BaseException | None) -> None:
        """Raise if a process has called something else, or has other parameters."""
        calls = [CALLS[int(call)] for call, _ in heads]
        if len({*calls}) > 1:
            ranks = dist.get_process_group_ranks(group)
            said = ", ".join(f"process {rank} called {call}()" for rank, call in zip(ranks, calls, strict=True))
            raise RuntimeError(
                f"all processes have to call the same methods of the clipper in the same order: {said}. A process "
                "without samples calls backward(torch.zeros(0)) or clip_and_accumulate(batch_size=0)"
            ) from error
        if len({digest for _, digest in heads}) > 1:
            raise RuntimeError(
                "all processes need the same trainable parameters, the same arguments of the clipper and, in private "
                "training, the same number of releases: they differ between processes"
            ) from error


def _buckets(values: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists of one device and dtype, each of at most 25 MiB, or of one tensor."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        kinds.setdefault((value.device, value.dtype), []).append(value)
    return [same[part] for same in kinds.values() for part in spans([value.nbytes for value in same], BUCKET)]
