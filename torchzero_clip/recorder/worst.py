"""The tables of a report: the steps and layers that stood out, and updates relative to parameters."""

import math

from torchzero_clip.recorder import words
from torchzero_clip.recorder.arithmetic import medians
from torchzero_clip.recorder.binning import Events
from torchzero_clip.recorder.data import Data, Layers
from torchzero_clip.recorder.page import paragraph, table
from torchzero_clip.recorder.precision import relative

MOST_STEPS = 20
MOST_WITH_LAYERS = 10
_MOST_LAYERS = 20
_TOP = 5
_LOST = "inf or NaN"
REASONS = {
    "nonfinite": "a gradient was inf or NaN",
    "found_inf": "the gradient scaler found inf or NaN",
    "error": "the step raised an error",
}


class Worst:
    """The spikes and skipped steps of a record, the worst first, and their layers."""

    def __init__(self, record: Data, events: Events) -> None:
        self._record = record
        self._events = events
        lost, high = events.worst()
        self._lost = dict(list(lost.items())[: max(MOST_STEPS // 2, MOST_STEPS - len(high))])
        self._indices = [*self._lost, *high[: MOST_STEPS - len(self._lost)]]
        self.steps = [record.steps[i] for i in self._indices]

    def step_table(self) -> list[str]:
        if not self._indices:
            return [paragraph("There were no spikes and no skipped steps.")]
        total = int((self._events.spikes | self._events.skipped).sum())
        shown = sum(self._lost.get(i, 1) for i in self._indices)
        some = f" ({shown:,} of {total:,} steps)" if total > shown else ""
        caption = f"Spikes and skipped steps. Norms that are inf or NaN come first, then the largest norms{some}."
        cells = [self._cells(i) for i in self._indices]
        return [table(caption, ("Step", "Norm", "Usual", "Ratio", "Loss", "What happened"), cells)]

    def _cells(self, i: int) -> list[str]:
        norm, usual = self._record.norm[i : i + 1], medians(self._record.norm[:i, None])
        ratio, more = float(relative(norm, usual, self._record.precision)), self._lost.get(i, 1) - 1
        deeds = self._deeds(i) or ["not clipped"]
        if more:
            deeds.append(f"(the norm was not finite in the next {words.counted(more, 'step')} either)")
        return [
            f"{self._record.steps[i]:,}",
            words.number_text(float(norm), _LOST if self._events.spikes[i] else "unknown"),
            words.number_text(float(usual)),
            words.as_ratio(ratio) if math.isfinite(norm) else "",
            words.number_text(float(self._record.loss[i])),
            "\n".join(deeds),
        ]

    def _deeds(self, i: int) -> list[str]:
        """What each transform did in a step, or why the step was skipped."""
        if reason := self._record.reasons[i]:
            return [f"skipped{self._reason(name, i)}" for name in reason.split(" ")]
        deeds: list[str] = []
        for name in dict.fromkeys(key.rpartition("/")[0] for key in self._record.metrics):
            limit, factor, share = (self._metric(f"{name}/{key}", i) for key in ("limit", "factor", "clipped"))
            texts = [f"{what} {words.number_text(x)}" for what, x in (("limit", limit), ("factor", factor)) if x == x]
            if share == share:
                texts.append(f"clipped {words.as_percent(share)}")
            if texts:
                deeds.append(f"{words.short(name)}: {', '.join(texts)}")
        return deeds

    def _metric(self, key: str, i: int) -> float:
        return float(self._record.metrics[key][i]) if key in self._record.metrics else math.nan

    def _reason(self, name: str, i: int) -> str:
        if name in REASONS:
            return f": {REASONS[name]}"
        mean = self._metric(f"{name}/mean", i)
        above = f", whose running mean was {words.number_text(mean)}" if math.isfinite(mean) else ""
        return f" by {words.short(name)}{above}"

    def layer_table(self) -> list[str]:
        with_layers = set(self._record.layer_steps) if self._record.layers else set[int]()
        steps = [step for step in self.steps if step in with_layers][:MOST_WITH_LAYERS]
        rows = [[f"{step:,}", *cells] for step in steps for cells in _cells_of(self._record.layers_of(step))]
        caption = f"The {_TOP} layers with the largest ratio of norm to usual norm, in the worst {len(steps)} steps."
        return [table(caption, ("Step", "Layer", "Norm", "Usual", "Ratio"), rows)] if rows else []


def _cells_of(layers: Layers) -> list[list[str]]:
    """The worst layers of a step. If more layers are not finite, the last row counts them."""
    lost, count = sum(not math.isfinite(layer.norm) for layer in layers), len(layers)
    if lost == count:
        return [[f"({f'all {count:,} layers are inf or NaN' if count else 'no layer has a gradient'})", "", "", ""]]
    rows = [
        [
            words.short(layer.name),
            words.number_text(layer.norm, _LOST),
            words.number_text(layer.usual),
            words.as_ratio(layer.ratio),
        ]
        for layer in layers[:_TOP]
        if not math.isnan(layer.ratio) or math.isnan(layer.usual)  # else rounding alone explains its norm
    ]
    if lost > _TOP:
        rows.append([f"({lost:,} of {count:,} layers are inf or NaN)", "", "", ""])
    return rows


def sign_table(record: Data) -> list[str]:
    signs = record.early_signs()
    rows = [
        [f"{step:,}", words.short(layer), number, f"{value:.2g}", f"{usual:.2g}", words.as_ratio(ratio)]
        for step, layer, number, value, usual, ratio in signs[: MOST_STEPS * _TOP]
    ]
    caption = "Norms of layers, and updates relative to the weights of their layer, that were unusually large"
    caption += f" (the first {len(rows)} of {len(signs):,})." if len(signs) > len(rows) else "."
    return [table(caption, ("Step", "Layer", "Number", "Value", "Usual", "Ratio"), rows)] if rows else []


def ratio_table(record: Data) -> list[str]:
    if not record.ratios or not record.layers:
        return []
    ratios = record.update_ratios()
    medians = ratios.nanmedian(dim=0).values.nan_to_num(nan=-1.0)
    order = medians.argsort(descending=True, stable=True).tolist()
    rows: list[list[str]] = []
    for i in [i for i in order if float(medians[i]) >= 0][:_MOST_LAYERS]:
        top = int(ratios[:, i].nan_to_num(nan=-1.0).argmax())
        numbers = (f"{float(value):.2g}" for value in (medians[i], ratios[top, i]))
        rows.append([words.short(record.layers[i]), *numbers, f"{record.ratios[top].step:,}"])
    some = f" (the {len(rows)} of {len(medians):,} layers with the largest medians)" if len(rows) < len(medians) else ""
    steps = words.counted(len(record.ratios), "step")
    caption = f"The norm of the update divided by the norm of the parameters, in {steps}{some}."
    return [table(caption, ("Layer", "Median", "Largest", "In step"), rows)] if rows else []
