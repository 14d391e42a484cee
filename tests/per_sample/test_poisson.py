"""The loader of Poisson batches: its distribution, empty batches, workers, processes, and what it refuses."""

import math
import multiprocessing
import time
from collections import UserDict, namedtuple

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from torchzero_clip.per_sample.private.poisson import poisson_loader

Pair = namedtuple("Pair", "x y")


def ten(size=500):
    return TensorDataset(torch.arange(size))


def drawn(loader):
    return [indices.tolist() for (indices,) in loader]


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(0)])
def test_each_sample_is_drawn_on_its_own_with_the_rate(generator):
    loader = poisson_loader(ten(), sample_rate=0.1, steps=400, generator=generator)
    masks = torch.zeros(400, 500)
    for step, (indices,) in enumerate(loader):
        masks[step, indices] = 1
        assert len(indices.unique()) == len(indices)
    assert masks.mean().item() == pytest.approx(0.1, abs=6 * math.sqrt(0.09 / masks.numel()))
    assert masks.sum(1).var().item() == pytest.approx(45, rel=6 * math.sqrt(2 / 400))  # the sizes of Poisson sampling
    assert masks.sum(0).var().item() == pytest.approx(36, rel=6 * math.sqrt(2 / 500))
    for centred in (masks - 0.1, masks.T - 0.1):  # neither samples nor steps depend on each other
        products = centred[:-1] * centred[1:]
        assert abs(products.mean()) < 6 * 0.09 / math.sqrt(products.numel())


def test_the_rate_1_takes_all():
    assert drawn(poisson_loader(ten(), sample_rate=1.0)) == [[*range(500)]]
    assert drawn(poisson_loader(ten(), sample_rate=1 - 2**-53, steps=1)) == [[*range(500)]]


@pytest.mark.parametrize(("rate", "steps"), [(0.05, 20), (1 / 49, 49), (0.3, 3), (1.0, 1)])
def test_an_iteration_is_one_pass_on_average(rate, steps):
    assert len(poisson_loader(ten(), sample_rate=rate)) == steps
    assert len(poisson_loader(ten(), sample_rate=rate, steps=7)) == 7


def test_draws_are_fresh_and_follow_a_generator():
    def two(seed=None):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = poisson_loader(ten(), sample_rate=0.1, steps=3, generator=generator)
        return drawn(loader), drawn(loader)

    found = [*two(), *two(), *two(1), *two(2)]
    assert len({str(batches) for batches in found}) == 8
    assert two(1) == tuple(found[4:6])


def nested(samples):
    """As collate functions of tokenizers, of detection and of graphs give."""
    x, _ = default_collate(samples)
    size = len(samples)
    tokens = UserDict(ids=torch.zeros(size, 7, dtype=torch.int64), time_first=x.T)
    graph = {"edges": torch.zeros(2, 5 * size), "offsets": torch.zeros(size + 1, dtype=torch.int32)}
    return tokens, [x[i] for i in range(size)], Pair(x.half(), ["a"] * size), graph, None, "train", 3


def shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict | UserDict):
        return type(value), {key: shapes(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shapes(part) for part in value]
    return value


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")  # if another test has imported JAX
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")  # on a single core
@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_batch_has_the_structure_of_the_others(workers):
    data = TensorDataset(torch.ones(3, 4), torch.ones(3, dtype=torch.int64))
    given = {"sample_rate": 1e-9, "num_workers": workers}
    (plain,) = poisson_loader(data, steps=1, **given)
    assert shapes(plain) == (list, [((0, 4), torch.float32), ((0,), torch.int64)])
    for empty in poisson_loader(data, steps=2, collate_fn=nested, **given):
        tokens = UserDict, {"ids": ((0, 7), torch.int64), "time_first": ((4, 0), torch.float32)}
        graph = dict, {"edges": ((2, 0), torch.float32), "offsets": ((1,), torch.int32)}
        pair = Pair, [((0, 4), torch.float16), (list, [])]
        assert shapes(empty) == (tuple, [tokens, (list, []), pair, graph, None, "train", 3])
        assert not empty[3]["offsets"].any()


def test_an_object_of_which_no_empty_one_is_known_is_named():
    loader = poisson_loader(ten(), sample_rate=1e-9, steps=1, collate_fn=lambda samples: {"x": object()})
    with pytest.raises(TypeError, match="collate_fn makes a object, of which no empty one is known: return tensors"):
        next(iter(loader))


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
def test_workers_fetch_the_samples_in_the_order_of_the_draws():
    def batches(**options):
        generator = torch.Generator().manual_seed(0)
        return drawn(poisson_loader(Slow(torch.arange(50)), sample_rate=0.2, steps=9, generator=generator, **options))

    assert batches(num_workers=2, persistent_workers=True, prefetch_factor=3) == batches()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"sample_rate": 0.0}, ValueError, "sample_rate must be > 0, got 0"),
        ({"sample_rate": 1.5}, ValueError, r"sample_rate must be in \[0, 1\], got 1.5"),
        ({"sample_rate": math.nan}, ValueError, "sample_rate must be > 0, got nan"),
        ({"sample_rate": 0.5, "steps": 0}, ValueError, "steps must be >= 1, got 0"),
        ({"sample_rate": 0.5, "steps": 2.0}, TypeError, "steps must be an int, got 2.0"),
        ({"sample_rate": 0.5, "generator": 3}, TypeError, "generator must be of class Generator, got 3"),
        ({"sample_rate": 0.5, "batch_size": 8}, TypeError, "no argument 'batch_size', because sample_rate decides"),
        ({"sample_rate": 0.5, "shuffle": True}, TypeError, "no argument 'shuffle', because sample_rate decides"),
        ({"sample_rate": 0.5, "num_wokers": 2}, TypeError, "num_wokers"),
        ({"sample_rate": 0.5, "dataset": Stream()}, TypeError, "must have a length and take indices, got Stream"),
        ({"sample_rate": 0.5, "dataset": 3}, TypeError, "must have a length and take indices, got int"),
        ({"sample_rate": 0.5, "dataset": []}, ValueError, r"len\(dataset\) must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(given, error, match):
    with pytest.raises(error, match=match):
        poisson_loader(given.pop("dataset", ten()), **given)


def test_in_one_process_a_loader_may_wrap_it():
    loader = poisson_loader(ten(), sample_rate=1.0)
    assert drawn(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)) == drawn(loader)


def in_processes():
    rank = dist.get_rank()
    multiprocessing.current_process()._config["daemon"] = False  # so that it may have workers
    parts, loader = [], poisson_loader(ten(), sample_rate=0.1, steps=5, num_workers=rank)
    for batches in (drawn(loader), drawn(poisson_loader(ten(), sample_rate=0.1, steps=5))):
        found = [None, None]
        dist.all_gather_object(found, batches)
        parts.append(found)
    # generators that differ: that of the first process counts
    seeded = drawn(poisson_loader(ten(), sample_rate=0.1, steps=2, generator=torch.Generator().manual_seed(rank)))
    wrapped = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    errors = [ranks.refused(lambda: next(iter(wrapped)))]
    errors += [
        ranks.refused(lambda given=given: next(iter(poisson_loader(ten(given.pop("size", 500)), **given))))
        for given in ({"sample_rate": 0.5, "size": 5 + rank}, {"sample_rate": 0.5 + rank / 4})
    ]
    drawn(loader)  # it still works
    return parts, seeded, errors


@pytest.mark.slow
def test_processes_share_one_draw_and_nobody_splits_it_again():
    (parts, first, errors), (_, second, errors_of_second) = ranks.run(in_processes, 2)
    whole = drawn(poisson_loader(ten(), sample_rate=0.1, steps=2, generator=torch.Generator().manual_seed(0)))
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == whole
    sizes = []
    for mine, others in parts:
        for a, b in zip(mine, others, strict=True):
            assert not {*a} & {*b}
            assert len(a) - len(b) in (0, 1)
            sizes.append(len(a) + len(b))
    assert sum(sizes) / 10 == pytest.approx(50, abs=6 * math.sqrt(45 / 10))
    assert errors[0] == errors_of_second[0]
    assert "accelerator.prepare only the model and the optimizer" in errors[0]
    assert errors[1] == "processes have other values of len(dataset), sample_rate, steps: 5, 0.5, 2; 6, 0.5, 2"
    assert errors[2].endswith("500, 0.5, 2; 500, 0.75, 1")


def prepared(**given):
    """The error of the first batch of a loader that Accelerate has prepared."""
    import accelerate

    settings = accelerate.utils.DataLoaderConfiguration(**given)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    loader = poisson_loader(ten(), sample_rate=0.1)
    if given.get("dispatch_batches") and dist.get_rank():
        return ""  # the first process alone would read, and this one would wait for it
    return ranks.refused(lambda: next(iter(accelerator.prepare(loader))))


def under_accelerate():
    settings = {}, {"even_batches": False}, {"dispatch_batches": True}, {"split_batches": True}
    return [prepared(**given) for given in settings]


@pytest.mark.peers
@pytest.mark.slow
def test_accelerate_does_not_split_it_again():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for rank, errors in enumerate(ranks.run(under_accelerate, 2)):
        for error in errors[: 3 - rank]:
            assert error.startswith("another loader wraps poisson_loader, and would split its draw")
        assert "split_batches==True" in errors[3]
