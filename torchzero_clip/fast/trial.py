"""A trial of an elementwise transform, before it acts on updates for the first time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.compat import FakeTensor
from torchzero_clip.core.elements import Elements
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.step import Step
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Setting

TOLERANCE = 1e-4
"""The largest difference between `change` and the formula, as a part of the largest number: rounding is smaller."""


def try_out(transform: Elementwise, setting: Setting, dtype: torch.dtype) -> None:
    """Take two steps of a small tensor. Raise if a method leaves elements as they were, or if two methods differ.

    A `change` that forgets ``result`` would train on memory with any values. The tensor is on CPU, so that the trial
    does not wait for a device.

    Args:
        transform: The transform.
        setting: Its settings.
        dtype: float32 or float64.
    """
    first = torch.linspace(-2.9, 3.3, 12, dtype=dtype, device="cpu")
    if isinstance(first, FakeTensor) or not transform.is_elementwise():
        return
    if not set(transform.keys) <= transform.init_state(first, setting).keys():
        return  # the step itself explains what is missing
    updates = [first, 1.7 * first.flip(0) + 0.013]
    found: list[list[tuple[str, Tensor]]] = []
    for by_formula in sorted({not transform.has_change, transform.has_formula}):
        with torch.random.fork_rng(devices=[]):  # both methods draw equal numbers, and the step those after them
            found.append(_steps(transform, setting, updates, by_formula))
    for (what, changed), (_, expected) in zip(found[0], found[-1], strict=True):
        if not torch.allclose(changed, expected, TOLERANCE, TOLERANCE * float(expected.abs().max()), equal_nan=True):
            raise RuntimeError(
                f"{transform!r}.change and its formula differ. Change computes {what} {_shown(changed)}, and the "
                f"formula {_shown(expected)}. Correct one of the two methods, or delete change"
            )


def _steps(
    transform: Elementwise, setting: Setting, updates: Sequence[Tensor], by_formula: bool
) -> list[tuple[str, Tensor]]:
    """The new elements and the new state after each step, with their names."""
    param, norm = torch.zeros_like(updates[0]), torch.ones(1, dtype=torch.float64, device="cpu")
    state, chain_state = transform.init_state(param, setting), transform.init_global_state()
    found: list[tuple[str, Tensor]] = []
    for x in updates:
        step = Step([param], [x], None, [state], [setting], chain_state, gradient_norms=norm)
        flags = transform.flags([x], step, None)
        flags = flags.of_formula() if by_formula else flags
        is_usual = all(bool(flag) for flag in flags[:2] if flag is not None)
        at = Elements(finite=True, scratch=Scratch()) if is_usual else flags.elements(0, x.device)
        own = [state[key] for key in transform.keys]
        given = [x, *own, *(vector.select(0, 0).to(x.dtype) for vector in flags.numbers)]
        found.append(("elements", _changed(transform, given, setting, at, by_formula)))
        found += [(f"state {key!r}", value.clone()) for key, value in zip(transform.keys, own, strict=True)]
    return found


def _changed(
    transform: Elementwise, given: Sequence[Tensor], setting: Setting, at: Elements, by_formula: bool
) -> Tensor:
    """The new elements. Raise if a method writes to what it may only read, or leaves NaN."""
    name, before, result = "formula" if by_formula else "change", given[0].clone(), torch.full_like(given[0], torch.nan)
    at.is_first = True
    transform.counted(given[0], result, given[1:], setting, at, by_formula=by_formula)
    if not torch.equal(before, given[0]):
        raise RuntimeError(f"{transform!r}.{name} changes x in place. Write the new elements to result")
    if bool(result.isnan().any()):
        way_out = "" if by_formula else ". Write every element to result, for example by at.write(new, x, result)"
        raise RuntimeError(f"{transform!r}.{name} gives NaN for finite elements{way_out}")
    return result


def _shown(tensor: Tensor) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in tensor[:3].tolist())}, ...]"
