"""The tables of a report: the steps and layers that stood out, and updates relative to parameters."""

import math
from collections import Counter

import torch
from torch import Tensor

from torchzero_clip.recorder import words
from torchzero_clip.recorder.binning import Events, relative, usual_norms
from torchzero_clip.recorder.numbers import median_of
from torchzero_clip.recorder.page import Column, details, grouped_table, paragraph, table
from torchzero_clip.recorder.record import Record

MOST_STEPS = 20
MOST_CANDIDATES = 60
MOST_LAYERS = 20
MOST_OFTEN = 10
TOP = 5
OPEN = 5  # worst steps whose layers are shown without a click
REASONS = {
    "nonfinite": "a gradient was inf or NaN",
    "found_inf": "the gradient scaler found inf or NaN",
    "error": "the step raised an error",
}
LAYER = Column("Layer", is_text=True)


class Worst:
    """The spikes and skipped steps of a record, the worst first, and their layers.

    Args:
        record: What was recorded.
        events: What happened in its steps.
    """

    def __init__(self, record: Record, events: Events) -> None:
        self._record = record
        self._events = events
        lost, high = events.worst()
        high = sorted(high[:MOST_CANDIDATES], key=lambda row: -self._ratio(row))
        half = MOST_STEPS // 2
        self._lost = dict(list(lost.items())[: max(half, MOST_STEPS - len(high))])
        self._rows = [*self._lost, *high[: MOST_STEPS - len(self._lost)]]
        self.steps = [record.steps[row] for row in self._rows]
        """The worst steps: those whose norm is not finite, then the largest ratios of norm to usual norm."""
        known = set(record.layer_steps) if record.layers else set[int]()
        self.layers = [(step, self._layers_of(step)) for step in self.steps if step in known]
        """The worst layers of each of these steps, if known: name, norm, usual norm and ratio."""

    def _usual(self, row: int) -> float:
        """The median of the finite norms before a step."""
        before = self._events.norm[:row]
        before = before[before.isfinite()]
        return median_of(before) if len(before) else math.nan

    def _ratio(self, row: int) -> float:
        ratio = float(self._events.norm[row]) / self._usual(row)
        return 0.0 if math.isnan(ratio) else ratio

    def step_table(self) -> list[str]:
        """What happened in the worst steps."""
        if not self._rows:
            return [paragraph("There were no spikes and no skipped steps.")]
        total = int((self._events.spikes | self._events.skipped).sum())
        shown = sum(self._lost.get(row, 1) for row in self._rows)
        caption = (
            "Spikes and skipped steps. Norms that are inf or NaN come first, then the largest ratios to the usual norm"
        )
        caption += f" ({shown:,} of {total:,} steps)." if total > shown else "."
        columns = [Column("Step"), Column("Norm"), Column("Usual"), Column("Ratio"), Column("Loss")]
        columns += [Column("What happened", is_text=True)]
        return [table(caption, columns, [self._cells(row) for row in self._rows])]

    def _cells(self, row: int) -> list[str]:
        norm, usual, more = float(self._events.norm[row]), self._usual(row), self._lost.get(row, 1) - 1
        deeds = self._deeds(row) or ["not clipped"]
        if more:
            deeds.append(f"(the norm was not finite in the next {words.counted(more, 'step')} either)")
        return [
            f"{self._record.steps[row]:,}",
            words.norm(norm) if self._events.spikes[row] else words.number(norm),
            words.number(usual),
            words.times(norm / usual),
            words.number(float(self._record.loss[row])),
            "\n".join(deeds),
        ]

    def _deeds(self, row: int) -> list[str]:
        """What each transform did in a step, or why the step was skipped."""
        reason = self._record.reasons[row]
        if reason:
            return [f"skipped{self._reason(name, row)}" for name in reason.split(" ")]
        deeds: list[str] = []
        for name in dict.fromkeys(key.rpartition("/")[0] for key in self._record.metrics):
            limit, factor, share = (self._metric(f"{name}/{key}", row) for key in ("limit", "factor", "clipped"))
            said = [f"{what} {words.number(x)}" for what, x in (("limit", limit), ("factor", factor)) if x == x]
            if share == share:
                said.append(f"clipped {words.percent(share)}")
            if said:
                deeds.append(f"{name}: {', '.join(said)}")
        return deeds

    def _metric(self, key: str, row: int) -> float:
        return float(self._record.metrics[key][row]) if row >= 0 and key in self._record.metrics else math.nan

    def _reason(self, name: str, row: int) -> str:
        if name in REASONS:
            return f": {REASONS[name]}"
        mean = self._metric(f"{name}/mean", row - 1)
        return f" by {name}{f', whose running mean was {words.number(mean)}' if math.isfinite(mean) else ''}"

    def _layers_of(self, step: int) -> list[list[str]]:
        """The worst layers of a step. If more layers are not finite, the last row counts them."""
        record = self._record
        norms = record.layer_norms[record.layer_steps.index(step)]
        lost, count = int(norms.isfinite().logical_not().sum()), int((norms != -1).sum())
        if lost == count:
            return [[f"({f'all {count:,} layers are inf or NaN' if count else 'no layer has a gradient'})", "", "", ""]]
        rows = [
            [layer.name, words.norm(layer.norm), words.number(layer.usual), words.times(layer.ratio)]
            for layer in record.worst(step, TOP)
        ]
        if lost > TOP:
            rows.append([f"({lost:,} of {count:,} layers are inf or NaN)", "", "", ""])
        return rows

    def layer_tables(self) -> list[str]:
        """The layers of the worst steps."""
        columns = [Column("Step"), LAYER, Column("Norm"), Column("Usual"), Column("Ratio")]
        groups = [(f"{step:,}", rows) for step, rows in self.layers]
        caption = f"The {TOP} layers with the largest ratio of norm to usual norm"
        if not groups:
            return []
        first = grouped_table(f"{caption}, in the worst steps.", columns, groups[:OPEN])
        if len(groups) <= OPEN:
            return [first]
        rest = grouped_table(f"{caption}, in further steps.", columns, groups[OPEN:])
        return [first, details(words.counted(len(groups) - OPEN, "more step"), rest)]

    def often_table(self) -> list[str]:
        """The layers by how often they were among the worst."""
        record, events = self._record, self._events.spikes | self._events.skipped
        chosen = {record.steps[row] for row in events.nonzero().flatten().tolist()}
        rows = [i for i, step in enumerate(record.layer_steps) if step in chosen]
        if not rows or not record.layers:
            return []
        ratios = relative(record.layer_norms[rows], usual_norms(record)).nan_to_num(nan=-1.0, posinf=math.inf)
        some = (ratios.isfinite() & (ratios >= 0)).any(dim=1)
        steps = [record.layer_steps[row] for row, is_some in zip(rows, some.tolist(), strict=True) if is_some]
        ratios = ratios[some]
        counts = Counter(layer for values in ratios for layer in _largest(values))
        if not counts:
            return [
                paragraph("No layer stood out: in each of these steps, all layers were inf or NaN, or had no gradient.")
            ]
        found: list[list[str]] = []
        for layer, count in counts.most_common(MOST_OFTEN):
            worst = int(ratios[:, layer].argmax())
            largest = words.times(float(ratios[worst, layer]))
            found.append([record.layers[layer], f"{count:,}", largest, f"{steps[worst]:,}"])
        in_steps = words.counted(len(steps), "step")
        caption = f"How often a layer was among the {TOP} worst layers of a spike or a skipped step ({in_steps})."
        return [table(caption, [LAYER, Column("Times"), Column("Largest ratio"), Column("In step")], found)]


def _largest(ratios: Tensor) -> list[int]:
    """The places of the largest ratios, and of all that are not finite. A ratio of -1 means no gradient."""
    order = ratios.argsort(descending=True, stable=True).tolist()
    return [i for place, i in enumerate(order) if float(ratios[i]) >= 0 and (place < TOP or bool(ratios[i].isinf()))]


def ratio_table(record: Record) -> list[str]:
    """The layers whose updates are largest relative to their parameters."""
    if not record.ratios or not record.layers:
        return []
    params = torch.stack([ratios.params for ratios in record.ratios])
    updates = torch.stack([ratios.updates for ratios in record.ratios])
    ratios = torch.where((params > 0) & (updates >= 0), updates / params, torch.nan)
    usual = ratios.nanmedian(dim=0).values.nan_to_num(nan=-1.0)
    order = usual.argsort(descending=True, stable=True).tolist()
    rows: list[list[str]] = []
    for i in [i for i in order if float(usual[i]) >= 0][:MOST_LAYERS]:
        top = int(ratios[:, i].nan_to_num(nan=-1.0).argmax())
        numbers = (f"{float(value):.2g}" for value in (usual[i], ratios[top, i]))
        rows.append([record.layers[i], *numbers, f"{record.ratios[top].step:,}"])
    if not rows:
        return []
    some = f" (the {len(rows)} of {len(usual):,} layers with the largest medians)" if len(rows) < len(usual) else ""
    taken = words.counted(len(record.ratios), "step")
    caption = f"The norm of the update divided by the norm of the parameters, in {taken}{some}."
    return [table(caption, [LAYER, Column("Median"), Column("Largest"), Column("In step")], rows)]
