"""A pretended CUDA device: tensors that say they are on ``cuda:0``, and compute real numbers on the CPU.

What is emulated: devices and the errors about them; synchronizations and copies from and to the host; kernel launches,
by the rules with which torch packs lists of tensors into launches; the bytes that kernels read and write; the memory
that is kept; and `Graph`, which repeats the operations of a call without its Python code, as a CUDA graph does.
What is not: the rounding of CUDA's kernels, streams, and time. `Posted` stands in for pinned memory with an event.

It changes torch in the process, so tests use it in a process of its own. A CPU build of torch has no guard of a CUDA
device, which autograd asks for: three lines of C++ are compiled for it. Backwards on a CUDA device ask for streams, so
they run on an XLA device: the variable ``PRETENDED`` of the environment says which it is.
"""

import ctypes
import gc
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from torchzero_clip import compat
from torchzero_clip.engine.device_decisions import DeviceDecisions
from torchzero_clip.functional import dtypes, foreach

KIND = os.environ.get("PRETENDED", "cuda")
CUDA, CPU = torch.device(KIND, 0), torch.device("cpu")

GUARD = f"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {{ C10_REGISTER_GUARD_IMPL({KIND.upper()}, NoOpDeviceGuardImpl<DeviceType::{KIND.upper()}>) }}
"""

VIEWS = {
    *("view", "_unsafe_view", "_reshape_alias", "as_strided", "expand", "narrow", "select", "slice", "split", "chunk"),
    *("split_with_sizes", "unbind", "squeeze", "unsqueeze", "t", "transpose", "permute", "movedim", "unfold", "alias"),
    *("detach", "view_as_real", "view_as_complex", "real", "imag", "diagonal", "lift_fresh", "unflatten"),
}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
SILENT = VIEWS | ALLOCATIONS
WAITING = {
    *("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "allclose"),
}
"""Operations whose result has values or a shape that the host has to know."""

MOST_TENSORS, MOST_BLOCKS, CHUNK = (770, 448, 336, 252, 210), 2240, 65536
"""What one launch takes of 1 to 5 lists (torch 2.13, arguments of 32 KB): tensors, and chunks of so many elements."""


class Counts:
    """What has happened on the device since `clear`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.launches: Counter[str] = Counter()
        """Kernel launches by operation."""
        self.bytes: Counter[str] = Counter()
        """Bytes that kernels read and wrote, by operation, if `Device.weighs`."""
        self.waits: list[str] = []
        """Operations for which the host waits for the device."""
        self.copies: list[str] = []
        """Copies between host and device."""


class OnCuda(Tensor):
    """A tensor on the simulated device, with its numbers in ``kept``, a tensor on the CPU."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> "OnCuda":
        if DEVICE.lacks_float64 and kept.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a tensor of this device to {kept.dtype}, which it does not support")
        options = {"dtype": kept.dtype, "device": CUDA, "strides": kept.stride()}
        result = Tensor._make_wrapper_subclass(cls, kept.shape, storage_offset=kept.storage_offset(), **options)
        result.kept = kept
        return result

    def __init__(self, kept: Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return OWN.get(function, function)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return DEVICE.dispatch(function, args, kwargs or {})


def _deep_copy(tensor: OnCuda, memo: dict) -> Tensor:
    new: Tensor = OnCuda(tensor.kept.clone())
    memo[id(tensor)] = new = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return new


def _to_list(tensor: OnCuda) -> Any:
    DEVICE.counts.waits.append("tolist")
    return tensor.kept.tolist()


def _to_numpy(*_: Any) -> None:
    raise TypeError("can't convert cuda:0 device type tensor to numpy")


def _quantile(function: Any, *args: Any, **kwargs: Any) -> Any:
    return DEVICE.run("quantile", function, args, kwargs, launches=5)


_NESTED = list, tuple, dict
QUANTILES = (torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile)
OWN = {
    Tensor.data_ptr: lambda tensor: tensor.kept.data_ptr(),
    Tensor.tolist: _to_list,
    Tensor.numpy: _to_numpy,
    Tensor.__repr__: lambda tensor: f"cuda({tensor.kept!r})",
    Tensor.__deepcopy__: _deep_copy,
    **{
        function: partial(_quantile, function) for function in QUANTILES
    },  # torch's code for it resizes tensors in place
}
"""Functions that the device carries out in its own way."""


def on_cuda(tensor: Tensor) -> OnCuda:
    """A copy on the simulated device."""
    return OnCuda(tensor.detach().clone())


def numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor on any device, without a copy that is counted."""
    return tensor.kept if isinstance(tensor, OnCuda) else tensor.detach()


class Device:
    """Computes on the CPU what the device is asked for, and counts it."""

    _lacks_float64 = False

    @property
    def lacks_float64(self) -> bool:
        """Whether a tensor of float64 on the device raises an error, as on GPUs of Apple."""
        return self._lacks_float64

    @lacks_float64.setter
    def lacks_float64(self, value: bool) -> None:
        self._lacks_float64 = value
        dtypes._has_float64.clear()  # the package asks each kind of device once

    def __init__(self) -> None:
        self.counts = Counts()
        self.weighs = False
        """Whether bytes are counted."""
        self.tape: list[tuple] | None = None
        """The operations that a `Graph` records."""

    def dispatch(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = function.overloadpacket.__name__
        is_of_lists = name.startswith("_foreach") and isinstance(args[0], list | tuple)
        if is_of_lists and len({tensor.device for tensor in args[0]}) > 1:
            return _row_by_row(function, args, kwargs)
        tensors = _tensors((args, kwargs))
        here = [tensor for tensor in tensors if isinstance(tensor, OnCuda)]
        asked = kwargs.get("device")
        goes_here = torch.device(asked).type == KIND if asked is not None else bool(here)
        if not here and not goes_here:
            return function(*args, **kwargs)
        self._check_devices(name, args, tensors, here)
        self._note_transfers(name, args, here, tensors, goes_here)
        if name == "copy_" and not isinstance(args[0], OnCuda):
            goes_here = False
        launches = _launches(name, args, kwargs) if here or goes_here else 0
        if self.weighs and name not in SILENT and name not in WAITING:
            self.counts.bytes[name] += _bytes(function, name, args, kwargs)
        return self.run(name, function, args, kwargs, launches, goes_here)

    def run(
        self, name: str, function: Any, args: Any, kwargs: dict[str, Any], launches: int, goes_here: bool = True
    ) -> Any:
        """Call a function with the numbers of tensors, and put its results on the device."""
        owner: dict[int, OnCuda] = {}

        def on_the_host(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, OnCuda):
                return tensor
            owner[id(tensor.kept)] = tensor
            return tensor.kept

        own_args, own_kwargs = _mapped(on_the_host, args), _mapped(on_the_host, kwargs)
        if own_kwargs.get("device") is not None:
            own_kwargs = {**own_kwargs, "device": CPU}
        if name == "_fused_sgd_":
            function = partial(_sgd, function)
        found = function(*own_args, **own_kwargs)
        is_silent = name in SILENT
        if not is_silent:
            self.counts.launches[name] += launches
            if self.weighs and goes_here and name not in WAITING:
                self.counts.bytes[name] += sum(_size(t) for t in _tensors(found) if id(t) not in owner)
        if self.tape is not None and not is_silent:
            self.tape.append((function, own_args, own_kwargs, found))

        def placed(tensor: Tensor) -> Tensor:
            if not goes_here:
                return tensor
            return owner[id(tensor)] if id(tensor) in owner else OnCuda(tensor)

        return _mapped(placed, found)

    def _check_devices(self, name: str, args: Any, tensors: Sequence[Tensor], here: Sequence[Tensor]) -> None:
        others = [tensor for tensor in tensors if not isinstance(tensor, OnCuda)]
        if not here or not others or name in ("_to_copy", "copy_", "_foreach_copy_"):
            return
        if any(tensor.ndim for tensor in others) and name not in ("index", "index_put_"):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {name}")
        if name.endswith("_") and any(args[0] is other for other in others):
            raise RuntimeError(f"{name}: the output is on the cpu, inputs are on cuda:0")

    def _note_transfers(self, name: str, args: Any, here: Any, tensors: Any, goes_here: bool) -> None:
        if name in WAITING or (name == "repeat_interleave" and len(args) < 3):
            self.counts.waits.append(name)
        if name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.counts.waits.append(f"{name} by a mask")
        if name == "_to_copy" and bool(here) != goes_here:
            self.counts.copies.append(f"{name} {tuple(args[0].shape)}")
        pairs = [args[:2]] if name == "copy_" else zip(*args[:2], strict=True) if name == "_foreach_copy_" else ()
        self.counts.copies += [
            f"{name} {tuple(to.shape)}" for to, source in pairs if isinstance(to, OnCuda) != isinstance(source, OnCuda)
        ]


def _row_by_row(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of lists with each row, as torch does if a list has several devices."""
    count, found = len(args[0]), []
    for i in range(count):
        row = [[a[i]] if isinstance(a, list | tuple) and len(a) == count else a for a in args]
        found.append(function(*row, **kwargs))
    return None if found[0] is None else [result for (result,) in found]


def _sgd(function: Any, *lists: Sequence[Tensor], **options: Any) -> None:
    """Compute in float32 at least, as kernels on CUDA do. The one for CPUs leaves half precision as it is."""
    wide = [[t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors] for tensors in lists]
    function(*wide, **options)
    for tensors, results in zip(lists, wide, strict=True):
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result)


DEVICE = Device()


class _Dispatches(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip it takes a sixth of the time

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if OnCuda not in types and kwargs.get("device") is None:  # most are on the CPU
            return function(*args, **kwargs)
        return DEVICE.dispatch(function, args, kwargs)


def install() -> None:
    """Make torch and the package accept the device, for the rest of the process."""
    torch.cuda._lazy_init = lambda: None
    if not torch.backends.cuda.is_built():
        _load_guard()
    if KIND != "cuda":
        _serve_backwards()
    for module in (_foreach_utils, torch_optimizer):
        kinds = getattr(module, "_foreach_supported_types", None)
        if isinstance(kinds, list):
            kinds.append(OnCuda)
    DeviceDecisions.send = Posted
    torch.nn.utils.clip_grad._has_foreach_support = lambda tensors, device: True
    foreach.PLAIN.add(OnCuda)
    compat._ORDINARY.add(OnCuda)


def _serve_backwards() -> None:
    """In the threads of backwards, torch makes no tensor of Python numbers here, and calls no `OWN` functions."""
    make, make_like, to_list, storage = torch.tensor, Tensor.new_tensor, Tensor.tolist, Tensor.untyped_storage

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, device="cpu", **options)
        return made if device is None or torch.device(device) == CPU else made.to(device)

    def new_tensor(like: Tensor, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        return tensor(data, dtype=dtype or like.dtype, device=device or like.device)

    torch.tensor, Tensor.new_tensor = tensor, new_tensor
    Tensor.tolist = lambda x: _to_list(x) if type(x) is OnCuda else to_list(x)
    Tensor.untyped_storage = lambda x: storage(x.kept if type(x) is OnCuda else x)
    OWN[make_like], OWN[to_list] = new_tensor, _to_list


def _load_guard() -> None:
    base = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name, "guard.cpp"), Path(name, "guard.so")
        source.write_text(GUARD)
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        paths = [f"-I{base}/include", str(source), f"-L{base}/lib", "-lc10", "-o", str(library)]
        subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", abi, *paths], check=True)
        ctypes.CDLL(str(library))


@contextmanager
def pretended() -> Iterator[Counts]:
    """Within the block, tensors can be made on `CUDA`, and what they do is counted."""
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Dispatches():
            yield DEVICE.counts
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


@contextmanager
def without_float64() -> Iterator[None]:
    """Within the block, the device has no float64."""
    DEVICE.lacks_float64 = True
    try:
        yield
    finally:
        DEVICE.lacks_float64 = False


class Posted:
    """Numbers on their way to the host, which arrive when they are asked for the third time."""

    def __init__(self, tensor: Tensor) -> None:
        self._values: list[float] = numbers(tensor).tolist()
        self._asked = 0

    def arrived(self) -> bool:
        self._asked += 1
        return self._asked > 2

    def read(self) -> list[float]:
        if self._asked <= 2:
            DEVICE.counts.waits.append("synchronize")
        return self._values


class Graph:
    """Repeats the operations of a call on the same memory, without the Python code between them.

    Args:
        call: The call, which is carried out once.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        DEVICE.tape = []
        try:
            call()
        finally:
            self._tape, DEVICE.tape = DEVICE.tape, None

    def replay(self) -> None:
        for function, args, kwargs, results in self._tape:
            found = function(*args, **kwargs)
            for old, new in zip(_tensors(results), _tensors(found), strict=True):
                if new is not old:
                    old.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    """Those in nested lists, tuples and dicts. `torch.utils._pytree` takes several times as long."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _NESTED):
            found += _tensors(item)
    return found


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same lists, tuples and dicts with the results for their tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if not value or not isinstance(value, _NESTED):
        return value
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    items = [
        function(x) if isinstance(x, Tensor) else _mapped(function, x) if isinstance(x, _NESTED) else x for x in value
    ]
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def memory_in_use() -> int:
    """The bytes of all tensors on the device."""
    gc.collect()
    storages = {t.kept.untyped_storage().data_ptr(): t.kept.untyped_storage().nbytes() for t in _alive()}
    return sum(storages.values())


def _alive() -> list[OnCuda]:
    return [found for found in gc.get_objects() if type(found) is OnCuda]


def _size(tensor: Tensor) -> int:
    """The bytes that are read if every element is: expanded dimensions count once."""
    if not tensor.numel():
        return 0
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def _bytes(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> int:
    """The bytes that an operation reads, and those that it writes to its arguments."""
    only_writes = name in ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
    total = 0
    for i, argument in enumerate(function._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        size = sum(map(_size, _tensors(value)))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused") and argument.name == "grads":
            is_written = kwargs.get("grad_scale") is not None
        total += size * is_written + size * (not (is_written and (only_writes or argument.is_out)))
    return total


def _launches(name: str, args: Any, kwargs: dict[str, Any]) -> int:
    """How many kernels an operation launches."""
    if name in SILENT or name == "_local_scalar_dense":
        return 0
    if name in ("cat", "stack"):
        return -(-len(args[0]) // 128)
    if not name.startswith(("_foreach", "_fused")):
        return 1
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    lists = lists[:-1] if name.startswith("_fused") else lists  # the last one has the step counts
    first = lists[0]
    if not _packs(name, lists):
        return sum(tensor.numel() > 0 for tensor in first)
    depth = len(lists) + (0 if name.endswith("_") or name == "_foreach_norm" else 1)
    count = _packed([tensor.numel() for tensor in first], min(depth, len(MOST_TENSORS)))
    return count + 1 + -(-len(first) // 400) if name == "_foreach_norm" else count


def _packs(name: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether torch packs lists into few launches: tensors of one dtype, dense, and alike in each row."""
    first = lists[0]
    dtypes = [{tensor.dtype for tensor in own} for own in lists]
    alike = all(
        len(own) == len(first)
        and all(a.shape == b.shape and a.stride() == b.stride() for a, b in zip(first, own, strict=True))
        for own in lists
    )
    one_each = all(len(kinds) == 1 for kinds in dtypes) and (name == "_foreach_copy_" or len(set.union(*dtypes)) == 1)
    return alike and one_each and all(foreach.is_dense(tensor) for own in lists for tensor in own)


def _packed(sizes: Sequence[int], depth: int) -> int:
    launches = tensors = blocks = 0
    for size in filter(None, sizes):
        tensors += 1
        chunks = -(-size // CHUNK)
        for chunk in range(1, chunks + 1):
            blocks += 1
            if (tensors == MOST_TENSORS[depth - 1] and chunk == chunks) or blocks == MOST_BLOCKS:
                launches, blocks, tensors = launches + 1, 0, 0 if chunk == chunks else 1
    return launches + (blocks > 0)
