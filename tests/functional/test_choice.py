"""Choices between tensors and numbers: the numbers of `torch.where`, and one new tensor for each number."""

import pytest
import torch

from torchzero_clip.functional import choice
from torchzero_clip.functional.choice import at_most_one, clamped, places, where

CONDITION, VALUES = torch.tensor([True, False]), torch.tensor([3.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(("number", "shown"), [(1.0, [3.0, 1.0]), (torch.inf, [3.0, torch.inf])])
def test_numbers_stand_where_the_condition_is_false(number, shown):
    assert where(CONDITION, VALUES, number).tolist() == shown
    assert where(CONDITION.logical_not(), number, VALUES).tolist() == shown


def test_a_number_is_made_once_for_a_device(monkeypatch):
    monkeypatch.setattr(choice, "_CONSTANTS", {})
    condition, values = CONDITION.to("meta"), VALUES.to("meta")
    for _ in range(3):
        for number in (torch.nan, 0.0, -0.0):
            result = where(condition, values, number)
            assert (result.dtype, result.shape, result.device.type) == (torch.float64, (2,), "meta")
    assert len(choice._CONSTANTS) == 3
    where(condition, values.float(), 0.0)
    assert len(choice._CONSTANTS) == 4


def test_a_number_made_in_inference_mode_can_be_used_outside(monkeypatch):
    monkeypatch.setattr(choice, "_CONSTANTS", {})
    with torch.inference_mode():
        where(CONDITION.to("meta"), VALUES.to("meta"), 2.0)
    assert not any(number.is_inference() for number in choice._CONSTANTS.values())


def test_two_numbers_are_refused():
    with pytest.raises(TypeError, match="where needs a tensor beside the condition"):
        where(CONDITION.to("meta"), 1.0, 2.0)


def test_ratios_are_at_most_one_and_one_without_a_number():
    ratios = torch.tensor([0.0, 0.5, 1.0, 2.0, torch.inf, torch.nan], dtype=torch.float64)
    assert at_most_one(ratios).tolist() == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_tensor_is_clamped_to_what_another_dtype_holds():
    result = clamped(torch.tensor([0.1, 1e300, -torch.inf], dtype=torch.float64), 2.0, torch.float32)
    assert result.dtype == torch.float32
    assert result.tolist() == torch.tensor([0.1, 2.0, -2.0]).tolist()


def test_places_are_made_once_for_a_device(monkeypatch):
    assert places(torch.ones(3)).tolist() == [0, 1, 2]
    monkeypatch.setattr(choice, "_CONSTANTS", {})
    vector = torch.ones(3, device="meta")
    assert places(vector) is places(vector)
    assert places(vector[1:]).shape == (2,)
