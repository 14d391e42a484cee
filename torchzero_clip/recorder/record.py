"""What was recorded of a run, and the ways to read it."""

import csv
import importlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.checks import count
from torchzero_clip.recorder.figures import draw_record
from torchzero_clip.recorder.numbers import medians
from torchzero_clip.recorder.suggestion import FEWEST, Scope, Series, Suggestion, suggested

Place: TypeAlias = str | Path


class Layer(NamedTuple):
    """The gradient of a layer in one step."""

    name: str
    norm: float
    usual: float
    """The median norm of the steps before; NaN if there is none."""

    @property
    def ratio(self) -> float:
        """The norm divided by the usual norm; NaN if the usual norm is unknown.

        It is inf if the norm is not finite, or if the usual norm is 0 and the norm is not. It is 1 if both are 0.
        """
        if not math.isfinite(self.norm):
            return math.inf
        if self.usual == 0:
            return math.inf if self.norm > 0 else 1.0
        return self.norm / self.usual


class Layers(list[Layer]):
    """Layers, the worst first. Prints as a table."""

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [("name", "norm", "usual", "ratio")]
        rows += [(layer.name, *(f"{x:.4g}" for x in (layer.norm, layer.usual, layer.ratio))) for layer in self]
        return as_table(rows)


class Block(NamedTuple):
    """Norms of layers over several steps."""

    first: int
    last: int
    median: Tensor
    maximum: Tensor


class Ratios(NamedTuple):
    """Norms of parameters, and of what was subtracted from them in a step; -1 without a gradient."""

    step: int
    params: Tensor
    updates: Tensor


class Readable(ABC):
    """The ways to read what was recorded."""

    @abstractmethod
    def record(self) -> "Record":
        """Return what was recorded, on the CPU. The call waits for the device."""

    def worst(self, step: int | None = None, top: int = 5) -> Layers:
        """Return the layers whose gradients stood out most in one step.

        Args:
            step: The number of the step. None for the first step whose joint norm is not finite, or else the step with
                the largest joint norm.
            top: How many layers.

        Returns:
            Rows with ``name``, ``norm`` and ``usual``, which is the median norm of the steps before. The row with the
                largest ratio of ``norm`` to ``usual`` is the first, but norms that are not finite come before all
                others. The rows print as a table. Layers without a gradient in this step are left out.

        Raises:
            ValueError: If the layers of this step were not kept.
        """
        return self.record().worst(step, top)

    def spikes(self) -> list[int]:
        """Return the steps whose joint norm was a spike, as in `suggest_max_norm`, or was not finite."""
        return self.record().spikes()

    def frame(self, *, transforms: bool = False) -> Any:
        """Return one row for each step.

        Args:
            transforms: Add what each transform did, in columns such as ``"clip_norm/limit"``, ``"clip_norm/norm"``
                (before it), ``"clip_norm/factor"`` and ``"clip_norm/clipped"``.

        Returns:
            A `pandas.DataFrame` indexed by step, or a dict of lists if pandas is not installed. The columns are
                ``step``; ``norm``, the joint norm of all gradients before the first transform (NaN if there was no
                gradient); ``loss`` (NaN if unknown); ``share_clipped``, the largest share that a transform clipped;
                and ``skipped``.
        """
        return self.record().frame(transforms=transforms)

    def to_csv(self, path: Place) -> None:
        """Write what ``frame(transforms=True)`` returns to a CSV file."""
        self.record().to_csv(path)

    def to_tensorboard(self, writer: Any, since: int = 0) -> None:
        """Add the numbers of each step to a `SummaryWriter`.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`, or anything else with its ``add_scalar``.
            since: The first step to write.

        Raises:
            TypeError: If ``writer`` has no ``add_scalar``.
        """
        if not hasattr(writer, "add_scalar"):
            raise TypeError(f"writer must be a SummaryWriter, got {type(writer).__name__}")
        for step, numbers in self.record().numbers(since):
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

    def to_wandb(self, run: Any, since: int = 0) -> None:
        """Log the numbers of each step to a run of Weights & Biases.

        Args:
            run: What ``wandb.init`` returned, or anything else with its ``log``.
            since: The first step to write. Weights & Biases accepts steps only in increasing order.
        """
        for step, numbers in self.record().numbers(since):
            run.log(numbers, step=step)

    def plot(self, path: Place | None = None) -> Any:
        """Draw the norms with limits and spikes, the layers by steps, and how often each norm was seen.

        Args:
            path: Where to save the picture, for example ``"norms.png"``. None if it should not be saved.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ModuleNotFoundError: Without matplotlib.
        """
        return draw_record(self.record(), path)

    def suggest_max_norm(self, share_clipped: float = 0.01, scope: Scope = "joint") -> Suggestion:
        """Find a limit for `ClipNorm` that would have clipped a given share of the usual norms.

        Norms that are 0 or not finite do not count. The others are divided into twenty blocks in the order of steps.
        The first blocks are left out, at most ten, until the median of a block is within a factor of 1.25 of the median
        of the second half of the run. A remaining norm is a spike if its logarithm exceeds the median of the logarithms
        by more than max(6 · 1.4826 · MAD, ln 2). The limit is the quantile 1 - ``share_clipped`` of the remaining norms
        that are not spikes.

        Args:
            share_clipped: The share of usual norms that the limit clips, above 0 and below 1. Spikes are clipped too,
                and are not counted in this share.
            scope: "joint" for all gradients together, "parameter" for one limit that clips each tensor on its own,
                "group" for one limit per param group. A record that was read from a file supports only "joint".

        Returns:
            The limit, and whether to trust it. Print the result to read the explanation.

        Raises:
            ValueError: If there are fewer than 20 norms, if ``scope`` is unknown, or if ``share_clipped`` is out of
                range.
            TypeError: If ``share_clipped`` is not a number.
        """
        return self.record().suggest_max_norm(share_clipped, scope)


@dataclass
class Record(Readable):
    """What was recorded of a run. `Recorder.record` returns one, and `read_record` reads one from a file.

    Vectors and matrices are float64, with one row for each step.

    Args:
        steps: The numbers of the steps, in order.
        reasons: Why the step was not taken, such as "skip_step" or "nonfinite"; empty if it was taken.
        norm: The joint norm of the gradients before the first transform; NaN if there was no gradient.
        loss: The loss, if it was reported or a closure returned it; else NaN.
        metrics: What the transforms measured, by names such as "clip_norm/factor"; NaN if there is no number.
        layers: The names of the layers.
        layer_steps: The steps for which the norms of all layers are known.
        layer_norms: A row for each step in ``layer_steps``, a column for each layer; -1 without a gradient.
        blocks: In a record from a file, the median and the largest norm of each layer over several steps.
        ratios: In some steps, the norms of parameters, and of what was subtracted from them.
        joint: The names of transforms that limit the joint norm.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular, Recorder
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([("weight", weight)], ClipNorm(1.0))
        >>> recorder = Recorder(optimizer)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> record = recorder.record()
        >>> record.norm.tolist(), record.metrics["clip_norm/limit"].tolist()
        ([5.0], [1.0])
    """

    steps: list[int]
    reasons: list[str]
    norm: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]
    layers: list[str]
    layer_steps: list[int]
    layer_norms: Tensor = field(repr=False)
    blocks: list[Block] = field(default_factory=list, repr=False)
    ratios: list[Ratios] = field(default_factory=list, repr=False)
    joint: list[str] = field(default_factory=list)

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {step: row for row, step in enumerate(self.steps)}

    @cached_property
    def _layer_rows(self) -> dict[int, int]:
        return {step: row for row, step in enumerate(self.layer_steps)}

    def record(self) -> "Record":
        """Return this record."""
        return self

    @property
    def share_clipped(self) -> Tensor:
        """The largest share that a transform clipped, for each step; NaN if no transform reports a share."""
        shares = [values for name, values in self.metrics.items() if name.endswith("/clipped")]
        if not shares:
            return torch.full_like(self.norm, torch.nan)
        columns = torch.stack(shares)
        unknown = columns.isnan().all(dim=0)
        return torch.where(unknown, torch.nan, columns.nan_to_num(nan=-1.0).amax(dim=0))

    def limits(self) -> Tensor:
        """The lowest limit that a transform sets to the joint norm, for each step; NaN if none is known."""
        found = torch.full_like(self.norm, torch.nan)
        for name in self.joint:
            found = torch.fmin(found, self.metrics.get(f"{name}/limit", found))
        return torch.where(found.isfinite(), found, torch.nan)

    def last(self, count: int) -> "Record":
        """The last steps. The layers of all of them must be known."""
        first = max(len(self.steps) - count, 0)
        metrics = {name: values[first:] for name, values in self.metrics.items()}
        ratios = [ratio for ratio in self.ratios if ratio.step in self.steps[first:]]
        vectors = (self.norm[first:], self.loss[first:], metrics, self.layers)
        layers = (self.layer_steps[first:], self.layer_norms[first:])
        return Record(self.steps[first:], self.reasons[first:], *vectors, *layers, [], ratios, self.joint)

    def index(self, step: int) -> int:
        """The row of a step.

        Raises:
            ValueError: If the step was not kept.
        """
        if step in self._rows:
            return self._rows[step]
        kept = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no steps"
        raise ValueError(
            f"step {step} was not kept: the record has {kept}. To keep more steps, set a larger keep=, or set path="
        )

    def worst(self, step: int | None = None, top: int = 5) -> Layers:
        """Return the layers whose gradients stood out most in one step: see `Recorder.worst`."""
        step = self._most_unusual() if step is None else _step_number(step)
        count("top", top)
        self.index(step)
        if step not in self._layer_rows:
            raise ValueError(
                f"the file does not have the layers of step {step}. It has the layers of spikes and skipped steps: "
                f"{_some(self.layer_steps)}"
            )
        norms = self.layer_norms[self._layer_rows[step]].tolist()
        usual = self._usual(step)
        named = zip(self.layers, norms, usual, strict=True)
        layers = [Layer(*values) for values in named if not values[1] < 0]
        layers.sort(key=lambda layer: (math.isfinite(layer.norm), -_or_zero(layer.ratio), -_or_zero(layer.norm)))
        return Layers(layers[:top])

    def _usual(self, step: int) -> list[float]:
        """The median of the norms of each layer before a step."""
        blocks = [block.median for block in self.blocks if block.last < step]
        blocks = blocks or [block.median for block in self.blocks if block.first < step]
        if blocks:
            return medians(torch.stack(blocks)).tolist()
        return medians(self.layer_norms[[i for i, known in enumerate(self.layer_steps) if known < step]]).tolist()

    def _most_unusual(self) -> int:
        """The first step whose joint norm is not finite, or else the step with the largest one."""
        if not self.layer_steps:
            raise ValueError("the record does not have the layers of any step")
        norms = [math.inf if self._is_bad(i) else _or_zero(norm) for i, norm in enumerate(self.norm.tolist())]
        known = set(self.layer_steps)
        rows = [i for i, step in enumerate(self.steps) if step in known]
        return self.steps[max(rows, key=lambda i: norms[i])]

    def _is_bad(self, row: int) -> bool:
        """True if a gradient of a step was not finite; False if the step had no gradients."""
        norm, step = float(self.norm[row]), self.steps[row]
        if not math.isnan(norm):
            return math.isinf(norm)
        return step in self._layer_rows and not bool((self.layer_norms[self._layer_rows[step]] < 0).all())

    def spikes(self) -> list[int]:
        """Return the steps whose joint norm was a spike or not finite: see `Recorder.spikes`."""
        return self.spikes_after(self.norm[:0])

    def spikes_after(self, before: Tensor) -> list[int]:
        """The spikes, if the run began with the joint norms ``before``."""
        usable = self.norm.isfinite() & (self.norm > 0)
        found = {self.steps[i] for i in usable.logical_not().nonzero().flatten().tolist() if self._is_bad(i)}
        before = before[before.isfinite() & (before > 0)]
        norms = torch.cat([before, self.norm[usable]])
        if len(norms) >= FEWEST:
            series = Series.of(norms)
            places = series.spikes.nonzero().flatten() + series.start - len(before)
            rows = usable.nonzero().flatten()[places[places >= 0]]
            found |= {self.steps[i] for i in rows.tolist()}
        return sorted(found)

    def frame(self, *, transforms: bool = False) -> Any:
        """Return one row for each step: see `Recorder.frame`."""
        columns = self.columns(transforms=transforms)
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError:
            return columns
        return pandas.DataFrame(columns, index=pandas.Index(self.steps))

    def columns(self, *, transforms: bool = False) -> dict[str, list[Any]]:
        """The columns of `frame`, as lists."""
        columns: dict[str, list[Any]] = {
            "step": list(self.steps),
            "norm": self.norm.tolist(),
            "loss": self.loss.tolist(),
            "share_clipped": self.share_clipped.tolist(),
            "skipped": [bool(reason) for reason in self.reasons],
        }
        if transforms:
            columns |= {"reason": list(self.reasons)}
            columns |= {name: values.tolist() for name, values in self.metrics.items()}
        return columns

    def numbers(self, since: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Each step from ``since`` on, with its numbers by name, without the unknown ones."""
        columns = self.columns(transforms=True)
        del columns["reason"]
        names = [name for name in columns if name != "step"]
        for step, *values in zip(columns["step"], *(columns[name] for name in names), strict=True):
            if step >= since:
                pairs = zip(names, values, strict=True)
                yield step, {name if "/" in name else f"gradients/{name}": float(v) for name, v in pairs if v == v}

    def to_csv(self, path: Place) -> None:
        """Write a CSV file: see `Recorder.to_csv`."""
        columns = self.columns(transforms=True)
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))

    def suggest_max_norm(self, share_clipped: float = 0.01, scope: Scope = "joint") -> Suggestion:
        """Find a limit from the joint norms: see `Recorder.suggest_max_norm`."""
        if scope != "joint":
            raise ValueError(
                f"scope must be 'joint' for a Record, got {scope!r}: call suggest_max_norm of the Recorder"
            )
        return suggested({"joint": self._norms_of_gradients()}, share_clipped, "joint")

    def _norms_of_gradients(self) -> Tensor:
        """The joint norms, with -1 for steps without gradients, and for those that a GradScaler refused."""
        norms, bad = self.norm.clone(), -1
        for row in (~norms.isfinite()).nonzero().flatten().tolist():
            # a file has the layers of only the first ten of a series of steps that are not finite
            if self._is_bad(row) or (bad == row - 1 >= 0 and self.steps[row] not in self._layer_rows):
                bad = row
            if bad != row or self.reasons[row] == "found_inf":
                norms[row] = -1.0
        return norms


def joined(records: list[Record]) -> Record:
    """Join consecutive records of one run into one record."""
    if len(records) == 1:
        return records[0]
    layers = list(dict.fromkeys(name for record in records for name in record.layers))
    names = list(dict.fromkeys(name for record in records for name in record.metrics))

    def wide(record: Record, values: Tensor) -> Tensor:
        result = values.new_full((*values.shape[:-1], len(layers)), -1.0)
        result[..., [layers.index(name) for name in record.layers]] = values
        return result

    def column(name: str, record: Record) -> Tensor:
        return record.metrics.get(name, torch.full_like(record.norm, torch.nan))

    return Record(
        [step for record in records for step in record.steps],
        [reason for record in records for reason in record.reasons],
        torch.cat([record.norm for record in records]),
        torch.cat([record.loss for record in records]),
        {name: torch.cat([column(name, record) for record in records]) for name in names},
        layers,
        [step for record in records for step in record.layer_steps],
        torch.cat([wide(record, record.layer_norms) for record in records]),
        [],
        [Ratios(r.step, wide(record, r.params), wide(record, r.updates)) for record in records for r in record.ratios],
        list(dict.fromkeys(name for record in records for name in record.joint)),
    )


def as_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text; the first column is aligned to the left, the others to the right."""
    rows = [
        tuple(cell.encode("unicode_escape").decode() if not cell.isprintable() else cell for cell in row)
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _step_number(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, got {step!r}") from None


def _some(steps: list[int]) -> str:
    """The numbers of steps, or of the last 20 if there are more."""
    shown = ", ".join(map(str, steps[-20:])) or "none"
    return f"..., {shown}" if len(steps) > 20 else shown


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
