"""Ring buffers by hand."""

import torch

from torchzero_clip.clipping.statistics import filled, put_


def test_the_oldest_value_is_replaced_and_one_that_is_not_wanted_is_left_out():
    ring, count, seen = torch.zeros(3, dtype=torch.float64), torch.zeros((), dtype=torch.float64), []
    for value, where in [(1.0, True), (9.0, False), (2.0, True), (3.0, True), (4.0, True), (5.0, True)]:
        put_(ring, count, torch.tensor(value), torch.tensor(where))
        seen.append(ring.tolist())
    assert seen == [[1, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3], [4, 2, 3], [4, 5, 3]]
    assert count.item() == 5


def test_places_that_were_not_written_are_left_out_of_quantiles():
    ring = torch.tensor([1.0, 3.0, 0.0, 0.0])
    for count, median in [(1, 1.0), (2, 2.0), (4, 0.5), (9, 0.5)]:
        assert filled(ring, torch.tensor(count)).nanquantile(0.5).item() == median
    assert filled(ring, torch.tensor(0)).isnan().all()
