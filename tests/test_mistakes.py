"""Calls that cannot work, or that do not do what they look like: each tells the way out."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import torchzero_clip as tz
from torchzero_clip import (
    SGD,
    AdamW,
    ClipNorm,
    ConstantFlatClipper,
    Modular,
    PerSampleGradientClipper,
    clip_grad_norm_,
    integrations,
)


def test_public_names_are_listed():
    assert dir(tz) == sorted(tz.__all__)
    assert {"Recorder", "ClipNorm", "clip_grad_norm_"} < set(dir(tz))
    assert not [name for name in dir(tz) if name.startswith("_") or name in ("recorder", "clipping", "hints")]


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def params():
    return model().parameters()


def attached_twice():
    module, clipper = model(), tz.ConstantFlatClipper(1.0)
    first = tz.PerSampleGradientClipper(module, clipper)
    try:
        tz.PerSampleGradientClipper(module, clipper)
    finally:
        first.detach()


def after_step(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


class WithoutSuper(tz.TensorwiseTransform):
    def __init__(self):
        self.factor = 2.0

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return tensor * self.factor


class WithoutDefaults(WithoutSuper):
    def __init__(self):
        super(WithoutSuper, self).__init__()


class KeepsRate(tz.UpdateRule):
    def __init__(self, lr=1e-3):
        super().__init__({})

    def apply_tensors(self, updates, step):
        return updates


def grouped(*optimizers):
    """One optimizer of the class and the groups of several, as torchrl makes it."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return type(optimizers[0])(groups)


REFUSED = {
    "a rate in Modular": (lambda: Modular(model(), ClipNorm(1), AdamW(), lr=1e-3), "write AdamW(lr=...)"),
    "an unknown argument of Modular": (lambda: Modular(model(), SGD(), nonfinit="skip"), "did you mean 'nonfinite'?"),
    "max_grad_norm": (lambda: ClipNorm(max_grad_norm=1.0), "did you mean 'max_norm'?"),
    "norm_type": (lambda: ClipNorm(1.0, norm_type=2), "did you mean 'ord'?"),
    "clip_value": (lambda: tz.ClipValue(clip_value=2), "did you mean 'value'?"),
    "an unknown argument": (lambda: ClipNorm(1.0, foo=2), "there are: max_norm, ord, dim, inverse_dims, min_size"),
    "decay in Adam": (lambda: tz.Adam(weight_decay=0.1), "write WeightDecay(0.1) in the chain, or AdamW(weight_decay"),
    "decay in Muon": (lambda: tz.Muon(wd=0.1), "write WeightDecay(0.1) in the chain"),
    "parameters for a rule": (lambda: AdamW(params()), "lr must be a number, got parameters (generator)"),
    "listed parameters for a rule": (
        lambda: AdamW(list(params()), lr=1e-3),
        "AdamW takes no parameters. Write Modular(model.parameters(), ..., AdamW(...))",
    ),
    "groups for a rule": (
        lambda: AdamW([{"params": params()}], lr=1e-3),
        "AdamW takes no parameters. Write Modular(model.parameters(), ..., AdamW(...))",
    ),
    "groups alone for a rule": (
        lambda: AdamW([{"params": params(), "lr": 0.1}], weight_decay=0.1),
        "lr must be a number, got parameters (list). They are the first argument of Modular",
    ),
    "groups of another chain": (
        lambda: grouped(Modular(params(), SGD()), Modular(params(), SGD())),
        "Code that passes parameters alone, such as group_optimizers of torchrl, needs a class of Modular.of",
    ),
    "a rule that keeps its rate": (
        lambda: Modular(params(), KeepsRate(0.5)),
        "KeepsRate(lr=None) has not passed its lr on: write super().__init__(..., lr=lr) in its class",
    ),
    "two betas": (lambda: AdamW(1e-3, 0.9, 0.999), "Write both betas as one pair, as in betas=(0.9, 0.999)"),
    "a function of parameters": (
        lambda: Modular(model().parameters, SGD()),
        "call it, as in Modular(model.parameters(), ...)",
    ),
    "a schedule without an argument": (
        lambda: ClipNorm(lambda: 1.0),
        "must take the number of steps, as in lambda step",
    ),
    "swapped arguments": (lambda: tz.clip_grad_norm_(1.0, params()), "They are the first argument of Modular"),
    "swapped arguments of a move": (
        lambda: tz.from_torch_optim(Modular(params(), SGD()), torch.optim.SGD(params())),
        "optimizer must be of class Modular, got SGD",
    ),
    "a function of parameters to clip": (
        lambda: clip_grad_norm_(model().parameters, 1.0),
        "got method: pass model.parameters()",
    ),
    "a module to clip": (lambda: tz.clip_grad_value_(model(), 1.0), "got Sequential: pass model.parameters()"),
    "a layer to normalize": (
        lambda: tz.normalize_grads_(nn.Linear(2, 1), 1.0),
        "got Linear: pass model.parameters()",
    ),
    "a model to record": (
        lambda: tz.Recorder(model(), Modular(params(), SGD())),
        "got Sequential: write Recorder(optimizer, model=model)",
    ),
    "a model without its name": (lambda: tz.Recorder(Modular(params(), SGD()), model()), "write model=model"),
    "a state dict after the optimizer": (
        lambda: tz.from_torch_optim(Modular(params(), SGD()), torch.optim.SGD(params()).state_dict()),
        "got dict: write from_torch_optim(state_dict, optimizer)",
    ),
    "an unknown dim": (lambda: ClipNorm(1, dim="joint"), "None, an int, a sequence of ints or 'global', got 'joint'"),
    "no defaults": (WithoutDefaults, "Transform.__init__ needs the argument 'defaults': write super().__init__({})"),
    "an abbreviation": (lambda: tz.AGC, "did you mean 'AdaptiveGradientClip'?"),
    "another case": (lambda: tz.Adamw, "did you mean 'AdamW'?"),
    "a metric before the first step": (
        lambda: Modular(params(), ClipNorm(1), SGD()).metrics()["clip_norm/norm"],
        "no step was taken yet",
    ),
    "an unknown metric": (
        lambda: after_step(Modular(params(), ClipNorm(1), SGD())).metrics()["clipnorm/norm"],
        "did you mean 'clip_norm/norm'?",
    ),
    "a second clipper": (attached_twice, "call detach() of that clipper first"),
    "no super().__init__()": (lambda: Modular(params(), WithoutSuper(), SGD()), "super().__init__"),
    "a typo in a group": (
        lambda: Modular([{"params": params(), "max_nrom": 2.0}], ClipNorm(1), SGD()),
        "did you mean 'max_norm'?",
    ),
    "one limit per layer": (lambda: tz.ConstantPerLayerClipper(1.0), "got 1.0 (float): write a list, such as [1.0]"),
    "no norm clipper": (lambda: PerSampleGradientClipper(model()), "'norm_clipper': write ConstantFlatClipper(1.0)"),
    "a transform for samples": (
        lambda: PerSampleGradientClipper(model(), ClipNorm(1)),
        "got ClipNorm(1) (ClipNorm): write ConstantFlatClipper(1.0)",
    ),
    "a norm clipper before the model": (
        lambda: PerSampleGradientClipper(ConstantFlatClipper(1), model()),
        "write the model first, then ConstantFlatClipper(1.0)",
    ),
    "parameters for samples": (
        lambda: PerSampleGradientClipper(params(), ConstantFlatClipper(1)),
        "(generator): pass the model itself",
    ),
    "limits per layer": (
        lambda: tz.PerSampleGradientClipper(model(), tz.ConstantPerLayerClipper([1.0, 1.0])),
        "one for each of 4 norms, got 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_with_the_way_out(name):
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError), match=re.escape(message)):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "callback"), [("transformers", "TrainerCallback"), ("lightning", "LightningCallback")]
)
def test_a_callback_gets_a_recorder_or_a_function(package, callback):
    pytest.importorskip(package)
    for given in ("run.jsonl", model()):
        with pytest.raises(TypeError, match=r"write functools.partial\(Recorder, path=...\)"):
            getattr(integrations, callback)(given)


def other_keys(optimizer):
    optimizer.param_groups[0]["max_nrom"] = 0.5
    return after_step(after_step(optimizer))


def weights():
    module = model()
    module(torch.ones(1, 2)).sum().backward()
    return tz.get_total_norm(module.parameters())


WARNED = {
    "a share as a percentile": (
        lambda: tz.AutoClip(0.95),
        "percentile=0.95 is below 1 percent, which clips nearly every step: write AutoClip(95)",
    ),
    "a limit of 0": (lambda: ClipNorm(0), "for no limit write math.inf"),
    "two decays": (lambda: Modular(model(), tz.WeightDecay(0.1), AdamW(1e-3)), "write AdamW(weight_decay=0)"),
    "no optimizer": (lambda: Modular(model(), ClipNorm(1)), "Put an optimizer at its end"),
    "a typo that is written later": (
        lambda: other_keys(Modular(params(), ClipNorm(1), SGD())),
        "no transform has a setting 'max_nrom'; did you mean 'max_norm'?",
    ),
    "the norm of weights": (weights, "returns the norm of the weights"),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_mistake_gives_one_warning(name):
    make, message = WARNED[name]
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        make()
    assert len(caught) == 1
    assert caught[0].filename == __file__ or name in ("two decays", "a typo that is written later")


def test_what_is_meant_gives_no_warning():
    module = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Modular(module, ClipNorm(1), AdamW(1e-3, weight_decay=0), tz.WeightDecay(0.1))
        Modular(module, ClipNorm(1), tz.LR(0.1))
        Modular(module, KeepsRate(), tz.LR(0.1))  # the chain has a rate
        tz.AutoClip(0), tz.AutoClip(1.0), tz.AutoClip(99.5)  # pyright: ignore
        Modular(module.parameters(), ClipNorm(1))
        optimizer = Modular([{"params": params(), "max_norm": 0.0}], ClipNorm(1), SGD())
        optimizer.param_groups[0]["max_norm"] = 0.0
        optimizer.param_groups[0]["my_note"] = "body"
        after_step(optimizer)
        ClipNorm(lambda step: 0.0)
        tz.ConstantFlatClipper(0)  # for samples, it is a limit as others are
        tz.get_total_norm([param.detach() for param in module.parameters()])
        sum(param.sum() for param in module.parameters()).backward()
        tz.clip_grad_norm_(module.parameters(), 0.0)


def test_a_new_key_is_noticed_between_planned_steps():
    optimizer = Modular(params(), ClipNorm(1), SGD(0.1))
    for _ in range(8):
        after_step(optimizer)
    assert optimizer.runner.fast_way.plan is not None
    with pytest.warns(UserWarning, match="no transform has a setting 'max_nrom'"):
        other_keys(optimizer)


def test_parameters_that_are_added_get_the_names_of_the_module():
    module = model()
    module[0].requires_grad_(False)
    optimizer = Modular(module, ClipNorm(1), SGD())
    module.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": module[2].parameters()})
    assert optimizer.param_groups[1]["param_names"] == ["2.weight", "2.bias"]
    with pytest.raises(ValueError, match="set its requires_grad"):
        optimizer.add_param_group({"params": list(module[0].parameters())})
    with pytest.raises(ValueError, match="one without a name, at index 0"):
        optimizer.add_param_group({"params": params()})
    assert len(optimizer.param_groups) == 2
    pickle.loads(pickle.dumps(optimizer))
    with pytest.raises(ValueError, match="one without a name, at index 0"):
        copy.deepcopy(optimizer).add_param_group({"params": nn.Linear(1, 1).parameters()})


def test_metrics_are_a_dict_that_loads_with_weights_only(tmp_path):
    metrics = after_step(Modular(params(), ClipNorm(1), SGD())).metrics()
    assert metrics.get("foo") is None
    torch.save(metrics, tmp_path / "metrics.pt")
    assert torch.load(tmp_path / "metrics.pt", weights_only=True) == metrics


def test_classes_of_users_are_called_as_they_say():
    class OfModule(tz.TensorwiseTransform):
        def __init__(self, module, *, lr):
            super().__init__({})
            self.module, self.rate = module, lr

        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            return tensor

    transform = OfModule(model(), lr=3)
    assert copy.deepcopy(transform).rate == 3
    with pytest.raises(TypeError, match="missing 1 required"):
        OfModule(lr=3)


def test_the_names_of_torch_in_functions():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="clip_grad_norm_ has no argument 'norm_type'; did you mean 'ord'"):
        clip_grad_norm_([weight], 1.0, norm_type=2)
    with pytest.raises(TypeError, match="clip_grad_norm_ has no argument 'foreach'"):
        clip_grad_norm_([weight], 1.0, foreach=True)


def test_a_number_in_place_of_a_norm_clipper():
    with pytest.raises(TypeError, match=r"write ConstantFlatClipper\(1.0\)"):
        PerSampleGradientClipper(nn.Linear(2, 1), 1.0)
    with pytest.raises(TypeError, match="no argument 'max_norm'; write ConstantFlatClipper"):
        PerSampleGradientClipper(nn.Linear(2, 1), max_norm=1.0)
    with pytest.raises(TypeError, match="did you mean 'flat_value'"):
        ConstantFlatClipper(max_grad_norm=1.0)


def test_too_many_skipped_steps():
    optimizer = Modular(params(), SGD(), nonfinite="skip", max_consecutive_skips=0)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, torch.nan)
    with pytest.raises(RuntimeError, match=r"1 steps in a row .* The argument max_consecutive_skips allows 0"):
        optimizer.step()


def test_a_generator_that_was_used_before():
    params = nn.Linear(2, 1).parameters()
    list(params)
    with pytest.raises(ValueError, match=r"a generator gives its parameters only once. Pass list\(model.parameters"):
        Modular(params, AdamW())


def test_a_qualified_key_that_is_written_later():
    model = nn.Linear(2, 1)
    optimizer = Modular(model, ClipNorm(1), AdamW())
    optimizer.param_groups[0]["clip_norm/max_norm"] = 5
    model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match="no transform has a setting 'clip_norm/max_norm'; did you mean 'max_norm'"):
        optimizer.step()


def test_a_name_in_set_param_groups():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="A name belongs to a param group that Modular gets"):
        ClipNorm(1).set_param_groups([{"params": model.parameters(), "max_norm": 0.1, "name": "head"}])


def test_the_signature_of_a_class_is_that_of_its_constructor_and_of_an_object_that_of_its_call():
    class Own(ConstantFlatClipper):
        def __call__(self, norms):
            return norms

    assert list(inspect.signature(Own).parameters) == ["flat_value"]
    assert list(inspect.signature(Own(1.0)).parameters) == ["norms"]
    assert list(inspect.signature(tz.NormalizeByEMA).parameters)[:2] == ["beta", "ord"]
