"""Where two runs part: the first step whose norms differ by more than rounding, its layers, and a guess why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.recorder.arithmetic import joined_norms
from torchzero_clip.recorder.data import Data
from torchzero_clip.recorder.figures import draw_ratios
from torchzero_clip.recorder.files import FilePath
from torchzero_clip.recorder.words import as_table, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
REPORTED = "reported_norm"
MOST_ROWS = 10
MOST_COPIES = 16  # the most copies, processes or accumulated batches that an explanation names
DRIFT = 8.0  # in 36 pairs of runs that drift apart by rounding, no step was above 8 times the drift before it
_SMALL = 64.0  # a layer counts as if its norm were at least the joint norm divided by it
# how precise the squares of reported norms are: if bfloat16 holds all norms, and otherwise
BFLOAT16, _FLOAT32 = 2.0**-7, 1e-5


class Difference(NamedTuple):
    """The norm of a layer in both runs. -1 means that it had no gradient."""

    name: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """The norm in the second run divided by that in the first; NaN if one is not above 0."""
        return self.second / self.first if self.first > 0 and self.second > 0 else math.nan


@dataclass(eq=False)
class Comparison:
    """Where two records part. Print it to read what differs.

    Args:
        step: The first step in which the runs differ by more than rounding; None if there is none.
        layers: The layers that differ there, the largest difference first.
        findings: What differs, in sentences.
        only_first: The layers that only the first record has.
        only_second: The layers that only the second record has.
        ratios: The ratio second / first of each common layer, for each step that was compared by layers.
    """

    step: int | None
    layers: list[Difference] = field(repr=False)
    findings: list[str]
    only_first: list[str] = field(default_factory=list, repr=False)
    only_second: list[str] = field(default_factory=list, repr=False)
    ratios: dict[int, Tensor] = field(default_factory=dict, repr=False)
    names: list[str] = field(default_factory=list, repr=False)
    only_joint: int = field(default=0, repr=False)
    """In how many other steps only the joint norms were compared."""

    @property
    def differs(self) -> bool:
        """True if anything differs: norms, layers, limits, skipped steps, or a reported norm from the recorded one."""
        return bool(self.findings or self.only_first or self.only_second)

    def _equal(self) -> str:
        layers = f"the norms of {counted(len(self.names), 'layer')} in {counted(len(self.ratios), 'step')}"
        joint = f"the joint norms of {counted(self.only_joint, 'step')}"
        parts = [layers] * bool(self.ratios) + [joint] * bool(self.only_joint)
        return f"{' and '.join(parts).capitalize()} are equal up to rounding." if parts else "No norm was compared."

    @override
    def __str__(self) -> str:
        lines = list(self.findings)
        if self.step is None:  # findings are about reported norms, or about all steps
            lines.append(self._equal())
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                shown = ", ".join(names[:MOST_ROWS]) + (", ..." if len(names) > MOST_ROWS else "")
                lines.append(f"Only the {which} run has {counted(len(names), 'layer')}: {shown}.")
        if self.layers:
            rows = [("layer", "first", "second", "ratio")]
            rows += [(d.name, f"{d.first:.4g}", f"{d.second:.4g}", f"{d.ratio:.4g}") for d in self.layers[:MOST_ROWS]]
            more = len(self.layers) - MOST_ROWS
            lines += [as_table(rows), *([f"and {counted(more, 'more layer')}"] if more > 0 else [])]
        return "\n".join(lines)

    def plot(self, path: FilePath | None = None) -> "Figure":
        """Draw the ratio of the norms of both runs, of each layer in each step, and return the figure.

        Args:
            path: Where to save the picture, for example ``"ratios.png"``.
        """
        return draw_ratios(self.names, self.ratios, path)


def compared(first: Data, second: Data) -> Comparison:
    """Compare two records: see `Record.compare`."""
    pair = _Pair(first, second)
    if not pair.steps:
        raise ValueError("the records have no step in common, so they cannot be compared")
    result = Comparison(None, [], [], pair.only_first, pair.only_second, names=pair.names)
    drift = 0.0
    for step in pair.steps:
        bound = max(4 * pair.precision, DRIFT * drift)
        if (norms := pair.norms(step)) is not None:
            result.ratios[step] = norms[1] / norms[0]
            apart = _apart(*norms)
        else:
            apart = _apart(*pair.joint(step))
            result.only_joint += len(apart)
        if bool((apart > bound).any()):
            result.step = step
            result.layers, where = pair.differences(step, bound)
            weights = pair.weights(step, bound)
            result.findings = [*weights, _parted(step, where, result.layers, pair, guess=not (weights or where))]
            break
        if found := pair.otherwise(step, bound):
            result.step, result.findings = step, found
            break
        drift = max(drift, float(apart.max()) if len(apart) else 0.0)
    if result.step is None:
        result.findings = pair.dead()
    texts = {"first": how_reports_differ(first), "second": how_reports_differ(second)}
    result.findings[:0] = [f"The norm that the {which} run reports {text}" for which, text in texts.items() if text]
    return result


class _Pair:
    """Two records, with the steps and the layers that both have."""

    def __init__(self, first: Data, second: Data) -> None:
        self.records = first, second
        self.precision = max(first.precision, second.precision)
        self.steps = sorted(set(first.steps).intersection(second.steps))
        self._with_layers = set(first.layer_steps).intersection(second.layer_steps)
        named = [_unwrapped(first.layers), _unwrapped(second.layers)]
        if set(first.layers) == set(second.layers):
            named = [{name: i for i, name in enumerate(record.layers)} for record in self.records]
        if named[0].keys().isdisjoint(named[1]):
            named = list(map(_without_prefix, named))
        self.names = [name for name in named[0] if name in named[1]]
        self._places = [[places[name] for name in self.names] for places in named]
        self.only_first, self.only_second = ([n for n in named[i] if n not in named[1 - i]] for i in range(2))

    def norms(self, step: int) -> tuple[Tensor, Tensor] | None:
        """The norms of the common layers in both runs; None if one of the records does not have them."""
        if step not in self._with_layers or not self.names:
            return None
        one, other = (
            record.layer_norms_of(step)[places] for record, places in zip(self.records, self._places, strict=True)
        )
        return one, other

    def joint(self, step: int) -> tuple[Tensor, Tensor]:
        """The joint norms of a step, as vectors of one number; empty if only one record has some of the layers."""
        if self.names and (self.only_first or self.only_second):
            return torch.zeros(0), torch.zeros(0)
        one, other = (record.norm[[record.index(step)]].nan_to_num(nan=-1.0) for record in self.records)
        return one, other

    def differences(self, step: int, bound: float) -> tuple[list[Difference], str]:
        """The layers that differ in the first step from ``step`` on for which both have layers, or in a block of steps.

        Also what to say of that step or block, unless it is ``step`` itself.
        """
        later = min((s for s in self._with_layers if s >= step), default=None)
        norms, where = None, "" if later == step else f", by the layers of step {later}"
        blocks, others = ({(b.first, b.last): b for b in record.blocks if b.last >= step} for record in self.records)
        one = next((block for span, block in blocks.items() if span in others), None)
        if one is not None and (later is None or later > one.last):
            other = others[one.first, one.last]
            norms = one.median[self._places[0]], other.median[self._places[1]]
            where = f", by the medians of steps {one.first} to {one.last}"
        elif later is not None:
            norms = self.norms(later)
        if norms is None:
            return [], ""
        apart = _apart(*norms)
        order = [i for i in apart.argsort(descending=True, stable=True).tolist() if float(apart[i]) > bound]
        return [Difference(self.names[i], float(norms[0][i]), float(norms[1][i])) for i in order], where

    def otherwise(self, step: int, bound: float) -> list[str]:
        """What differs although the gradients are equal: whether the step was skipped, or a limit or factor."""
        at = [record.index(step) for record in self.records]
        one, other = (record.reasons[i] for record, i in zip(self.records, at, strict=True))
        if bool(one) != bool(other):
            return [
                f"Step {step}: the gradients are equal, but only the {'first' if one else 'second'} run skipped the "
                f"step ({one or other})."
            ]
        texts: list[str] = []
        for name in self.records[0].metrics:
            if name.endswith(("/limit", "/factor")) and name in self.records[1].metrics:
                values = [float(record.metrics[name][i]) for record, i in zip(self.records, at, strict=True)]
                if bool((_apart(*torch.tensor(values, dtype=torch.float64).split(1)) > bound).any()):
                    texts.append(f"{name} is {values[0]:.4g} and {values[1]:.4g}")
        return [f"Step {step}: the gradients are equal, but {', '.join(texts)}."] if texts else []

    def weights(self, step: int, bound: float) -> list[str]:
        """Says that the weights differ before any update."""
        pairs = zip(self.records, self._places, strict=True)
        both = [{ratios.step: ratios.params[places] for ratios in record.ratios} for record, places in pairs]
        if step == self.steps[0] and step in both[0].keys() & both[1].keys():
            count = int((_apart(both[0][step], both[1][step]) > bound).sum())
            if count:
                return [f"The weights of {counted(count, 'layer')} differ already before step {step}."]
        return []

    def dead(self) -> list[str]:
        """Warns that equal norms prove little, because all of them are 0, or never change."""
        norms = [record.norm[list(map(record.index, self.steps))] for record in self.records]
        if all(bool((x == 0).all()) for x in norms):
            return ["All gradients are 0 in both runs, so that nothing was compared."]
        if len(self.steps) > 2 and all(bool(((x - x[0]).abs() <= 4 * self.precision * x[0]).all()) for x in norms):
            return ["The norms of both runs never change: nothing trains, so that little was compared."]
        return []


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """How far norms of layers are apart, relative to the larger, or to a share of the joint norm; inf if one is inf."""
    present = [torch.where(x < 0, 0.0, x).double() for x in (one, other)]
    finite = [torch.where(x.isfinite(), x, 0.0) for x in present]
    joint = torch.maximum(*(joined_norms(x) for x in finite)) if len(one) else torch.zeros((), dtype=torch.float64)
    scale = torch.maximum(torch.maximum(*finite), joint / _SMALL)
    apart = torch.where(scale > 0, (finite[0] - finite[1]).abs() / scale, 0.0)
    return torch.where(present[0].isfinite() == present[1].isfinite(), apart, math.inf)


def _parted(step: int, where: str, layers: Sequence[Difference], pair: _Pair, *, guess: bool) -> str:
    """Which layers differ, and with ``guess`` what it looks like."""
    if not layers:
        one, other = pair.joint(step)
        sizes = f": {float(one):.4g} and {float(other):.4g}" if len(one) else ""
        return f"Step {step}: the joint norms differ{sizes}, and the records do not tell in which layers."
    count, total = len(layers), len(pair.names)
    differing = {layer.name for layer in layers}
    places = frozenset(i for i, name in enumerate(pair.names) if name in differing)
    name = next((text for text, members in named_sets(pair.names).items() if members == places), None)
    some = f"{count:,} of {total:,} layers{f', {name},' if name else ''}"
    who = layers[0].name if count == 1 else f"all {total:,} layers" if count == total else some
    appearance = f", {_appearance(layers, 4 * pair.precision)}" if guess else "."
    return f"Step {step}{where}: {who} {'differs' if count == 1 else 'differ'}{appearance}"


def _appearance(layers: Sequence[Difference], tolerance: float) -> str:
    """What the differences of layers look like."""
    ratios = torch.tensor([layer.ratio for layer in layers], dtype=torch.float64)
    pairs = {name: [getattr(layer, name) for layer in layers] for name in ("first", "second")}
    for run, norms in pairs.items():
        if not all(map(math.isfinite, norms)):
            return f"inf or NaN in the {run} run only."
    for run, norms in pairs.items():
        if min(norms) <= 0:
            return f"no gradient, or zeros, in the {run} run: left out of the backward, or of the exchange?"
    larger, size = ("second", ratios) if bool((ratios > 1).all()) else ("first", 1 / ratios)
    if bool((size < 1).any()):
        return "each by another factor: other data, another seed, other dropout and other weights look alike."
    if float(size.max() / size.min()) > 1 + tolerance:
        return f"larger in the {larger} run, unequally: has the other norms of shards, or a clip before the exchange?"
    size = float(size.log().mean().exp())
    return f"{size:.4g} times as large in the {larger} run{_cause(size, tolerance)}"


def _cause(size: float, tolerance: float) -> str:
    """What multiplies all norms by a factor above 1."""
    for k in range(2, MOST_COPIES + 1):
        if abs(size / k - 1) <= tolerance:
            return f": a sum where the other has a mean over {k}?"
        if abs(size / k**0.5 - 1) <= tolerance:
            return f", the root of {k}: are the squares of {k} copies added up?"
    exponent = round(math.log2(size))
    if size > MOST_COPIES and abs(size / 2.0**exponent - 1) <= tolerance:
        return f": a loss scale of 2**{exponent} that was not undone?"
    return "."


def _unwrapped(names: Sequence[str]) -> dict[str, int]:
    """The places of names without the parts that wrappers add; of full names if two would become equal."""
    short = [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names]
    chosen = short if len(set(short)) == len(names) else names
    return {name: i for i, name in enumerate(chosen)}


def _without_prefix(places: Mapping[str, int]) -> dict[str, int]:
    """The places of names without the parts that all of them begin with."""
    parts = [name.split(".") for name in places]
    same = 0
    while len({tuple(part[: same + 1]) for part in parts}) == 1 and all(len(part) > same + 1 for part in parts):
        same += 1
    return {".".join(part[same:]): i for part, i in zip(parts, places.values(), strict=True)}


def named_sets(layers: Sequence[str]) -> dict[str, frozenset[int]]:
    """The places of layers by names such as ``*.bias`` or ``blocks.*.mlp``; the shortest name of a set comes first.

    A set has the layers that match one pattern or two, one but not another, or neither.
    """
    sets: dict[str, set[int]] = {}
    parts_of: dict[str, set[int]] = {}  # a part of the model with a number, such as ``blocks.1``
    for i, name in enumerate(layers):
        numbered = name.split(".")
        parts = [numbered[0], *("*" if part.isdigit() else part for part in numbered[1:-1]), numbered[-1]]
        texts = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        texts |= {f"*.{'.'.join(parts[start:])}" for start in range(1, len(parts))}
        texts |= {f"*.{part}.*" for part in parts[1:-1]} | {f"*{parts[-1].rpartition('_')[2]}"}
        for text in texts:
            sets.setdefault(text, set()).add(i)
        for end in range(2, len(parts)):
            parts_of.setdefault(".".join(numbered[:end]), set()).add(i)
    ones, others = _distinct(sets), _distinct(parts_of)
    twos = {f"{a} and {b}": one | other for (a, one), (b, other) in combinations(ones.items(), 2)}
    named = {**ones, **others, **twos}
    parts = {f"{a} except {b}": one - other for (a, one), (b, other) in permutations(ones.items(), 2)}
    everything = frozenset(range(len(layers)))
    rests = {f"all layers except {text}": everything - members for text, members in named.items()}
    return {text: members for text, members in (named | parts | rests).items() if members}


def _distinct(sets: Mapping[str, set[int]]) -> dict[str, frozenset[int]]:
    """Each set once, by the shortest of its names; ``*bias`` only if there is no ``*.bias``."""
    ordered = sorted(sets, key=lambda text: (text[0] == "*" and text[1:2] != ".", text.count("."), len(text)))
    names = {frozenset(sets[text]): text for text in reversed(ordered)}
    return {f"`{text}`": members for members, text in reversed(names.items())}


def how_reports_differ(record: Data) -> str | None:
    """Says how the norms that the trainer reported differ from the joint ones; None if they do not."""
    reported = record.metrics.get(REPORTED, torch.full_like(record.norm, torch.nan))
    usable = (reported.isfinite() & (reported >= 0) & record.norm.isfinite() & (record.norm > 0)).nonzero().flatten()
    sizes, squares = reported[usable], (reported[usable] / record.norm[usable]).square()
    tolerance = BFLOAT16 if bool((sizes.bfloat16().double() == sizes).all()) else _FLOAT32
    apart = ((squares - 1).abs() > tolerance).nonzero().flatten().tolist()
    if not apart:
        return None
    usable, squares = usable[apart[0] :], squares[apart[0] :]  # the difference may begin in the middle of a run
    since = f", from step {record.steps[int(usable[0])]} on" if apart[0] else ""
    size = float(squares.median().sqrt())
    if size > 1 and bool(((squares / size**2 - 1).abs() <= 4 * tolerance).all()):
        return f"is {size:.4g} times the recorded one{since}{_cause(size, 4 * tolerance)}"
    found = _counted_otherwise(record, dict(zip(usable.tolist(), squares.tolist(), strict=True)), tolerance)
    clipped = ". Were the gradients clipped in between?" if bool((squares >= 1 - tolerance).all()) else "."
    other = f"is {size:.4g} times the recorded one, and no set of layers explains it"
    return f"{found}{since}." if found else f"{other}{since}{clipped}"


def _counted_otherwise(record: Data, squares: Mapping[int, float], tolerance: float) -> str | None:
    """Says which layers were counted several times, or not at all.

    If layers count k times, the square of the reported norm exceeds that of the joint norm by k - 1 times the sum of
    the squares of their norms, in each step.
    """
    with_layers = set(record.layer_steps)
    steps = [i for i in squares if record.steps[i] in with_layers]
    if not steps or not record.layers:
        return None
    norms = torch.stack([record.layer_norms_of(record.steps[i]) for i in steps]).clamp(min=0)
    shares = (norms / joined_norms(norms)[:, None]).square()
    missing = torch.tensor([squares[i] - 1 for i in steps], dtype=torch.float64)
    named = named_sets(record.layers)
    members = torch.zeros(len(record.layers), len(named), dtype=torch.float64)
    for k, places in enumerate(named.values()):
        members[list(places), k] = 1
    of_sets = shares @ members
    copies = (missing @ of_sets / of_sets.square().sum(dim=0)).round()  # beside the first one
    fits = ((missing[:, None] - copies * of_sets).abs() <= 4 * tolerance).all(dim=0)
    fits &= (of_sets.amax(dim=0) > 4 * tolerance) & (copies != 0) & (copies >= -1) & (copies < MOST_COPIES)
    if not bool(fits.any()):
        return None
    found = int(fits.nonzero()[0])
    name, times = list(named)[found], 1 + int(copies[found])
    return f"leaves out {name}" if not times else f"counts {name} {'twice' if times == 2 else f'{times} times'}"
