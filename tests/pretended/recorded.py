"""A recorder beside steps about which the device decides: what it costs, and that it stores what the host would."""

import json
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretended.costs import WARM, Start
from pretended.device import DEVICE, on_cuda
from pretended.runs import CLIPS, GATES, HOSTS, RULES, Run, error_of
from torch import Tensor, nn

from torchzero_clip import Modular, Recorder, before_step
from torchzero_clip.recorder.series import LATEST

MOST = 5
"""How many launches a recorder may take in a step in which nothing is written."""
CHAINS = ("each", "skip", "gate, joint", "ema", "before, gate, joint")
EVENTS = ["nan", "inf", "spike", "spike", "zeros", "huge", "missing", "settings", "closure"]


def costs_of(start: Start, folder: str | None) -> list[tuple[int, int]]:
    """Launches and waits of each of 34 steps, with a file of a recorder in a folder."""
    generator, found = torch.Generator().manual_seed(0), list[tuple[int, int]]()
    params = [nn.Parameter(on_cuda(torch.randn(300 + k % 7, generator=generator))) for k in range(100)]
    optimizer, loss = start(params), on_cuda(torch.tensor(1.0))
    recorder = None if folder is None else Recorder(optimizer, path=Path(folder, "run.jsonl"))
    for _ in range(34):
        for param in params:
            param.grad = on_cuda(torch.randn(param.shape, generator=generator))
        DEVICE.counts.clear()
        if recorder is not None:
            recorder.report_loss(loss)
        optimizer.step()
        found.append((DEVICE.counts.launches.total(), len(DEVICE.counts.waits) + len(DEVICE.counts.copies)))
    if recorder is not None:
        recorder.close()
    return found


def rows_do_not_wait() -> None:
    """The tenth step is written, and later ones are not. Metrics of some steps are computed together."""
    for name in CHAINS:
        start, _ = WARM[name]
        plain = costs_of(start, None)
        with tempfile.TemporaryDirectory() as folder:
            recorded = costs_of(start, folder)
        assert recorded[9][1] > 0
        more = [found[0] - alone[0] for found, alone in zip(recorded, plain, strict=True)][11:]
        assert all(waits == 0 for _, waits in recorded[11:]), (name, recorded)
        together = [launches for launches in more if launches > MOST]
        assert len(together) <= 1, (name, more)
        assert sum(together) < 2 * LATEST, (name, more)
        assert min(more) > 0


def _make(seed: str) -> Callable[[random.Random, list[Any]], tuple[Any, Any]]:
    def make(draw: random.Random, groups: list[Any]) -> tuple[Any, Any]:
        clip, gate, rule = draw.choice(sorted(CLIPS)), draw.choice(sorted(GATES)), draw.choice(sorted(RULES))
        (gates, options), transform = GATES[gate](draw), CLIPS[clip](draw)
        transforms = [*gates, *([] if transform is None else [transform])]
        if transforms and rule in HOSTS and draw.random() < 0.4:
            optimizer = HOSTS[rule](groups)
            return optimizer, before_step(optimizer, *transforms, **options)
        options |= {name: draw.random() < 0.2 for name in ("keep_grads", "maximize")}
        optimizer = Modular(groups, *transforms, RULES[rule](draw), **options)
        return optimizer, optimizer

    return make


def _seen(recorder: Recorder, path: Path) -> dict[str, Any]:
    """All that a user can read: numbers as text, so that one NaN is like another."""
    record, state = recorder.record(), recorder.state_dict()
    tape = state["tape"]
    columns = dict(zip(tape["keys"], tape["numbers"].unbind(1), strict=True))
    columns |= {f"metric {key}": values for key, values in record.metrics.items()}
    # a column of NaN alone is as good as none
    shown = {key: _exact(values) for key, values in columns.items() if not values.isnan().all()}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        **shown,
        "reasons": record.reasons,
        "refused_by": tape["refused_by"],
        "ratios": [(ratios.step, _exact(ratios.params), _exact(ratios.updates)) for ratios in record.ratios],
        "norms": _exact(tape["norms"]),
        "layers": _exact(record.layer_norms),
        "spikes": recorder.spikes(),
        "file": [{key: value for key, value in line.items() if key not in ("id", "run")} for line in lines],
    }


def _exact(values: Tensor) -> list[Any]:
    return torch.nan_to_num(values.double(), nan=12345.0).tolist()


def _trained(seed: str, path: Path, *, by_host: bool) -> tuple[dict[str, Any], list[str], int]:
    """A run with events, what its recorder has, its warnings, and about how many steps the device has decided."""
    run, happening = Run(seed, _make(seed)), random.Random(f"events {seed}")
    if by_host:  # each step is an ordinary one
        run.chain.runner._host_reasons = lambda: ["this run is the oracle"]
        run.chain.runner.fast_way.learn = lambda *_: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = Recorder(run.optimizer, path=path, flush_every=7, ratios_every=3)
        for k in range(40):
            event = happening.choice(EVENTS) if happening.random() < 0.3 else None
            draw = random.Random(happening.randrange(2**30))
            run.fill(event, draw)
            run.happen(event, draw)
            if draw.random() < 0.7:
                recorder.report_loss(on_cuda(torch.tensor(draw.random())))
            if draw.random() < 0.1:
                recorder.report_norm(float(k))
            error_of(lambda event=event: run.optimizer.step(*[lambda: 0.5] * (event == "closure")), quiet=False)
        found = _seen(recorder, path)
        recorder.close()
    said = sorted({str(w.message) for w in caught if "inf or NaN" in str(w.message)})
    return found, said, run.chain.runner._posting


def rows_are_those_of_the_host() -> None:
    """Rows, files, states, spikes and the warning of the first NaN, of whole random runs."""
    late, refused, warned = 0, 0, 0
    for k in range(14):
        seed = f"recorded {k}"
        with tempfile.TemporaryDirectory() as folder:
            found, said, decided = _trained(seed, Path(folder, "a.jsonl"), by_host=False)
            expected, also_said, none = _trained(seed, Path(folder, "b.jsonl"), by_host=True)
        different = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        assert not different, (seed, {key: (found.get(key), expected.get(key)) for key in different[:2]})
        assert none == 0
        late, warned = late + decided, warned + len(said)
        assert len(said) == len(also_said) <= 1, (seed, said, also_said)
        refused += sum(map(bool, found["reasons"]))
    assert min(late - 100, refused - 30, warned - 5) > 0, (late, refused, warned)


CHECKS: dict[str, Callable[[], None]] = {
    "recorder, costs": rows_do_not_wait,
    "recorder, rows": rows_are_those_of_the_host,
}
