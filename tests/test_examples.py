"""The examples show what they say they show. Those of recipes run in `test_recipes`."""

import ast
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from ranks import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name, *packages):
    """The module of an example; skips the test if a package that it needs is not installed."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_progress_bars_write_to_terminals_only(folder):
    """In a file or a notebook's shell, each update would be a line."""
    calls = [
        node
        for path in (EXAMPLES.parent / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tqdm"
    ]
    disabled = [{word.arg: ast.unparse(word.value) for word in call.keywords}.get("disable") for call in calls]
    assert disabled == ["None"] * len(calls) != []


@pytest.mark.slow
def test_two_calls_and_a_chain_train_alike():
    results = example("from_two_calls_to_a_chain").train(10)
    assert results["chain"][0] == pytest.approx(results["two calls"][0], rel=1e-4)


def test_captured_steps_on_a_cpu_are_ordinary_steps():
    module = example("captured_step")
    module.DEVICE = torch.device("cpu")
    assert module.train(60) == module.train(60, replayed=False)


@pytest.mark.filterwarnings("ignore:max_norm is 0.5 in the checkpoint and 9.0")
def test_a_changed_chain_goes_on_with_what_it_keeps():
    report = example("change_a_chain").run(5)
    assert "pass new=['clip_norm_growth'] to load_state_dict" in report["a plain load"]
    assert report["with new="] == "max_norm 0.5, averages kept: True"
    assert report["with dropped="] == "clip_norm_growth, adam, lr"


@pytest.mark.slow
def test_a_loop_like_nanogpts_learns_and_resumes_bit_for_bit():
    results, same = example("nanogpt_loop").run(60)
    assert same
    losses = torch.tensor([loss for loss, _ in results])
    assert losses[0] == pytest.approx(math.log(256), rel=0.03)
    assert losses[-10:].mean() < 3.3


def mislabelled():
    return example("mislabelled", "matplotlib", "sklearn", "tqdm")


@pytest.mark.slow
def test_mislabelled_digits_have_large_norms():
    digits = mislabelled()
    run = digits.train(digits.MAIN, "median", 30, 0)
    wrong, norms = run.digits.wrong, run.scores("norm")
    assert wrong.sum() == 64
    assert run.limit == pytest.approx(run.norms[0].median().item())
    assert digits.auc(norms, wrong) > 0.99
    assert digits.precision(norms, wrong) > 0.85
    assert digits.precision(run.scores("loss"), wrong) > 0.85
    assert run.accuracy[-1] > 0.95


@pytest.mark.slow
def test_a_wrong_majority_is_not_found():
    digits = mislabelled()
    run = digits.train("60 % of the fours to nines", "median", 30, 0)
    assert set(run.digits.truth[run.digits.wrong].tolist()) == {4}
    assert set(run.digits.labels[run.digits.wrong].tolist()) == {9}
    assert digits.precision(run.scores(), run.digits.wrong) < 0.3


@pytest.mark.slow
def test_auc_and_precision_of_mislabelled():
    digits = mislabelled()
    wrong = torch.tensor([True, False, True, False])
    assert digits.auc(torch.tensor([3.0, 1.0, 2.0, 2.0]), wrong) == 0.875  # (1 + 1 + 1 + 1/2) / 4
    assert digits.precision(torch.tensor([3.0, 1.0, 2.0, 2.5]), wrong) == 0.5


@pytest.mark.slow
def test_a_network_trained_on_checked_samples_finds_a_wrong_majority():
    digits = mislabelled()
    data = digits.load("60 % of the fours to nines", torch.Generator().manual_seed(0))
    scores = digits.losses_by_trusted(data, 200, 0)[digits.TRUSTED :]
    assert digits.precision(scores, data.wrong[digits.TRUSTED :]) > 0.8


@pytest.mark.slow
def test_the_parts_of_the_noise_scale_are_right_on_average():
    scale = example("noise_scale", "sklearn").NoiseScale(4)
    grads = torch.randn(4, 3, dtype=torch.float64)
    scale.add(grads.norm(dim=1), grads.mean(0).norm())
    products = (grads @ grads.T)[~torch.eye(4, dtype=torch.bool)]  # those of two samples, as if they were independent
    assert scale.square == pytest.approx(products.mean().item())
    assert scale.trace == pytest.approx(grads.var(0).sum().item())
    assert scale.value == pytest.approx(scale.trace / scale.square) or scale.square <= 0


@pytest.mark.slow
def test_the_noise_scale_by_norms_is_that_of_all_samples_and_the_page_shows_it():
    found = example("noise_scale", "sklearn").measure("mlp", 100, 200, 0)
    assert 1 / 1.5 < found["norms"] / found["all samples"] < 1.5
    page = (EXAMPLES.parent / "docs" / "per_sample_norms.md").read_text().splitlines()
    (row,) = [line.split() for line in page if line.split()[:2] == ["mlp", "0"]]
    assert [float(value) for value in row[2:]] == pytest.approx(list(found.values()), rel=0.2)


@pytest.mark.slow
def test_spikes_of_losses_are_rises_above_the_median_before():
    spikes = example("loss_spikes", "matplotlib", "tqdm").spikes
    flat = [2.0, 2.1] * 40
    assert spikes(flat)[0] == 0
    assert spikes([*flat, 20.0, 20.0, *flat])[0] == 1  # neighbours are one spike
    count, rise = spikes([*flat, 20.0, *flat, 10.0, *flat])
    assert count == 2
    assert rise == pytest.approx(20 / 2.05, rel=0.03)
    assert spikes([*flat, math.nan, *flat])[0] == 1


@pytest.mark.slow
def test_a_limit_that_adapts_survives_corrupted_batches_that_harm_without_one():
    module = example("loss_spikes", "matplotlib", "tqdm")
    situation, options, texts = module.SITUATIONS[0], module.Options(300, 1), module.load_texts()
    corrupted = module.corrupted_steps(situation, options, 0)
    assert set(corrupted.values()) == {True, False}
    assert min(corrupted) >= 60  # none in the first fifth
    runs = {name: module.train(module.METHODS[name], situation, texts, options, 0) for name in (module.NONE, "ZClip()")}
    assert len(runs["ZClip()"].clipped_corrupted) == len(corrupted)
    assert module.mean(runs["ZClip()"].clipped_corrupted) > 0.4  # random characters have usual norms
    assert runs["ZClip()"].held_out < runs[module.NONE].held_out - 0.2


def printed(name, *args):
    """The lines that an example of several processes prints."""
    return run_script(EXAMPLES / f"{name}.py", *args).splitlines()


def rows(lines):
    """The rows of the table: the number of a step, and numbers of several ways."""
    return [list(map(float, line.split()[1:])) for line in lines if line.split() and line.split()[0].isdigit()]


@pytest.mark.slow
def test_a_pipeline_is_clipped_as_one_process_by_a_line_and_by_a_chain():
    lines = printed("pipeline", "--steps", "10")
    found = rows(lines)
    assert len(found) == 11
    for row in found:
        assert row[:2] == pytest.approx(row[4:], rel=1e-3)
        assert row[2:4] == pytest.approx(row[4:], rel=1e-3)
    assert any(norm > 0.3 for *_, norm in found)
    assert lines[-1] == "Stopped at step 5 and resumed: the same losses and norms."


@pytest.mark.slow
def test_experts_on_a_mesh_of_their_own_are_clipped_as_in_one_process():
    found = rows(printed("expert_parallel", "--steps", "10"))
    assert len(found) == 11
    for row in found:
        assert row[:3] == pytest.approx(row[3:], rel=1e-3)
    assert any(factor < 1 for *_, factor in found)


@pytest.mark.slow
def test_samples_of_two_processes_are_clipped_as_in_one():
    found = rows(printed("per_sample_processes", "--steps", "10"))
    assert len(found) == 11
    for row in found:
        assert row[:2] == pytest.approx(row[2:], rel=1e-3)
    assert any(norm > 0.5 for *_, norm in found)


@pytest.mark.slow
def test_the_record_of_a_run_finds_its_corrupted_batches(tmp_path):
    module = example("find_the_spike", "matplotlib", "tqdm")
    before = module.train("without a clip", 500, tmp_path / "run.jsonl", [])
    assert set(before.wrong) <= set(before.record.spikes())
    assert min(before.wrong) >= 150
    after = module.train("with the limit", 500, tmp_path / "with_limit.jsonl", [before.suggestion.transform()])
    assert after.held_out < before.held_out - 0.2
    assert after.record.share_clipped[min(before.wrong)] == 1
