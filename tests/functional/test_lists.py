"""Lists of tensors and param groups as collections of objects."""

import torch

from torchzero_clip.functional.lists import has_repeats, params_of, same_objects


def equal_tensors():
    return [torch.zeros(2), torch.zeros(2)]


def test_params_of_groups_are_in_order():
    first, second = equal_tensors()
    params = params_of([{"params": [second], "lr": 1.0}, {"params": []}, {"params": [first]}])
    assert [id(param) for param in params] == [id(second), id(first)]


def test_same_objects_compares_neither_values_nor_a_part():
    first, second = equal_tensors()
    assert same_objects([first, second], (first, second))
    assert not same_objects([first, second], [second, first])
    assert not same_objects([first, second], [first])
    assert not same_objects([first], [first, second])
    assert same_objects([], {}.values())


def test_equal_tensors_are_no_repeats():
    first, second = equal_tensors()
    assert not has_repeats([first, second])
    assert has_repeats([first, second, first])
    assert not has_repeats([])
