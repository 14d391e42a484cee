"""Groups of processes with different tensors; `contract/test_process_group` has chains in them."""

import copy
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist

from torchzero_clip.functional.processes import SharedGroup, check_group, device_of, gathered, gathered_texts


def test_without_a_group_there_is_one_row():
    check_group(None, [])
    assert gathered(torch.tensor([1.0, 2.0]), None).tolist() == [[1.0, 2.0]]
    assert device_of([]) == torch.device("cpu")
    assert device_of([torch.zeros(1, device="meta")]) == torch.device("meta")


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch\.distributed\.ProcessGroup or None, got int$"):
        check_group(3, [])
    with pytest.raises(ValueError, match="this process is not in process_group"):
        check_group(dist.GroupMember.NON_GROUP_MEMBER, [])


def test_copies_share_a_group_and_pickles_leave_it_out():
    for group, is_lost in [(None, False), (object(), True)]:
        shared = SharedGroup(group, False)
        assert copy.deepcopy(shared) is shared
        for _ in range(2):  # what is lost stays lost
            shared = pickle.loads(pickle.dumps(shared))
            assert (shared.group, shared.is_lost) == (None, is_lost)


TEXTS = ["", "ä€😀", "abc" * 100]


def of_all():
    rank, group = dist.get_rank(), dist.group.WORLD
    every_other = torch.arange(6.0)[::2] + 10 * rank
    return gathered(every_other, group).tolist(), gathered_texts(TEXTS[rank], group, torch.device("cpu"))


@pytest.mark.slow
def test_all_processes_get_all_rows_and_texts():
    assert ranks.run(of_all, 3) == [([[0.0, 2.0, 4.0], [10.0, 12.0, 14.0], [20.0, 22.0, 24.0]], TEXTS)] * 3
