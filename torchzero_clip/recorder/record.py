"""What was recorded of a run, and the ways to read it."""

import importlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import one_of
from torchzero_clip.recorder.data import Data, Layers, Ratios, at_places, places_of
from torchzero_clip.recorder.figures import draw_record
from torchzero_clip.recorder.files import FilePath
from torchzero_clip.recorder.series import EarlySign
from torchzero_clip.recorder.suggestion import LimitScope, Suggestion, suggested
from torchzero_clip.recorder.two_runs import Comparison, compared, how_reports_differ
from torchzero_clip.recorder.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Readable(ABC):
    """The ways to read what was recorded."""

    @abstractmethod
    def record(self) -> "Record":
        """Return what was recorded, on the CPU. The call synchronizes with the GPU."""

    def _with_older(self) -> "Record":
        """The record, with the steps that only the file still has."""
        return self.record()

    def worst(self, step: int | None = None, top: int = 5) -> Layers:
        """Return the layers whose gradients stood out most in one step.

        Args:
            step: The number of the step. None for the first step whose joint norm is not finite, or else the step with
                the largest joint norm.
            top: How many layers.

        Returns:
            Rows with ``name``, ``norm``, ``usual``, the median norm of the steps before, and ``ratio``, the norm
                divided by the larger of ``usual`` and the rounding of the step. Norms that are not finite come first,
                then the largest ratios. Layers whose norms are rounding only have the ratio NaN and come last. The rows
                print as a table.

        Raises:
            ValueError: If the layers of this step were not kept.
        """
        latest = self.record()
        return (latest if step in latest.steps else self._with_older()).worst(step, top)

    def spikes(self) -> list[int]:
        """Return the steps whose joint norm was a spike or not finite, skipped steps, and those of `early_signs`."""
        return self._with_older().spikes()

    def early_signs(self) -> list[EarlySign]:
        """Return the layers whose norm or update was unusually large, even though the joint norm may be usual.

        Returns:
            Rows with ``step``, ``layer``, ``number`` ("norm", or "update_ratio" for the norm of the update divided
                by the norm of the weights), its ``value``, ``usual`` (the median of those before) and ``ratio``, in the
                order of steps. In each step, norms come before updates, and the worst comes first.
        """
        return self._with_older().early_signs()

    def frame(self, *, transforms: bool = False) -> "DataFrame":
        """Return one row for each step.

        Args:
            transforms: Add what each transform did, in columns such as ``"clip_norm/limit"``, ``"clip_norm/norm"``
                (before it), ``"clip_norm/factor"`` and ``"clip_norm/clipped"``.

        Returns:
            A `pandas.DataFrame` indexed by step. The columns are ``step``; ``norm``, the joint norm of all gradients
                before the first transform (NaN if there was no gradient); ``loss`` (NaN if unknown);
                ``limit``, the lowest limit of the joint norm (NaN if unknown); ``share_clipped``, the largest share
                that a transform clipped; ``skipped``; and ``reason``, why the step was not taken.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("frame() needs pandas: pip install pandas, or call rows()") from error
        record = self.record()
        return pandas.DataFrame(record.columns(transforms=transforms), index=pandas.Index(record.steps))

    def rows(self, *, transforms: bool = False) -> list[dict[str, object]]:
        """Return one dict for each step, with the columns of `frame` as keys. It does not need pandas."""
        columns = self.record().columns(transforms=transforms)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def plot(self, path: FilePath | None = None) -> "Figure":
        """Draw the norms with limits and spikes, and the layers by steps, and return the `matplotlib.figure.Figure`.

        Args:
            path: Where to save the picture, for example ``"norms.png"``. It must not be the file of a `Recorder`.
        """
        return draw_record(self.record(), path)

    def compare(self, other: "Readable") -> Comparison:
        """Find the first step, and the layers, whose norms differ from those of another run by more than rounding.

        It shows why the norms under FSDP, tensor or expert parallelism, offload or another precision are not those of
        one process. Train both from the same weights with the same data. Layers are matched by name, without what
        wrappers add, such as ``module.``. So use the same ``by=`` in both.

        A layer differs if ``|a - b| > max(4 P, 8 D) max(a, b, joint / 64)``. P is the ``precision`` of the records. D
        is the largest relative difference in the steps before, because runs drift apart by rounding. Norms that were
        passed to `Recorder.report_norm` are compared with the recorded ones of the same run.

        Args:
            other: The record of the other run, or its recorder.

        Returns:
            What differs, and guesses why. Print it.

        Raises:
            ValueError: If the records have no step in common.
            TypeError: If ``other`` is not a record.

        Examples:
            >>> import torch
            >>> from torchzero_clip import SGD, Modular, Recorder
            >>> def run(copies):
            ...     torch.manual_seed(0)
            ...     model = torch.nn.Linear(2, 1)
            ...     recorder = Recorder(Modular(model, SGD(0.0)))
            ...     (copies * model(torch.ones(1, 2)).sum()).backward()
            ...     recorder.optimizer.step()
            ...     return recorder.record()
            >>> print(run(1).compare(run(8)))  # doctest: +NORMALIZE_WHITESPACE
            Step 0: all 2 layers differ, 8 times as large in the second run:
            a sum where the other has a mean over 8?
            layer   first  second  ratio
            weight  1.414   11.31      8
            bias        1       8      8
        """
        if not isinstance(other, Readable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"other must be a Record or a Recorder, got {type(other).__name__}: call read_record(path)")
        return compared(self._with_older(), other._with_older())

    def suggest_max_norm(self, share_clipped: float = 0.01, scope: LimitScope = "joint") -> Suggestion:
        """Find a limit for `ClipNorm` that would have clipped a given share of the usual norms.

        The limit is the quantile 1 - ``share_clipped`` of the norms, without norms that are 0 or not finite, without
        the start of the run while the norms still change, and without spikes. A norm is a spike if its logarithm
        exceeds the median of the logarithms by more than max(6 · 1.4826 · MAD, ln 2).

        Args:
            share_clipped: The share of usual norms that the limit clips, above 0 and below 1. The limit also clips
                spikes, which this share does not include.
            scope: "joint" for all gradients together, "parameter" for one limit that clips each tensor on its own,
                "group" for one limit per param group. A record that was read from a file supports only "joint".

        Returns:
            The limit, and how well the record determines it. Print the result to read the explanation.

        Raises:
            ValueError: If there are fewer than 20 norms, ``scope`` is unknown, or not "joint" for a `Record`, or
                ``share_clipped`` is out of range.
            TypeError: If ``share_clipped`` is not a number.
        """
        one_of("scope", scope, get_args(LimitScope))
        if scope != "joint":
            advice = f"call recorder.suggest_max_norm(scope={scope!r}) in the process that trains"
            raise ValueError(f"scope must be 'joint' for a Record, which may lack norms of parameters: {advice}")
        record = self._with_older()
        return suggested(
            {"joint": record.norms_of_gradients()}, share_clipped, "joint", record.doubts(), record.skips()
        )


class Record(Data, Readable):  # in this order, because methods of `Data` compute what those of `Readable` ask for
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
        layer_norms: A row for each step in ``layer_steps``, and a column for each layer; -1 without a gradient.
        blocks: In a record from a file, the median and the largest norm of each layer over several steps.
        ratios: For some steps, the norms of the parameters and of their updates.
        joint: The names of transforms that limit the joint norm.
        precision: The largest rounding of a step, divided by its joint norm. All steps are judged by it, also those
            before it rose, as in a run that goes on under autocast: smaller norms of layers may be rounding only.
        jumps: The steps and the layers of norms that are far above those before, as the run itself found them.

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

    @override
    def record(self) -> "Record":
        """Return this record."""
        return self

    @override
    def worst(self, step: int | None = None, top: int = 5) -> Layers:
        layers = super().worst(step, top)
        if (text := how_reports_differ(self)) is not None:
            layers.note = f"The norm that was reported {text}"
        return layers

    @override
    def __repr__(self) -> str:
        steps = f", from {self.steps[0]:,} to {self.steps[-1]:,}" if self.steps else ""
        names = ", ".join(["norm", "loss", *(f"metrics[{name!r}]" for name in self.metrics)])
        return (
            f"Record of {counted(len(self.steps), 'step')}{steps}, and {counted(len(self.layers), 'layer')}. "
            f"Vectors with a number for each step: {names}. "
            'To read it: rows(), frame(), spikes(), worst(step=...), plot("norms.png").'
        )

    def columns(self, *, transforms: bool = False) -> dict[str, list[object]]:
        """The columns of `frame`, as lists."""
        vectors = {"norm": self.norm, "loss": self.loss, "limit": self.limits(), "share_clipped": self.share_clipped}
        columns: dict[str, list[object]] = {"step": list(self.steps)}
        columns |= {name: values.tolist() for name, values in vectors.items()}
        columns |= {"skipped": [bool(reason) for reason in self.reasons], "reason": list(self.reasons)}
        if transforms:
            columns |= {name: values.tolist() for name, values in self.metrics.items()}
        return columns

    def filled(self, latest: "Record") -> "Record":
        """This record, with the steps of ``latest``, which have all layers, in place of its last ones."""
        older = self.part(0, bisect_left(self.steps, latest.steps[0]))
        return replace(joined([older, latest]), blocks=self.blocks, jumps=self.jumps)


def joined(records: list[Record]) -> Record:
    """Join consecutive records of one run."""
    if len(records) == 1:
        return records[0]
    places = places_of(record.layers for record in records)
    names = list(dict.fromkeys(name for record in records for name in record.metrics))

    def wide(record: Record, values: Tensor) -> Tensor:
        return at_places(values, record.layers, places)

    def column(name: str, record: Record) -> Tensor:
        return record.metrics.get(name, torch.full_like(record.norm, torch.nan))

    return Record(
        [step for record in records for step in record.steps],
        [reason for record in records for reason in record.reasons],
        torch.cat([record.norm for record in records]),
        torch.cat([record.loss for record in records]),
        {name: torch.cat([column(name, record) for record in records]) for name in names},
        list(places),
        [step for record in records for step in record.layer_steps],
        torch.cat([wide(record, record.layer_norms) for record in records]),
        [],
        [Ratios(r.step, wide(record, r.params), wide(record, r.updates)) for record in records for r in record.ratios],
        list(dict.fromkeys(name for record in records for name in record.joint)),
        max(record.precision for record in records),
        [jump for record in records for jump in record.jumps],
    )
