"""All processes name the same gradients, and none of them waits for the others in vain."""

import math

import pytest
import ranks
from contract import bad_gradients as programs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_functions_raise_on_all_processes_for_a_plain_gradient_of_one(bad):
    found = ranks.run(programs.of_one_rank, 4, bad)
    for rank, own in enumerate(found):
        for bad_rank, (together, apart) in enumerate(own):
            assert together == found[0][bad_rank][0]
            of_stage = f" (rank {bad_rank // 2} of process_group)"
            *named, unnamed = together
            assert all(f"with inf or NaN: weight{of_stage}. Pass" in text for text in named)
            assert f"with inf or NaN: parameter 0 of shape (2,){of_stage}. Pass" in unnamed
            if rank // 2 == bad_rank // 2:
                assert all(f"is {bad}" in text for text in (apart[0], *apart[2:]))
                assert "is nan" in apart[1]
                assert all("with inf or NaN: weight. Pass" in text for text in apart[:3])
            else:
                assert apart == [""] * 4


def test_functions_raise_where_only_one_process_has_a_gradient():
    for texts in ranks.run(programs.alone, 4):
        assert len(texts) == 8
        assert all("norm of the gradients is nan" in text and "with inf or NaN: weight. Pass" in text for text in texts)


def test_an_optimizer_names_a_plain_gradient_of_any_rank():
    roots = {"weight": 2**0.5, "bias": 3**0.5, "sharded": 2**0.5}
    for own in ranks.run(programs.of_optimizer, 4, False):
        for bad_rank, (bad, _) in enumerate(own):
            stage = bad_rank // 2
            assert (bad.names, bad.total) == ((f"weight (rank {stage} of process_group)",), 1)
            largest = [("bias", 0), ("bias", 1), ("weight" if stage == 1 else "sharded", 0)]
            expected = {
                f"{name} (rank {k} of process_group)": pytest.approx(roots[name], rel=5e-6) for name, k in largest
            }  # six digits
            assert list(bad.largest.items()) == list(expected.items())


def test_a_plain_gradient_may_be_missing_on_one_rank():
    for own in ranks.run(programs.of_optimizer, 4, True):
        for bad_rank, (bad, texts) in enumerate(own):
            sharded = f"sharded (rank {bad_rank // 2} of process_group)"
            assert (bad.names, bad.total, len(bad.largest)) == ((sharded,), 1, 3)
            assert all(f"with inf or NaN: {sharded}. Pass" in text for text in texts[:3])
            assert f"parameter 2 of shape (2,) (rank {bad_rank // 2} of process_group). Pass" in texts[3]
