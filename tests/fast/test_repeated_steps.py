"""Steps that an optimizer did not take, and that are repeated, in the fast way."""

import itertools

import pytest
from contract.training import assert_equal, assert_same_checkpoint, values
from fast.comparison import short_pieces
from other_optimizer.test_undone_steps import CHAINS, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:a max_norm of 0"),
    pytest.mark.filterwarnings(r"ignore:step \d+. the gradients of"),
]


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(
    ("chain", "fused"), list(zip(CHAINS, itertools.cycle([False, True]), strict=False)), ids=lambda value: str(value)
)
def test_a_repeated_step_is_one_step(chain, fused):
    """In the first step, in the next, and in steps that may follow a plan."""
    with short_pieces:
        options = {"fused": fused}.items()
        params, optimizer, handle, _ = run(chain, fails={0, 1, 4, 6}, options=options)
        others, plain, other, _ = run(chain, fails=(), options=options)
    assert_equal(params, values(others))
    assert_same_checkpoint(optimizer.state_dict(), plain.state_dict())
    assert (handle.steps_taken, handle.skipped_steps) == (other.steps_taken, other.skipped_steps)
