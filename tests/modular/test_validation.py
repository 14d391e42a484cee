"""Parameters that no step can use are refused by name, before anything changes."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from contract.training import assert_equal, gradients, parameters, set_grads, train, values
from torch import nn

from torchzero_clip import (
    SGD,
    Adam,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Modular,
    SkipStep,
    TensorwiseTransform,
    clip_grad_norm_,
    normalize_grads_,
)


@pytest.mark.parametrize("mark", ["_is_flat_param", "_fsdp_flattened"])
def test_parameters_of_fsdp1_are_refused(mark):
    model = nn.Linear(2, 1)
    setattr(model.bias, mark, True)
    with pytest.raises(ValueError, match=r"bias belongs to FSDP1 .*: use fully_shard"):
        Modular(model, ClipNorm(1.0, dim="global"))
    optimizer = Modular([model.weight], ClipNorm(1.0))
    with pytest.raises(ValueError, match=r"belongs to FSDP1"):
        optimizer.add_param_group({"params": [model.bias]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own import
def test_zero_redundancy_optimizer_is_refused(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        params = [nn.Parameter(torch.zeros(2))]

        def chain(params, **kwargs):
            return Modular(params, ClipNorm(1.0, dim="global"), SGD(0.1))

        with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer gives each process .*: use fully_shard"):
            ZeroRedundancyOptimizer(params, optimizer_class=chain)
        Modular(params, SGD())  # alone it may be made in the same process
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_is_deleted_frees_its_state_at_once():
    torch.optim.SGD([weight := nn.Parameter(torch.zeros(2))], 0.1)  # for the first one torch imports its compiler
    gc.disable()
    try:
        optimizer = Modular([weight], ClipNorm(1.0), Adam())
        weight.grad = torch.ones(2)
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_a_chain_on_meta_parameters_says_that_they_have_no_values():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    optimizer = Modular(model, SkipStep(1.0), ClipNormByEMA(tensorwise=False), Adam())
    model.to_empty(device="cpu")  # makes other parameters
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight is on the meta device and has no values: .* Build Modular after"):
        optimizer.step()


def test_a_chain_on_meta_parameters_works_if_they_are_given_values_in_place():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    optimizer = Modular(model, ClipNormByEMA(tensorwise=False), Adam())
    other = nn.Linear(2, 1)
    for name, param in list(model.named_parameters()):
        torch.utils.swap_tensors(param, nn.Parameter(getattr(other, name).detach().clone()))
    reference = Modular(other, ClipNormByEMA(tensorwise=False), Adam())
    for module, stepper in ((model, optimizer), (other, reference)):
        module(torch.ones(1, 2)).sum().backward()
        stepper.step()
    assert_equal(model.parameters(), other.parameters())


def test_a_frozen_parameter_may_stay_on_the_meta_device():
    param, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"), requires_grad=False)
    param.grad = torch.ones(1)
    Modular([param, frozen], SGD(0.5)).step()
    assert param.tolist() == [-0.5]


@pytest.mark.parametrize("what", ["gradient", "state"])
def test_a_parameter_of_another_shape_is_an_error_before_anything_changes(what):
    first, second = parameters(shapes=[(2,), (4, 3)])
    optimizer = Modular([("first", first), ("second", second)], ClipNorm(0.1), ClipNormGrowth(), Adam())
    rows = [gradients([first, second], 1)[0]] * 2
    train(optimizer, [first, second], rows[:1])
    set_grads([first, second], rows[0])
    second.data = torch.zeros(2, 3)
    if what == "state":
        second.grad = torch.ones(2, 3)
    before, grads = values([first, second]), [first.grad.clone(), second.grad.clone()]
    state = {key: value.clone() for key, value in optimizer.state[first].items()}
    message = "the gradient of second has" if what == "gradient" else "the state 'adam/exp_avg' of second has"
    with pytest.raises(RuntimeError, match=rf"{message} shape \(4, 3\), and the parameter has \(2, 3\)"):
        optimizer.step()
    assert_equal([first, second], before)
    assert_equal([first.grad, second.grad], grads)
    torch.testing.assert_close(dict(optimizer.state[first]), state, rtol=0, atol=0)

    del optimizer.state[second]
    second.grad = torch.ones(2, 3)
    optimizer.step()
    assert optimizer.state[second]["adam/exp_avg"].shape == (2, 3)


def test_state_of_a_shape_of_its_own_is_no_error():
    class Window(TensorwiseTransform):
        def init_state(self, param, setting):
            return {"last": torch.zeros(5, device=param.device)}

        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            state["last"].copy_(state["last"].roll(1))
            return tensor

    params = parameters()
    optimizer = Modular(params, Window({}), Adam())
    train(optimizer, params, gradients(params, 3))
    assert all(state["window/last"].shape == (5,) for state in optimizer.state.values())


@pytest.mark.parametrize("chain", [[ClipNorm(1.0), SGD(0.1)], [Adam(0.1)]], ids=str)
def test_meta_parameters_with_meta_gradients_are_refused(chain):
    params = [nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)]
    optimizer = Modular(params, *chain)
    set_grads(params, [torch.ones(3, device="meta")] * 2)
    with pytest.raises(RuntimeError, match="is on the meta device and has no values"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("dim", [None, "global"])
@pytest.mark.parametrize("function", [clip_grad_norm_, normalize_grads_])
def test_functions_name_gradients_on_the_meta_device_beside_others(function, dim):
    params = [nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "meta")]
    set_grads(params, [torch.ones(3, device=param.device) for param in params])
    with pytest.raises(RuntimeError, match="some gradients are on the meta device, where they have no values"):
        function(params, 0.5, dim=dim)
    assert params[0].grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("number", [torch.zeros(5), torch.zeros(1)], ids=["five", "one"])
def test_a_number_replaced_by_a_vector_is_refused_and_nothing_changes(number):
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = Modular(params, ClipNorm(1.0), Adam(0.1))
    train(optimizer, params, [[torch.ones(3)] * 2] * 2)
    optimizer.state[params[0]]["adam/step"] = number
    with pytest.raises(RuntimeError, match="the state 'adam/step' of a parameter has shape"):
        train(optimizer, params, [[torch.ones(3)] * 2])
    assert optimizer.state[params[1]]["adam/step"] == 2


class Clipped(Modular):
    """A class that builds itself from parameters and rates, as functions of other packages expect it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, ClipNorm(1.0), SGD(lr))


def test_groups_of_several_optimizers_of_a_class_make_one_as_in_torchrl():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    first, second = Clipped(params[:1], 0.5), Clipped(params[1:], 0.25)
    both = type(first)([*first.param_groups, *second.param_groups])
    for param in params:
        param.grad = torch.tensor([3.0, 4.0])
    both.step()
    torch.testing.assert_close(params, [nn.Parameter(lr * torch.tensor([-0.6, -0.8])) for lr in (0.5, 0.25)])
