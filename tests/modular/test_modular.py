"""The chain as an optimizer: keys, overrides, the learning rate, targets, state of the chain, repr."""

import copy
import pickle

import pytest
import torch
from contract.entries import LimitRMS, Mul, TrackJointNorm
from contract.training import gradients, parameters, train
from torch import nn
from versions import needs_grad_dtype

from torchzero_clip import LR, SGD, Adam, AdamW, Chain, ClipNorm, ClipValue, Modular, WeightDecay
from torchzero_clip.core.transform import snake_case


def stepped(chain, grad, start=0.0):
    param = nn.Parameter(torch.full((len(grad),), start))
    param.grad = torch.tensor(grad)
    optimizer = Modular([param], chain)
    optimizer.step()
    return param, optimizer


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize(
    ("make", "lr"),
    [
        (lambda: ClipNorm(1), 1.0),
        (lambda: Adam(), 1e-3),
        (lambda: SGD(), 1e-3),
        (lambda: [Adam(), SGD()], 1e-3),
        (lambda: Adam(0.5), 0.5),
        (lambda: [Adam(), SGD(0.25)], 0.25),
        (lambda: [LR(0.125), Adam()], 0.125),
        (lambda: Chain(LR(0.125), target="update_difference"), 0.125),
    ],
)
def test_there_is_exactly_one_learning_rate(make, lr):
    optimizer = Modular([nn.Parameter(torch.zeros(1))], make())
    assert optimizer.param_groups[0]["lr"] == lr
    assert sum("lr" in key for key in optimizer.defaults) == 1


@pytest.mark.filterwarnings("ignore:two optimizers act on")
def test_default_learning_rates_that_differ_need_lr():
    class Slow(SGD):
        default_lr = 0.5

    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"different default learning rates \[0.001, 0.5\]: add LR"):
        Modular([weight], Adam(), Slow())
    assert Modular([weight], Adam(), Slow(), LR(0.1)).param_groups[0]["lr"] == 0.1


def test_lr_scales_where_it_stands():
    assert stepped([LR(0.5), ClipNorm(1)], [3.0, 4.0])[0].tolist() == pytest.approx([-0.6, -0.8])
    assert stepped([ClipNorm(1), LR(0.5)], [3.0, 4.0])[0].tolist() == pytest.approx([-0.3, -0.4])


def test_the_first_owner_of_a_key_has_it_bare():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], ClipNorm(1), Adam(), ClipNorm(2), ClipNorm(3))
    assert list(optimizer.transforms) == ["clip_norm", "adam", "clip_norm_2", "clip_norm_3", "lr"]
    group = optimizer.param_groups[0]
    assert (group["max_norm"], group["clip_norm_2/max_norm"], group["clip_norm_3/max_norm"]) == (1, 2, 3)
    optimizer.add_param_group(
        {"params": nn.Parameter(torch.zeros(1)), "clip_norm/max_norm": 7, "clip_norm_2/max_norm": 8}
    )
    group = optimizer.param_groups[1]
    assert (group["max_norm"], group["clip_norm_2/max_norm"], group["clip_norm_3/max_norm"]) == (7, 8, 3)
    assert "clip_norm/max_norm" not in group


def test_one_transform_may_serve_twice_and_in_several_optimizers():
    clip = ClipNorm(1.0)
    param, _ = stepped([clip, Mul(3.0), clip], [3.0, 4.0])
    assert param.tolist() == pytest.approx([-0.6, -0.8])
    assert stepped(clip, [0.0, 2.0])[0].tolist() == [0, -1]
    assert pickle.loads(pickle.dumps(clip)).defaults == clip.defaults


def test_settings_can_be_changed_between_steps():
    param, optimizer = stepped(ClipNorm(1.0), [3.0, 4.0])
    optimizer.param_groups[0]["max_norm"] = 2.0
    param.data.zero_()
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert param.tolist() == pytest.approx([-1.2, -1.6])


def test_overrides_split_a_group_in_the_order_of_first_parameters():
    params = parameters()
    clip = ClipNorm(1.0).set_param_groups(
        [{"params": params[1], "max_norm": 0.1}, {"params": params[3:], "max_norm": 0.3}]
    )
    value = ClipValue(1.0).set_param_groups([{"params": params[1:3], "value": 0.5}])
    optimizer = Modular([{"params": params, "max_norm": 9.0}], clip, value)
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [[id(p)] for p in params]
    assert [(g["max_norm"], g["value"]) for g in optimizer.param_groups] == [
        (9.0, 1.0),
        (0.1, 0.5),
        (9.0, 0.5),
        (0.3, 1.0),
    ]


def test_overrides_keep_names_and_reach_later_groups():
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    chain = AdamW().set_param_groups([{"params": [model.bias, head.bias], "weight_decay": 0.0, "betas": (0.5, 0.5)}])
    optimizer = Modular(model, ClipNorm(1), chain)
    optimizer.add_param_group({"params": [(f"head.{name}", p) for name, p in head.named_parameters()]})
    assert [g["param_names"] for g in optimizer.param_groups] == [["weight"], ["bias"], ["head.weight"], ["head.bias"]]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.0, 0.01, 0.0]
    assert [g["betas"] for g in optimizer.param_groups] == [(0.9, 0.999), (0.5, 0.5)] * 2


def test_plain_chains_and_lists_are_spliced_and_units_are_not():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], [Chain(ClipNorm(1), [AdamW()])], Chain(ClipNorm(2), target="update_difference"))
    assert list(optimizer.transforms) == ["clip_norm", "adam", "weight_decay", "chain", "lr"]
    assert optimizer.param_groups[0]["chain/clip_norm/max_norm"] == 2


def test_a_unit_passes_on_what_its_transforms_removed():
    unit = Chain(Mul(2.0), ClipValue(5.0), target="update_difference")
    assert stepped(unit, [3.0, 1.0])[0].tolist() == [-(3 - 5), -(1 - 2)]


def test_a_unit_keeps_its_state_under_its_name():
    param, optimizer = stepped(Chain(SGD(momentum=0.5), TrackJointNorm(), target="update_difference"), [3.0, 4.0])
    assert list(optimizer.state[param]) == ["chain/sgd/momentum_buffer"]
    assert optimizer.param_groups[0]["chain/track_joint_norm/average"].item() == pytest.approx(2.5)


def test_state_of_the_chain_is_shown_by_every_group_as_plain_scalars():
    params = parameters()
    optimizer = Modular([{"params": params[:1]}, {"params": params[1:]}], TrackJointNorm())
    train(optimizer, params, gradients(params, 1))
    average = optimizer.param_groups[0]["track_joint_norm/average"]
    joint = torch.cat([g.flatten() for g in gradients(params, 1)[0]]).norm().item()
    assert average.item() == pytest.approx(joint / 2, rel=1e-6)
    assert optimizer.param_groups[1]["track_joint_norm/average"] is average
    assert not optimizer.state
    twin = Modular([{"params": params[:1]}, {"params": params[1:]}], TrackJointNorm())
    twin.load_state_dict(optimizer.state_dict())
    loaded = twin.param_groups[0]["track_joint_norm/average"]
    assert loaded.item() == average.item()
    assert loaded.dtype == torch.float64
    assert loaded.data_ptr() != average.data_ptr()


def test_target_grad_reaches_the_update_only_if_nothing_made_one():
    param, _ = stepped([Mul(2.0), ClipNorm(1.0, target="grad")], [3.0, 4.0])
    assert param.tolist() == [-6, -8]
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])
    param, _ = stepped([ClipNorm(1.0, target="grad"), Mul(2.0)], [3.0, 4.0])
    assert param.tolist() == pytest.approx([-1.2, -1.6])


def test_target_grad_after_a_reader_that_passes_gradients_on():
    param, _ = stepped([SGD(1.0), ClipNorm(1.0, target="grad")], [3.0, 4.0])
    assert param.tolist() == [-3, -4]
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])


def test_target_closure_acts_before_the_first_transform_in_chain_order():
    param = nn.Parameter(torch.zeros(2))

    def closure():
        param.grad = torch.tensor([3.0, 4.0])
        return 0.0

    optimizer = Modular([param], Mul(2.0), ClipNorm(1.0, target="closure"), Mul(5.0, target="closure"))
    assert optimizer.step(closure) == 0.0
    assert param.tolist() == pytest.approx([-6, -8])
    assert param.grad.tolist() == pytest.approx([3, 4])


def test_targets_on_parameters():
    param, _ = stepped([ClipNorm(1.0, target="params_direct"), Mul(2.0)], [3.0, 4.0], start=1.0)
    assert param.tolist() == pytest.approx([0.5**0.5 - 6, 0.5**0.5 - 8])
    param, _ = stepped([Mul(2.0), ClipNorm(1.0, target="params_difference")], [3.0, 4.0], start=1.0)
    assert param.tolist() == pytest.approx([0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize("reason", ["grad is None", "frozen"])
def test_metrics_are_of_the_last_step_that_did_something(reason):
    param, optimizer = stepped(ClipNorm(1.0), [3.0, 4.0])
    if reason == "frozen":
        param.requires_grad_(False)
    else:
        param.grad = None
    optimizer.step()
    assert optimizer.metrics()["clip_norm/norm"].item() == 5


def test_repr_reads_like_the_code_that_made_it():
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))]
    optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW(lr=3e-4, weight_decay=0.1), maximize=True)
    assert repr(optimizer) == (
        "Modular(\n    <2 tensors, 9 elements>,\n    ClipNorm(1, dim='global'),\n    AdamW(lr=0.0003, "
        "weight_decay=0.1),\n    maximize=True,\n)"
    )
    groups = [{"params": params[:1]}, {"params": params[1:], "max_norm": 0.5}]
    assert repr(Modular(groups, ClipNorm(1), LR(0.1))) == (
        "Modular(\n    [<1 tensors, 6 elements>, {'params': <1 tensors, 3 elements>, 'max_norm': 0.5}],\n"
        "    ClipNorm(1),\n    LR(0.1),\n)"
    )


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (ClipNorm(1, "mad", (0, 1), True, 3), "ClipNorm(1, ord='mad', dim=(0, 1), inverse_dims=True, min_size=3)"),
        (ClipNorm(1.0, target="grad"), "ClipNorm(1.0, target='grad')"),
        (Adam(amsgrad=True, state_dtype=torch.float32), "Adam(amsgrad=True, state_dtype=torch.float32)"),
        (Adam(lr=torch.tensor(0.5)), "Adam(lr=tensor(0.5000))"),
        (SGD(0.1, 0.9, nesterov=True), "SGD(lr=0.1, momentum=0.9, nesterov=True)"),
        (AdamW(0.1), "AdamW(lr=0.1)"),
        (AdamW(eps=0.5, weight_decay=0.1).only("a"), "AdamW(eps=0.5, weight_decay=0.1).only('a')"),
        (Chain(ClipValue(1), target="grad"), "Chain(ClipValue(1), target='grad')"),
        (LimitRMS(0.5), "LimitRMS(0.5)"),
    ],
)  # fmt: skip
def test_repr_of_transforms(transform, expected):
    assert repr(transform) == expected


def test_repr_shows_no_number_that_no_group_uses():
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))]
    unit = Chain(ClipValue(5), target="update_difference")
    optimizer = Modular(params, ClipNorm(1), [unit, AdamW(0.1)], ClipNorm(2))
    for key, value in (
        ("max_norm", 0.5),
        ("value", 4),
        ("lr", 0.01),
        ("weight_decay", 0.3),
        ("clip_norm_2/max_norm", 7),
    ):
        optimizer.param_groups[0][key] = value
    unit_repr = "Chain(ClipValue(4), target='update_difference')"
    assert repr(optimizer) == (
        f"Modular(\n    <2 tensors, 9 elements>,\n    ClipNorm(0.5),\n    {unit_repr},\n"
        "    AdamW(lr=0.01, weight_decay=0.3),\n    ClipNorm(7),\n)"
    )
    groups = [{"params": params[:1], "max_norm": 3}, {"params": params[1:], "max_norm": 4}]
    assert repr(Modular(groups, ClipNorm(1), Adam())) == (
        "Modular(\n    [<1 tensors, 6 elements>, {'params': <1 tensors, 3 elements>, 'max_norm': 4}],\n"
        "    ClipNorm(3),\n    Adam(),\n)"
    )


def test_names_in_snake_case():
    names = {
        "ClipNorm": "clip_norm",
        "ClipNormByEMA": "clip_norm_by_ema",
        "LR": "lr",
        "SGD": "sgd",
        "LimitRMS": "limit_rms",
    }
    assert {name: snake_case(name) for name in names} == names


def test_checkpoint_order_of_overrides_is_stable_under_deepcopy():
    params = parameters()
    clip = ClipNorm(1.0).set_param_groups([{"params": params[2], "max_norm": 0.1}])
    optimizer = Modular(params, clip, WeightDecay(0.1))
    twin = copy.deepcopy(optimizer)
    assert [len(g["params"]) for g in twin.param_groups] == [3, 1]
    twin.load_state_dict(optimizer.state_dict())
    added = nn.Parameter(torch.zeros(1))
    twin.add_param_group({"params": added})
    assert len(optimizer.param_groups) == 2


def test_overrides_inside_a_unit_reach_its_groups():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    override = [{"params": [("second", second)], "max_norm": 0.1}]
    for unit in (
        Chain(ClipNorm(1.0), target="update_difference").set_param_groups(override),
        Chain(ClipNorm(1.0).set_param_groups(override), target="grad"),
    ):
        assert [g["max_norm"] for g in Modular([first, second], unit).param_groups] == [1.0, 0.1]


def test_overrides_of_a_chain_add_to_those_of_its_transforms_or_change_nothing():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1.0).set_param_groups([{"params": [second], "max_norm": 0.1}])
    chain = Chain(clip, Adam()).set_param_groups([{"params": [first], "eps": 1e-3}])
    assert [(g["max_norm"], g["eps"]) for g in Modular([first, second], chain).param_groups] == [(1, 1e-3), (0.1, 1e-8)]
    with pytest.raises(ValueError, match="eps must be >= 0"):
        chain.set_param_groups([{"params": [first], "max_norm": 7.0, "eps": -1.0}])
    assert [g["max_norm"] for g in Modular([first, second], chain).param_groups] == [1, 0.1]


def test_empty_groups_stay_where_they_are():
    weight = nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1.0).set_param_groups([{"params": weight, "max_norm": 0.1}])
    optimizer = Modular([{"params": []}, {"params": [weight]}], clip)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    with pytest.raises(TypeError, match="ordered collections"):
        Modular([{"params": {weight}}], clip)


def test_the_learning_rate_of_an_optimizer_inside_a_unit_counts():
    weight = nn.Parameter(torch.zeros(1))
    unit = Chain(Adam(lr=0.5), ClipValue(0.1), target="update_difference")
    assert Modular([weight], unit).param_groups[0]["lr"] == 0.5
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(1,\) has several learning rates, those of Adam\(lr=0.5"
    ):
        Modular([weight], unit, SGD(0.1))


@pytest.mark.parametrize("unit", [False, True])
def test_target_grad_inside_a_unit_leaves_earlier_updates_alone(unit):
    scaled = Mul(2.0, target="grad")
    middle = Chain(scaled, target="params_direct") if unit else scaled
    assert stepped([SGD(1.0), middle], [3.0, 4.0])[0].tolist() == [-3, -4]
    param, _ = stepped([ClipNorm(1.0), middle, SGD(1.0)], [3.0, 4.0])
    assert param.tolist() == pytest.approx([-0.6, -0.8])
    assert param.grad.tolist() == [6, 8]


def test_missing_state_inside_a_unit_is_found():
    param, optimizer = stepped(Chain(Adam(), target="update_difference"), [3.0, 4.0])
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["chain/adam/exp_avg"]
    with pytest.raises(ValueError, match="missing: 'chain/adam/exp_avg'"):
        Modular([param], Chain(Adam(), target="update_difference")).load_state_dict(saved)


def test_a_parameter_without_state_loads():
    _, optimizer = stepped(Adam(), [3.0, 4.0])
    saved = optimizer.state_dict()
    saved["state"] = {0: {}}
    optimizer.load_state_dict(saved)
    assert not any(optimizer.state.values())


def test_optimizers_share_no_tensor_settings():
    clip = SGD(torch.tensor(0.5))
    first, second = stepped(clip, [1.0])[1], stepped(clip, [1.0])[1]
    first.param_groups[0]["lr"].fill_(9.0)
    first.add_param_group({"params": nn.Parameter(torch.zeros(1))})
    assert [g["lr"].item() for g in (second.param_groups[0], first.param_groups[1])] == [0.5, 0.5]


def test_lists_and_numpy_floats_become_what_checkpoints_can_hold():
    numpy = pytest.importorskip("numpy")
    weight = nn.Parameter(torch.zeros(1))
    groups = [{"params": [weight], "eps": numpy.float64(0.5)}]
    optimizer = Modular(groups, ClipNorm(numpy.float64(1)), Adam(betas=[0.8, 0.9]))
    group = optimizer.param_groups[0]
    assert (type(group["max_norm"]), type(group["eps"]), group["betas"]) == (float, float, (0.8, 0.9))


def test_a_step_leaves_nothing_in_the_transforms():
    clip = ClipNorm(1.0)
    stepped(clip, [3.0, 4.0])
    assert not hasattr(clip, "metrics")
    assert not hasattr(clip, "global_state")


def test_sgd_keeps_no_reference_to_grad():
    param, optimizer = stepped(SGD(1.0, 0.5), [3.0, 4.0])
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.state[param]["sgd/momentum_buffer"].tolist() == [3, 4]


@needs_grad_dtype
def test_gradients_wider_than_their_parameter_resume():
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.ones(2)
    optimizer = Modular([param], ClipNorm(1.0), SGD(0.1, 0.9), WeightDecay(0.1))
    optimizer.step()
    resumed = Modular([param], ClipNorm(1.0), SGD(0.1, 0.9), WeightDecay(0.1))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[param]["sgd/momentum_buffer"].dtype == torch.bfloat16


class Returns(Mul):
    def __init__(self, function):
        super().__init__(1.0)
        self.function = function

    def apply_tensors(self, updates, step):
        return [self.function(update, state) for update, state in zip(updates, step.states, strict=True)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensor, state: None, "returned NoneType instead of a tensor"),
        (lambda tensor, state: tensor.sum(), r"shape \(\) of torch.float32 for one of shape \(2,\)"),
        (lambda tensor, state: tensor.double(), r"of torch.float64 for one"),
        (lambda tensor, state: state.setdefault("seen", tensor), r"keeps state \['seen'\] that its init_state"),
    ],
)
def test_slips_of_an_author_are_named(function, message):
    with pytest.raises(RuntimeError, match=message):
        stepped(Returns(function), [3.0, 4.0])


@pytest.mark.parametrize("key", ["params", "a.b"])
def test_names_that_a_setting_cannot_have(key):
    class Bad(ClipNorm):
        def __init__(self):
            TrackJointNorm.__bases__[0].__init__(self, {key: 1.0})

    with pytest.raises(ValueError, match="cannot be the name of a setting"):
        Bad()
