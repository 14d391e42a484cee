"""Two gloo processes under FSDP2 equal one process, and resume through torch.distributed.checkpoint."""

import pytest
import ranks
from contract import sharded

pytestmark = pytest.mark.slow
GROUPS = {check: pytest.mark.xdist_group(f"sharded, {check}") for check in sharded.PER_ENTRY}
ONCE = pytest.mark.xdist_group("sharded, once")


@pytest.fixture(scope="module")
def failures():
    """The failures of each set of checks. The same processes make all checks of a set, because they start slowly."""
    results = {}

    def of(program, *args):
        if (program, *args) not in results:
            try:
                results[program, *args] = ranks.run(program, 2, *args)[0]
            except AssertionError as error:
                results[program, *args] = error
        found = results[program, *args]
        assert isinstance(found, dict), found
        return found

    return of


@pytest.mark.parametrize(
    ("entry", "check"),
    [
        pytest.param(entry, check, marks=group, id=f"{entry}-{check}")
        for check, group in GROUPS.items()
        for entry in sharded.entries_of(check)
    ],
)
def test_entry(failures, entry, check):
    assert failures(sharded.run_for_each_entry, check)[entry.name] == ""


@pytest.mark.parametrize("check", [pytest.param(check, marks=ONCE) for check in sharded.ONCE])
def test_once(failures, check):
    assert failures(sharded.run_once)[check] == ""
