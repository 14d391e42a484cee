"""A private release of a sharded model: clipped sums as in one process, and noise on each element once.

The oracle is one backward for each sample in one process. The noise of all shards is recorded, and put together.
"""

import copy
import gc
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import ranks
import torch
import torch.distributed as dist
from per_sample.harness import losses_of, reference, small
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import (
    SGD,
    AutomaticClipper,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    Modular,
    PrivateGradientClipper,
)
from torchzero_clip.per_sample.private import private_clipper

LIMIT, NOISE, EXPECTED = 0.5, 2.0, 4.0
SHARES = {2: ([4, 2], [6, 0], [0, 0]), 4: ([1, 2, 0, 3], [0, 0, 6, 0], [0, 0, 0, 0])}
"""The samples of each process in three steps."""


def sharded(model, *, nested=False, part=False, **settings):
    """Of a ``part``, only the last module is sharded, and the others have a copy on each process."""
    parts = [module for module in model.children() if next(module.parameters(), None) is not None]
    for module in parts[-1:] if part else (*parts, model) if nested else (model,):
        fully_shard(module, **settings).set_force_sum_reduction_for_comms(True)  # gloo cannot divide
    return model


def uneven(dtype=torch.float64):
    """Five rows on four processes are two, two, one and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def inputs(count=6, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(count, 3, dtype=dtype) * torch.arange(1, count + 1)[:, None]


def made(model, limit=LIMIT, **settings):
    given = {"noise_multiplier": NOISE, "expected_batch_size": EXPECTED, **settings}
    return PrivateGradientClipper(model, ConstantFlatClipper(limit), **given)


def own(x, shares):
    return x.split(shares)[dist.get_rank()]


def even(x):
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


def full(model):
    grads = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def together(model, recorded):
    """The noise of all processes for each parameter, from what each process drew."""
    drawn = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, recorded)
    first, *_ = drawn = list(map(iter, drawn))
    are_sharded = [isinstance(param, DTensor) for param in model.parameters()]
    noise = [torch.cat([next(each) for each in drawn]) if cut else next(first) for cut in are_sharded]
    assert [next(each, None) for each in drawn] == [None] * len(drawn)
    return noise


def equal_to_one_process(dtype, **settings):
    plain = uneven(dtype)
    model, x = sharded(copy.deepcopy(plain), **settings), inputs(dtype=dtype)
    # the same seed on all processes, which must not give shards the same noise
    clipper = made(model, generator=torch.Generator().manual_seed(0))
    gaussian, failures = private_clipper.gaussian, []
    for step, shares in enumerate(SHARES[dist.get_world_size()]):
        recorded = []

        def record(like, std, generator, recorded=recorded):
            noise = gaussian(like, std, generator)
            recorded.append(noise.clone())
            return noise

        parts = [x, x.flip(1)] if step == 0 else [x] if sum(shares) else [x[:0]]
        sums = [torch.zeros_like(param) for param in plain.parameters()]
        for part in parts:
            clipper.backward(losses_of(model(own(part, shares if len(part) else [0] * len(shares)))))
            if len(part):
                sums = [a + b for a, b in zip(sums, reference(plain, part, LIMIT)[1], strict=True)]
        with patch.object(private_clipper, "gaussian", record):
            assert clipper.pre_step()[1] == len(parts) * sum(shares)
        noise = together(model, recorded)
        scale = max(float(value.abs().max()) for value in noise)
        for grad, value, added in zip(full(model), sums, noise, strict=True):
            assert added.shape == value.shape
            difference = ((value + added) / EXPECTED - grad).abs().max().item() / scale
            if difference > (1e-12 if dtype == torch.float64 else 1e-6):
                failures.append((step, difference))
    assert clipper.releases == {NOISE: 3}
    return failures


def noise_of(dtype, seed):
    """The noise of two releases of a model with uneven and empty shards, of standard deviation 3 / 1.5."""
    torch.manual_seed(0)
    model = sharded(nn.Linear(40, 1003).to(dtype))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    clipper = made(model, 1.5, noise_multiplier=2.0, expected_batch_size=1.5, generator=generator)
    found = []
    for _ in range(2):
        clipper.pre_step()
        assert {param.grad.dtype for param in model.parameters()} == {dtype}
        found.append(full(model)[0].float())
    return found


def noise_has_the_promised_moments(dtype, seed):
    first, second = noise_of(dtype, seed)
    count = dist.get_world_size()
    blocks = [block.flatten() for block in first.tensor_split(count)]
    least = min(map(len, blocks))
    pairs = [(a[:least], b[:least]) for i, a in enumerate(blocks) for b in blocks[:i]]
    pairs.append((first.flatten(), second.flatten()))
    correlations = [float((a * b).mean() / (a.std() * b.std()) * len(a) ** 0.5) for a, b in pairs]
    moments = [(float(b.mean()) / 2, float(b.std()) / 2, float((b / 2).pow(4).mean())) for b in blocks]
    return moments, correlations


def what_is_not_sharded_gets_one_noise():
    """The released gradient of this process, whose noise has the standard deviation 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), sharded(nn.Linear(100, 2)))
    clipper = made(model, 1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    clipper.pre_step()
    return [param.grad for param in model[0].parameters()]


def noise_is_on_every_process_and_element_once():
    """Parameters of fewer rows than processes have empty shards."""
    torch.manual_seed(0)
    model = sharded(nn.Linear(3000, 1))
    clipper = made(model, 1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    clipper.pre_step()
    weight, bias = full(model)
    return weight.shape, float(weight.std()), bias.shape, model.weight.grad.to_local().numel()


def one_sample_changes_the_sum_by_the_limit_at_most(policy, norm_clipper, *, part=False):
    """The largest change by one sample, in units of the limit, for a sample of each process."""
    settings = {} if policy is None else {"mp_policy": policy}
    model, x = sharded(uneven(torch.float32), part=part, **settings), inputs(8, torch.float32)
    clipper = PrivateGradientClipper(model, norm_clipper, noise_multiplier=0.0, expected_batch_size=1.0)

    def summed(chosen):
        clipper.backward(losses_of(model(even(x)[chosen])))
        clipper.pre_step()
        return torch.cat([grad.double().flatten() for grad in full(model)])

    mine = torch.ones(len(even(x)), dtype=torch.bool)
    whole, largest = summed(mine), []
    for rank in range(dist.get_world_size()):
        without = mine.clone()
        without[0] = rank != dist.get_rank()
        largest.append(float((whole - summed(without)).norm()) / LIMIT)
    return largest


def sums_are_not_reduced_in_half_precision():
    """In bfloat16, 256 + 1 is 256."""
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = sharded(nn.Linear(1, 2, bias=False), mp_policy=half)
    clipper = made(model, 1000.0, noise_multiplier=0.0, expected_batch_size=1.0)
    sizes = [256.0, 1.0, 0.0, 0.0]
    clipper.backward(model(torch.full((1, 1), sizes[dist.get_rank()])).sum(1))
    clipper.pre_step()
    return full(model)[0].flatten().tolist()


def a_sample_that_is_not_finite_adds_zeros():
    model, x = sharded(uneven()), inputs()
    clipper = made(model, noise_multiplier=0.0)
    x[-1] = torch.nan
    clipper.backward(losses_of(model(even(x))))
    clipper.pre_step()
    _, sums = reference(uneven(), x[:-1], LIMIT)
    pairs = zip(full(model), sums, strict=True)
    return max(float((grad * EXPECTED - value).abs().max()) for grad, value in pairs)


def training_goes_on_after_steps_without_samples():
    """Parameters as by steps of one process with the same gradients."""
    model, x = sharded(uneven()), inputs()
    plain = uneven()
    optimizer, other = Modular(model.parameters(), SGD(0.1)), torch.optim.SGD(plain.parameters(), 0.1)
    clipper = made(model)
    outputs = []
    for step in range(4):
        clipper.backward(losses_of(model(even(x) if step % 2 else x[:0])))
        clipper.pre_step()
        for param, grad in zip(plain.parameters(), full(model), strict=True):
            param.grad = grad
        optimizer.step()
        other.step()
        with clipper.paused(), torch.no_grad():
            outputs.append(float((model(x) - plain(x)).abs().max()))
    return outputs


def frozen_parameters_and_buffers_may_not_change():
    model = uneven()
    model[0].requires_grad_(False)
    model.register_buffer("table", torch.zeros(3))
    sharded(model, nested=True)
    clipper, x = made(model), inputs()
    for _ in range(3):
        clipper.backward(losses_of(model(even(x))))
        clipper.pre_step()
    texts = []
    for change in (lambda: model[0].weight.to_local().add_(1), lambda: model.table.add_(1)):
        clipper.backward(losses_of(model(even(x))))
        with torch.no_grad():
            change()
        texts.append(ranks.refused(clipper.pre_step))
        clipper.discard()
    return texts


def differences_raise_on_all():
    """One process differs in turn in what it calls, in a setting, in its limit and in an error."""
    model, x, rank = sharded(uneven()), inputs(), dist.get_rank()
    clipper = made(model, noise_multiplier=0.0)
    texts = {}

    def forward():
        return losses_of(model(even(x)))

    texts["calls"] = ranks.refused(clipper.pre_step if rank == 1 else forward)
    clipper.noise_multiplier = float(rank == 1)
    texts["multiplier"] = ranks.refused(forward)
    clipper.noise_multiplier = 0.0
    clipper.expected_batch_size = 4.0 + (rank == 1)
    texts["divisor"] = ranks.refused(clipper.pre_step)
    clipper.expected_batch_size = 4.0
    losses = forward()
    clipper.norm_clipper = ConstantFlatClipper(1.0 + (rank == 1))
    texts["limit"] = ranks.refused(lambda: clipper.backward(losses))
    order = [0.3, 0.4, 0.0, 0.0] if rank == 1 else [0.4, 0.3, 0.0, 0.0]
    others = {"order": ConstantPerLayerClipper(order), "class": (ConstantFlatClipper, AutomaticClipper)[rank](LIMIT)}
    for name, other in others.items():
        clipper.norm_clipper = other
        texts[name] = ranks.refused(lambda: clipper.backward(losses))
    clipper.norm_clipper = ConstantFlatClipper(LIMIT)
    clipper.load_state_dict({"releases": {0.0: rank}})
    texts["releases"] = ranks.refused(forward)
    clipper.load_state_dict({"releases": {}})
    losses = forward()
    losses = losses_of(model(x[:0]))
    texts["empty"] = ranks.refused(lambda: clipper.backward(losses[:, None] if rank == 1 else losses))
    losses = forward()
    texts["error"] = ranks.refused(lambda: clipper.backward(losses.sum() if rank == 1 else losses))
    clipper.discard()
    before = [param.grad for param in model.parameters()] == [None] * 4
    clipper.backward(forward())
    texts["number of calls"] = ranks.refused(
        (lambda: clipper.backward(torch.zeros(0))) if rank == 1 else clipper.pre_step
    )
    clipper.discard()
    clipper.backward(forward())
    clipper.pre_step()
    return texts, before, clipper.releases


def only_the_count_is_stored():
    clipper = made(sharded(uneven()))
    clipper.load_state_dict({"releases": {2.0: 5}})
    clipper.pre_step()
    return clipper.state_dict()


def a_deleted_clipper_leaves_nothing():
    model = sharded(uneven())
    hooks = len(model._forward_pre_hooks)
    clipper = made(model)
    clipper.backward(losses_of(model(inputs())))
    alive = weakref.ref(clipper)
    del clipper
    gc.collect()
    return alive() is None, len(model._forward_pre_hooks) - hooks


def other_ways_to_distribute_are_refused():
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("stage", "shard"))
    texts = {"replicated shards": ranks.refused(lambda: made(sharded(small(), mesh=mesh)))}
    flat = init_device_mesh("cpu", (size,))
    tensor = small()
    tensor[0].weight = nn.Parameter(distribute_tensor(tensor[0].weight.detach(), flat, [Shard(0)]))
    for param in (tensor[0].bias, *tensor[2].parameters()):
        param.requires_grad_(False)
    texts["tensor parallel"] = ranks.refused(lambda: made(tensor))
    some = mesh["shard"]
    texts["some processes"] = ranks.refused(lambda: made(sharded(small(), mesh=some)))
    model = small()
    clipper = made(DistributedDataParallel(model))
    fully_shard(model)
    texts["later"] = ranks.refused(clipper.pre_step)
    return texts


def canaries(count=2000):
    """The released numbers of a sample for each coordinate, half of which are in the data, and which these are."""
    generator = torch.Generator().manual_seed(3)
    inside = torch.rand(count, generator=generator) < 0.5
    model = nn.Embedding(count, 1)
    sharded(model)
    clipper = made(model, 1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    clipper.backward(100 * model(even(inside.nonzero()[:, 0]))[:, 0])
    clipper.pre_step()
    return full(model)[0][:, 0], inside


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
CASES = {
    "equal float64": partial(equal_to_one_process, torch.float64),
    "equal float64, nested": partial(equal_to_one_process, torch.float64, nested=True),
    "equal float64, part": partial(equal_to_one_process, torch.float64, part=True),
    "equal float32": partial(equal_to_one_process, torch.float32),
    "noise for all": what_is_not_sharded_gets_one_noise,
    "moments, generator": partial(noise_has_the_promised_moments, torch.float32, 0),
    "moments, secure": partial(noise_has_the_promised_moments, torch.float32, None),
    "moments, bfloat16": partial(noise_has_the_promised_moments, torch.bfloat16, None),
    "every element": noise_is_on_every_process_and_element_once,
    "influence": partial(one_sample_changes_the_sum_by_the_limit_at_most, None, ConstantFlatClipper(LIMIT)),
    "influence, part": partial(
        one_sample_changes_the_sum_by_the_limit_at_most, None, ConstantFlatClipper(LIMIT), part=True
    ),
    "influence, half": partial(one_sample_changes_the_sum_by_the_limit_at_most, HALF, ConstantFlatClipper(LIMIT)),
    "influence, layers": partial(
        one_sample_changes_the_sum_by_the_limit_at_most, None, ConstantPerLayerClipper([0.3, 0.4, 0.0, 0.0])
    ),
    "float32": sums_are_not_reduced_in_half_precision,
    "not finite": a_sample_that_is_not_finite_adds_zeros,
    "empty steps": training_goes_on_after_steps_without_samples,
    "frozen": frozen_parameters_and_buffers_may_not_change,
    "differences": differences_raise_on_all,
    "state": only_the_count_is_stored,
    "deleted": a_deleted_clipper_leaves_nothing,
    "refused": other_ways_to_distribute_are_refused,
    "audit": canaries,
}
ON_FOUR = [
    "equal float64",
    "equal float64, part",
    "noise for all",
    "moments, generator",
    "moments, bfloat16",
    "every element",
    "influence",
    "state",
    "refused",
]
"""What is run with four processes; the others with two."""
RUNS = [*((2, name) for name in CASES if name != "refused"), *((4, name) for name in ON_FOUR)]


def program(names):
    return {name: CASES[name]() for name in names}


@pytest.fixture(scope="module")
def results():
    """What each process returns, from one start of two processes and one of four."""
    found = {}

    def of(count, name):
        if count not in found:
            found[count] = ranks.run(program, count, [each for size, each in RUNS if size == count])
        return [each[name] for each in found[count]]

    return of


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("private shards")]
both = pytest.mark.parametrize("count", [2, 4])


@pytest.mark.parametrize(("count", "name"), [run for run in RUNS if run[1].startswith("equal")])
def test_gradients_are_those_of_one_process_and_the_noise_of_all_shards(results, count, name):
    assert results(count, name) == [[]] * count


@pytest.mark.parametrize(("count", "name"), [run for run in RUNS if run[1].startswith("moments")])
def test_the_noise_of_each_shard_has_the_promised_moments_and_is_its_own(results, count, name):
    found = results(count, name)
    assert found == [found[0]] * count  # all see the same gradients
    moments, correlations = found[0]
    for mean, std, fourth in moments:  # of at least 10,000 numbers
        assert abs(mean) < 0.05
        assert abs(std - 1) < 0.035
        assert abs(fourth - 3) < 0.5
    assert max(map(abs, correlations)) < 5


@both
def test_parameters_that_are_not_sharded_get_one_noise_for_all_processes(results, count):
    (weight, bias), *others = results(count, "noise for all")
    assert 0.97 < weight.std() < 1.03
    assert 0.7 < bias.std() < 1.3
    for other in others:
        assert other[0].equal(weight)
        assert other[1].equal(bias)


@both
def test_each_element_gets_noise_once_also_beside_empty_shards(results, count):
    found = results(count, "every element")
    for rank, (shape, std, bias, held) in enumerate(found):
        assert (shape, bias, held) == ((1, 3000), (1,), 3000 if rank == 0 else 0)
        assert 0.9 < std < 1.1


@pytest.mark.parametrize(("count", "name"), [run for run in RUNS if run[1].startswith("influence")])
def test_one_sample_of_any_process_changes_the_sum_by_the_limit_at_most(results, count, name):
    for largest in results(count, name):
        assert all(0 < each <= 1.00001 for each in largest)


def test_sums_are_reduced_in_float32(results):
    assert results(2, "float32") == [[257.0, 257.0]] * 2


def test_a_sample_that_is_not_finite_is_left_out(results):
    assert max(results(2, "not finite")) < 1e-12


def test_steps_without_samples_change_the_parameters_of_the_next_forward(results):
    for differences in results(2, "empty steps"):
        assert max(differences) < 1e-9


def test_a_frozen_parameter_or_a_buffer_that_changes_raises(results):
    for frozen, buffer in results(2, "frozen"):
        assert "'0.weight' has changed since the step began" in frozen
        assert "'table' has changed since the step began" in buffer


def test_what_differs_between_processes_raises_on_all(results):
    for texts, nothing_changed, releases in results(2, "differences"):
        assert "process 0 called forward(), process 1 called pre_step()" in texts["calls"]
        assert "differ between processes" in texts["multiplier"]
        assert "differ between processes" in texts["divisor"]
        assert "must be the same on all processes, got [1.0, 2.0]" in texts["limit"]
        assert "same class and the same limits" in texts["order"]
        assert "same class and the same limits" in texts["class"]
        assert "the same number of releases" in texts["releases"]
        assert "losses must have shape (B,)" in texts["error"]
        assert "losses must have shape (B,), got (0, 1)" in texts["empty"]
        assert "process 0 called pre_step(), process 1 called backward()" in texts["number of calls"]
        assert nothing_changed
        assert releases == {0.0: 1}


@both
def test_a_checkpoint_has_the_count_of_releases_only(results, count):
    assert results(count, "state") == [{"releases": {2.0: 6}}] * count


def test_a_deleted_clipper_leaves_nothing_at_a_sharded_model(results):
    assert results(2, "deleted") == [(True, 0)] * 2


def test_other_ways_to_distribute_are_refused_by_name(results):
    for texts in results(4, "refused"):
        assert "HSDP" in texts["replicated shards"]
        assert "tensor parallelism" in texts["tensor parallel"]
        assert "must be sharded over all 4 processes, got 2" in texts["some processes"]
        assert "sharded later" in texts["later"]


def test_an_audit_of_two_thousand_canaries_stays_within_epsilon(results):
    pytest.importorskip("scipy")
    from per_sample.audit import alarm, gaussian_profile

    (scores, inside), _ = results(2, "audit")
    inside, scores = inside.numpy(), scores.numpy()
    assert 900 < inside.sum() < 1100
    assert not alarm(scores[inside], scores[~inside], gaussian_profile(1.0))
    assert alarm(scores[inside], scores[~inside], gaussian_profile(2.0))  # it can fail
