"""A trial of an elementwise transform, before it acts on updates for the first time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.compat import FakeTensor
from torchzero_clip.core.elements import Elements
from torchzero_clip.core.elementwise import WRITE_ALL, Elementwise
from torchzero_clip.core.step import Step
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Setting

TOLERANCE = 1e-4
"""The largest difference between `change` and the formula, as a part of the largest number: rounding is smaller."""
_ROUNDING = 1e-6
"""The same between a formula of halves of a tensor and of the whole."""
Computed = tuple[str, Tensor, float]
"""What was computed, its numbers, and how much they may differ."""


def try_out(transform: Elementwise, setting: Setting, dtype: torch.dtype) -> None:
    """Take four steps of a small tensor. Raise if a method does not write all elements, or if two methods differ.

    In the third step an element is inf, and in the fourth the gradient is not finite. A `change` that forgets
    ``result`` would train on uninitialized memory. It is on the CPU, so the trial does not synchronize with a GPU.
    """
    first = torch.linspace(-2.9, 3.3, 12, dtype=dtype, device="cpu")
    # a setting in a tensor is not read, and may give NaN
    setting = {k: torch.ones_like(v, device="cpu") if isinstance(v, Tensor) else v for k, v in setting.items()}
    if isinstance(first, FakeTensor) or not transform.is_elementwise:
        return
    if not set(transform.keys) <= transform.init_state(first, setting).keys():
        return  # the step itself explains what is missing
    second = 1.7 * first.flip(0) + 0.013
    updates = [first, second, second.roll(1).masked_fill(first == first[2], torch.inf), second]
    computed: list[list[Computed]] = []
    for by_formula in sorted({not transform.has_change, transform.has_formula}):
        with torch.random.fork_rng(devices=[]):  # both methods draw equal numbers, and the step those after them
            computed.append(_steps(transform, setting, updates, by_formula))
    for (what, changed, _), (_, expected, allowed) in zip(computed[0], computed[-1], strict=True):
        wrong = ~torch.isclose(changed, expected, TOLERANCE, allowed, equal_nan=True)
        if bool(wrong.any()):
            raise RuntimeError(
                f"{transform!r}.change and its formula differ. Change computes {what} {_shown(changed[wrong])}, and "
                f"the formula {_shown(expected[wrong])}. Correct one of the two methods, or delete change"
            )


def _steps(transform: Elementwise, setting: Setting, updates: Sequence[Tensor], by_formula: bool) -> list[Computed]:
    """The new elements, the new state and how many elements changed, after each step."""
    state, chain_state = transform.init_state(updates[0], setting), transform.init_global_state()
    computed: list[Computed] = []
    for i, x in enumerate(updates):
        norm = torch.full((1,), torch.inf if i == 3 else 1.0, dtype=torch.float64, device="cpu")
        step = Step([torch.zeros_like(x)], [x], None, [state], [setting], chain_state, gradient_norms=norm)
        flags = transform.flags([x], step, None)
        flags = flags.of_formula() if by_formula else flags
        is_usual = all(bool(flag) for flag in flags[:2] if flag is not None)
        at = Elements(finite=i < 2, scratch=Scratch()) if is_usual else flags.elements(0, x.device)
        at.is_first = True
        tensors = [state[key] for key in transform.keys]
        arguments = [x, *tensors, *(vector.select(0, 0).to(x.dtype) for vector in flags.numbers)]
        if by_formula and i < 2:
            _check_formula(transform, arguments, setting, at)
        new, count = _changed(transform, arguments, setting, at, by_formula)
        # rounding may change elements in one of two methods
        unclear = (new != x) & torch.isclose(new, x, 0, TOLERANCE * _largest(x))
        named = {"elements": new, **{f"state {k!r}": v.clone() for k, v in zip(transform.keys, tensors, strict=True)}}
        computed += [(what, value, TOLERANCE * _largest(value)) for what, value in named.items()]
        computed.append(("the count", count.to(x.dtype).view(1), float(unclear.sum())))
    return computed


def _changed(
    transform: Elementwise, arguments: Sequence[Tensor], setting: Setting, at: Elements, by_formula: bool
) -> tuple[Tensor, Tensor]:
    """The new elements and the count. Raise if a method writes to what it may only read, or leaves NaN."""
    method, x = f"{transform!r}.{'formula' if by_formula else 'change'}", arguments[0]
    copies, result = [tensor.clone() for tensor in arguments], torch.full_like(x, torch.nan)
    rest = ~x.isfinite() if at.mask is None else ~(x.isfinite() & at.mask)
    count = transform.counted(x, result, arguments[1:], setting, at, by_formula=by_formula)
    if not torch.equal(copies[0], x):
        raise RuntimeError(f"{method} changes x in place. Write the new elements to result")
    if bool(result[x.isfinite()].isnan().any()):
        raise RuntimeError(f"{method} gives NaN for finite elements{'' if by_formula else WRITE_ALL}")
    for key, new, old in zip(transform.keys, arguments[1:], copies[1:], strict=False):
        if by_formula and bool(new[x.isfinite()].isnan().any()):
            raise RuntimeError(f"{method} gives NaN in the state {key!r} for finite elements")
        if transform.keeps_statistics and not torch.equal(new[rest], old[rest]):
            raise RuntimeError(
                f"{method} changes the state {key!r} of elements that do not take part, such as those that an earlier "
                "transform made inf. Write at = at.only_finite(size), and change the state by at.lerp_ or at.put"
            )
    return result, count


def _check_formula(transform: Elementwise, arguments: Sequence[Tensor], setting: Setting, at: Elements) -> None:
    """Raise if results of the formula that are not random depend on the shape."""
    with torch.random.fork_rng(devices=[]):
        whole, again, halves = (_in_parts(transform, arguments, setting, at, parts) for parts in (1, 1, 2))
    if torch.equal(whole, again) and not torch.allclose(whole, halves, _ROUNDING, _ROUNDING * _largest(whole)):
        raise RuntimeError(
            f"{transform!r}.formula computes other numbers from halves of a tensor than from the whole. It must treat "
            "each element alone, because the optimizer cuts and joins tensors: derive from TensorwiseTransform instead"
        )


def _in_parts(transform: Elementwise, whole: Sequence[Tensor], setting: Setting, at: Elements, parts: int) -> Tensor:
    """What the formula computes from the tensors, cut into parts: the new elements and the new state, in rows."""
    cut = [tensor.clone().chunk(parts) if tensor.ndim else [tensor] * parts for tensor in whole]
    results: list[Tensor] = []
    for x, *state in zip(*cut, strict=True):
        result = torch.empty_like(x)
        transform.counted(x, result, state, setting, at, by_formula=True)
        results.append(torch.stack([result, *state[: len(transform.keys)]]))
    return torch.cat(results, 1)


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _shown(tensor: Tensor) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in tensor[:3].tolist())}{', ...' if len(tensor) > 3 else ''}]"
