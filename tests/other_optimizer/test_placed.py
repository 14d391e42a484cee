"""State of transforms beside that of another optimizer: loaders place it by the name of the parameter."""

import copy
import itertools

import pytest
import torch
from contract.training import assert_equal, assert_same_checkpoint, gradients, set_grads, through_file, values
from other_optimizer.test_before_step_optimizers import OPTIMIZERS
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from versions import TORCH

from torchzero_clip import AdaGC, AutoClip, ClipNorm, ClipNormByEMA, ClipValueByEMA, ClipValueGrowth, ZClip, before_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = ["a", "b", "c", "d"]
SHAPE = (4, 3)  # one shape, so that state of another parameter would fit
CHAINS = {
    "average": lambda: [ClipNormByEMA(0.5)],
    "each": lambda: [ClipNormByEMA(0.5), AdaGC(warmup_steps=2)],
    "values": lambda: [ClipValueGrowth(), ClipValueByEMA(0.7, ema_init="update")],
    "joint too": lambda: [ZClip(warmup_steps=2), ClipNormByEMA(0.5), AutoClip(50.0, window=3)],
    "some": lambda: [ClipNormByEMA(0.5).only("b", "d"), ClipNorm(1.0, dim="global")],
}
WAYS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
}


def options_of(way):
    if way == "flat" and TORCH < (2, 10):
        pytest.skip("torch.distributed.checkpoint of this torch cannot flatten state that is nested")
    return WAYS[way]


def model_of(initial, names=NAMES):
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(initial[name].clone()))
    return model


def made(kind, model, groups, chain):
    """An optimizer whose groups have these parameters, and a handle of its transforms."""
    cls, options = OPTIMIZERS[kind]
    params = [{"params": [getattr(model, name) for name in names]} for names in groups]
    optimizer = cls(params, **copy.deepcopy(options))
    return optimizer, before_step(optimizer, *CHAINS[chain](), model=model)


def train(optimizer, model, rows):
    for row in rows:
        for name, grad in row.items():
            getattr(model, name).grad = grad.clone()
        optimizer.step()
    optimizer.zero_grad()  # torch makes the state into which it loads only if there are no gradients


def rows_of(count, dtype=torch.float32, names=NAMES):
    grads = gradients([torch.zeros(SHAPE, dtype=dtype) for _ in names], count)
    return [dict(zip(names, row, strict=True)) for row in grads]


def start(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(SHAPE, generator=generator).to(dtype) for name in NAMES}


def own_state(optimizer, model):
    """What the transforms have stored of each parameter, by its name."""
    optimizer.state_dict()  # after a load, the portable form stands there until it is needed
    return {name: optimizer.state[param].get("before_step", {}) for name, param in model.named_parameters()}


GROUPS = {
    "another order": [["d", "b", "a", "c"]],
    "two groups": [["c", "a"], ["d", "b"]],
}
PLACES = [("nested", "another order"), ("flat", "another order"), ("flat", "two groups"), ("full", "another order")]
# torch cannot load an optimizer without state as a full checkpoint
LOADS = [(kind, *place) for kind in OPTIMIZERS for place in PLACES if place[0] != "full" or not kind.endswith("SGD")]
CASES = [(kind, chain, *place) for (kind, *place), chain in zip(LOADS, itertools.cycle(CHAINS), strict=False)]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("kind", "chain", "way", "groups"), CASES)
def test_state_goes_to_the_parameter_of_its_name(kind, chain, way, groups):
    rows, options = rows_of(9), options_of(way)
    model = model_of(start())
    optimizer, _ = made(kind, model, [NAMES], chain)
    train(optimizer, model, rows[:5])
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = model_of({name: param.detach() for name, param in model.named_parameters()})
    second, _ = made(kind, other, GROUPS[groups], chain)
    set_optimizer_state_dict(other, second, saved, options=options)
    expected, loaded = own_state(optimizer, model), own_state(second, other)
    assert any(expected.values())
    for name in NAMES:
        assert_same_checkpoint(loaded[name], expected[name])
    train(optimizer, model, rows[5:])
    train(second, other, rows[5:])
    for name in NAMES:  # joint norms add up in another order
        torch.testing.assert_close(getattr(other, name), getattr(model, name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chain", ["average", "values"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "fused SGD with momentum"])
def test_parts_of_a_pipeline_are_split_anew(kind, chain):
    """Two optimizers save flat into one checkpoint. A single one, and two others, load their parameters from it."""
    rows, options, initial = rows_of(8), options_of("flat"), start()
    whole, halfway = model_of(initial), {}
    optimizer, _ = made(kind, whole, [NAMES], chain)
    train(optimizer, whole, rows)
    saved = {}
    for names in (["a", "b"], ["c", "d"]):
        part = model_of(initial, names)
        of_part = before_optimizer(kind, part, chain)
        train(of_part, part, [{name: row[name] for name in names} for row in rows[:5]])
        halfway |= {name: param.detach() for name, param in part.named_parameters()}
        saved |= copy.deepcopy(get_optimizer_state_dict(part, of_part, options=options))
    for names in (["a"], ["d", "b", "c"], NAMES):
        part = model_of(halfway, names)
        of_part = before_optimizer(kind, part, chain)
        set_optimizer_state_dict(part, of_part, copy.deepcopy(saved), options=options)
        train(of_part, part, [{name: row[name] for name in names} for row in rows[5:]])
        for name in names:
            assert torch.equal(getattr(part, name), getattr(whole, name))


def before_optimizer(kind, part, chain):
    cls, options = OPTIMIZERS[kind]
    optimizer = cls(part.parameters(), **copy.deepcopy(options))
    before_step(optimizer, *CHAINS[chain]())
    return optimizer


def by_names(optimizer, state_dict):
    """The pre-hook of torch's documentation: state goes to the parameter that has the same name."""
    renumbered = copy.deepcopy(optimizer.state_dict())
    group, saved = renumbered["param_groups"][0], state_dict["param_groups"][0]
    group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    renumbered["state"] = {}
    for number, name in zip(group["params"], group["param_names"], strict=True):
        index = saved["params"][saved["param_names"].index(name)]
        if index in state_dict["state"]:
            renumbered["state"][number] = copy.deepcopy(state_dict["state"][index])
    return renumbered


@pytest.mark.parametrize("order", ["hook first", "transforms first", "hook first, no transforms yet"])
@pytest.mark.parametrize("shapes", ["one", "several"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "fused AdamW", "fused SGD"])
def test_a_hook_maps_the_parameters_by_their_names(kind, order, shapes):
    initial = start()
    if shapes == "several":  # before the hook, the state fits no parameter
        initial = {name: torch.randn(2 + i, 3) for i, name in enumerate(NAMES)}
    rows = [dict(zip(NAMES, row, strict=True)) for row in gradients([initial[name] for name in NAMES], 7)]
    cls, options = OPTIMIZERS[kind]
    model = model_of(initial)
    optimizer = cls(model.named_parameters(), **options)
    before_step(optimizer, ClipNormByEMA(0.5))
    train(optimizer, model, rows[:4])
    saved = through_file(optimizer.state_dict())
    other = model_of({name: param.detach() for name, param in model.named_parameters()}, NAMES[::-1])
    second = cls(other.named_parameters(), **options)
    if order == "transforms first":
        before_step(second, ClipNormByEMA(0.5))
    second.register_load_state_dict_pre_hook(by_names)
    if order == "hook first":
        before_step(second, ClipNormByEMA(0.5))
    second.load_state_dict(saved)
    if order.endswith("yet"):
        before_step(second, ClipNormByEMA(0.5))
    train(optimizer, model, rows[4:])
    train(second, other, rows[4:])
    for name in NAMES:
        assert torch.equal(getattr(other, name), getattr(model, name))


def test_a_load_that_fails_after_a_later_hook_changes_nothing():
    model = model_of(start())
    optimizer, handle = made("AdamW", model, [NAMES], "each")
    train(optimizer, model, rows_of(3))

    def spoil(optimizer, state_dict):
        saved = copy.deepcopy(state_dict)
        saved["state"][1]["before_step"]["clip_norm_by_ema/ema"]["step"] = torch.zeros(7)
        return saved

    optimizer.register_load_state_dict_pre_hook(spoil)
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 77.0
    settings = copy.deepcopy(handle.param_groups[0]["beta"])
    with pytest.raises(ValueError, match=r"is a tensor of shape \(7,\)"):
        optimizer.load_state_dict(saved)
    assert_same_checkpoint(optimizer.state_dict(), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert handle.param_groups[0]["beta"] == settings


def test_a_flat_checkpoint_grows_with_the_number_of_parameters_only():
    def size(count):
        model = nn.Module()
        for i in range(count):
            model.register_parameter(f"p{i}", nn.Parameter(torch.ones(2)))
        optimizer = torch.optim.AdamW(model.parameters())
        before_step(optimizer, AdaGC(), ClipValueByEMA())
        for param in model.parameters():
            param.grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()
        saved = get_optimizer_state_dict(model, optimizer, options=options_of("flat"))
        return len(torch.utils._pytree.tree_leaves(saved))

    assert (size(40) - size(20)) == (size(60) - size(40)) == 20 * (size(2) - size(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_load_before_the_call_rounds_nothing(kind, dtype):
    """As Hugging Face loads. torch casts state to the dtype of the parameter, or to float32: 257 would become 256."""
    if kind == "Muon" and dtype == torch.float64:
        pytest.skip("torch's Muon computes in bfloat16 anyway")
    model = model_of(start(dtype))
    optimizer, _ = made(kind, model, [NAMES], "joint too")
    train(optimizer, model, rows_of(4, dtype))
    for param in model.parameters():
        of_param = optimizer.state[param]["before_step"]
        of_param["clip_norm_by_ema/prev"].fill_(257 + 2**-40)
        of_param["clip_norm_by_ema/ema"].fill_(1 / 3)
    saved, expected = through_file(optimizer.state_dict()), copy.deepcopy(own_state(optimizer, model))
    other = model_of(start(dtype))
    cls, options = OPTIMIZERS[kind]
    second = cls(other.parameters(), **copy.deepcopy(options))
    second.load_state_dict(saved)
    before_step(second, *CHAINS["joint too"](), model=other)
    for name, of_param in own_state(second, other).items():
        assert_same_checkpoint(of_param, expected[name])


class Casts(torch.optim.AdamW):
    """Loads as optimizers of some packages do: it runs no hooks, and casts everything to the dtype of the parameter."""

    def load_state_dict(self, state_dict):
        def cast(value, param):
            if isinstance(value, dict):
                return {key: cast(inner, param) for key, inner in value.items()}
            if isinstance(value, torch.Tensor) and value.dtype != torch.uint8:
                return value.to(param.dtype)
            return value

        saved = copy.deepcopy(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        state = {params[i]: cast(of_param, params[i]) for i, of_param in saved["state"].items()}
        groups = zip(saved["param_groups"], self.param_groups, strict=True)
        self.__setstate__({"state": state, "param_groups": [{**new, "params": old["params"]} for new, old in groups]})


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_an_optimizer_that_casts_everything_and_runs_no_hooks_resumes(dtype, early):
    def run(model):
        optimizer = Casts(model.parameters())
        return optimizer, (None if early else before_step(optimizer, *CHAINS["joint too"]()))

    rows = rows_of(8, dtype)
    model = model_of(start(dtype))
    optimizer = Casts(model.parameters())
    before_step(optimizer, *CHAINS["joint too"]())
    train(optimizer, model, rows[:5])
    saved = through_file(optimizer.state_dict())
    expected = copy.deepcopy(own_state(optimizer, model))
    other = model_of({name: param.detach() for name, param in model.named_parameters()})
    second, handle = run(other)
    second.load_state_dict(saved)
    handle = handle or before_step(second, *CHAINS["joint too"]())
    train(optimizer, model, rows[5:6])
    train(second, other, rows[5:6])
    assert expected.keys() == own_state(second, other).keys()
    for name in NAMES:
        assert_same_checkpoint(own_state(second, other)[name], own_state(optimizer, model)[name])


def test_state_appears_after_the_first_step_of_its_parameter():
    """An optimizer such as Adam makes its own state if that of a parameter is empty."""
    model = model_of(start())
    optimizer, _ = made("AdamW", model, [NAMES], "each")
    model.c.requires_grad_(False)
    rows = rows_of(4)
    assert not optimizer.state
    train(optimizer, model, [{name: row[name] for name in "abd"} for row in rows[:2]])
    assert {name for name, of_param in own_state(optimizer, model).items() if of_param} == set("abd")
    model.c.requires_grad_(True)
    train(optimizer, model, rows[2:])
    assert all(own_state(optimizer, model).values())
    assert all(set(optimizer.state[p]) > {"before_step", "exp_avg"} for p in model.parameters())


class Late(torch.optim.Optimizer):
    """Makes its state in the second step in which a parameter has a gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.seen = {}

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.seen[param] = self.seen.get(param, 0) + 1
            if self.seen[param] > 1:
                state = self.state[param]
                if len(state) == 0:
                    state["sum"] = torch.zeros_like(param)
                state["sum"] += param.grad
            param -= 0.1 * param.grad


def test_an_optimizer_may_make_its_state_later():
    rows = rows_of(5)
    model = model_of(start())
    optimizer = Late(model.parameters())
    before_step(optimizer, ClipNormByEMA())
    train(optimizer, model, rows[:1])
    assert [set(of_param) for of_param in optimizer.state.values()] == [{"before_step"}] * 4
    train(optimizer, model, rows[1:])
    assert [set(of_param) for of_param in optimizer.state.values()] == [{"sum", "before_step"}] * 4


def test_an_optimizer_without_state_saves_an_entry_of_each_trainable_parameter():
    model = model_of(start())
    optimizer, _ = made("SGD", model, [NAMES], "some")
    model.c.requires_grad_(False)
    train(optimizer, model, [{name: row[name] for name in "abd"} for row in rows_of(2)])
    assert [bool(of_param) for of_param in own_state(optimizer, model).values()] == [False, True, False, True]
    state_dict = optimizer.state_dict()
    assert state_dict["state"][0] == {}
    assert [i for i, state in state_dict["state"].items() if state] == [1, 3]
    plain = torch.optim.SGD(model_of(start()).parameters())
    plain.load_state_dict(state_dict)  # without transforms
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.ones(SHAPE)
    with pytest.warns(UserWarning, match="This one has none: call before_step"):
        plain.step()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("how", ["replaced", "cleared", "deleted"])
def test_who_resets_the_state_of_the_optimizer_resets_that_of_the_transforms(kind, how):
    rows = rows_of(6)
    model = model_of(start())
    optimizer, _ = made(kind, model, [NAMES], "average")
    train(optimizer, model, rows[:3])
    if how == "replaced":
        optimizer.state = type(optimizer.state)(dict)
    elif how == "cleared":
        optimizer.state.clear()
    else:
        for param in model.parameters():
            del optimizer.state[param]
    fresh = model_of({name: param.detach() for name, param in model.named_parameters()})
    second, _ = made(kind, fresh, [NAMES], "average")
    train(optimizer, model, rows[3:])
    train(second, fresh, rows[3:])
    assert_equal(model.parameters(), values(fresh.parameters()))
    assert_same_checkpoint(own_state(optimizer, model), own_state(second, fresh))


@pytest.mark.parametrize("shape", [SHAPE, (6, 3)])
def test_state_that_is_moved_by_hand_goes_along_if_it_fits(shape):
    """As implementations of Gaussian splatting do, which add and remove rows."""
    model = model_of(start())
    optimizer, _ = made("AdamW", model, [NAMES], "average")
    train(optimizer, model, rows_of(3))
    old, new = model.b, nn.Parameter(torch.ones(shape))
    state = optimizer.state.pop(old)
    expected = copy.deepcopy(state["before_step"])
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros(shape), torch.zeros(shape)
    optimizer.state[new] = state
    optimizer.param_groups[0]["params"][1] = model.b = new
    before = optimizer.state_dict()["state"][1].get("before_step")
    if shape == SHAPE:
        assert_same_checkpoint({key: value["step"] for key, value in before.items()}, expected)
    else:
        assert not any(value["step"].any() for value in before.values())  # that of a parameter before its first step
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = optimizer.state[new]["before_step"]
    assert moved["clip_norm_by_ema/ema"].shape == shape
    if shape != SHAPE:
        torch.testing.assert_close(moved["clip_norm_by_ema/ema"], torch.full(shape, 0.5))


def test_tensors_that_a_trainer_replaces_by_equal_ones_stay():
    """As Lightning moves the state of an optimizer to another device."""
    rows = rows_of(6)
    runs = [model_of(start()) for _ in range(2)]
    optimizers = [made("AdamW", model, [NAMES], "each")[0] for model in runs]
    for k, row in enumerate(rows):
        for model, optimizer in zip(runs, optimizers, strict=True):
            train(optimizer, model, [row])
        if k == 2:
            states = optimizers[1].state
            for param in states:
                states[param] = torch.utils._pytree.tree_map(torch.clone, states[param])
    assert_equal(runs[0].parameters(), values(runs[1].parameters()))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_remove_leaves_nothing(kind):
    model = model_of(start())
    optimizer, handle = made(kind, model, [NAMES], "each")
    train(optimizer, model, rows_of(2))
    handle.remove()
    assert "before_step" not in str(optimizer.state_dict())
    assert (kind == "SGD") == (not optimizer.state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_checkpoint_trains_without_transforms(kind):
    model = model_of(start())
    optimizer, _ = made(kind, model, [NAMES], "each")
    rows = rows_of(5)
    train(optimizer, model, rows[:3])
    bare = model_of({name: param.detach() for name, param in model.named_parameters()})
    twin = model_of({name: param.detach() for name, param in model.named_parameters()})
    cls, options = OPTIMIZERS[kind]
    one, other = (cls(m.parameters(), **copy.deepcopy(options)) for m in (bare, twin))
    saved = through_file(optimizer.state_dict())
    one.load_state_dict(copy.deepcopy(saved))  # torch shares the tensors with what it loads
    for of_param in saved["state"].values():
        of_param.pop("before_step")
    for group in saved["param_groups"]:
        group.pop("before_step")
    other.load_state_dict(saved)
    with pytest.warns(UserWarning, match="This one has none"):
        train(one, bare, rows[3:])
    train(other, twin, rows[3:])
    assert_equal(bare.parameters(), values(twin.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_the_call_may_come_after_the_first_step_and_before_a_load(way):
    rows, model = rows_of(7), model_of(start())
    optimizer, _ = made("AdamW", model, [NAMES], "joint too")
    train(optimizer, model, rows[:5])
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options_of(way)))
    other = model_of({name: param.detach() for name, param in model.named_parameters()})
    second = torch.optim.AdamW(other.parameters())
    train(second, other, rows[:1])
    before_step(second, *CHAINS["joint too"]())
    set_optimizer_state_dict(other, second, saved, options=options_of(way))
    for name, of_param in own_state(second, other).items():
        assert_same_checkpoint(of_param, own_state(optimizer, model)[name])


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_part_that_was_dropped_is_missed(kind):
    rows, model = rows_of(3), model_of(start())
    optimizer, _ = made(kind, model, [NAMES], "each")
    train(optimizer, model, rows)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options_of("flat")))
    other = model_of(start())
    second, _ = made(kind, other, [NAMES], "each")
    # with gradients, torch makes no state into which it could load
    set_grads(list(other.parameters()), list(rows[0].values()))
    with pytest.raises(ValueError, match=r"call before_step before the first step .*, set gradients to None"):
        set_optimizer_state_dict(other, second, saved, options=options_of("flat"))


@pytest.mark.parametrize("chain", CHAINS)
def test_a_load_forgets_what_the_checkpoint_does_not_have(chain):
    """As finders of a learning rate do: they train, and load what they saved before the first step."""
    rows = rows_of(8)
    model = model_of(start())
    optimizer, _ = made("AdamW", model, [NAMES], chain)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, model, rows[:4])
    optimizer.load_state_dict(saved)
    fresh = model_of({name: param.detach() for name, param in model.named_parameters()})
    second, _ = made("AdamW", fresh, [NAMES], chain)
    assert not any(own_state(optimizer, model).values())
    train(optimizer, model, rows[4:])
    train(second, fresh, rows[4:])
    assert_equal(model.parameters(), values(fresh.parameters()))
    assert_same_checkpoint(optimizer.state_dict(), second.state_dict())


@pytest.mark.parametrize("saved_by_name", [False, True])
@pytest.mark.parametrize("loads_by_name", [False, True])
def test_names_of_the_checkpoint_are_no_settings(saved_by_name, loads_by_name):
    """What describes the optimizer, such as the names of parameters, stays that of the optimizer that loads."""

    def made(model, by_name):
        optimizer = torch.optim.AdamW(model.parameters())
        return optimizer, before_step(optimizer, ClipNormByEMA(), model=model if by_name else None)

    rows, model, other = rows_of(3), model_of(start()), model_of(start())
    optimizer, _ = made(model, saved_by_name)
    train(optimizer, model, rows[:1])
    settings = optimizer.state_dict()["param_groups"][0]["before_step"]["settings"]
    assert settings.keys() == {"beta", "eps", "max_ema_growth", "chain"}
    second, handle = made(other, loads_by_name)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["before_step"]["settings"] |= {"param_names": NAMES, "name": "body", "params": [7]}
    second.load_state_dict(saved)
    assert handle.param_groups[0]["params"] == list(other.parameters())
    assert handle.param_groups[0].get("param_names") == (NAMES if loads_by_name else None)
    assert "name" not in handle.param_groups[0]
    second.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    train(second, other, rows[1:])
    assert len(second.state_dict()["param_groups"]) == len(handle.param_groups) == 2


class OfLists(torch.optim.SGD):
    """Its state of a parameter is a list."""

    def step(self, closure=None):
        super().step(closure)
        self.state |= {param: [param.grad.norm()] for param in self.param_groups[0]["params"]}


def test_an_optimizer_whose_state_is_no_dict_steps_and_cannot_be_saved_with_state_of_transforms():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = OfLists([weight], lr=1.0)
    handle = before_step(optimizer, ClipNormByEMA(0.5, ema_init="update"))
    for size in (1.0, 4.0):
        weight.grad = torch.tensor([0.0, size])
        optimizer.step()
    assert weight.tolist() == [0.0, -2.5]
    with pytest.raises(TypeError, match=r"OfLists has list as state of a parameter, not a dict.*handle.remove\(\)"):
        optimizer.state_dict()
    handle.remove()
    assert optimizer.state_dict()["state"] == {0: [1.5]}
