"""Sends numbers of a run to a logger."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.compat import warn_user
from torchzero_clip.recorder.arithmetic import median_of, medians
from torchzero_clip.recorder.precision import relative
from torchzero_clip.recorder.record import Record

Send: TypeAlias = Callable[[int, dict[str, float]], object]

EARLIER = 200  # how many earlier steps give the usual norm
_TOP = 3  # layers of a write by their norms, in units of their usual ones, and as many by their update ratios
HIGH = 2.0  # times its usual norm: such a layer gets a curve of its own
_MOST_LAYERS = 20  # that have curves
_STEP = "gradients/step"


class Live:
    """Sends points to a logger: joint norms, what was clipped and skipped, and the layers that stand out most."""

    def __init__(self, target: Any, every: int | None) -> None:
        self._send, once = sender(target)
        self.every = None if once else every  # how many steps one point sums up; None for all that are sent at once
        self.next = 0  # the first step that was not sent
        self._layers = set[str]()  # those that were high once are part of all later points, so that each has a line
        self._warned = False

    def send(self, record: Record, *, is_end: bool = False) -> None:
        """Send the points of steps that were not sent yet; at the end also the last point, which may be incomplete."""
        first = sum(step < self.next for step in record.steps)
        every = self.every or max(len(record.steps) - first, 1)
        while first < len(record.steps):
            end = min(first + every, len(record.steps))
            if end - first < every and not is_end:
                break
            self.next = record.steps[end - 1] + 1
            try:
                self._send(record.steps[end - 1], self._point(record, first, end))
            except Exception as error:  # a logger that fails must not stop training
                if not self._warned:
                    warn_user(f"log= raised an error, and training continues: {error!r}")
                self._warned = True
            if self.next > record.steps[end - 1] + 1:  # the logger has closed the recorder, which sent the rest
                break
            first = end

    def _point(self, record: Record, first: int, end: int) -> dict[str, float]:
        norm = record.norm[first:end]
        finite = norm[norm.isfinite()]
        clipped, limit = record.share_clipped[first:end], record.limits()[first:end]
        norms = record.layer_norms[first:end]
        steps = record.part(first, end)
        ratios = steps.update_ratios()[-1] if steps.ratios else norms.new_full((len(record.layers),), math.nan)
        is_lost = bool(norms.isfinite().logical_not().any())
        values = {
            "gradients/norm": median_of(finite) if len(finite) else math.nan,
            "gradients/largest_norm": math.inf if is_lost else float(finite.max()) if len(finite) else math.nan,
            "gradients/loss": float(record.loss[first:end].nanmean()),
            "gradients/share_clipped": float(clipped.nanmean()),
            "gradients/limit": float(limit[-1]),
            "gradients/skipped": float(sum(map(bool, record.reasons[first:end]))),
        }
        largest = torch.where(norms < 0, -1.0, norms.nan_to_num(nan=math.inf)).amax(dim=0)
        usual = medians(record.layer_norms[max(first - EARLIER, 0) : first])
        high = relative(norms, usual, record.precision).nan_to_num(nan=-1.0, posinf=math.inf).amax(dim=0)
        shown = {*_top(high), *_top(ratios)}
        for i, name in enumerate(record.layers):
            if i in shown and high[i] > HIGH and len(self._layers) < _MOST_LAYERS:
                self._layers.add(name)
            if i in shown or name in self._layers:
                values[f"layers/{name}/norm"] = float(largest[i]) if largest[i] >= 0 else math.nan
                values[f"layers/{name}/update_ratio"] = float(ratios[i])
        return {key: value for key, value in values.items() if not math.isnan(value)}


def _top(sizes: Tensor) -> list[int]:
    sizes = sizes.nan_to_num(nan=-1.0, posinf=math.inf)
    return [i for i in sizes.argsort(descending=True, stable=True).tolist()[:_TOP] if sizes[i] > 0]


def sender(target: Any) -> tuple[Send, bool]:
    """A function that sends one point, and whether all steps that are sent at once must be one point."""
    if hasattr(target, "add_scalar"):

        def add(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

        return add, False
    if hasattr(target, "define_metric") and hasattr(target, "log"):
        for names in ("gradients/*", "layers/*"):
            target.define_metric(names, step_metric=_STEP)
        # without step=, because W&B drops rows whose step is below its own count; each call raises that count by one
        return lambda step, values: target.log({**values, _STEP: step}), True
    if hasattr(target, "log_metrics"):
        return lambda step, values: target.log_metrics(values, step=step), False
    log = getattr(target, "log", None)
    if callable(log) and "step" in inspect.signature(log).parameters:  # of Accelerate and Trackio
        return lambda step, values: target.log(values, step=step), False
    if callable(target):
        return target, False
    raise TypeError(
        "log must be a run of Weights & Biases or Trackio, a SummaryWriter, a logger of Lightning, an Accelerator or a "
        f"function log(step, values), got {type(target).__name__}"
    )
