"""Calls of the methods that authors write, and checks of what these return, change and store.

An error names the transform. The first step of a parameter compares what a method may not change, by the versions
that torch counts for each tensor. Later steps do not spend time on this.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import FakeTensor
from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, UpdateRule
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import TensorwiseTransform, Transform, storable
from torchzero_clip.functional.dtypes import widest_of
from torchzero_clip.functional.foreach import is_one_number
from torchzero_clip.functional.measure import Measured
from torchzero_clip.hints import described, explanation
from torchzero_clip.types import State


def applied(node: Node, updates: list[Tensor], step: Step) -> list[Tensor]:
    """The result of a transform for updates, to which it may write unless it is an update rule."""
    transform = node.transform
    if transform.pure:
        step.loss = None
    read, written = (updates, ()) if isinstance(transform, UpdateRule) else ((), updates)
    check = _watched(node, step, {"its updates": read}, written) if step.is_first else None
    try:
        result: Any = transform.apply_tensors(list(updates), step)  # an author may change the list
    except Exception as error:
        _explain(error, node, step)
    if not isinstance(result, list | tuple):
        raise RuntimeError(f"{_method(transform)} returned {type(result).__name__} instead of a list of tensors")
    if len(result) != len(updates):
        raise RuntimeError(f"{_method(transform)} returned {len(result)} tensors for {len(updates)}")
    for new, old in zip(result, updates, strict=True):
        if not isinstance(new, Tensor):
            raise RuntimeError(f"{_method(transform)} returned {type(new).__name__} instead of a tensor")
        if new.shape != old.shape or new.dtype != old.dtype:
            got, expected = (f"{tuple(t.shape)} of {t.dtype}" for t in (new, old))
            raise RuntimeError(f"{_method(transform)} returned a tensor of shape {got} for one of shape {expected}")
    if check is not None:
        check()
        _check_views(node, step, result)
    check_state(node, step)
    # later transforms may write to the result, and torch cannot write to an expanded tensor
    return [new.contiguous() if 0 in new.stride() else new for new in result]


def _method(transform: Transform) -> str:
    is_applied_to_each = type(transform).apply_tensors is TensorwiseTransform.apply_tensors
    return f"{transform!r}.{'apply_tensor' if is_applied_to_each else 'apply_tensors'}"


def factors_of(node: Node, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
    """The factors that a scaling returns. Its state and its metrics are checked too."""
    if not measured.indices:  # all tensors are left alone
        return torch.ones_like(measured.vector)
    if node.transform.pure:
        step.loss = None
    check = None
    if step.is_first:
        check = _watched(node, step, {"its updates": updates, "the norms": [measured.vector, measured.total]})
    try:
        factors: Any = cast(Scaling, node.transform).factors(measured, updates, step)
    except Exception as error:
        _explain(error, node, step)
    if check is not None:
        check()
    count = len(measured.vector)
    if not isinstance(factors, Tensor) or factors.shape != (count,) or not factors.is_floating_point():
        raise RuntimeError(
            f"{node.transform!r}.factors returned {described(factors)} instead of {count} numbers to multiply by, one "
            "for each slice: return measured.by_setting(step.settings, rule), measured.by_norm(rule), or "
            "measured.joined(factors) of a list like measured.norms"
        )
    if node.transform.pure and step.is_first:
        _check_own_memory(node, step, [factors, *step.metrics.values()])
    check_state(node, step)
    if node.transform.pure:
        return factors
    # a copy, because factors may be a view of state, which is stored next; an expanded number stays expanded
    numbers = factors.narrow(0, 0, 1) if count and is_one_number(factors) else factors
    return numbers.to(factors.dtype if factors.dtype.itemsize >= 4 else widest_of(factors), copy=True).expand(count)


def slice_dims(scaling: Scaling, tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a slice, which a subclass returns."""
    dims: Any = scaling.slice_dims(tensor)
    if not isinstance(dims, tuple | list):
        raise TypeError(f"{scaling!r}.slice_dims returned {dims!r}: return a tuple, () to leave the tensor alone")
    return tuple(dims)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def take_step(node: Node, updates: list[Tensor], step: Step) -> None:
    """Let a final rule change the parameters."""
    rule = cast(FinalRule, node.transform)
    try:
        returned: Any = rule.take_step(updates, step)  # pyright: ignore
    except Exception as error:
        _explain(error, node, step)
    if returned is not None:
        raise RuntimeError(f"{rule!r}.take_step returned {described(returned)}: change step.params and return None")
    check_state(node, step)


def ask_gate(node: Node, norm: Tensor, step: Step) -> Tensor:
    """Whether a gate refuses the step: a 0-d boolean tensor."""
    gate = cast(Gate, node.transform)
    before = dict(step.global_state)
    then = versions(before.values())
    answer = _called(gate.refuses, node, norm, step)
    now = step.global_state
    is_kept = len(now) == len(before) and all(now.get(key) is value for key, value in before.items())
    if not is_kept or versions(before.values()) != then:
        raise RuntimeError(f"{gate!r}.refuses changed step.global_state: change it in accept, and in refused")
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.ndim:
        raise RuntimeError(
            f"{gate!r}.refuses returned {described(answer)} instead of a 0-d tensor of booleans: return a comparison "
            "of tensors, such as norm > limit, without bool() or .item()"
        )
    return answer


def tell_gate(node: Node, norm: Tensor, step: Step, taken: bool | Tensor) -> None:
    """Tell a gate whether the step is taken: a 0-d boolean tensor if the device decides."""
    gate = cast(Gate, node.transform)
    if isinstance(taken, Tensor):
        _called(lambda norm, step: gate.record(norm, step, taken), node, norm, step)
    else:
        _called(gate.accept if taken else gate.refused, node, norm, step)
    check_state(node, step)


def reason_of_gate(node: Node, norm: Tensor, step: Step) -> str:
    """The reason that the gate gives for refusing the step."""
    gate = cast(Gate, node.transform)
    said: Any = _called(gate.why, node, norm, step)
    if not isinstance(said, str):
        raise RuntimeError(f"{gate!r}.why returned {described(said)} instead of a string")
    return said


def _called(method: Callable[[Tensor, Step], object], node: Node, norm: Tensor, step: Step) -> object:
    if not cast(Gate, node.transform).needs_loss:
        step.loss = None
    check = _watched(node, step, {"the norm": [norm]}) if step.is_first else None
    try:
        answer = method(norm, step)
    except Exception as error:
        _explain(error, node, step)
    if check is not None:
        check()
    return answer


def check_state(node: Node, step: Step) -> None:
    """Raise if a metric is not a 0-d tensor, or if state was not declared or checkpoints cannot hold it.

    Copies metrics that may be views of state. State that differs from what was declared is restored before the error.
    """
    for key, value in step.metrics.items():
        if not isinstance(value, Tensor) or value.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuntimeError(
                f"{node.transform!r} has {described(value)} as metric {key!r}: a metric is a 0-d tensor, such as "
                "norms.mean()"
            )
        if not node.transform.pure:  # it may be a view of state, which this and later steps overwrite
            step.metrics[key] = value.clone()
    wrong = _put_right("init_global_state", step.global_state, step.global_state_before) if step.global_state else []
    dicts_read = step.stored.dicts_read or []
    for state in dicts_read:
        if not node.has_state and len(state) > 0:
            added = f"{node.transform!r} added the state {next(iter(state))!r}"
            raise RuntimeError(f"{added}, which checkpoints would not load: let init_state return it")
        if not isinstance(node.transform, FinalRule):  # the state of a wrapped optimizer is its own
            storable(node.transform, state)
    if dicts_read and not isinstance(node.transform, FinalRule):
        for i, declared in step.stored.first_states.items():
            entries = dicts_read[i]
            if len(entries) != len(declared):  # a transform may add state that it declares
                declared = {**node.transform.possible_state(step.params[i], step.settings[i]), **declared}
            wrong += _put_right("init_state", entries, declared)
    if wrong:
        raise RuntimeError(f"{node.transform!r} {wrong[0]}")


def _put_right(method: str, stored: State, declared: State) -> list[str]:
    """Remove keys that state does not declare, restore values of another kind, and return what was wrong."""
    wrong: list[str] = []
    for key in [key for key, value in stored.items() if value is not declared.get(key)]:
        value = stored[key]
        if key not in declared:
            del stored[key]
            wrong.append(f"added the state {key!r}, which checkpoints would not load: let {method} return it")
        elif _kind(value) != _kind(declared[key]):
            stored[key] = declared[key]
            wrong.append(
                f"replaced the state {key!r}, {described(declared[key])}, by {described(value)}, which checkpoints "
                f"would not load: keep the kind that {method} returns"
            )
    return wrong


def _kind(value: object) -> object:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else isinstance(value, int | float)


def versions(values: Iterable[object]) -> list[int | None]:
    """How often each tensor was changed in place; None where torch does not count."""
    if torch.compiler.is_compiling():
        return []
    return [v._version if isinstance(v, Tensor) and not v.is_inference() else None for v in values]


def _watched(
    node: Node, step: Step, read: Mapping[str, Sequence[Tensor]], written: Sequence[Tensor] = ()
) -> Callable[[], None]:
    """Note what a transform may not change. Return a function that raises if it was changed.

    Until it is called, pure transforms cannot read ``step.grads``, except rules and tensorwise ones.
    """
    transform = node.transform
    may_write = set(map(id, written))  # before another optimizer, updates may be the gradients themselves
    grads = [grad for grad in step.grads if id(grad) not in may_write]
    watched = {**read, "the parameters": step.params, "the gradients": grads}
    then = {what: versions(tensors) for what, tensors in watched.items()}
    attributes, all_grads = dict(vars(transform)), step.grads
    # a rule may ask how gradients are laid out, and `apply_tensor` gets a gradient in any case
    if transform.pure and not isinstance(transform, UpdateRule | TensorwiseTransform):
        step.grads = cast(list[Tensor], _Unreadable(transform))

    def check() -> None:
        step.grads = all_grads
        for what, earlier in then.items():
            if versions(watched[what]) != earlier:
                raise RuntimeError(
                    f"{transform!r} wrote to {what}, which it may only read: compute new tensors, as in update * 2 "
                    "instead of update.mul_(2)"
                )
        for key, value in vars(transform).items():
            before = attributes.get(key)
            if value is not before and (isinstance(value, Tensor) or (type(value) in (int, float) and value != before)):
                setattr(transform, key, before) if key in attributes else delattr(transform, key)
                raise RuntimeError(
                    f"{transform!r} stored {described(value)} in its attribute {key!r}, which checkpoints do not "
                    "have: store it in state, which init_state or init_global_state returns"
                )

    return check


class _Unreadable(Sequence[Tensor]):
    """Stands for the gradients in the first step of a pure transform, which does not read them."""

    def __init__(self, transform: Transform) -> None:
        self._text = f"{transform!r} reads step.grads, and its class says pure = True: write pure = False there"

    @override
    def __getitem__(self, index: object) -> NoReturn:
        raise RuntimeError(self._text)

    @override
    def __len__(self) -> NoReturn:
        raise RuntimeError(self._text)


def _stored(step: Step) -> list[object]:
    """All values of the state that a transform has seen."""
    states = (*(step.stored.dicts_read or ()), *step.stored.first_states.values(), step.global_state)
    return [value for state in states for value in state.values()]


def _check_own_memory(node: Node, step: Step, tensors: Sequence[Tensor]) -> None:
    """Raise if factors or metrics of a pure transform share memory with its state."""
    if isinstance(tensors[0], FakeTensor):
        return
    numbers = [value for value in _stored(step) if type(value) is Tensor and value.numel()]
    # by addresses: numbers that are elements of one vector share its storage
    if not {number.data_ptr() for number in numbers}.isdisjoint(tensor.data_ptr() for tensor in tensors):
        raise RuntimeError(
            f"{node.transform!r} returned or showed a view of its state, and its class says pure = True: return "
            "clones, or write pure = False there"
        )


def _check_views(node: Node, step: Step, result: Sequence[Tensor]) -> None:
    """Raise if a transform returned a view of what a later transform must not write to."""
    kept = {id(value) for value in (*step.params, *step.grads, *_stored(step)) if isinstance(value, Tensor)}
    for tensor in result:
        if id(tensor) not in kept and not tensor.is_inference() and id(tensor._base) in kept:
            raise RuntimeError(
                f"{node.transform!r} returned a view of its state, of a gradient or of a parameter, to which a later "
                "transform might write: return view.clone()"
            )


def _explain(error: Exception, node: Node, step: Step) -> NoReturn:
    """Raise the error of a method that an author wrote, with an explanation if we have one."""
    transform = node.transform
    states = step.stored.dicts_read or step.states
    names = {
        "settings": node.storage_keys,
        "state of a parameter": states[0] if states else (),
        "state of the whole chain": node.global_keys,
        **({"children": node.children} if node.children else {}),
    }
    text = explanation(error, repr(transform), names)
    if text is not None:
        raise RuntimeError(text) from error
    error.add_note(f"in {transform!r}")
    # by its text, because the operations that get None raise errors of several classes
    if step.loss is None and "'NoneType'" in str(error):
        way_out = "call optimizer.report_loss(loss) before step(), or pass step a closure that returns the loss"
        if isinstance(transform, Gate) and not transform.needs_loss:
            way_out = f"write needs_loss = True in the class of the gate, and {way_out}"
        elif transform.pure and not isinstance(transform, Gate):
            way_out = f"write pure = False in its class, because a pure transform gets no loss, and {way_out}"
        error.add_note(f"the loss of this step is None: {way_out}")
    raise error
