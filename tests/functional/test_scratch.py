"""Memory and plans that steps reuse."""

import torch

from torchzero_clip.functional.scratch import Scratch


def test_memory_is_reused_and_grows_and_is_apart_for_each_name_and_dtype():
    scratch, like = Scratch(), torch.zeros(0)
    first = scratch.memory("a", 4, like)
    assert first.shape == (4,)
    assert scratch.memory("a", 3, like).data_ptr() == first.data_ptr()
    assert scratch.memory("a", 5, like).shape == (5,)
    others = [scratch.memory("b", 4, like), scratch.memory("a", 4, like.double())]
    assert others[1].dtype == torch.float64
    assert len({tensor.data_ptr() for tensor in [scratch.memory("a", 4, like), *others]}) == 3


def test_elements_of_vectors_reuse_their_memory():
    scratch = Scratch()
    first = scratch.elements(torch.tensor([1.0, 2.0]))
    assert list(map(float, first)) == [1, 2]
    assert scratch.elements(torch.tensor([3.0, 4.0])) is first
    assert list(map(float, first)) == [3, 4]
    others = [scratch.elements(other) for other in (torch.ones(3), torch.ones(3, dtype=torch.float64))]
    assert [(len(own), own[0].dtype) for own in others] == [(3, torch.float32), (3, torch.float64)]


def test_a_plan_is_made_anew_if_a_layout_or_the_key_changes():
    scratch, made = Scratch(), []

    def planned(*tensors, key=None, name="plan"):
        return scratch.plan(name, tensors, lambda: made.append(name) or len(made), key)

    matrix = torch.zeros(2, 3)
    assert planned(matrix) == 1
    assert planned(torch.ones(2, 3)) == 1  # other tensors of the same layout
    assert planned(matrix, key=5) == 2
    assert planned(matrix, key=5) == 2
    assert planned(torch.zeros(3, 2).t(), key=5) == 3
    assert planned(torch.zeros(2, 3, dtype=torch.float64), key=5) == 4
    assert planned(torch.zeros(2, 3, dtype=torch.float64), matrix, key=5) == 5
    assert planned(matrix, name="other") == 6
    assert planned(torch.zeros(2, 3, dtype=torch.float64), matrix, key=5) == 5


def test_a_known_layout_is_not_checked_again():
    scratch, tensors, made = Scratch(), [torch.zeros(2, 3)], []

    def planned(layout):
        return scratch.knowing(tensors, layout).plan("plan", tensors, lambda: made.append(layout) or len(made))

    first, second = object(), object()
    assert planned(first) == 1
    tensors[0].data = torch.zeros(4)
    assert planned(first) == 1  # the caller has said so
    assert planned(second) == 2
    assert made == [first, second]
