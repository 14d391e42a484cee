"""What can be seen beside a release: computed from samples without noise, it is either absent or refused."""

import copy
import io
import pickle
import struct

import pytest
import torch
from per_sample.harness import Net, batch, grads, losses_of, small
from per_sample.layers import LAYERS
from torch import nn

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper, check_per_sample


def private(model, limit=1.0, noise_multiplier=1.0, **settings):
    given = {"noise_multiplier": noise_multiplier, "expected_batch_size": 1.0, **settings}
    return PrivateGradientClipper(model, ConstantFlatClipper(limit), **given)


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_hook_of_a_parameter_runs_before_the_release(name, memory):
    model, x = (make() for make in LAYERS[name])
    clipper = private(model, memory=memory)
    seen, nodes = [], []
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(seen.append)
            param.register_post_accumulate_grad_hook(seen.append)
            nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])  # accumulates the gradient
            nodes[-1].register_hook(lambda *found: seen.append(found))
            nodes[-1].register_prehook(lambda *found: seen.append(found))
    clipper.backward(losses_of(model(x)))
    assert seen == []
    assert all(grad is None for grad in grads(model))


def test_a_model_that_is_saved_within_a_step_holds_no_data():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clipper = private(model)
    losses = losses_of(model(torch.full((5, 3), 1234.5)))
    for _ in range(2):  # before and after backward
        file = io.BytesIO()
        torch.save(model, file)
        for data in (pickle.dumps(model), file.getvalue()):
            assert struct.pack("<f", 1234.5) not in data
        if not clipper.waits:
            clipper.backward(losses)
    assert clipper.waits
    assert all(vars(param) == {} for param in model.parameters())


def test_an_ordinary_backward_reaches_no_gradient():
    model = small()
    clipper = private(model)
    losses_of(model(batch())).mean().backward()
    assert grads(model) == [None] * 4
    with pytest.raises(RuntimeError, match="wait to be clipped"):
        torch.optim.SGD(model.parameters()).step()
    clipper.discard()


def test_a_gradient_that_nobody_released_is_refused_in_the_same_optimizer():
    model, head = small(), nn.Linear(2, 2).double()
    clipper = private(model)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1.0)
    before = copy.deepcopy((model.state_dict(), head.state_dict()))
    outputs = model(batch())
    clipper.backward(losses_of(outputs))
    head(outputs.detach()).sum().backward()
    clipper.pre_step()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(2, 2\) in the optimizer has a gradient that no"):
        optimizer.step()
    for module, old in zip((model, head), before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in module.state_dict().items())
    head.zero_grad()
    optimizer.step()
    other = private(head)  # then both are released
    clipper.pre_step()
    other.pre_step()
    optimizer.step()


class ByData(nn.Module):
    """Writes into a buffer without raising its version."""

    def __init__(self):
        super().__init__()
        self.inner = small()
        self.register_buffer("code", torch.tensor([float("nan"), 0.0, 0.0], dtype=torch.float64))
        self.is_written = True

    def forward(self, x):
        if self.is_written:
            self.code.data[1:].copy_(x.detach().mean(0)[1:])
        return self.inner(x)


def test_buffers_that_change_by_their_data_are_refused():
    model = ByData()
    clipper = private(model)
    with pytest.raises(RuntimeError, match="'code' has changed since the step began"):
        clipper.backward(losses_of(model(batch())))
    clipper.discard()
    model.is_written = False
    clipper.backward(losses_of(model(batch())))
    clipper.pre_step()


def test_a_frozen_table_that_is_rescaled_where_it_is_read_is_refused():
    held = {"table": nn.Embedding(6, 3, max_norm=0.1), "head": nn.Linear(3, 2)}
    model = Net(lambda m, index: m.head(m.table(index).mean(1)), **held)
    model.table.requires_grad_(False)
    clipper = private(model)
    losses = losses_of(model(torch.tensor([[0, 1], [1, 2]])))
    for call in (lambda: clipper.backward(losses), clipper.pre_step):
        with pytest.raises(RuntimeError, match=r"'table\.weight' has changed since the step began"):
            call()
    clipper.discard()
    with torch.no_grad():
        model.table.weight.mul_(0.5)  # between steps, as a moving average of another model
    model.table.max_norm = None
    clipper.backward(losses_of(model(torch.tensor([[0, 1], [1, 2]]))))
    clipper.pre_step()


@pytest.mark.parametrize("parts", [[(0, 0), (4, 8)], [(1, 4), (4, 8)]], ids=str)
def test_a_gradient_scaler_sees_the_release_only(parts):
    rows = torch.randn(8, 3)

    def trained(parts, larger):
        torch.manual_seed(0)
        model = small().float()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", growth_interval=2)
        clipper = private(model, 1e-20, 1e20, generator=torch.Generator().manual_seed(1))
        for start, stop in parts:
            clipper.backward(scaler.scale(losses_of(model(rows[start:stop] * larger))))
            clipper.pre_step()
            scaler.step(optimizer)
            scaler.update()
        return model.state_dict(), scaler.state_dict()

    (one, scale), (other, other_scale) = trained([(0, 4), (4, 8)], 1.0), trained(parts, 1e30)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert scale == other_scale
    assert scale["scale"] == 2**17  # it grew, and no step was skipped


def test_a_resumed_run_counts_on_and_draws_fresh_noise_whatever_the_seed():
    found, state = [], {"releases": {1.0: 3}}
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(30, 30)
        clipper = private(model)
        clipper.load_state_dict(state)
        before = torch.get_rng_state()
        clipper.pre_step()
        assert torch.equal(torch.get_rng_state(), before)
        assert clipper.releases == {1.0: 4}
        found.append(model.weight.grad)
    assert abs(torch.corrcoef(torch.stack([grad.flatten() for grad in found]))[0, 1]) < 0.2


@pytest.mark.parametrize(
    "weighed",
    [lambda losses: losses / losses.detach().sum(), lambda losses: losses / len(losses)],
    ids=["by other losses", "by the number of samples"],
)
def test_what_the_clipper_cannot_see_in_a_loss_is_found_by_the_check_that_the_page_names(weighed):
    model = small()
    clipper = private(model)
    clipper.backward(weighed(losses_of(model(batch()))))  # no gradient shows it
    clipper.detach()
    with pytest.raises(ValueError, match="or the loss of a sample depends on others"):
        check_per_sample(model, batch(), lambda model, x: weighed(losses_of(model(x))))
    check_per_sample(model, batch(), lambda model, x: losses_of(model(x)))
