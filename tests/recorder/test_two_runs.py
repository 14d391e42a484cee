"""Where two runs part."""

import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from recorder import parted
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular, Record, Recorder, read_record
from torchzero_clip.__main__ import main
from torchzero_clip.recorder.data import Block, Ratios
from torchzero_clip.recorder.two_runs import named_sets

NAMES = [f"blocks.{i}.{part}" for i in range(3) for part in ("norm.weight", "norm.bias", "mlp.weight", "mlp.bias")]
NAMES += ["head.weight", "head.bias"]
STEPS = 30


def record(names=NAMES, steps=STEPS, seed=0, **changes) -> Record:
    """A record of random norms."""
    generator = torch.Generator().manual_seed(seed)
    norms = torch.rand(steps, len(names), generator=generator, dtype=torch.float64) + 0.1
    joint = norms.square().sum(dim=1).sqrt()
    loss = torch.full((steps,), math.nan, dtype=torch.float64)
    made = Record(list(range(steps)), [""] * steps, joint, loss, {}, list(names), list(range(steps)), norms)
    return replace(made, **changes)


def changed(factors, names=NAMES, begin=10) -> Record:
    """The record with norms times factors, by the place of the layer, from a step on."""
    made = record(names)
    for place, factor in factors.items():
        made.layer_norms[begin:, place] *= factor
    return replace(made, norm=made.layer_norms.square().sum(dim=1).sqrt())


def places(text):
    return [i for i, name in enumerate(NAMES) if text in name]


def test_equal_runs_differ_in_nothing():
    comparison = record().compare(record())
    assert not comparison.differs
    assert comparison.step is None
    assert str(comparison) == "The norms of 14 layers in 30 steps are equal up to rounding."


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_are_joined_without_those_of_wrappers(prefix):
    assert not record().compare(record([prefix + name for name in NAMES])).differs


def test_a_common_prefix_of_all_names_is_left_out():
    names = [f"net.model.{name}" for name in NAMES]
    assert not record(names).compare(record()).differs
    assert record(names).compare(changed({0: 2.0})).step == 10


def test_without_common_names_the_joint_norms_are_compared():
    names = [f"layer_{i}" for i in range(14)]
    same, other = (record().compare(replace(made, layers=names)) for made in (record(), changed({0: 2.0})))
    assert same.differs
    assert str(same).startswith(
        "The joint norms of 30 steps are equal up to rounding.\nOnly the first run has 14 layers"
    )
    assert other.step == 10
    assert "the joint norms differ" in other.findings[0]


def test_steps_without_layers_are_counted():
    made = record()
    made = replace(made, layer_steps=[0, 1], layer_norms=made.layer_norms[:2])
    text = "The norms of 14 layers in 2 steps and the joint norms of 28 steps are equal up to rounding."
    assert str(made.compare(made)) == text


def test_other_weights_are_said_first():
    weights = torch.arange(1, 15, dtype=torch.float64)
    pair = [
        replace(made, ratios=[Ratios(0, weights * factor, weights)])
        for made, factor in ((record(), 1.0), (changed({0: 2.0, 1: 2.0}, begin=0), 1.1))
    ]
    found = pair[0].compare(pair[1]).findings
    assert found == [
        "The weights of 14 layers differ already before step 0.",
        "Step 0: 2 of 14 layers, `blocks.0.norm`, differ.",
    ]


def test_a_wrapped_part_has_the_name_of_the_part():
    names = [name.replace("mlp.", "mlp._checkpoint_wrapped_module.") for name in NAMES]
    assert not record(names).compare(record()).differs


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (8.0, "8 times as large in the second run: a sum where the other has a mean over 8?"),
        (1 / 3, "3 times as large in the first run: a sum where the other has a mean over 3?"),
        (2**0.5, "1.414 times as large in the second run, the root of 2: are the squares of 2 copies added up?"),
        (1 / 65536, "a loss scale of 2**16 that was not undone?"),
        (1.7, "1.7 times as large in the second run."),
    ],
)
def test_a_common_factor_is_explained(factor, text):
    comparison = record().compare(changed(dict.fromkeys(range(len(NAMES)), factor)))
    assert (comparison.step, len(comparison.layers)) == (10, 14)
    assert str(comparison).startswith("Step 10: all 14 layers differ, ")
    assert text in comparison.findings[0]


@pytest.mark.parametrize(("text", "name"), [(".mlp.", "`*.mlp.*`"), ("bias", "`*.bias`"), ("head", "`head`")])
def test_layers_with_a_common_name_are_named_together(text, name):
    comparison = record().compare(changed(dict.fromkeys(places(text), 0.5)))
    assert f"{len(places(text))} of 14 layers, {name}, differ" in comparison.findings[0]
    assert {layer.name for layer in comparison.layers} == {n for n in NAMES if text in n}


def test_one_layer_is_named():
    comparison = record().compare(changed({3: 1.001}))
    assert comparison.findings == ["Step 10: blocks.0.mlp.bias differs, 1.001 times as large in the second run."]
    assert str(comparison).splitlines()[1].split() == ["layer", "first", "second", "ratio"]


def test_layers_that_are_smaller_by_different_factors_look_like_shards():
    comparison = record().compare(changed({i: 0.4 + i / 40 for i in places(".mlp.")}))
    assert "larger in the first run, unequally: has the other norms of shards" in comparison.findings[0]


def test_other_data_look_like_other_seeds():
    comparison = record().compare(record(seed=1))
    assert comparison.step == 0
    assert "other data, another seed, other dropout and other weights look alike" in comparison.findings[0]


@pytest.mark.parametrize(("norm", "text"), [(math.nan, "inf or NaN"), (-1.0, "no gradient, or zeros")])
def test_a_layer_that_one_run_lacks_or_loses_is_said(norm, text):
    other = record()
    other.layer_norms[4, 2] = norm
    comparison = record().compare(other)
    assert (comparison.step, [layer.name for layer in comparison.layers]) == (4, [NAMES[2]])
    assert text in comparison.findings[0]


def test_drift_by_rounding_is_no_difference_and_a_jump_above_it_is():
    other, growth = record(), 1 + 1e-6 * 1.3 ** torch.arange(STEPS, dtype=torch.float64)
    other.layer_norms.mul_(growth[:, None])
    other = replace(other, norm=other.layer_norms.square().sum(dim=1).sqrt())
    assert not record().compare(other).differs
    other.layer_norms[25, 5] *= 1.05
    assert record().compare(other).step == 25


def test_a_small_layer_is_judged_against_the_joint_norm():
    noise = record()
    noise.layer_norms[:, 0] = 1e-9
    other = replace(noise, layer_norms=noise.layer_norms.clone())
    other.layer_norms[:, 0] = 3e-9  # as the bias of keys, whose gradient is rounding
    assert not noise.compare(other).differs


def test_layers_of_one_run_only_are_listed():
    comparison = record().compare(record([*NAMES[:-1], "extra"]))
    assert (comparison.only_first, comparison.only_second) == (["head.bias"], ["extra"])
    assert comparison.differs
    assert "Only the second run has 1 layer: extra." in str(comparison)


def test_joint_norms_of_other_layers_are_not_compared():
    kept = [0, 1]
    first, second = (
        replace(made, layer_steps=kept, layer_norms=made.layer_norms[kept], norm=made.norm * factor)
        for made, factor in ((record(), 1.0), (record([*NAMES[:-1], "extra"]), 3.0))
    )
    assert str(first.compare(second)).startswith("The norms of 13 layers in 2 steps are equal up to rounding.\nOnly")


def test_without_layers_the_joint_norm_tells_the_step():
    first, second = (replace(r, layer_steps=[], layer_norms=r.layer_norms[:0]) for r in (record(), changed({0: 3.0})))
    comparison = first.compare(second)
    assert comparison.step == 10
    assert "the joint norms differ" in comparison.findings[0]
    with pytest.raises(ValueError, match="no step in common for which both have the norms of layers"):
        comparison.plot()


def test_later_layers_tell_where_the_joint_norm_differs():
    kept = [*range(8), 20]
    pair = [replace(r, layer_steps=kept, layer_norms=r.layer_norms[kept]) for r in (record(), changed({0: 3.0}))]
    comparison = pair[0].compare(pair[1])
    assert comparison.step == 10
    assert [layer.name for layer in comparison.layers] == [NAMES[0]]
    assert comparison.findings == ["Step 10, by the layers of step 20: blocks.0.norm.weight differs."]


def test_blocks_tell_where_the_joint_norm_differs_if_no_later_step_has_layers():
    pair = [
        replace(
            made,
            layer_steps=[0],
            layer_norms=made.layer_norms[:1],
            blocks=[Block(8, 15, made.layer_norms[8:16].median(dim=0).values, made.layer_norms[8:16].amax(dim=0))],
        )
        for made in (record(), changed({0: 3.0}, begin=8))
    ]
    comparison = pair[0].compare(pair[1])
    assert [layer.name for layer in comparison.layers] == [NAMES[0]]
    assert comparison.findings == ["Step 8, by the medians of steps 8 to 15: blocks.0.norm.weight differs."]


def test_a_step_that_one_run_skipped_is_said():
    reasons = ["skip_step" if step == 6 else "" for step in range(STEPS)]
    comparison = record().compare(replace(record(), reasons=reasons))
    assert comparison.findings == [
        "Step 6: the gradients are equal, but only the second run skipped the step (skip_step)."
    ]


def test_limits_are_compared_where_gradients_are_equal():
    limits = [{"clip_norm/limit": torch.full((STEPS,), limit, dtype=torch.float64)} for limit in (1.0, 2.0)]
    comparison = replace(record(), metrics=limits[0]).compare(replace(record(), metrics=limits[1]))
    assert comparison.findings == ["Step 0: the gradients are equal, but clip_norm/limit is 1 and 2."]


def test_runs_that_do_not_train_tell_nothing():
    zeros, same = (
        record(layer_norms=torch.full((STEPS, 14), x).double(), norm=torch.full((STEPS,), x).double())
        for x in (0.0, 1.0)
    )
    assert zeros.compare(zeros).findings == ["All gradients are 0 in both runs, so that nothing was compared."]
    assert "never change" in same.compare(same).findings[0]
    rounded = replace(same, norm=same.norm * (1 + 1e-7 * torch.rand(STEPS).double()))
    assert "never change" in rounded.compare(same).findings[0]


def reporting(copies, chosen, begin=0, rounded=False) -> Record:
    made = record()
    factors = torch.ones(14, dtype=torch.float64)
    factors[chosen] = copies
    norms = (made.layer_norms.square() @ factors).sqrt()
    norms[:begin] = made.norm[:begin]
    return replace(made, metrics={"reported_norm": norms.bfloat16().double() if rounded else norms})


@pytest.mark.parametrize(
    ("copies", "text", "name"),
    [
        (2, "bias", "counts `*.bias` twice"),
        (4, ".norm.", "counts `*.norm.*` 4 times"),
        (0, "head", "leaves out `head`"),
        (2, "blocks.1", "counts `blocks.1` twice"),
    ],
)
def test_a_reported_norm_tells_which_layers_it_counts_otherwise(copies, text, name):
    chosen = places(text)
    made = reporting(copies, chosen)
    comparison = record().compare(made)
    assert comparison.findings == [f"The norm that the second run reports {name}."]
    assert repr(made.worst(3)).startswith("The norm that was reported ")


def test_two_sets_of_layers_are_named():
    made = reporting(2, [*places("norm"), *places("head")])
    assert record().compare(made).findings == [
        "The norm that the second run reports counts `head` and `*.norm.*` twice."
    ]


def test_biases_of_which_some_are_sharded_are_named_by_what_they_are():
    """Under tensor parallelism each process has the biases of `down` and `norm`, and a part of those of `up`."""
    parts = [f"blocks.{i}.{part}" for i in range(3) for part in ("norm", "up", "down")]
    names = [f"{part}.{kind}" for part in ("embed", *parts, "head") for kind in ("weight", "bias")]
    biases = {i for i, name in enumerate(names) if name.endswith("bias") and ".up." not in name}
    text = next(text for text, members in named_sets(names).items() if members == biases)
    assert text == "`*.bias` except `*.up.*`"


def test_a_reported_norm_that_is_wrong_from_a_step_on():
    found = record().compare(reporting(3, places("mlp"), begin=7)).findings
    assert found == ["The norm that the second run reports counts `*.mlp.*` 3 times, from step 7 on."]


@pytest.mark.parametrize("rounded", [False, True])
def test_a_right_reported_norm_is_no_difference(rounded):
    made = reporting(1, [], rounded=rounded)
    assert not made.compare(record()).differs
    assert not made.worst(3).note


def test_a_reported_norm_of_copies_of_all_layers():
    found = record().compare(reporting(2, list(range(14)))).findings
    assert "1.414 times the recorded one, the root of 2: are the squares of 2 copies added up?" in found[0]


def test_sets_of_layers_have_their_shortest_names():
    named = named_sets(NAMES)
    assert named["`*.bias`"] == {*places("bias")}
    assert named["`blocks.2`"] == {*places("blocks.2")}
    assert named["all layers except `head`"] == {*places("blocks")}
    assert next(text for text, members in named.items() if members == {*places("mlp")}) == "`*.mlp.*`"


def test_other_arguments_raise():
    with pytest.raises(TypeError, match="other"):
        record().compare("run.jsonl")
    with pytest.raises(ValueError, match="no step in common"):
        record().compare(record(steps=0))


def trained(factor, chain=(), **options) -> Recorder:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    recorder = Recorder(Modular(model, *chain, SGD(0.01)), **options)
    for k in range(12):
        (model(torch.ones(2, 3) + k).sum() * (factor if k >= 5 else 1)).backward()
        recorder.optimizer.step()
        recorder.optimizer.zero_grad()
    return recorder


def test_recorders_are_compared_as_records_are():
    assert trained(1.0).compare(trained(4.0)).step == 5


def test_a_reported_norm_is_a_metric():
    recorder = trained(1.0)
    model = recorder.optimizer
    for norm in (torch.tensor([3.0]), 4.0):
        for group in model.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        recorder.report_norm(norm)
        model.step()
    assert recorder.record().metrics["reported_norm"].tolist()[-2:] == [3.0, 4.0]
    with pytest.raises(TypeError, match="norm"):
        recorder.report_norm("large")
    for wrong, error in ((torch.ones(2), ValueError), (-1.0, ValueError), (torch.tensor(True), TypeError)):
        with pytest.raises(error, match="norm must"):
            recorder.report_norm(wrong)


def test_a_norm_before_a_clip_is_not_that_of_some_layers():
    made = record()
    reported = made.norm * (1 + torch.rand(STEPS, dtype=torch.float64))
    found = record().compare(replace(made, metrics={"reported_norm": reported})).findings
    assert found[0].endswith("no set of layers explains it. Were the gradients clipped in between?")
    without = replace(reporting(2, places("bias")), layer_steps=[], layer_norms=made.layer_norms[:0])
    assert record().compare(without).findings[0].count("no set of layers explains it") == 1


def test_files_are_compared_by_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("one", "same", "other")]
    for path, factor in zip(paths, (1.0, 1.0, 4.0), strict=True):
        trained(factor, [ClipNorm(1.0)], path=path).close()
    assert main(["compare", *paths[:2]]) == 0
    assert capsys.readouterr().out == "The norms of 4 layers in 12 steps are equal up to rounding.\n"
    assert main(["compare", paths[0], paths[2], "--plot", str(tmp_path / "ratios.png")]) == 1
    assert capsys.readouterr().out.startswith("Step 5: all 4 layers differ, 4 times as large in the second run")
    assert (tmp_path / "ratios.png").stat().st_size > 1000
    assert main(["compare", paths[0], str(tmp_path / "missing.jsonl")]) == 2


def test_two_runs_of_one_file_are_compared(tmp_path):
    path = tmp_path / "runs.jsonl"
    runs = []
    for factor in (1.0, 4.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the second run is appended
            recorder = trained(factor, path=path)
            recorder.close()
        runs.append(recorder.state_dict()["run"])
    assert main(["compare", str(path), str(path), "--runs", *runs]) == 1
    assert main(["compare", str(path), str(path), "--runs", runs[0], runs[0]]) == 0


def test_a_file_has_the_layers_of_the_first_hundred_steps(tmp_path):
    weight = nn.Parameter(torch.zeros(2))
    recorder = Recorder(Modular([("weight", weight)], SGD(0.1)), path=tmp_path / "run.jsonl", flush_every=7)
    for _ in range(130):
        weight.grad = torch.ones(2)
        recorder.optimizer.step()
    recorder.close()
    assert read_record(tmp_path / "run.jsonl").layer_steps == list(range(101))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parted")
    parted.written(folder)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("parted")
@pytest.mark.parametrize("dtype", parted.DTYPES)
def test_runs_in_one_process_and_in_two_do_not_part(folder, dtype):
    records = {name: read_record(folder / f"{name} {dtype}.jsonl") for name in parted.WAYS}
    pairs = list(itertools.combinations(records, 2))
    assert len(pairs) == 55
    false = {pair: str(c) for pair in pairs if (c := records[pair[0]].compare(records[pair[1]])).differs}
    assert not false


@pytest.mark.slow
@pytest.mark.xdist_group("parted")
@pytest.mark.parametrize("dtype", parted.DTYPES)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("a shard", "The norm that the second run reports is 0."),
        (
            "counted twice",
            "The norm that the second run reports counts all layers except `*.up.*` and",
        ),
        ("wrong group", "8 of 23 layers, `*.mlp.*`, differ, "),
        ("a sum", "a sum where the other has a mean over 2?"),
        ("left out", "blocks.1.mlp.up.weight differs"),
        ("clipped before", "all 23 layers differ"),
        ("scaled", "a loss scale of 2**10 that was not undone?"),
        ("other data", "layers differ"),
    ],
)
def test_faults_are_found_in_their_first_step(folder, dtype, fault, text):
    right, wrong = (read_record(folder / f"{name} {dtype}.jsonl") for name in ("alone", fault))
    comparison = right.compare(wrong)
    assert text in comparison.findings[0]
    assert f"tep {parted.BEGINS}" in comparison.findings[0]
