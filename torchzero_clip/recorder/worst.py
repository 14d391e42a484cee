"""The tables of a report: the steps and layers that stood out, and updates relative to parameters."""

import math
from collections import Counter

import torch

from torchzero_clip.recorder import words
from torchzero_clip.recorder.binning import Events
from torchzero_clip.recorder.data import Data, Layer, Layers
from torchzero_clip.recorder.numbers import medians_before
from torchzero_clip.recorder.page import Column, details, grouped_table, paragraph, table

MOST_STEPS = 20
MOST_CANDIDATES = 60
MOST_LAYERS = 20
MOST_OFTEN = 10
MOST_COUNTED = 200  # steps in which the worst layers are counted
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

    def __init__(self, record: Data, events: Events) -> None:
        self._record = record
        self._events = events
        lost, high = events.worst()
        rows = [*list(lost)[:MOST_STEPS], *high[:MOST_CANDIDATES]]
        usual = medians_before(record.norm[:, None], rows).flatten().tolist()
        self._joint = {row: Layer("", float(events.norm[row]), x) for row, x in zip(rows, usual, strict=True)}
        """The joint norms of the worst steps, by row."""
        ratios = {row: self._joint[row].ratio for row in high[:MOST_CANDIDATES]}
        high = sorted(ratios, key=lambda row: math.inf if math.isnan(ratios[row]) else -ratios[row])
        half = MOST_STEPS // 2
        self._lost = dict(list(lost.items())[: max(half, MOST_STEPS - len(high))])
        self._rows = [*self._lost, *high[: MOST_STEPS - len(self._lost)]]
        self.steps = [record.steps[row] for row in self._rows]
        """The worst steps: those whose norm is not finite, then the largest ratios of norm to usual norm."""
        known = set(record.layer_steps) if record.layers else set[int]()
        known_steps = [step for step in self.steps if step in known]
        self.layers = list(zip(known_steps, map(_cells_of, record.layers_of(known_steps)), strict=True))
        """The worst layers of each of these steps, if known: name, norm, usual norm and ratio."""

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
        joint, more = self._joint[row], self._lost.get(row, 1) - 1
        deeds = self._deeds(row) or ["not clipped"]
        if more:
            deeds.append(f"(the norm was not finite in the next {words.counted(more, 'step')} either)")
        return [
            f"{self._record.steps[row]:,}",
            words.norm(joint.norm) if self._events.spikes[row] else words.number(joint.norm),
            words.number(joint.usual),
            words.times(joint.ratio) if math.isfinite(joint.norm) else "",
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
                deeds.append(f"{words.short(name)}: {', '.join(said)}")
        return deeds

    def _metric(self, key: str, row: int) -> float:
        return float(self._record.metrics[key][row]) if row >= 0 and key in self._record.metrics else math.nan

    def _reason(self, name: str, row: int) -> str:
        if name in REASONS:
            return f": {REASONS[name]}"
        mean = self._metric(f"{name}/mean", row - 1)
        return (
            f" by {words.short(name)}{f', whose running mean was {words.number(mean)}' if math.isfinite(mean) else ''}"
        )

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
        bad = {record.steps[row] for row in events.nonzero().flatten().tolist()}
        chosen = [step for step in record.layer_steps if step in bad]
        if not chosen or not record.layers:
            return []
        known = len(chosen)
        chosen = chosen[:: math.ceil(known / MOST_COUNTED)]
        steps, counts, largest = 0, Counter[str](), dict[str, tuple[float, int]]()
        for step, layers in zip(chosen, record.layers_of(chosen), strict=True):
            lost = _count_lost(layers)
            if lost == len(layers):
                continue
            steps += 1
            for layer in layers[: max(TOP, lost)]:
                if not math.isnan(layer.ratio):
                    counts[layer.name] += 1
                    largest[layer.name] = max(largest.get(layer.name, (0.0, step)), (layer.ratio, step))
        if not counts:
            return [
                paragraph("No layer stood out: in each of these steps, all layers were inf or NaN, or had no gradient.")
            ]
        found = [
            [words.short(name), f"{count:,}", words.times(largest[name][0]), f"{largest[name][1]:,}"]
            for name, count in counts.most_common(MOST_OFTEN)
        ]
        in_steps = words.counted(steps, "step") if len(chosen) == known else f"{steps:,} of {known:,} steps"
        caption = f"How often a layer was among the {TOP} worst layers of a spike or a skipped step ({in_steps})."
        return [table(caption, [LAYER, Column("Times"), Column("Largest ratio"), Column("In step")], found)]


def _count_lost(layers: Layers) -> int:
    return sum(not math.isfinite(layer.norm) for layer in layers)


def _cells_of(layers: Layers) -> list[list[str]]:
    """The worst layers of a step. If more layers are not finite, the last row counts them."""
    lost, count = _count_lost(layers), len(layers)
    if lost == count:
        return [[f"({f'all {count:,} layers are inf or NaN' if count else 'no layer has a gradient'})", "", "", ""]]
    rows = [
        [words.short(layer.name), words.norm(layer.norm), words.number(layer.usual), words.times(layer.ratio)]
        for layer in layers[:TOP]
    ]
    if lost > TOP:
        rows.append([f"({lost:,} of {count:,} layers are inf or NaN)", "", "", ""])
    return rows


def sign_table(record: Data) -> list[str]:
    """The updates that were unusually large relative to the weights."""
    groups: dict[int, list[list[str]]] = {}
    for sign in record.early_signs():
        ratio, usual = f"{sign.ratio:.2g}", f"{sign.usual:.2g}"
        rows = groups.setdefault(sign.step, [])
        rows.append([words.short(sign.layer), ratio, usual, words.times(sign.ratio / sign.usual)])
    if not groups:
        return []
    shown = [(f"{step:,}", rows[:TOP]) for step, rows in list(groups.items())[:MOST_STEPS]]
    caption = f"Updates that were unusually large relative to the weights of their layer, at most {TOP} in each step"
    caption += f" (the first {len(shown)} of {len(groups):,} steps)." if len(groups) > len(shown) else "."
    columns = [Column("Step"), LAYER, Column("Update / weights"), Column("Usual"), Column("Ratio")]
    return [grouped_table(caption, columns, shown)]


def ratio_table(record: Data) -> list[str]:
    """The layers whose updates are largest relative to their parameters."""
    if not record.ratios or not record.layers:
        return []
    ratios = torch.stack([ratios.relative for ratios in record.ratios])
    medians = ratios.nanmedian(dim=0).values.nan_to_num(nan=-1.0)
    order = medians.argsort(descending=True, stable=True).tolist()
    rows: list[list[str]] = []
    for i in [i for i in order if float(medians[i]) >= 0][:MOST_LAYERS]:
        top = int(ratios[:, i].nan_to_num(nan=-1.0).argmax())
        numbers = (f"{float(value):.2g}" for value in (medians[i], ratios[top, i]))
        rows.append([words.short(record.layers[i]), *numbers, f"{record.ratios[top].step:,}"])
    if not rows:
        return []
    some = f" (the {len(rows)} of {len(medians):,} layers with the largest medians)" if len(rows) < len(medians) else ""
    taken = words.counted(len(record.ratios), "step")
    caption = f"The norm of the update divided by the norm of the parameters, in {taken}{some}."
    return [table(caption, [LAYER, Column("Median"), Column("Largest"), Column("In step")], rows)]
