"""What the callbacks of trainers do when training starts."""

import pytest
import torch
from torch import nn

from torchzero_clip import AdamW, ClipNorm, Modular, Recorder, ZClip, before_step
from torchzero_clip.integrations.attaching import attached, check_recorder, check_trained, started
from torchzero_clip.other_optimizer.before_step import chain_of


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def test_transforms_of_an_earlier_training_stay_and_those_of_others_are_refused():
    model = nn.Linear(2, 1)
    optimizer = sgd(model.parameters())
    handle = attached([ClipNorm(1).only("weight")], [None], optimizer, model)
    assert chain_of(optimizer) is chain_of(handle) is handle
    assert attached([ZClip()], [handle], optimizer, model) is handle
    with pytest.raises(RuntimeError, match="already has transforms before its steps"):
        attached([ZClip()], [None], optimizer, model)
    handle.remove()
    assert chain_of(optimizer) is None
    assert attached(ZClip(), [handle], optimizer, model) is not handle


def test_a_function_makes_the_handle():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight])
    handle = attached(lambda o: before_step(o, ClipNorm(1), nonfinite="skip"), [], optimizer, nn.Module())
    weight.grad = torch.tensor([torch.inf, 1.0])
    optimizer.step()
    assert handle.skipped_by == ("nonfinite",)


def test_transforms_beside_a_chain_and_other_optimizers_are_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match="takes the transforms"):
        attached([ZClip()], [], Modular(model, AdamW()), model)
    with pytest.raises(TypeError, match="AdamW"):
        attached([ZClip(), torch.optim.AdamW], [], sgd(model.parameters()), model)


def test_parameters_that_no_optimizer_has_are_named():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    first, rest = sgd(model[0].parameters()), sgd([*model[1].parameters(), *model[2].parameters()])
    check_trained([first, rest], model, raises=True)  # a warning would raise
    with pytest.warns(
        UserWarning, match=r"does not have 4 of the 6 .* not trained: '1.weight', '1.bias', '2.weight', "
    ):
        check_trained([first], model, raises=True)
    model[1].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"does not have 2 of the 4 .* not trained: '2.weight', '2.bias'$"):
        check_trained([first], model, raises=True)
    model[0].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"has none of the 2 trainable parameters of the model \('2.weight', '2.bias'\)"
    ):
        check_trained([first], model, raises=True)
    with pytest.warns(UserWarning, match="does not have 2 of the 2"):
        check_trained([first], model, raises=False)


@pytest.mark.parametrize("wrong", [lambda optimizer: [ClipNorm(1)], lambda optimizer: None])
def test_a_function_that_returns_no_handle_is_refused(wrong):
    """Otherwise the model would train without transforms."""
    layer = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"must return a handle, got .*lambda optimizer: before_step\(optimizer, "):
        attached(wrong, [], sgd(layer.parameters()), layer)


def test_transforms_in_the_place_of_the_recorder_are_refused():
    with pytest.raises(TypeError, match=r"recorder must be .* got list: .* as transforms=\[...\]"):
        check_recorder([ClipNorm(1)])


def test_a_recorder_that_an_earlier_training_has_closed_is_refused():
    model = nn.Linear(2, 1)
    optimizer = sgd(model.parameters())
    recorder = Recorder(optimizer)
    recorder.close()
    with pytest.raises(ValueError, match=r"the recorder is closed. Pass a function that makes a recorder"):
        started(recorder, None, optimizer, model, log=lambda *_: None, saved=None, step=0)
