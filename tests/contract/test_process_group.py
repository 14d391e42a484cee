"""Processes that hold different parameters equal one process that holds all of them."""

import pytest
import ranks
import torch
from contract import process_group as programs
from contract import random_groups
from contract.process_group import OWN


def check(found, expected, name):
    for rank, own in enumerate(found):
        for key in own["params"]:
            torch.testing.assert_close(
                own["params"][key], expected["params"][key], rtol=1e-9, atol=1e-12, equal_nan=True
            )
            torch.testing.assert_close(
                own["states"][key], expected["states"][key], rtol=1e-9, atol=1e-12, equal_nan=True
            )
        assert list(own["params"]) == list(expected["params"])[OWN[rank]]
        assert own["metrics"].keys() == expected["metrics"].keys(), name
        for key, value in expected["metrics"].items():
            torch.testing.assert_close(
                own["metrics"][key], value, rtol=1e-9, atol=1e-12, equal_nan=True, msg=f"{name} {key}"
            )
        torch.testing.assert_close(own["chain"], expected["chain"], rtol=1e-9, atol=1e-12, equal_nan=True)
        for what in ("metrics", "chain"):  # bit for bit
            torch.testing.assert_close(own[what], found[0][what], rtol=0, atol=0, equal_nan=True, msg=f"{name} {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_chains_equal_one_process(fast):
    """The same processes see all events, because they start slowly."""
    events = programs.EVENTS if fast else ("inf",)  # the two ways differ only in how they compute
    expected, found = programs.train_all(fast, events), ranks.run(programs.train_all, 3, fast, events)
    failures = []
    for event, name in expected:
        try:
            check([own[event, name] for own in found], expected[event, name], name)
        except AssertionError as error:
            failures.append(f"{event} {name}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("event", "names"),
    [
        ("", ["ClipNorm+AdamW", "gates", "a joint child"]),
        pytest.param(
            "nobody", ["statistics of one process", "schedule", "gates", "gradients before"], marks=pytest.mark.slow
        ),
        pytest.param("empty", ["joint statistics", "norms of averages", "joint std", "gates"], marks=pytest.mark.slow),
        pytest.param("all empty", programs.names("empty"), marks=pytest.mark.slow, id="all empty"),
    ],
)
def test_a_few_chains_equal_one_process(event, names):
    expected = [programs.train_group(name, event) for name in names]
    found = ranks.run(programs.train_some, 3, names, event)
    for k, name in enumerate(names):
        check([own[k] for own in found], expected[k], name)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "seeds"), [(2, range(12)), (3, range(30, 45))], ids=["2", "3"])
def test_random_chains_equal_one_process(processes, seeds):
    for found in ranks.run(random_groups.all_differences, processes, seeds):
        assert not found, "\n\n".join(found)


@pytest.mark.slow
def test_functions_equal_one_process():
    expected, found = programs.functions(), ranks.run(programs.functions, 3)
    for name, whole in expected.items():
        results = [own[name][len(range(4)[OWN[rank]]) :] for rank, own in enumerate(found)]
        assert all(result == results[0] for result in results)
        joined = [grad for rank, own in enumerate(found) for grad in own[name][: len(range(4)[OWN[rank]])]]
        for grad, other in zip([*joined, *results[0]], whole, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-12, check_dtype=False, msg=name)


@pytest.mark.slow
def test_norms_of_negative_order_are_those_of_one_process_at_every_magnitude():
    expected = programs.negative_orders()
    assert expected[0].item() == pytest.approx(1e200 / 5**0.5)
    assert [norm.item() for norm in expected[-2:]] == [0, 0]
    for found in ranks.run(programs.negative_orders, 3):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0, check_dtype=False)


@pytest.mark.slow
def test_a_loss_of_one_process_is_that_of_all():
    skipped, mean = programs.losses()
    found = ranks.run(programs.losses, 3)
    assert found[1:] == found[:1] * 2
    assert found[0] == [skipped, pytest.approx(mean, rel=1e-9)]
    assert skipped > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_nan_of_one_process_stops_all(policy):
    for said, is_same, is_stateless in ranks.run(programs.non_finite, 3, policy):
        assert (said == "skipped") == (policy == "skip")
        assert policy == "skip" or "not finite" in said
        assert is_same
        assert is_stateless


@pytest.mark.slow
def test_copies_share_a_group_and_pickles_lose_it():
    ranks.run(programs.life_of_a_group, 3)


def test_a_process_without_parameters_gets_some_later():
    first, second = ranks.run(programs.later_parameters, 2)
    own = [-1 / 8**0.5] * 2
    assert first == [pytest.approx(own)] * 4
    assert second == [pytest.approx(row) for row in (own, [-0.25 / 2**0.5] * 2, own, own)]


@pytest.mark.slow
def test_a_checkpoint_that_fits_on_some_processes_loads_on_none():
    said = ranks.run(programs.disagreement, 3)
    assert "max_norm" in said[2]
    assert ["another rank" in text for text in said] == [True, True, False]


@pytest.mark.slow
def test_what_fails_before_the_check_of_a_checkpoint_fails_on_all_processes():
    *others, last = ranks.run(programs.failing_loads, 3)
    assert last == ["AttributeError: 'NoneType' object has no attribute 'copy'", "OSError: lost", ""]
    for missing, hook, loaded in others:
        assert "ValueError: the checkpoint does not fit on another rank" in missing
        assert (hook, loaded) == (missing, "")


@pytest.mark.slow
def test_a_scope_warns_if_it_matches_on_no_process():
    for said in ranks.run(programs.warnings_of_scopes, 3):
        assert [("nowhere" in text) for text in said] == [True]


def test_all_processes_name_the_difference_between_their_chains():
    found = ranks.run(programs.different_chains, 3)
    assert found == found[:1] * 3
    for name, said in found[0].items():
        assert len(said) == (0 if name in ("settings", "patterns") else 2), (name, said)
        assert all("process 1 has" in text and "where process 0 has" in text for text in said)
    first = [said[0].partition("process 1 has ")[2].partition(".")[0] for said in found[0].values() if said]
    assert first == [
        "clip_norm_2: ClipNorm(dim='global') where process 0 has sgd: SGD()",
        "clip_norm: ClipNorm() where process 0 has clip_norm: ClipNorm(dim='global')",
        "clip_value_by_ema/ema_tfm/normalize: Normalize() where process 0 has "
        "clip_value_by_ema/ema_tfm/normalize: Normalize(dim='global')",
        "clip_norm: ClipNorm(dim='global') with a scope where process 0 has clip_norm: ClipNorm(dim='global')",
        "skip_step: SkipStep() that judges the loss where process 0 has skip_step: SkipStep()",
        "nonfinite='skip' where process 0 has nonfinite='propagate'",
        "max_consecutive_skips=3 where process 0 has max_consecutive_skips=None",
    ]


@pytest.mark.slow
def test_groups_that_cannot_be_used_are_refused():
    for rank, said in enumerate(ranks.run(programs.wrong_groups, 3)):
        kind = "TypeError" if rank < 2 else "ValueError"  # the third process is not in that group
        assert [text.partition(":")[0] for text in said] == [kind, kind, *["ValueError"] * 3, "TypeError"]
        assert 'got DeviceMesh: pass the group of one dimension, mesh["pp"].get_group()' in said[-1]
        others = ", ".join(str(k) for k in range(3) if k != rank)
        assert all(f"processes {others}," in text for text in said[2:5])


@pytest.mark.slow
def test_a_gradient_that_is_missing_on_one_rank_of_a_mesh_counts_as_zeros():
    for rank, found in enumerate(ranks.run(programs.missing_on_a_mesh, 2)):
        for name, (own_params, own_metrics, own_states) in found.items():
            params, metrics, states = programs.masked(name, rank)
            torch.testing.assert_close(own_params, params, rtol=1e-9, atol=1e-12, msg=name)
            for own, expected in zip(own_states, states, strict=True):  # a state that has not begun has no entries here
                assert own.keys() <= expected.keys()
                torch.testing.assert_close(own, {key: expected[key] for key in own}, rtol=1e-9, atol=1e-12, msg=name)
            for key, value in metrics.items():
                torch.testing.assert_close(own_metrics[key], value, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")


@pytest.mark.slow
def test_functions_take_gradients_that_are_missing_on_one_rank_of_a_mesh():
    expected = programs.sharded_values(0)
    first = torch.cat([value.chunk(2)[0].flatten() for value in expected]).norm()
    for total, clipped, normalized in ranks.run(programs.functions_with_missing, 2):
        torch.testing.assert_close(total, first, rtol=1e-9, atol=0)
        torch.testing.assert_close(clipped.item(), 0.1 * len(expected) ** 0.5, rtol=1e-9, atol=0)
        torch.testing.assert_close(normalized.item(), 0.1, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_all_processes_name_the_gradients_that_are_not_finite():
    expected, found = programs.names_of_bad_gradients(), ranks.run(programs.names_of_bad_gradients, 3)
    assert found == [expected] * 3
    skipped, raised, _, of_function = expected
    assert skipped.names == ("1", "2")
    assert sorted(skipped.largest) == ["0", "3"]
    assert "gradients are not finite: 1, 2." in raised
    assert "Gradients with inf or NaN: 1, 2." in of_function
