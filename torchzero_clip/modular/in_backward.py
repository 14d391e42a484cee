"""Steps that are taken while the backward runs, so that gradients need little memory."""

import weakref
from collections.abc import Callable, Iterable
from threading import RLock
from typing import cast

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchzero_clip.checks import count
from torchzero_clip.compat import at_end_of_backward, current_graph_task_id, never_compiled, warn_user
from torchzero_clip.engine.parts import Parts, second_gradient
from torchzero_clip.modular.backward_checks import check_backward_steps
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.wrappers import unwrap
from torchzero_clip.types import Group, Setting

_SHOWN = 10  # names of updated parameters that an error shows

_WITHOUT: Group = {"params": []}
"""In place of a group of which no parameter waits."""


class StepInBackward:
    """Updates parameters while the backward runs, until `remove` is called. `step_in_backward` makes it."""

    def __init__(self, optimizer: Modular, bucket_bytes: int) -> None:
        # weak, so that a deleted optimizer is freed at once, together with its hooks
        self._reference = weakref.ref(optimizer)
        self._bucket_bytes = bucket_bytes
        self._parts = Parts(_weakly(self._attach))
        self._lock = RLock()  # backwards on several devices run hooks in several threads
        self._hooks: dict[int, RemovableHandle] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by id of parameter: the index of its group, and that in it
        self._task = -1
        self._settings: dict[str, list[Setting]] = {}
        self._waiting: dict[int, Tensor] = {}
        self._bytes = 0
        self._ready = _weakly(self.collect)
        self._attach()
        # Parameters may be added or unfrozen between steps. This hook alone keeps the handle alive, as long as the
        # optimizer lives
        self._after_steps = optimizer.register_step_post_hook(lambda *_: self._attach())  # pyright: ignore
        optimizer.runner.parts = self._parts
        _IN_USE.add(self)

    @property
    def _optimizer(self) -> Modular:
        return cast(Modular, self._reference())  # only hooks of the optimizer get here

    @property
    def _is_in_use(self) -> bool:
        optimizer = self._reference()
        return optimizer is not None and optimizer.runner.parts is self._parts

    def remove(self) -> None:
        """Go back to ordinary steps. Call this between a step and the next backward.

        Raises:
            RuntimeError: If parameters were updated since the last ``optimizer.step()``. Call ``optimizer.step()``
                first. If that raises, call ``optimizer.zero_grad()`` before it.
        """
        if self._is_in_use and self._parts.updated:
            raise RuntimeError(
                "the backward has updated parameters: call optimizer.step() before remove(). If step() raises, call "
                "optimizer.zero_grad() first"
            )
        self._let_go()

    def _let_go(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._after_steps.remove()
        if self._is_in_use:
            self._optimizer.runner.parts = None

    def _attach(self) -> None:
        """Find the parameters, hook those that have no hook yet, and drop the hooks of others."""
        groups, hooks = self._optimizer.param_groups, self._hooks
        self._places = {id(p): (g, i) for g, group in enumerate(groups) for i, p in enumerate(group["params"])}
        if len(self._places) < sum(len(group["params"]) for group in groups):
            raise ValueError("step_in_backward takes no optimizer in which a parameter is listed twice")
        for key in hooks.keys() - self._places.keys():
            hooks.pop(key).remove()
        new = [p for group in groups for p in group["params"] if id(p) not in hooks and p.requires_grad]
        if new:
            self._take_over(set(map(id, new)))
        for param in new:
            hooks[id(param)] = param.register_post_accumulate_grad_hook(self._ready)

    def _take_over(self, params: set[int]) -> None:
        """Let earlier optimizers of these parameters take ordinary steps, as if a notebook cell is run again."""
        for other in list(_IN_USE):
            if other is not self and other._is_in_use and not params.isdisjoint(other._hooks):
                other._let_go()
                warn_user(
                    "parameters stepped in the backward of another optimizer, which takes ordinary steps from now on. "
                    "To avoid this warning, call remove() of its handle first"
                )

    def collect(self, param: Tensor) -> None:
        """Add a parameter to those that wait. If they fill a bucket, update all of them."""
        if not self._is_in_use:
            return
        with self._lock:
            task = current_graph_task_id()
            if task != self._task or task == -1:  # no backward: a per-sample clipper has called the hook itself
                self._begin(task)
            key = id(param)
            if param.grad is None or key not in self._places:
                return
            if key in self._waiting or key in self._parts.updated:
                error = second_gradient()
                error.add_note(self._updated())
                raise error
            self._waiting[key] = param
            # the size of the whole parameter, so that the processes of a mesh agree
            self._bytes += param.numel() * param.element_size()
            if self._bytes >= self._bucket_bytes or task == -1:
                self._flush()

    @never_compiled  # so that an error reaches the user
    def _begin(self, task: int) -> None:
        """Check everything before the first update of a backward."""
        optimizer = self._optimizer
        check_backward_steps(optimizer)
        self._settings = optimizer.checked_settings()
        self._attach()
        self._waiting, self._bytes = {}, 0  # left by a backward that failed: `step` takes these gradients
        if task != -1:
            at_end_of_backward(self._end)
        self._task = task

    def _end(self) -> None:
        with self._lock:
            if self._is_in_use:
                self._flush()
            self._task = -1

    def _flush(self) -> None:
        """Update all parameters that wait, and free their gradients."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if not waiting:
            return
        # so that autograd raises if the rest of the backward needs an old value: fused kernels do not count versions
        increment_version(waiting.values())
        try:
            optimizer = self._optimizer
            optimizer.runner.step_part(self._groups_of(waiting), optimizer.state, self._settings, next(iter(waiting)))
        except BaseException as error:
            error.add_note(self._updated())
            raise
        for param in waiting.values():
            param.grad = None

    def _groups_of(self, params: Iterable[int]) -> list[Group]:
        """The param groups, each with only the given parameters (ids), in order."""
        all_groups = self._optimizer.param_groups
        groups = [_WITHOUT] * len(all_groups)
        for g, i in sorted(self._places[key] for key in params):
            group = all_groups[g]
            if groups[g] is _WITHOUT:
                groups[g] = {**group, "params": []} | ({"param_names": []} if "param_names" in group else {})
            groups[g]["params"].append(group["params"][i])
            if "param_names" in group:
                groups[g]["param_names"].append(group["param_names"][i])
        return groups

    def _updated(self) -> str:
        """What was updated in this step, for the notes of errors."""
        groups = self._optimizer.param_groups
        names: list[str] = []
        for param in self._parts.updated:
            g, i = self._places[param]
            names.append(groups[g]["param_names"][i] if "param_names" in groups[g] else f"{i} of group {g}")
        total = sum(len(group["params"]) for group in groups)
        shown = f": {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}" if names else ""
        return f"the backward had updated {len(names)} of {total} parameters in this step{shown}"


_IN_USE: weakref.WeakSet[StepInBackward] = weakref.WeakSet()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method while its object exists, without keeping the object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return call


def step_in_backward(optimizer: Optimizer, *, bucket_bytes: int = 2**23) -> StepInBackward:
    """Update each parameter in the backward, as soon as its gradient is ready, and free the gradient.

    After each backward call ``optimizer.step()`` as usual. It advances schedules and counters, collects the metrics,
    and updates parameters whose gradient was set by hand. The result is that of an ordinary step, up to rounding. The
    gradients never exist all at once, so they take the memory of the largest parameter and of one bucket.

    All transforms have to treat each tensor on its own: see `Transform.each_alone`.

    Only one optimizer can update a parameter in the backward. If another one did so before, it takes ordinary steps
    from now on, its handle has no effect any more, and there is a warning.

    Args:
        optimizer: A `Modular`.
        bucket_bytes: Small parameters wait until together they have this many bytes, because updating many small
            tensors in one pass takes less time. Those that still wait when the backward ends are updated then. With 0,
            no parameter waits.

    Returns:
        A handle. Its ``remove()`` goes back to ordinary steps.

    Raises:
        ValueError: For a transform that needs several gradients at once, a gate, ``target="closure"``, ``nonfinite``
            other than "propagate", a ``process_group``, a parameter that is listed twice, or plain parameters in
            several processes.
        TypeError: If ``optimizer`` is not a `Modular`.
        RuntimeError: If the optimizer steps in the backward already, or has a listener such as a `Recorder`. Later, in
            the backward: for a second gradient before ``optimizer.step()``, and under compiled autograd.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AdamW, ClipNorm, Modular, step_in_backward
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Modular(model, ClipNorm(1), AdamW())
        >>> handle = step_in_backward(optimizer)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
        >>> sorted(optimizer.metrics())
        ['clip_norm/clipped', 'clip_norm/factor', 'clip_norm/norm']
        >>> handle.remove()
    """
    modular = unwrap(optimizer)
    if not isinstance(modular, Modular):
        raise TypeError(f"step_in_backward takes a Modular, got {type(optimizer).__name__}")
    count("bucket_bytes", bucket_bytes)
    if modular.runner.parts is not None:
        raise RuntimeError("this optimizer steps in the backward already: call remove() of its handle first")
    check_backward_steps(modular)
    return StepInBackward(modular, bucket_bytes)
