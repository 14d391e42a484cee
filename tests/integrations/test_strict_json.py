"""What goes into logs and files is strict JSON: no number of any transform is Infinity or NaN there."""

import json
import math

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import gradients, parameters, set_grads

from torchzero_clip import Modular, Recorder, SkipStep, ZClip, read_record
from torchzero_clip.integrations import metrics, numbers


def strict(text):
    """What a JSON text says; an error for the tokens that are not JSON."""

    def refuse(token):
        raise ValueError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(params):
    """Gradients of usual steps, of zeros, and of an inf and a NaN."""
    usual = gradients(params, 4)
    bad = [[torch.full_like(grad, value) for grad in usual[0]] for value in (0.0, math.inf, math.nan)]
    return [usual[0], *bad, *usual, usual[1]]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_numbers_of_every_transform(entry, fast):
    params = parameters()
    optimizer = Modular(params, entry.make(), fast=fast)
    for row in rows(params):
        set_grads(params, row)
        optimizer.step()
        found = numbers(optimizer)
        assert strict(json.dumps(found)) == found
        read = {name: value.item() for name, value in metrics(optimizer).items()}
        assert found == {name: value for name, value in read.items() if math.isfinite(value)}


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_the_file_of_a_recorder_and_the_checkpoint_of_every_transform(entry, tmp_path):
    params = parameters()
    path = tmp_path / "run.jsonl"
    optimizer = Modular(params, entry.make())
    recorder = Recorder(optimizer, path=path, ratios_every=2)
    for i, row in enumerate(rows(params)):
        set_grads(params, row)
        recorder.report_loss([1.0, math.inf, math.nan, -math.inf][i % 4])
        optimizer.step()
    if not any(getattr(transform, "needs_loss", False) for transform in optimizer.transforms.values()):
        recorder.report_loss(math.nan, step=2)
    with pytest.warns(UserWarning, match="inf or NaN"):
        recorder.close()
    kinds = {strict(line)["kind"] for line in path.read_text().splitlines()}
    assert {"run", "step", "layers", "block", "ratios"} <= kinds
    assert len(read_record(path).steps) == 9
    strict(optimizer.state_dict()["param_groups"][0]["chain"])


def test_a_limit_that_does_not_limit_is_left_out_of_logs():
    params = parameters(shapes=[(2,)])
    optimizer = Modular(params, ZClip(max_norm=None, warmup_steps=3), SkipStep(max_norm=100.0))
    sent = []
    recorder = Recorder(optimizer, log=lambda step, values: sent.append(values), log_every=1, flush_every=1)
    for size in (1.0, 1.1, 0.9, 1.0, 50.0, 1.0):
        params[0].grad = torch.tensor([size, 0.0])
        optimizer.step()
    assert numbers(optimizer).keys() == {"z_clip/norm", "z_clip/factor", "z_clip/clipped", "z_clip/z"} | {
        "skip_step/mean",
        "skipped_steps",
    }
    recorder.close()
    assert all(math.isfinite(value) for values in sent for value in values.values())
