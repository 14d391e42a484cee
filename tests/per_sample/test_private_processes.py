"""A private release by two processes: equal to that of one, on both, also with an empty share."""

import pytest
import ranks
import torch
import torch.distributed as dist
from per_sample.harness import batch, losses_of, small
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import ConstantFlatClipper, ConstantPerLayerClipper, PrivateGradientClipper


def made(model, limit=0.5, **settings):
    given = {"noise_multiplier": 2.0, "expected_batch_size": 4.0, **settings}
    return PrivateGradientClipper(model, ConstantFlatClipper(limit), **given)


def released(model):
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def same_everywhere(value):
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return all(torch.equal(value, other) for other in found)


def equal_to_one_process(rank):
    torch.manual_seed(0)
    model, x = small(), batch(6)
    ddp = DistributedDataParallel(model)
    # a generator on every process, which only the first may use
    clipper = made(ddp, generator=torch.Generator().manual_seed(rank))
    found = []
    for shares in ([4, 2], [6, 0], [0, 0]):
        mine = x[: sum(shares)].split(shares)[rank]
        clipper.backward(losses_of(ddp(mine)) if len(mine) else torch.zeros(0))
        assert clipper.pre_step()[1] == sum(shares)
        found.append(released(model))
    clipper.pre_step()  # without a call of backward
    assert clipper.releases == {2.0: 4}
    return [*found, released(model)]


def secure_noise_is_that_of_one_process(rank):
    model = nn.Linear(100, 50)
    clipper = made(DistributedDataParallel(model), limit=1.0)
    clipper.pre_step()
    assert same_everywhere(released(model))
    assert 0.45 < released(model).std() < 0.55  # two noises would give 0.71
    return


def errors_on_one_process_are_errors_on_both(rank):
    model = small()
    ddp = DistributedDataParallel(model)
    clipper = made(ddp, noise_multiplier=0.0)
    with torch.no_grad():
        before = released_or_none(model)
    texts = []
    outside = nn.Linear(2, 2).double() if rank == 1 else nn.Identity()
    texts.append(ranks.refused(lambda: clipper.backward(losses_of(outside(ddp(batch()))))))
    clipper.noise_multiplier = float(rank)
    texts.append(ranks.refused(clipper.pre_step))
    clipper.noise_multiplier = 0.0
    clipper.second_noise_multiplier = 1.0 + rank
    texts.append(ranks.refused(clipper.pre_step))
    clipper.second_noise_multiplier = 1.0
    clipper.norm_clipper = ConstantFlatClipper(1.0 + rank)
    texts.append(ranks.refused(clipper.pre_step))
    clipper.norm_clipper = ConstantPerLayerClipper([1.0]) if rank else ConstantFlatClipper(2.0)
    texts.append(ranks.refused(clipper.pre_step))  # the joint limits are the same
    clipper.norm_clipper = ConstantFlatClipper(2.0)
    clipper.pre_step()
    assert before == [None] * 4
    assert not released(model).any()
    assert clipper.releases == {0.0: 1}
    return texts


def released_or_none(model):
    return [param.grad for param in model.parameters()]


def what_cannot_be_released_together_is_refused(rank):
    model = small()
    model.register_buffer("table", torch.zeros(3))
    plain = ranks.refused(lambda: made(model))
    broadcast = ranks.refused(lambda: made(DistributedDataParallel(model)))
    return plain, broadcast, ranks.refused(lambda: made(DistributedDataParallel(model, broadcast_buffers=False)))


PROGRAMS = (
    equal_to_one_process,
    secure_noise_is_that_of_one_process,
    errors_on_one_process_are_errors_on_both,
    what_cannot_be_released_together_is_refused,
)


def program():
    return [call(dist.get_rank()) for call in PROGRAMS]


@pytest.fixture(scope="module")
def results():
    return [dict(zip(PROGRAMS, found, strict=True)) for found in ranks.run(program, 2)]


@pytest.mark.slow
@pytest.mark.xdist_group("private")
def test_two_processes_release_what_one_releases(results):
    torch.manual_seed(0)
    model, x = small(), batch(6)
    clipper = made(model, generator=torch.Generator().manual_seed(0))
    for step, size in enumerate([6, 6, 0, 0]):
        if size:
            clipper.backward(losses_of(model(x)))
        clipper.pre_step()
        first, second = (found[equal_to_one_process][step] for found in results)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, released(model), rtol=1e-12, atol=1e-13)
    assert results[0][secure_noise_is_that_of_one_process] is None


@pytest.mark.slow
@pytest.mark.xdist_group("private")
def test_errors_are_raised_on_both_and_change_nothing(results):
    first, second = (found[errors_on_one_process_are_errors_on_both] for found in results)
    assert "process 1 raised RuntimeError: a tensor of shape" in first[0]
    assert second[0].startswith("a tensor of shape")
    for texts in (first, second):
        assert "differ between processes" in texts[1]
        assert "differ between processes" in texts[2]
        assert "must be the same on all processes, got [1.0, 2.0]" in texts[3]
        assert "same class and the same limits on all processes" in texts[4]


@pytest.mark.slow
@pytest.mark.xdist_group("private")
def test_processes_that_would_release_apart_are_refused(results):
    for found in results:
        plain, broadcast, right = found[what_cannot_be_released_together_is_refused]
        assert "must be in DistributedDataParallel" in plain
        assert "broadcast_buffers=False" in broadcast
        assert right == ""
