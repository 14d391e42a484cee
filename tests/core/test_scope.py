"""Transforms that act on some parameters only."""

import math
import pickle
import warnings

import pytest
import torch
from contract.training import set_grads
from torch import nn

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Modular,
    Muon,
    Normalize,
    Transform,
)

pytestmark = pytest.mark.filterwarnings("ignore:the chain has no optimizer")


def model():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    return nn.ModuleDict({"body": body, "head": nn.Linear(2, 1)})


def with_gradients(module):
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return module


def scaled(optimizer, module):
    """The names of parameters that do not end at minus their gradient."""
    with_gradients(module)
    for param in module.parameters():
        param.data.zero_()
    optimizer.step()
    return {name for name, param in module.named_parameters() if not torch.equal(param.data, -torch.ones_like(param))}


BIASES = {"body.1.bias", "head.bias"}
ALL = {"body.0.weight", "body.1.weight", "head.weight", *BIASES}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (lambda t: t.only("*.bias"), BIASES),
        (lambda t: t.only("head"), {"head.weight", "head.bias"}),
        (lambda t: t.only("body.0", "head.bias"), {"body.0.weight", "head.bias"}),
        (lambda t: t.only(lambda p: p.ndim >= 2), ALL - BIASES),
        (lambda t: t.without("head"), ALL - {"head.weight", "head.bias"}),
        (lambda t: t.without("*.bias", "body.0"), {"body.1.weight", "head.weight"}),
        (lambda t: t.only("body").without(lambda p: p.ndim == 1), {"body.0.weight", "body.1.weight"}),
        (lambda t: t.only("body").only("*.bias"), {"body.1.bias"}),
    ],
)
def test_parameters_are_chosen_by_name_and_by_function(limit, expected):
    module = model()
    assert scaled(Modular(module, limit(Normalize(0.1))), module) == expected


def test_parameters_are_chosen_by_group():
    module = model()
    groups = [{"params": list(module[name].parameters()), "name": name} for name in ("body", "head")]
    assert scaled(Modular(groups, Normalize(0.1).only(groups="head")), module) == {"head.weight", "head.bias"}
    expected = {"body.0.weight", "body.1.weight", "body.1.bias"}
    assert scaled(Modular(groups, Normalize(0.1).without(groups=["head"])), module) == expected


def test_a_joint_norm_leaves_out_what_is_out_of_scope():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 1))
    optimizer = Modular([first, second], ClipNorm(1, dim="global").without(lambda p: p.ndim == 2))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.full((2, 1), 100.0)
    optimizer.step()
    torch.testing.assert_close(first.data, torch.tensor([-0.6, -0.8]))
    assert second.flatten().tolist() == [-100, -100]
    assert optimizer.metrics()["clip_norm/norm"].item() == 5


def test_two_optimizers_share_the_parameters_and_one_checkpoint():
    module, twin = model(), model()
    split = [Adam().without(lambda p: p.ndim == 2), SGD(momentum=0.9).only(lambda p: p.ndim == 2), LR(0.1)]
    optimizer = Modular(module, split)
    adam = torch.optim.Adam([p for p in twin.parameters() if p.ndim != 2], 0.1)
    sgd = torch.optim.SGD([p for p in twin.parameters() if p.ndim == 2], 0.1, 0.9)
    for _ in range(3):
        with_gradients(module), with_gradients(twin)
        optimizer.step(), adam.step(), sgd.step()
    torch.testing.assert_close(list(module.parameters()), list(twin.parameters()), rtol=1e-6, atol=1e-7)
    keys = {name: set(optimizer.state[p]) for name, p in module.named_parameters()}
    assert keys["head.bias"] == {"adam/step", "adam/exp_avg", "adam/exp_avg_sq"}
    assert keys["head.weight"] == {"sgd/momentum_buffer"}
    Modular(module, split).load_state_dict(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:no optimizer acts on")
def test_state_of_a_transform_that_is_out_of_scope_does_not_load():
    module = model()
    saved = Modular(module, Adam())
    with_gradients(module)
    saved.step()
    message = (
        r"extra: 'adam/step', 'adam/exp_avg', 'adam/exp_avg_sq'; if the parameter is not in the scope of adam, sele"
    )
    with pytest.raises(ValueError, match=message):
        Modular(module, Adam().only("head")).load_state_dict(saved.state_dict())
    optimizer = Modular(module, ClipNormGrowth().only("head"), Adam())
    optimizer.load_state_dict(saved.state_dict(), new="clip_norm_growth")
    with_state = [name for name, p in module.named_parameters() if "clip_norm_growth/prev" in optimizer.state[p]]
    assert with_state == ["head.weight", "head.bias"]


@pytest.mark.filterwarnings("ignore:no optimizer acts on")
def test_lr_is_that_of_the_group():
    module = model()
    groups = [{"params": module["body"].parameters(), "lr": 0.5}, {"params": module["head"].parameters()}]
    optimizer = Modular(groups, SGD(0.1).only(lambda p: p.ndim == 2))
    with_gradients(module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer.step()
    steps = {name: (before[name] - p).flatten()[0].item() for name, p in module.named_parameters()}
    assert steps["body.1.weight"] == pytest.approx(0.5)
    assert steps["head.weight"] == pytest.approx(0.1)


def test_one_clip_with_a_scope_for_each_optimizer_of_a_gan_clips_in_both():
    generator, critic = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    named = [("generator", generator), ("critic", critic)]
    clip = ClipNorm(1.0)
    of_generator = Modular(named, clip.only("generator"), SGD(1.0))
    of_critic = Modular(named, clip.only("critic"), SGD(0.5))
    generator.grad = torch.tensor([3.0, 4.0])
    of_generator.step()
    generator.grad, critic.grad = None, torch.tensor([6.0, 8.0])
    of_critic.step()
    assert generator.tolist() == pytest.approx([-0.6, -0.8])
    assert critic.tolist() == pytest.approx([-0.3, -0.4])
    critic.grad = torch.tensor([6.0, 8.0])
    of_generator.step()  # its clip leaves the critic out
    assert critic.tolist() == pytest.approx([-6.3, -8.4])
    assert repr(clip) == "ClipNorm(1.0)"


def test_a_scope_of_a_transform_that_an_optimizer_has_does_not_change_the_optimizer():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Modular([("first", first), ("second", second)], ClipNorm(1.0), SGD(1.0))
    clip = optimizer.transforms["clip_norm"]
    narrower = clip.only("first").set_param_groups([{"params": second, "max_norm": 0.5}])
    optimizer.add_param_group({"params": [("third", nn.Parameter(torch.zeros(1)))]})
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert (first.item(), second.item()) == (-1.0, -1.0)
    assert [group["max_norm"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert repr(narrower) == "ClipNorm(1.0).only('first')"


@pytest.mark.filterwarnings("ignore:no optimizer acts on")
def test_a_plain_chain_hands_its_scope_to_its_transforms():
    adamw = AdamW(0.1).only("head")
    optimizer = Modular(model(), ClipNorm(1), adamw)
    assert list(optimizer.transforms) == ["clip_norm", "adam", "weight_decay", "lr"]
    assert repr(optimizer.transforms["adam"]) == "Adam(lr=0.1).only('head')"
    Modular(model(), adamw)  # the chain itself is as it was
    assert repr(next(iter(adamw.transforms.values()))) == "Adam(lr=0.1)"


def test_a_chain_that_stays_a_unit_may_have_a_scope_inside_and_outside():
    module = model()
    unit = Chain(Normalize(0.1), ClipValue(0.01).only("*.bias"), target="grad").only("head")
    optimizer = Modular(module, unit)
    assert scaled(optimizer, module) == {"head.weight", "head.bias"}
    assert module["head"].bias.item() == pytest.approx(-0.01)
    assert module["head"].weight.norm().item() == pytest.approx(0.1)
    assert repr(unit).endswith("target='grad').only('head')")


@pytest.mark.parametrize(
    ("target", "expected", "grad"),
    [
        ("update", 9.75, 1.0),
        ("grad", 9.75, 0.25),
        ("closure", 9.75, 0.25),
        ("params_direct", -0.75, 1.0),
        ("params_difference", 0.25, 1.0),
        ("update_difference", 9.25, 1.0),
    ],
)
def test_targets_keep_to_the_scope(target, expected, grad):
    first, second = nn.Parameter(torch.full((1,), 10.0)), nn.Parameter(torch.full((1,), 10.0))
    optimizer = Modular([("first", first), ("second", second)], ClipValue(0.25, target=target).only("first"))
    optimizer.step(lambda: set_grads([first, second], [torch.ones(1)] * 2))
    assert (first.item(), second.item()) == (expected, 9)
    assert (first.grad.item(), second.grad.item()) == (grad, 1)


def test_names_that_are_missing_are_an_error_and_patterns_that_match_nothing_a_warning():
    module = model()
    with pytest.raises(ValueError, match=r"ClipNorm\(1\)\.only\('head'\) chooses parameters by name, and these have"):
        Modular(module.parameters(), ClipNorm(1).only("head"))
    with pytest.warns(UserWarning, match=r"no parameter has a name that matches 'haed'"):
        Modular(module, ClipNorm(1).only("haed", "body"))
    with pytest.warns(UserWarning, match=r"no param group has the name 'haed' of ClipNorm\(1\)"):
        Modular(module, ClipNorm(1).only(groups="haed"))


def test_groups_that_are_added_later_need_names_too():
    module = model()
    optimizer = Modular(module["body"].named_parameters(), ClipNorm(1).only("1"))
    with pytest.raises(ValueError, match="has one without a name"):
        optimizer.add_param_group({"params": list(module["head"].parameters())})
    assert len(optimizer.param_groups) == 1


def test_scopes_of_names_are_pickled():
    module = model()
    optimizer = Modular(module, ClipNorm(0.1).only("head"))
    restored_module, restored = pickle.loads(pickle.dumps((module, optimizer)))
    assert scaled(restored, restored_module) == {"head.weight", "head.bias"}


def test_parameters_without_gradient_do_not_shift_the_scope():
    module = with_gradients(model())
    module["body"][0].weight.grad = None
    for param in module.parameters():
        param.data.zero_()
    Modular(module, Normalize(0.1).only("head.weight")).step()
    assert module["head"].weight.norm().item() == pytest.approx(0.1)
    assert module["body"][1].weight.norm().item() == pytest.approx(math.sqrt(6))


def test_a_gradient_that_no_update_was_made_of_yet_may_still_change():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Modular(
        [("first", first), ("second", second)], ClipNorm(0.5).only("first"), ClipValue(0.25, target="grad")
    )
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == (-0.5, -0.25)
    assert (first.grad.item(), second.grad.item()) == (0.25, 0.25)


class RowsAndColumns(Transform):
    """Its state can only be made for matrices."""

    def init_state(self, param, setting):
        return {"rows": torch.zeros(param.shape[0]), "columns": torch.zeros(param.shape[1])}

    def apply_tensors(self, updates, step):
        return updates


@pytest.mark.filterwarnings("ignore:no optimizer acts on bias")
def test_what_is_out_of_scope_is_never_shown_to_a_transform():
    module = with_gradients(nn.Linear(3, 3))
    optimizer = Modular(module, RowsAndColumns({}).only("weight"), Adam())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert "rows_and_columns/rows" in optimizer.state[module.weight]
    assert "rows_and_columns/rows" not in optimizer.state[module.bias]
    Modular(module, Chain(Muon(), target="update_difference").only("weight"))


def test_parameters_that_scopes_leave_to_no_optimizer_or_to_two_are_warned_of():
    module = model()
    with pytest.warns(UserWarning, match=r"no optimizer acts on body\.0\.weight and 2 more: its update"):
        Modular(module, Adam().only("head"))
    with pytest.warns(UserWarning, match=r"two optimizers act on head\.weight and 1 more: one after the other"):
        Modular(module, SGD(momentum=0.5).only("head"), Adam(), LR(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Modular(module, SGD().only("head"), Adam().without("head"))
    with pytest.warns(UserWarning, match=r"two optimizers act on body\.0\.weight and 4 more: one after the other"):
        Modular(module, SGD(), Adam())


def test_scopes_stay_with_the_names_of_the_optimizer_when_a_checkpoint_has_others():
    """A wrapper's prefix in the checkpoint would silently turn ``only`` and ``without`` around."""
    module = model()
    wrapped = nn.ModuleDict({"module": module})
    saved = Modular(wrapped, ClipNorm(0.1).only("module.head")).state_dict()
    assert saved["param_groups"][0]["param_names"][0].startswith("module.")
    optimizer = Modular(module, ClipNorm(0.1).only("head"))
    before = list(optimizer.param_groups[0]["param_names"])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == before
    assert scaled(optimizer, module) == {"head.weight", "head.bias"}

    turned = Modular(list(module.named_parameters())[::-1], SGD(0.1, 0.9))
    with pytest.raises(
        ValueError, match=r"the same parameters in another order: .*'param_names', 'body\.0\.weight' first"
    ):
        turned.load_state_dict(Modular(module, SGD(0.1, 0.9)).state_dict())


def test_only_numbered_parts_of_a_group_count_as_the_group():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [p], "name": "block"}, {"params": [q], "name": "block (bias)"}]
    optimizer = Modular(groups, ClipNorm(0.1).only(groups="block"), SGD(1.0))
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert torch.equal(q.data, torch.zeros(2))
    assert not torch.equal(p.data, torch.zeros(2))


@pytest.mark.parametrize(
    "clip",
    [
        lambda: ClipNorm(1).only("body").only("head"),
        lambda: ClipNorm(1).only(lambda p: False),
        lambda: ClipNorm(1).without("*"),
        lambda: Chain(ClipNorm(1).only("head"), name="outer").only("body"),
        lambda: Chain(ClipNorm(1), name="outer").without("*"),
    ],
)
def test_a_transform_without_parameters_is_named(clip):
    with pytest.warns(UserWarning, match=r"^'(outer/clip_norm|clip_norm|outer)' acts on no parameter: ") as caught:
        Modular(model(), clip(), SGD(0.1))
    assert len(caught) == 1


def test_a_function_of_a_scope_takes_the_parameter_alone():
    with pytest.raises(TypeError, match=r"call a function with a parameter alone, and .* takes other arguments"):
        ClipNorm(1).only(lambda name, p: p.ndim > 1)
    assert isinstance(ClipNorm(1).only(lambda p, least=2: p.ndim >= least, torch.is_floating_point), ClipNorm)
