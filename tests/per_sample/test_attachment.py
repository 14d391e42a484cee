"""Attaching and detaching: the model, its copies and its hooks, what is refused, and changes that are followed."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_matches_loop,
    attached,
    batch,
    clip,
    frozen,
    grads,
    losses_of,
    norms_by_loop,
    reference,
    small,
    weight,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchzero_clip import GradSampleModuleFastGradientClipping, check_per_sample


def test_detach_leaves_the_model_as_it_was():
    model = small()
    before = [dict(vars(m)) for m in model.modules()]
    keys = list(model.state_dict())
    clipper = clip(model)
    assert list(model.state_dict()) == keys
    clipper.backward(losses_of(model(batch())))
    clipper.detach()
    after = [dict(vars(m)) for m in model.modules()]
    assert [m.keys() for m in after] == [m.keys() for m in before]
    hooks = model._forward_pre_hooks, model._forward_hooks, model._forward_hooks_always_called
    assert not any(hooks)
    assert not any(p._backward_hooks for p in model.parameters())
    model.zero_grad()
    losses_of(model(batch())).sum().backward()
    assert all(grad is not None for grad in grads(model))


def test_detach_between_forward_and_backward_raises():
    model, _, clipper = attached()
    losses = losses_of(model(batch()))
    clipper.detach()
    with pytest.raises(RuntimeError, match="run the forward again"):
        losses.sum().backward()
    assert all(grad is None for grad in grads(model))


def test_a_forward_that_the_user_sets_meanwhile_stays():
    model, _, clipper = attached()
    model[0].forward = own = lambda x: x
    clipper.detach()
    assert model[0].forward is own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_of_an_attached_model_are_models_as_any_other(copied):
    model, x, clipper = attached()
    twin = copied(model)
    losses_of(twin(x)).sum().backward()
    assert all(grad is not None for grad in grads(twin))
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(twin, x))


def test_a_clipper_that_nobody_holds_leaves_its_model():
    model, x, before = small(), batch(), vars(small()[0]).keys()
    clipper = clip(model, keep_grad_samples=True)
    losses_of(model(x)).mean().backward()
    assert model[0].weight.grad_sample.shape[0] == len(x)
    del clipper
    assert not any(hasattr(param, "grad_sample") for param in model.parameters())
    assert vars(model[0]).keys() == before
    for _ in range(2):
        losses_of(model(x)).mean().backward()  # as if there had been none
    wrapper = GradSampleModuleFastGradientClipping(model)
    losses_of(wrapper(x)).mean().backward(retain_graph=True)
    assert hasattr(model[0].weight, "norm_sample")
    del wrapper
    assert not hasattr(model[0].weight, "norm_sample")
    clip(model).backward(losses_of(model(x)))


def test_a_model_that_holds_its_clipper_is_freed_with_it():
    model = Net(lambda m, x: m.layer(x), layer=nn.Linear(3, 2))
    model.clipper = clip(model, keep_grad_samples=True)
    model.clipper.backward(losses_of(model(torch.randn(4, 3))))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# what is refused


def behind(layer):
    return nn.Sequential(nn.Linear(3, 3), layer)


def complex_weight():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    return model


def own_forward():
    model = small()
    model[0].forward = lambda x: x
    return model


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


ORDER = r"'0' \(Transformer.*see batch_first=False, and batch_first=True was declared"
STATISTICS = r"'1' \(InstanceNorm1d\) .*track_running_stats=True mixes the samples: use track_running_stats=False"
REFUSED = {
    "batch norm": (lambda: behind(nn.BatchNorm1d(3)), r"'1' \(BatchNorm1d\).* in training mode: call its eval.*Group"),
    "batch norm without parameters": (lambda: behind(nn.BatchNorm2d(3, affine=False)), "BatchNorm2d"),
    "synchronized batch norm": (lambda: behind(nn.SyncBatchNorm(3)), "SyncBatchNorm"),
    "statistics": (lambda: behind(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), STATISTICS),
    "statistics without parameters": (lambda: behind(nn.InstanceNorm1d(3, track_running_stats=True)), STATISTICS),
    "frequencies": (lambda: behind(nn.Embedding(3, 2, scale_grad_by_freq=True)), "scale_grad_by_freq"),
    "sparse gradients": (lambda: behind(nn.Embedding(3, 2, sparse=True)), "sparse=False"),
    "a largest norm": (lambda: behind(nn.Embedding(3, 2, max_norm=1.0)), "max_norm"),
    "the largest of a bag": (lambda: behind(nn.EmbeddingBag(3, 2, mode="max")), "mode='max'"),
    "another order": (lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)), ORDER),
    "another order, decoder": (lambda: nn.Sequential(nn.TransformerDecoderLayer(8, 2, 16)), ORDER),
    "a scripted model": (lambda: scripted(small()), r"scripted, got a RecursiveScriptModule"),
    "a scripted layer": (
        lambda: behind(scripted(nn.Linear(3, 3))),
        r"'1' \(RecursiveScriptModule\) cannot be clipped .* it is scripted",
    ),
    "complex parameters": (complex_weight, r"'weight' is torch\.complex64"),
    "a forward of its own": (own_forward, r"'0' \(Linear\) has a forward of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_right_are_refused_by_name_and_left_alone(name):
    make, match = REFUSED[name]
    model = make()
    before = [set(vars(m)) for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        clip(model)
    assert [set(vars(m)) for m in model.modules()] == before
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers_whose_order_of_dimensions_was_declared_are_taken(kind, batch_first):
    layer, inputs = kind(8, 2, 16, dropout=0.0, batch_first=batch_first), 1 + (kind is nn.TransformerDecoderLayer)
    model, x = Net(lambda m, x: m.layer(*[x] * inputs), layer=layer).double(), torch.randn(3, 3, 8).double()
    expected = norms_by_loop(model, x, batch_dim=int(not batch_first))
    with clip(model, batch_first=batch_first) as clipper:
        assert_close(clipper.backward(losses_of(model(x), int(not batch_first))).norms, expected)


def test_a_second_clipper_on_one_model_is_refused():
    model = small()
    _clipper = clip(model)
    with pytest.raises(ValueError, match="another clipper is attached"):
        clip(model)


def test_scripted_modules_without_parameters_are_taken():
    model = nn.Sequential(nn.Linear(3, 3), scripted(nn.Tanh()), nn.Linear(3, 2))
    with clip(model) as clipper:
        assert clipper.backward(losses_of(model(torch.randn(4, 3)))).norms.shape == (4,)


def test_a_clipper_that_could_not_attach_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"'1\.weight' is lazy: run a forward first"):
        clip(model)
    model(torch.randn(4, 5))
    clip(model).backward(losses_of(model(torch.randn(4, 5))))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def distributed(model, name, *mesh):
    """A parameter as a DTensor that is not one of fully_shard."""
    owner, _, key = name.rpartition(".")
    mesh = torch.distributed.init_device_mesh("cpu", mesh)
    value = torch.distributed.tensor.distribute_tensor(model.get_parameter(name).detach(), mesh)
    setattr(model.get_submodule(owner), key, nn.Parameter(value))
    return model


@pytest.mark.usefixtures("one_process")
def test_parameters_that_are_distributed_otherwise_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'2\.weight' is a DTensor, but not one of fully_shard, as with tensor paral"):
        clip(distributed(small(), "2.weight", 1))
    model = frozen(distributed(nn.Linear(3, 2), "weight", 1), "bias")
    with pytest.raises(ValueError, match=r"'weight' is a DTensor, but not one of fully_shard, as with tensor paral"):
        clip(model)
    model = frozen(distributed(nn.Linear(3, 2), "weight", 1, 1), "bias")
    with pytest.raises(ValueError, match=r"'weight' is a DTensor on a mesh of 2 dimensions, as with HSDP"):
        clip(model)
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    with pytest.raises(ValueError, match=r"'0\.weight' is a DTensor on a mesh of 2 dimensions, as with HSDP"):
        clip(fully_shard(small(), mesh=mesh))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_part_of_the_model_may_be_sharded(is_frozen):
    model = small()
    frozen(model[0], *(["weight", "bias"] if is_frozen else []))
    whole = copy.deepcopy(model)
    fully_shard(model[0])
    x = torch.randn(4, 3, dtype=torch.float64)
    for each in (model, whole):
        clip(each).backward(losses_of(each(x)))
    for param, other in zip(model.parameters(), whole.parameters(), strict=True):
        if param.requires_grad:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            torch.testing.assert_close(grad, other.grad)


@pytest.mark.usefixtures("one_process")
def test_the_clipper_is_made_after_fully_shard():
    model = small()
    clipper = clip(model)
    fully_shard(model)
    with pytest.raises(ValueError, match="make the clipper after fully_shard"):
        model(batch())
    clipper.detach()


@pytest.mark.usefixtures("one_process")
def test_two_passes_and_the_check_of_a_model_refuse_shards():
    model = fully_shard(small())
    with pytest.raises(ValueError, match="two passes work in one process only: for several"):
        GradSampleModuleFastGradientClipping(model)
    with pytest.raises(ValueError, match="check it before you shard it"):
        check_per_sample(model, batch(), lambda model, x: losses_of(model(x)))


@pytest.mark.usefixtures("one_process")
def test_the_module_in_distributed_data_parallel_is_refused_with_the_way_out():
    model = small()
    _clipper = clip(model)
    with pytest.raises(RuntimeError, match="give the clipper the whole DistributedDataParallel model"):
        nn.parallel.DistributedDataParallel(model)(batch())


@pytest.mark.usefixtures("one_process")
def test_a_wrapped_part_of_the_model_is_refused_by_name():
    model = nn.Sequential(small(), nn.parallel.DistributedDataParallel(small()))
    with pytest.raises(ValueError, match=r"'1' is a DistributedDataParallel: wrap the whole model"):
        clip(model)


@pytest.mark.usefixtures("one_process")
def test_two_passes_refuse_distributed_data_parallel():
    with pytest.raises(ValueError, match="two passes work in one process only: for several"):
        GradSampleModuleFastGradientClipping(nn.parallel.DistributedDataParallel(small()))


@pytest.mark.usefixtures("one_process")
def test_a_wrapped_model_is_checked_before_it_is_wrapped():
    with pytest.raises(ValueError, match="check it before you wrap it"):
        check_per_sample(nn.parallel.DistributedDataParallel(small()), batch(), lambda model, x: losses_of(model(x)))


# changes that come later


def test_parameters_freed_or_frozen_later_are_followed():
    model, x, clipper = attached()
    model[0].requires_grad_(False)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def freed(name):
    def change(model):
        model.get_parameter(name).requires_grad_(True)

    return change


def exchanged(model):
    model[0] = nn.Linear(3, 4).double()


@pytest.mark.parametrize(
    ("make", "frozen", "change", "by_parts"),
    [
        (lambda: nn.Linear(3, 2).double(), "bias", freed("bias"), False),
        (small, None, exchanged, False),
        (small, "0.weight", freed("0.weight"), True),
    ],
    ids=["a bias", "a layer", "before a call of submodules"],
)
def test_what_was_freed_or_exchanged_before_a_forward_is_followed(make, frozen, change, by_parts):
    model, x = make(), batch()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    clipper = clip(model)
    change(model)
    output = model[2](model[1](model[0](x))) if by_parts else model(x)
    assert_close(clipper.backward(losses_of(output)).norms, norms_by_loop(model, x))


def test_a_layer_that_was_all_frozen_before_a_call_of_submodules_is_refused():
    model, x = small(), batch()
    model[0].requires_grad_(False)
    clipper = clip(model)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"outside the call of its layer|run it again"):
        clipper.backward(losses_of(model[2](model[0](x))))
    assert all(grad is None for grad in grads(model))
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_layers_freed_between_forward_and_backward_are_refused():
    model = small()
    model[0].requires_grad_(False)
    clipper = clip(model)
    losses = losses_of(model(batch()))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen, unfrozen or replaced since its forward started: run the forward"):
        clipper.backward(losses)
    assert all(grad is None for grad in grads(model))


def test_a_model_that_gets_trainable_parameters_of_its_own_has_to_be_called_again():
    token = nn.Parameter(torch.zeros(3), requires_grad=False)
    model, x = Net(lambda m, x: m.head(x + m.token), token=token, head=nn.Linear(3, 2)).double(), batch()
    with clip(model) as clipper:
        clipper.backward(losses_of(model(x)))
        model.token.requires_grad_(True)
        with pytest.raises(RuntimeError, match="call it once more"):
            model(x)
        assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_a_parameter_of_the_model_itself_may_be_exchanged():
    model = Net(lambda m, x: m.last(x) * m.scale, last=nn.Linear(3, 2), scale=weight(2)).double()
    with clip(model) as clipper:
        for _ in range(2):
            model.scale, x = nn.Parameter(torch.rand(2, dtype=torch.float64)), batch()
            expected = norms_by_loop(model, x)
            assert_close(clipper.backward(losses_of(model(x))).norms, expected)


def test_a_layer_that_cannot_be_right_put_in_later_is_refused_and_nothing_trains():
    model, _, clipper = attached()
    model.append(nn.BatchNorm1d(2).double())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'3' \(BatchNorm1d\)"):
            model(batch())
    del model[3]
    assert clipper.backward(losses_of(model(batch()))).norms.shape == (5,)


@pytest.mark.parametrize("used", [False, True])
def test_a_module_with_the_address_of_an_old_one_is_seen(used):
    for _ in range(20 if used else 1):
        model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 2)).double()
        clipper = clip(model)
        if used:
            clipper.backward(losses_of(model(batch())))
        model[1] = None
        model[1] = nn.BatchNorm1d(3, affine=False)
        with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) .*mixes the samples"):
            model(batch())


def test_batch_norm_is_decided_in_each_forward():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), batch()
    model(torch.randn(20, 3).double())  # statistics
    model.eval()
    assert_matches_loop(model, x)
    with clip(model) as clipper:
        clipper.backward(losses_of(model(x)))
        model.train()
        with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\)"):
            model(x)
        model[1].eval()
        clipper.backward(losses_of(model(x)))


def test_options_that_are_refused_are_refused_also_where_they_are_set_later():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    _clipper = clip(model)
    model[0].max_norm = 0.1
    with pytest.raises(ValueError, match=r"'0' \(Embedding\) cannot be clipped per sample: max_norm"):
        model(torch.tensor([[1, 2]]))


def test_settings_are_those_of_the_call():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).double(), batch()
    model[1].eps = 0.5
    norms = reference(model, x)[0]
    with clip(model) as clipper:
        losses = losses_of(model(x))
        model[1].eps = 1e-5
        assert_close(clipper.backward(losses).norms, norms)
