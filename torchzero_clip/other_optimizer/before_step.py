"""Transforms that change the gradients before each step of any optimizer."""

import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.checks import instance
from torchzero_clip.compat import is_capturing, may_be_template, may_call_base, never_compiled, warn_user
from torchzero_clip.core.chain import Transforms
from torchzero_clip.core.group_keys import BEFORE_STEP as KEY
from torchzero_clip.core.transform import Transform
from torchzero_clip.core.undo import Spares, Undo
from torchzero_clip.engine.checked import versions
from torchzero_clip.engine.end import Deliver
from torchzero_clip.engine.listener import HasListener
from torchzero_clip.engine.nonfinite import Nonfinite, is_worth_a_warning, warn_of_skips
from torchzero_clip.functional import foreach
from torchzero_clip.functional.bad import BadGradients
from torchzero_clip.functional.clip import inverse
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.functional.lists import params_of
from torchzero_clip.hints import explained
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.wrappers import unwrap, without_wrappers
from torchzero_clip.other_optimizer.entries import Entries
from torchzero_clip.other_optimizer.followed import Followed, runner_before
from torchzero_clip.other_optimizer.wrapping import (
    Depth,
    RefusedStep,
    are_zero,
    check_optimizer,
    takes_factor,
    unwrap_method,
    with_closure,
    wrap_method,
)
from torchzero_clip.private_losses import refuse_loss
from torchzero_clip.types import Closure, Group

T = TypeVar("T")

_ABSENT = object()

FOUND_INF = "found_inf"
"""Where a gradient scaler tells an optimizer that gradients are not finite, and who refuses such a step."""


REFUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that change nothing in a step if ``found_inf`` is 1."""


class BeforeStep:
    """Transforms that act before the steps of an optimizer, until `remove` is called. `before_step` makes it."""

    def __init__(self, optimizer: Optimizer, delivery: Deliver, followed: Followed, entries: Entries) -> None:
        # weak, so that a deleted optimizer is freed at once, together with its hooks
        self._reference = weakref.ref(optimizer)
        self._followed, self._entries = followed, entries
        self.runner = followed.runner
        """What takes the steps of the transforms."""
        self._spares = Spares()
        delivery.multiply, delivery.host_reasons = self._multiply, self._host_reasons
        entries.begin(optimizer)
        self._infs = 0  # steps in a row that a gradient scaler has refused
        self._depth = Depth()
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters and their gradients, in a refused step of this kind
        self._has_set_grad_scale = False  # this step has set ``grad_scale`` of the optimizer
        self._grad_scale_before: Any = None  # its value before the step
        self._has_found_inf = False  # this step has set ``found_inf`` of the optimizer
        entry_hooks = entries.register(optimizer)
        around = optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)
        self._hooks, self._before_id = [*around, *entry_hooks], around[0].id
        # our post-hook runs first, so errors in those of others do not undo the step: torch has no public way for this
        optimizer._optimizer_step_post_hooks.move_to_end(around[1].id, last=False)  # pyright: ignore
        self._wrappers = {
            "step": wrap_method(optimizer, "step", self._around_step),
            "zero_grad": wrap_method(optimizer, "zero_grad", self._around_zero_grad),
        }

    @property
    def param_groups(self) -> list[Group]:
        """The settings of the transforms, which may be changed at any time: a dict for each group of the optimizer."""
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("the optimizer of this handle was deleted")
        self._followed.sync(optimizer.param_groups)
        return self._followed.param_groups

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transforms by name, in their order."""
        return self.runner.transforms

    @property
    def bad_gradients(self) -> BadGradients | None:
        """As `Modular.bad_gradients`."""
        self._read_decisions()
        return self.runner.policy.bad_gradients

    @property
    def skipped_steps(self) -> int:
        """How many steps gates and ``nonfinite="skip"`` have refused."""
        return int(self.metrics().get("skipped_steps", 0))

    @property
    def skipped_by(self) -> tuple[str, ...]:
        """Who has refused the last call of ``optimizer.step()``; empty if the step was not refused.

        These are names of gates, "nonfinite", or "found_inf" if a gradient scaler has found gradients that are not
        finite.
        """
        self._read_decisions()
        return self.runner.skipped_by

    @property
    def steps_taken(self) -> int:
        """How many steps the transforms have let pass, as `Modular.steps_taken`."""
        self._read_decisions()
        return self.runner.steps_taken

    @property
    def host_decides(self) -> tuple[str, ...]:
        """As `Modular.host_decides`."""
        return self.runner.host_decides()

    def _read_decisions(self) -> None:
        self.runner.read_decisions(self._followed.param_groups)

    def has(self, group: Group) -> bool:
        """True if a param group is one of the optimizer's."""
        optimizer = self._reference()
        return optimizer is not None and any(held is group for held in optimizer.param_groups)

    def metrics(self) -> dict[str, Tensor]:
        """Return what the transforms measured, as `Modular.metrics` does."""
        return self.runner.metrics(self._followed.param_groups)

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the loss of the next step, as `Modular.report_loss` does."""
        refuse_loss(self._followed.param_groups, "report_loss")
        self.runner.reported.add(loss)

    def remove(self) -> None:
        """Let the optimizer take its steps with the gradients as they are. Its checkpoints have no entry any more."""
        if self not in _HANDLES:  # the optimizer may have another handle by now
            return
        optimizer = self._reference()
        _HANDLES.discard(self)
        for hook in self._hooks:
            hook.remove()
        self.runner.listener = None
        if optimizer is None:
            return
        for name, wrapper in self._wrappers.items():
            unwrap_method(optimizer, name, wrapper)
        self._entries.remove(optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a handle cannot be copied or pickled: call before_step on the copy of the optimizer")

    def __repr__(self) -> str:
        chain = ", ".join(map(repr, self.runner.transforms.values()))
        optimizer = self._reference()
        return f"before_step({'deleted' if optimizer is None else type(optimizer).__name__}, {chain})"

    @never_compiled
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the gradients, or wrap the closure that makes them."""
        if self._depth.enters_base(optimizer):
            return None
        # the step before may have raised an error, and been called without the wrapper
        self._end(optimizer, is_taken=False)
        # without the wrapper, a refused step runs without gradients, in which only optimizers of torch change nothing
        is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        if not self._depth.is_wrapped and self.runner.policy.may_skip and not is_of_torch:
            raise RuntimeError(
                f"this step of {type(optimizer).__name__} was stored before before_step was called, so transforms "
                "cannot refuse it: call before_step first, for example before accelerator.prepare"
            )
        if not self._depth.is_wrapped and may_call_base(optimizer):
            raise RuntimeError(
                f"this step of {type(optimizer).__name__}, which may call that of its base class, was stored before "
                "before_step was called, so transforms cannot know where it ends: call before_step first"
            )
        self._depth.count = 1
        self.runner.skipped_by = ()
        self._entries.take_over_changes(optimizer)
        self._entries.placed.withdraw(optimizer)
        changed = with_closure(args, kwargs, partial(self._wrapped, optimizer))
        if changed is None:
            self._change(optimizer, None)
        return changed

    def _wrapped(self, optimizer: Optimizer, closure: Closure) -> Closure:
        versions_before = versions(params_of(optimizer.param_groups)) if self.runner.policy.may_skip else None
        return partial(self._evaluate, optimizer, closure, [], versions_before)

    def _evaluate(
        self,
        optimizer: Optimizer,
        closure: Closure,
        results: list[Any],
        versions_before: list[int | None] | None,
    ) -> Any:
        """Call the closure, and apply the transforms.

        ``results`` has what the closure returned earlier in this step, and ``versions_before`` the versions of the
        parameters before it.
        """
        if results:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluates its closure several times in one step, and transforms that keep "
                f"statistics act once a step: call clip_grad_norm_ in the closure, {closure!r}"
            )
        if versions_before is not None and versions_before != versions(params_of(optimizer.param_groups)):
            raise RuntimeError(
                f"{type(optimizer).__name__} moves parameters before it evaluates its closure, so a refused step would "
                'leave them moved: leave out gates, such as SkipStep, and nonfinite="skip"'
            )
        results.append(closure())
        self._change(optimizer, results[0])
        return results[0]

    @torch.no_grad()
    def _change(self, optimizer: Optimizer, result: Any) -> None:
        """Apply the transforms. A refused step ends here. Without the wrapper, it goes on without gradients."""
        followed, runner, groups = self._followed, self.runner, optimizer.param_groups
        if not self._unscale(optimizer):
            return
        if may_be_template(groups, is_first=runner.steps_taken == 0) and are_zero(groups):
            self._entries.begin_states()
            runner.leave_out()
            runner.policy.idle.zeros(runner.steps_taken, is_taken=False)  # perhaps a step that only creates state
            return
        followed.sync(groups)
        runner.undo = None if is_capturing() else self._noted()  # a replay raises no error
        try:
            runner.step(followed.param_groups, followed.state, None if result is None else lambda: result)
        except BaseException:
            self._restore(is_taken=False)
            raise
        if runner.found_inf is not None:  # the device decides
            self._has_found_inf = True
            optimizer.found_inf = runner.found_inf  # pyright: ignore
        if not runner.skipped_by:
            return
        if self._depth.is_wrapped:
            raise RefusedStep(result)
        # optimizers of torch change nothing in a step without gradients
        params = {param for group in groups for param in group["params"] if param.grad is not None}
        self._hidden = [(param, param.grad) for param in params]
        for param in params:
            param.grad = None

    def _noted(self) -> Undo:
        """Note what a step may change, except for the state of parameters, which is noted before it changes."""
        undo, followed, runner = Undo(self._spares), self._followed, self.runner
        state = runner.chain_state.values
        undo.members([state, followed.state, *followed.param_groups])
        if state:
            undo.tensors([value for value in state.values() if isinstance(value, Tensor)])
        undo.then(runner.counts_put_back())
        return undo

    def _restore(self, *, is_taken: bool) -> None:
        """End the step of the transforms. If the optimizer has raised, restore the state from before them."""
        runner = self.runner
        undo, runner.undo = runner.undo, None
        if undo is not None and not is_taken and not runner.skipped_by:  # a refused step keeps its counts
            undo.restore()
            runner.step_metrics.forget()
            if runner.untold is not None:
                runner.untold.refused_by.append("error")

    def _unscale(self, optimizer: Any) -> bool:
        """Divide by the scale of a gradient scaler. Return False if it has found gradients that are not finite."""
        found_inf = getattr(optimizer, FOUND_INF, None)
        if found_inf is not None and found_inf.item():
            self._read_decisions()  # else the last answer of the device would replace the reason
            self.runner.leave_out((FOUND_INF,))
            self._infs += 1
            if is_worth_a_warning(self._infs):
                reason = "the gradient scaler has found gradients that are not finite"
                warn_of_skips(self._infs, {repr(FOUND_INF): reason}, "go back to a checkpoint, or use bfloat16")
            return False
        self._infs = 0
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            grads = [param.grad for param in params_of(optimizer.param_groups)]
            foreach.multiply_([grad for grad in grads if grad is not None], widened(scale).reciprocal())
            self._set_grad_scale(optimizer, None)
        return True

    def _set_grad_scale(self, optimizer: Any, scale: Tensor | None) -> None:
        """Let the step divide the gradients by ``scale``. `_end` restores what was there."""
        if not self._has_set_grad_scale:  # noted first, so that an interrupt leaves nothing behind
            self._grad_scale_before = vars(optimizer).get("grad_scale", _ABSENT)
            self._has_set_grad_scale = True
        optimizer.grad_scale = scale

    def _restore_grad_scale(self, optimizer: Any) -> None:
        if self._grad_scale_before is _ABSENT:  # GradScaler takes None for a scale
            vars(optimizer).pop("grad_scale", None)
        else:
            optimizer.grad_scale = self._grad_scale_before
        self._has_set_grad_scale, self._grad_scale_before = False, None

    def _multiply(self, grads: list[Tensor], factor: Tensor | float) -> None:
        """Multiply gradients by one factor. The fused optimizers of torch do it in the step, which saves a pass."""
        optimizer = self._reference()
        if grads[0].dtype != torch.float64 and takes_factor(optimizer, self._before_id, len(grads)):
            self._set_grad_scale(optimizer, inverse(factor))
        else:
            # one tensor for all takes a quarter of the time of one Python number
            number = factor if isinstance(factor, Tensor) else torch.full((), factor, dtype=torch.float64, device="cpu")
            foreach.multiply_each_(grads, number.expand(len(grads)))

    def _host_reasons(self) -> list[str]:
        """Why the optimizer cannot leave it to the device whether a step is taken."""
        optimizer: Any = self._reference()
        if type(optimizer) not in REFUSABLE:  # a class derived from one may change more
            return [f"{type(optimizer).__name__} has no kernel that can refuse a step"]
        if getattr(optimizer, FOUND_INF, None) is not None:
            return ["a gradient scaler decides too"]
        held = [param for param in params_of(optimizer.param_groups) if param.grad is not None]
        if not takes_factor(optimizer, self._before_id, len(held)):
            return [f"{type(optimizer).__name__} needs fused=True in all groups, and no later hook before its step"]
        if held and held[0].dtype == torch.float64:
            return ["gradients of float64 are multiplied before the step"]
        # its first step makes state: SGD of torch would leave its buffers without values
        if not _have_begun(optimizer):
            return ["the optimizer takes the first step of a parameter"]
        return []

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the step, unless it is that of a base class."""
        if not self._depth.leaves_base():
            self._end(optimizer, is_taken=True)

    def _around_step(self, optimizer: Optimizer, step: Callable[[], object]) -> object:
        """Take a step of the optimizer. A refused one returns what the closure has returned."""
        self._end(optimizer, is_taken=False)  # an earlier step that ran without this wrapper and raised
        self._depth.is_wrapped = True
        try:
            return step()
        except RefusedStep as refused:
            return refused.args[0]
        finally:
            self._depth.is_wrapped = False
            self._end(optimizer, is_taken=False)

    def _around_zero_grad(self, optimizer: Optimizer, zero_grad: Callable[[], object]) -> object:
        self.runner.reported.zeroed()
        return zero_grad()

    def _end(self, optimizer: Optimizer, *, is_taken: bool) -> None:
        """End the step, unless it has ended. If the optimizer has raised, undo what the transforms did to state."""
        if not self._depth.count:
            return
        if self._has_set_grad_scale:
            self._restore_grad_scale(optimizer)
        if self._has_found_inf:
            vars(optimizer).pop(FOUND_INF, None)
            self._has_found_inf = False
        self._restore(is_taken=is_taken)
        if self.runner.reported.count:
            self.runner.reported.clear()
        if self in _HANDLES:  # else a closure or a hook has called `remove`
            self._entries.placed.place(optimizer)
        self._depth.count = 0
        for param, grad in self._hidden:
            if param.grad is None:  # else there is a new one, if the step raised
                param.grad = grad
        self._hidden = []
        if self.runner.untold is not None:
            with torch.no_grad():
                self.runner.tell()


@explained
def before_step(
    optimizer: Optimizer,
    *transforms: Transforms,
    model: nn.Module | None = None,
    nonfinite: Nonfinite = "propagate",
    max_consecutive_skips: int | None = None,
    process_group: ProcessGroup | None = None,
    fast: bool = True,
    new: str | Iterable[str] = (),
    dropped: str | Iterable[str] = (),
) -> BeforeStep:
    """Apply transforms to the gradients before each step of any optimizer.

    The optimizer keeps its class, its groups, its state, its schedulers and its trainer. ``optimizer.step()`` first
    changes ``.grad`` of its parameters by the transforms, and then takes its step:

        g ← (tₙ ∘ … ∘ t₁)(g)

    The state of the transforms is saved and loaded with that of the optimizer. ``optimizer.state_dict()`` has the state
    of each parameter beside that of the optimizer, and the state of the whole chain in each param group, both under the
    key "before_step".

    If a gate or ``nonfinite="skip"`` refuses a step, the optimizer is not called, and ``step()`` returns what its
    closure has returned. Parameters, state and gradients are as before. If the optimizer raises in its step, the state
    of the transforms is as before, so the step can be repeated with new gradients.

    Args:
        optimizer: Any optimizer that evaluates a closure at most once in a step; also in a wrapper of Accelerate or
            Lightning. Its parameters are those of its groups at each step.
        *transforms: What to do with the gradients, in this order; nested lists are accepted. Update rules such as
            `AdamW`, `LR`, and transforms whose target is parameters are refused, because the optimizer takes the step.
        model: The module that has the names of the parameters, for ``only``, ``without`` and messages. Not needed if
            the optimizer was made of named parameters.
        nonfinite: As in `Modular`.
        max_consecutive_skips: As in `Modular`.
        process_group: As in `Modular`.
        fast: As in `Modular`.
        new: As in `Modular.load_state_dict`, for all loads of the optimizer.
        dropped: As ``new``.

    Returns:
        A handle and context manager, with the metrics and settings of the transforms. ``remove()`` ends their work.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer, is a `Modular`, takes its steps by another optimizer, lacks
            hooks, or needs a closure, as `torch.optim.LBFGS` does; for a transform that changes parameters.
        ValueError: As in `Modular`; for a parameter that is listed twice; for a checkpoint of other transforms, which
            was loaded before this call.
        RuntimeError: If the optimizer has transforms before its steps already.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, before_step
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> handle = before_step(optimizer, ClipNorm(1, dim="global"))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.6000, -0.8000])
        >>> round(handle.metrics()["clip_norm/norm"].item(), 4)
        5.0
    """
    inner = without_wrappers(optimizer)
    check_optimizer(inner, transforms)
    if handle_of(inner) is not None:
        raise RuntimeError(
            "this optimizer already has transforms before its steps: first call remove() of their handle"
        )
    if model is not None:
        instance("model", model, nn.Module)
    delivery = Deliver()
    runner = runner_before(
        delivery,
        transforms,
        nonfinite=nonfinite,
        max_consecutive_skips=max_consecutive_skips,
        process_group=process_group,
        fast=fast,
    )
    followed = Followed(runner, inner.param_groups, model)
    handle = BeforeStep(inner, delivery, followed, Entries(followed, new=new, dropped=dropped))
    _warn_of_copies()
    _HANDLES.add(handle)
    recorder = hook_owner(inner, HasListener)
    runner.listener = None if recorder is None else recorder.listener
    return handle


def _have_begun(optimizer: Any) -> bool:
    """True if all parameters with a gradient have the state of an optimizer that is `REFUSABLE`."""
    for group in optimizer.param_groups:
        states = [optimizer.state.get(param) or {} for param in group["params"] if param.grad is not None]
        if "momentum" not in group:  # as in groups of SGD, whose state begins with its momentum
            if not all(states):
                return False
        elif group["momentum"] and any(state.get("momentum_buffer") is None for state in states):
            return False
    return True


def chain_of(optimizer: Any) -> Modular | BeforeStep | None:
    """The transforms of an optimizer, which may have wrappers, or of a handle; None if there are none."""
    inner = optimizer if isinstance(optimizer, BeforeStep) else unwrap(optimizer)
    return inner if isinstance(inner, Modular | BeforeStep) else handle_of(inner)


def handle_of(optimizer: Optimizer) -> BeforeStep | None:
    """The transforms before the steps of an optimizer; None if it has none."""
    return hook_owner(optimizer, BeforeStep)


_HANDLES: weakref.WeakSet[BeforeStep] = weakref.WeakSet()
"""All handles until they are removed."""
_WARNED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The copies of which `warn_of_copy` has warned."""


def warn_of_copy(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn before the first step of an optimizer that has lost its transforms, as copies and pickles lose hooks."""
    groups = optimizer.param_groups
    if not groups or KEY not in groups[0] or torch.compiler.is_compiling() or hook_owner(optimizer, BeforeStep):
        return
    # the groups of SAM are those of its base optimizer
    if optimizer not in _WARNED and not any(handle.has(groups[0]) for handle in _HANDLES):
        _WARNED.add(optimizer)
        warn_user(
            f"the {type(optimizer).__name__} that this one was copied or loaded from had transforms before its steps. "
            "This one has none: call before_step on it"
        )


@cache  # so that the hook is registered once
def _warn_of_copies() -> None:
    """Warn of copies from now on, in this process."""
    register_optimizer_step_pre_hook(warn_of_copy)


def hook_owner(optimizer: Optimizer, kind: type[T]) -> T | None:
    """The object of a kind whose method is a hook of the steps of an optimizer; None if it has none."""
    # torch has no public way to list hooks. A copy of an optimizer has none, and so no owner
    hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    for hook in hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, kind):
            return owner
    return None
