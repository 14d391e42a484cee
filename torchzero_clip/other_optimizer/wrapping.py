"""What transforms ask of the optimizer that they stand before, and how they stay around its methods."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.checks import needs_closure
from torchzero_clip.compat import may_call_base
from torchzero_clip.core.chain import Transforms, flatten
from torchzero_clip.engine.listener import HasListener
from torchzero_clip.functional.lists import params_of
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.validation import NOT_ZERO_REDUNDANCY, is_zero_redundancy
from torchzero_clip.types import Group

Args: TypeAlias = tuple[Any, ...]


class RefusedStep(BaseException):
    """Ends a step before the optimizer changes anything. Its argument is what the closure has returned."""

    # no Exception, which an optimizer might catch


def check_optimizer(inner: Any, transforms: Sequence[Transforms]) -> None:
    """Raise if an optimizer cannot have transforms before its steps."""
    name = type(inner).__name__
    inside = [key for key, value in getattr(inner, "__dict__", {}).items() if isinstance(value, Optimizer)]
    way_out = f": call before_step on optimizer.{inside[0]}" if inside else ""
    if not isinstance(inner, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {name}{way_out}")
    listed = list(flatten(transforms))
    if isinstance(inner, Modular):
        shown = ", ".join(map(repr, listed)) or "ClipNorm(1)"
        raise TypeError(f"this optimizer is a chain, which takes the transforms: Modular(params, {shown}, ...)")
    if not listed:
        raise ValueError("before_step needs at least one transform, as in before_step(optimizer, ClipNorm(1))")
    if is_zero_redundancy(inner):
        raise TypeError(NOT_ZERO_REDUNDANCY)
    if inside:
        raise TypeError(f"{name} takes its steps by another optimizer{way_out}")
    if not all(hasattr(inner, f"_optimizer_{kind}_hooks") for kind in ("step_pre", "state_dict_post")):
        raise TypeError(f"{name} lacks hooks that optimizers of torch have: let it call Optimizer.__init__")
    if needs_closure(type(inner)):
        raise TypeError(
            f"{name} takes no step without a closure and may evaluate it several times in one step, but transforms "
            "that keep statistics act once a step: call clip_grad_norm_ in the closure"
        )


def are_zero(groups: Sequence[Group]) -> bool:
    """True if there are gradients, and all of them are 0."""
    grads = [param.grad for param in params_of(groups) if param.grad is not None]
    return bool(grads) and not any(bool(grad.any()) for grad in grads)


def takes_factor(optimizer: Any, hook: int, count: int) -> bool:
    """True if the step of a fused optimizer of torch divides ``count`` gradients, and no later hook reads them."""
    # a private mark that torch sets for GradScaler; there is no public one
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not is_fused or not type(optimizer).__module__.startswith("torch.optim."):
        return False
    held: list[Tensor] = []
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return False
        held += group["params"]
    # the step would also divide the gradients of frozen parameters, which transforms leave alone
    if count < len(held) and any(param.grad is not None and not param.requires_grad for param in held):
        return False
    hooks = optimizer._optimizer_step_pre_hooks  # torch has no public way to list them
    for key in reversed(hooks):
        if key == hook:
            break
        if not isinstance(getattr(hooks[key], "__self__", None), HasListener):  # the recorder reads no gradients here
            return False
    return True


class Depth:
    """How often ``step`` of an optimizer has been entered: twice if that of a subclass calls that of its base class."""

    def __init__(self) -> None:
        self.count = 0
        self.is_wrapped = False  # True while the wrapper of `wrap_method` runs, which sees how a step ends

    def enters_base(self, optimizer: Optimizer) -> bool:
        """Called by a hook before a step: True, and one deeper, if it is the step of a base class."""
        # after a step that raised outside of the wrapper, ``count`` is still 1, but the next is no step of a base class
        is_of_base = self.count > 0 and (self.is_wrapped or may_call_base(optimizer))
        self.count += 1 if is_of_base else 0
        return is_of_base

    def leaves_base(self) -> bool:
        """Called by a hook after a step: True if it was the step of a base class."""
        is_of_base = self.count > 1
        self.count -= 1 if is_of_base else 0
        return is_of_base


def with_closure(args: Args, kwargs: dict[str, Any], wrap: Callable[[Any], Any]) -> tuple[Args, dict[str, Any]] | None:
    """The arguments of a step, its closure wrapped; None without a closure. ``args`` begin with the optimizer."""
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        return None
    if "closure" in kwargs:
        return args, kwargs | {"closure": wrap(closure)}
    return (*args[:1], wrap(closure), *args[2:]), kwargs


def wrap_method(optimizer: Optimizer, name: str, around: Callable[[Any, Callable[[], object]], object]) -> Any:
    """Replace a method of one optimizer by ``around``, which gets the optimizer and a function that calls the method.

    Torch calls no hook after a step that raises, so the wrapper ends it.
    """
    replaced: Any = vars(optimizer).get(name)
    call: Any = getattr(type(optimizer), name) if replaced is None else replaced
    reference = weakref.ref(optimizer)

    def method(alive: object, *args: object, **kwargs: object) -> object:
        bound = (alive, *args) if replaced is None else args
        return around(alive, functools.partial(call, *bound, **kwargs))

    @functools.wraps(call)
    def wrapper(*args: object, **kwargs: object) -> object:
        alive = reference()  # weak, as in the wrapper of torch's schedulers
        if alive is None:
            raise ReferenceError(f"the optimizer of this {name} was deleted: keep the optimizer beside its {name}")
        return method(alive, *args, **kwargs)

    vars(wrapper)["__func__"] = method  # torch's schedulers read it, as on a bound method
    setattr(optimizer, name, wrapper)
    return wrapper


def unwrap_method(optimizer: Optimizer, name: str, wrapper: Any) -> None:
    """Remove a wrapper from an optimizer. If there is another one around it, both stay."""
    if vars(optimizer).get(name) is wrapper:
        delattr(optimizer, name)
        if wrapper.__wrapped__ is not getattr(type(optimizer), name):  # such as the wrapper of a scheduler
            setattr(optimizer, name, wrapper.__wrapped__)
