"""What may change with the version of torch. It has most of the private names of torch that the package uses.

`FakeTensor` is what the compiler and tests use instead of tensors with memory. The functions of functorch tell inside
which transformation, such as vmap, the forward of a module runs. `pytree` finds the tensors in arguments and outputs,
also in classes that users have registered. `DisableTorchFunctionSubclass` lets a subclass of tensors call functions of
torch as if it were an ordinary tensor. For none of them torch has a public name, nor for the ids of backwards.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import _current_graph_task_id  # pyright: ignore
from torch._C._functorch import get_interpreter_stack as get_interpreter_stack
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_batchedtensor as is_batchedtensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._C._functorch import maybe_get_bdim as maybe_get_bdim
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_F = TypeVar("_F", bound=FunctionType)
_T = TypeVar("_T", bound=Tensor)
SameLayout = Callable[[Sequence[Tensor]], bool]
"""Whether each tensor has the type, dtype, device, shape, strides and negation of the one that it stands for."""

pytree = _pytree

never_compiled = _disable_dynamo
"""`torch.compiler.disable` as torch itself uses it: the public one imports the compiler at once, which takes 0.5 s."""


def never_a_frame(function: _F) -> _F:
    """Never let `torch.compile` start at this function or at what it calls.

    A compiler that traces its caller still traces into it. Without this, torch 2.13 compiles a function mode that runs
    in an uncompiled part once, for the first function that it sees, and uses the result for all others.
    """
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore
    if (strategy := getattr(frames, "_FrameExecStrategy", None)) is not None:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, strategy(skip, skip))
    return function


def in_subclass(kind: type[_T], tensor: Tensor) -> _T:
    """A tensor of a subclass in the memory of another one. Autograd sees a new tensor; with ``as_subclass``, a view."""
    return torch.Tensor._make_subclass(kind, tensor)


def leave_uncompiled() -> None:
    """Let the compiler that is tracing run this function uncompiled."""
    torch._dynamo.skip_frame()


def never_traced(kind: type[Tensor]) -> None:
    """Run compiled functions uncompiled if they get tensors of this subclass.

    Call it whenever one is made, because the compiler may be imported later.
    """
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        config.nontraceable_tensor_subclasses.add(kind)


current_graph_task_id: Callable[[], int] = _current_graph_task_id
"""The number of the backward that is running in this thread, -1 for none: tells two backwards apart."""


backward_is_of_all: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""False in a backward for some tensors only: `torch.autograd.grad`, or `backward` with ``inputs=``."""

current_node: Callable[[], Any] = torch._C._current_autograd_node  # pyright: ignore
"""The function whose backward runs in this thread."""

at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Let the backward that is running in this thread call a function at its end. FSDP2 does so too."""


def is_backward_compiled() -> bool:
    """True if compiled autograd runs the backward: its hooks get no gradients, and `at_end_of_backward` fails."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


def checkpoint_around() -> object:
    """The innermost `torch.utils.checkpoint` around the code that runs now; None without one, or in a reentrant one."""
    # a checkpoint shows only by its hooks, which are known by their module and name
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore
    hooks = None if top is None else top(True)  # also while the compiler traces
    return hooks[0] if hooks is not None and _is_of_checkpoint(hooks[0], "checkpoint") else None


TELLS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # pyright: ignore
"""Whether torch tells which hooks have packed a saved tensor. Not all versions do."""


def is_in_checkpoint(saved: Any) -> bool:
    """True for what ``_raw_saved_...`` of a node returns if a checkpoint would run again to restore the tensor."""
    return TELLS_HOOKS and _is_of_checkpoint(saved.unpack_hook, "")


def _is_of_checkpoint(hook: object, word: str) -> bool:
    """True for a hook that `torch.utils.checkpoint` has made, with this word in its name."""
    is_made = getattr(hook, "__module__", "") == "torch.utils.checkpoint"
    return is_made and word in getattr(hook, "__qualname__", "")


def is_restored_by_checkpoint() -> bool:
    """True while `torch.utils.checkpoint` with ``use_reentrant=False`` runs code again to restore tensors."""
    calls: Any = torch._C._autograd  # pyright: ignore
    if not hasattr(calls, "_top_saved_tensors_default_hooks"):
        return False
    # the hooks of a checkpoint inside the one that restores are above the hooks that restore
    above: list[tuple[object, object]] = []
    try:
        while (hooks := calls._top_saved_tensors_default_hooks(True)) is not None:
            if _is_of_checkpoint(hooks[0], "recomputation"):
                return True
            above.append(hooks)
            calls._pop_saved_tensors_default_hooks()
        return False
    finally:
        for hooks in reversed(above):
            calls._push_saved_tensors_default_hooks(*hooks)


def is_capturing() -> bool:
    """True while a CUDA graph is captured. Always False before CUDA is initialized."""
    # a CUDA build of torch raises an error if it is asked without a driver (seen in 2.15)
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cpu_by_default() -> AbstractContextManager[object]:
    """A context in which new tensors without a device are on the CPU, as in torch's optimizers."""
    # Not entered if the CPU is the default, because every call of torch takes longer within it. In torch 2.8
    # and 2.9 get_default_device raises after set_default_device(None), so a tensor tells.
    return nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Disable autocast on the device of a tensor, within a block."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


_LAYOUT = attrgetter("dtype", "device", "layout", "shape")


def same_layout(tensors: Sequence[Tensor]) -> SameLayout:
    """A check that later tensors look like these, and that none is there twice."""
    # the check in Python takes about ten times as long, which makes a step of many small tensors a tenth longer
    return native_guard(tensors) or _in_python(tensors)


def native_guard(tensors: Sequence[Tensor]) -> SameLayout | None:
    """The check of `torch.compile`, in C++ and private to torch, also of ``requires_grad``. None if torch lacks it."""
    shapes, strides = ([list(of(tensor)) for tensor in tensors] for of in (Tensor.size, Tensor.stride))
    check: Callable[..., bool]
    try:
        guards: Any = torch._C._dynamo.guards  # pyright: ignore
        check = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None
    count = len(tensors)

    def fits(others: Sequence[Tensor]) -> bool:
        return len(others) == count and check(*others)

    return fits


def _in_python(tensors: Sequence[Tensor]) -> SameLayout:
    looks = [(of, list(map(of, tensors))) for of in (type, _LAYOUT, Tensor.is_neg, Tensor.stride)]

    def fits(others: Sequence[Tensor]) -> bool:
        return all(list(map(of, others)) == look for of, look in looks) and len(set(map(id, others))) == len(others)

    return fits


flatten_dense: Callable[[Sequence[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors  # pyright: ignore
"""The elements of all tensors, one after the other: a new vector. torch has no public name for it."""

unflatten_dense: Callable[[Tensor, Sequence[Tensor]], list[Tensor]] = torch._C._nn.unflatten_dense_tensors  # pyright: ignore
"""The inverse of `flatten_dense`: views of the vector in the shapes of other tensors."""


def may_call_base(optimizer: Optimizer) -> bool:
    """True if the class of an optimizer and a base each have a `step` with hooks, so that one may call the other."""
    # torch wraps `step` of a class, also if it is inherited, when it makes the first object of this class
    steps: list[Any] = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    return len({step.__wrapped__ for step in steps if getattr(step, "hooked", False)}) > 1


def may_be_template(groups: Sequence[Mapping[str, object]], *, is_first: bool) -> bool:
    """True if all rates are 0. torch.distributed.checkpoint takes such a step, with gradients of 0, to create state."""
    # neither rates on a device nor gradients are read here, because reading synchronizes with the GPU
    rates = [group["lr"] for group in groups if group.get("lr") is not None]
    if any((isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0 for rate in rates):
        return False
    return len(rates) > 0 or is_first


def is_distributed(tensor: object) -> "TypeIs[DTensor]":
    """True for a distributed tensor. It does not import `torch.distributed.tensor`, because that takes 0.7 s."""
    return type(tensor) not in _ORDINARY and issubclass(type(tensor), _distributed_types())


def any_distributed(tensors: Sequence[object]) -> bool:
    """True if one of these is a distributed tensor."""
    kinds = set(map(type, tensors))
    return not kinds <= _ORDINARY and any(issubclass(kind, _distributed_types()) for kind in kinds)


def fully_sharded(model: nn.Module) -> list[Any]:
    """The modules in a model on which `fully_shard` was called. It does not import `torch.distributed.fsdp`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def dtensors() -> ModuleType:
    """The module `torch.distributed.tensor`, for code that has a distributed tensor already."""
    return importlib.import_module("torch.distributed.tensor")


def _distributed_types() -> tuple[type, ...]:
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing the module
    return () if kind is None else (kind,)


_ORDINARY = {Tensor, nn.Parameter}


def warn_user(text: str) -> None:
    """Warn at the line of the user."""
    # its frame is searched, because hooks of torch may lie between, and Python 3.11 has no ``skip_file_prefixes``
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torchzero_clip", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def has_fused_kernels(tensor: Tensor) -> bool:
    """True if torch has fused kernels of optimizers for the device of a tensor."""
    # torch's list has the CPU too, but to ask for it takes longer
    return tensor.is_cpu or tensor.device.type in _get_fused_kernels_supported_devices()
