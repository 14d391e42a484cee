"""Functions that are called where no parameter has a gradient warn once for each place in the code."""

import warnings

import pytest
import torch
from torch import nn

import torchzero_clip
from torchzero_clip import (
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    normalize_grads_,
)

FUNCTIONS = {
    "clip_grad_norm_": lambda params: clip_grad_norm_(params, 1.0),
    "clip_grad_norm_ global": lambda params: clip_grad_norm_(params, 1.0, dim="global"),
    "clip_grad_norm_ tensor": lambda params: clip_grad_norm_(params, torch.tensor(1.0)),
    "clip_grad_norm_ rows": lambda params: clip_grad_norm_(params, 1.0, "std", dim=0, error_if_nonfinite=True),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1.0),
    "normalize_grads_": lambda params: normalize_grads_(params, 1.0),
    "centralize_grads_": lambda params: centralize_grads_(params),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1.0, 2.0),
}
each = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def test_every_function_that_changes_gradients_is_in_the_table():
    changing = {name for name in torchzero_clip.__all__ if name.endswith("_")}
    assert changing == {name.partition(" ")[0] for name in FUNCTIONS}


@each
@pytest.mark.parametrize("form", [list, lambda params: params[0], lambda params: (p for p in params), dict.fromkeys])
def test_no_gradients(function, form):
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="none of the parameters has a gradient, so nothing was changed"):
        function(form(list(model.parameters())))
    with pytest.warns(UserWarning, match="after backward"):
        function(model.named_parameters())
    assert model.weight.grad is None


@each
def test_one_gradient_is_enough(function):
    model = nn.Linear(3, 2)
    model.bias.grad = torch.ones(2)
    function(model.parameters())  # a warning would be an error
    assert model.weight.grad is None
    assert model.bias.grad.isfinite().all()


@each
def test_gradients_instead_of_parameters(function):
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match="pass the parameters, not their gradients"):
        function([param.grad for param in model.parameters()])


@each
def test_frozen_parameters_and_an_empty_list_are_usual(function):
    model = nn.Linear(3, 2).requires_grad_(False)
    function(model.parameters())  # a warning would be an error
    function([])
    assert model.weight.grad is model.bias.grad is None


@each
def test_an_iterator_that_has_ended(function):
    params = nn.Linear(3, 2).parameters()
    list(params)
    with pytest.warns(UserWarning, match="an iterator that has ended"):
        function(params)


def test_a_place_warns_once():
    param = nn.Parameter(torch.zeros(2))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            clip_grad_norm_(param, 1.0)
        clip_grad_norm_(param, 1.0)
    assert len(found) == 2
    assert found[0].filename == __file__


def test_a_rank_of_several_processes_may_have_no_gradient(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = nn.Linear(3, 2)
    for function in FUNCTIONS.values():
        function(model.parameters())  # a warning would be an error
    assert model.weight.grad is None


def test_the_norm_of_no_tensors_is_zero():
    assert get_total_norm(iter([])).item() == 0
