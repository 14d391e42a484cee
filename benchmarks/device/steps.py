"""One row of a table: a step that takes turns with torch's clip and fused AdamW."""

import gc
import math
import statistics
from collections.abc import Sequence

from benchmarks.device.meter import Meter, Times
from benchmarks.device.run import Result
from benchmarks.memory import of_case
from benchmarks.report import MIB
from benchmarks.timing import Case, Gradients, Params, Timed

WARM_UP = 14  # a plan stands after at most 12 steps, and `captured` records at most the 14th step
MOST_ROUNDS = 30  # gradients grow in each step, and after 80 their squares leave float32


def rounds_of(gradients: Gradients) -> int:
    """The timed steps of a row: fewer if a step takes long."""
    count = sum(source.numel() for source in gradients.source)
    return MOST_ROUNDS if count < 1e7 else 12 if count < 5e8 else 6


def measured(meter: Meter, device: str, case: Case, base: Case, gradients: Gradients, rounds: int) -> Result:
    """Milliseconds of a step, ratios to torch's clip and AdamW in the same rounds, launches, synchronizations, MiB."""
    result = timed_beside(meter, case, base, gradients, rounds)
    gc.collect()
    memory = of_case(case, gradients, device, warm_up=WARM_UP)
    held = None if memory.held is None else memory.held / MIB
    return {**result, "held": held, "peak": memory.peak / MIB}


def timed_beside(meter: Meter, case: Case, base: Case, gradients: Gradients, rounds: int) -> Result:
    """All but memory, whose measurement needs the memory of both."""
    pair: dict[str, tuple[Params, Timed]] = {}
    for each in (base, case):
        if each.name not in pair:
            params = gradients.params()
            pair[each.name] = params, each.make(params)
    counts = dict.fromkeys(pair, 0)

    def prepare(name: str) -> Timed:
        params, run = pair[name]
        gradients.refill(params, counts[name])
        counts[name] += 1
        run.before()
        return run

    times: dict[str, list[Times]] = {name: [] for name in pair}
    for number in range(WARM_UP + rounds):
        for name in pair:
            found = meter.timed(prepare(name).step)
            if number >= WARM_UP:
                times[name].append(found)
    waits = {name: meter.waits(prepare(name).step) for name in pair}
    queued: dict[str, list[float]] = {name: [] for name in pair}
    for _ in range(max(rounds // 2, 1)):
        for name in pair:
            host = statistics.median(each.host for each in times[name])
            run = prepare(name)
            queued[name].append(math.nan if waits[name] else meter.on_device(run.step, host))
    row: Result = {}
    for column, values in {
        "device": queued,
        "host": {name: [each.host for each in own] for name, own in times.items()},
        "wall": {name: [each.wall for each in own] for name, own in times.items()},
    }.items():
        row[column], row[f"{column} ratio"] = medians(values[case.name], values[base.name])
    return {**row, "launches": meter.launches(prepare(case.name).step), "waits": waits[case.name]}


def medians(values: Sequence[float], others: Sequence[float]) -> tuple[float | None, float | None]:
    """The median, and that of the ratios to the values of the same rounds; None if there is none."""
    here = [value for value in values if not math.isnan(value)]
    pairs = [(a, b) for a, b in zip(values, others, strict=True) if not (math.isnan(a) or math.isnan(b))]
    ratio = statistics.median(a / b for a, b in pairs) if pairs else None
    return statistics.median(here) if here else None, ratio
