"""One row of input that stands for all samples."""

import copy

import pytest
import torch
from per_sample.harness import assert_close, assert_matches_loop, loop, losses_of, norms_of
from torch import nn

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper


class Uses(nn.Module):
    """Uses the output of a layer whose input is one row for all samples."""

    def __init__(self, use, layer=None, *, frozen=False):
        super().__init__()
        self.layer, self.head, self.use = layer or nn.Linear(3, 3), nn.Linear(3, 2), use
        self.head.requires_grad_(not frozen)
        self.register_buffer("row", torch.randn(1, 4, 3))

    def forward(self, x):
        return self.head(self.use(x, self.layer(self.row)))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.tanh(x * self.weight)


def added_in_place(x, row):
    x = x.clone()
    x += row
    return x


RIGHT = {
    "added": lambda x, row: x + row,
    "added to": lambda x, row: row + x,
    "multiplied": lambda x, row: x * row,
    "subtracted": lambda x, row: torch.sub(row, x),
    "divided": lambda x, row: row / (x.square() + 1),
    "in place": added_in_place,
    "scaled": lambda x, row: x + 0.5 * row - row / 3,
    "converted": lambda x, row: x + row.to(x.dtype).double(),
    "expanded": lambda x, row: torch.sin(row.expand(len(x), -1, -1)) + x,
    "twice": lambda x, row: (x + row) * row,
    "sum": lambda x, row: x * row.sum(0),
    "mean": lambda x, row: x * row.mean(0, keepdim=True),
    "first": lambda x, row: x * row[0],
    "squeezed": lambda x, row: x * row.squeeze(0),
    "both": lambda x, row: (x + row) * row[0],
    "nonlinear": lambda x, row: x + torch.tanh(row),
    "sliced": lambda x, row: x[:, :2] * row[:, :2],
    "indexed": lambda x, row: x * row[:, torch.tensor([3, 1, 0, 2])],
    "concatenated": lambda x, row: x * torch.cat([row[:, 2:], row[:, :2]], 1),
    "split": lambda x, row: torch.cat([x[:, :2] * row.split(2, 1)[0], x[:, 2:] * row.unbind(1)[3][:, None]], 1),
    "repeated": lambda x, row: torch.cat([x, row.repeat(len(x), 1, 1)], 1)[:, 2:6],
    "a class token": lambda x, row: torch.cat([row[:, :1].expand(len(x), -1, -1), x[:, 1:]], 1),
    "of all samples alone": lambda x, row: x * (row.flatten() @ row.flatten()),
}
WRONG = {
    "changed": lambda x, row: x + row.mul_(2),
    "a matrix product": lambda x, row: x @ (row[0].t() @ row[0]),
    "in a condition": lambda x, row: torch.where(x > 0, row, x),
    "of all samples": lambda x, row: x * torch.einsum("btd,otd->td", x, row),
}


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.LayerNorm(3), Scale(), nn.Conv1d(4, 4, 1)], ids=str)
@pytest.mark.parametrize("use", RIGHT)
def test_arithmetic_with_one_row_for_all_samples_is_right(use, layer):
    assert_matches_loop(Uses(RIGHT[use], layer), torch.randn(5, 4, 3), modes=("auto", "low"))


def test_layers_behind_one_row_for_all_samples_are_right():
    behind = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), Scale(), nn.Linear(3, 3))
    assert_matches_loop(Uses(RIGHT["added"], behind), torch.randn(5, 4, 3))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("use", WRONG)
def test_other_uses_of_one_row_for_all_samples_are_refused_by_name(use, frozen):
    model, x = Uses(WRONG[use], frozen=frozen).double(), torch.randn(5, 4, 3).double()
    expected = model(x).detach()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    output = model(x)
    assert_close(output, expected)
    with pytest.raises(RuntimeError, match=r"'layer' \(Linear\) had one row.*expand"):
        clipper.backward(losses_of(output))
    assert all(param.grad is None for param in model.parameters())


def test_the_output_for_one_row_has_one_row():
    model = Uses(lambda x, row: x + row.new_ones(row.shape))
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    seen = []
    model.layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(torch.randn(5, 4, 3))
    assert seen == [(1, 4, 3)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1)

    def encode(self, x):
        return self.first(x)

    def forward(self, x, *others):
        return self.second(self.encode(x)) * sum(other.sum() for other in others) if others else self.encode(x)


def test_calls_outside_a_forward_do_not_know_the_batch_of_the_last():
    model = Encoder()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    clipper.backward(model(torch.randn(8, 3)).sum(1))
    x = torch.randn(1, 3)
    output = model.encode(x)
    assert output.shape == (1, 2)
    assert_close(clipper.backward(output.sum(1)).norms, (2 * (x.norm() ** 2 + 1)).sqrt()[None], rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_inputs_of_other_sizes_do_not_outvote_the_batch(count):
    model, x, other = Encoder().double(), torch.randn(count, 3).double(), torch.rand(7).double()
    check_one = [model(x[i : i + 1], other, other) for i in range(count)]
    norms = []
    for output in check_one:
        grads = torch.autograd.grad(output.square().sum(), list(model.parameters()))
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm())
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model(x, other, other).square().mean().backward()
    assert_close(clipper.clip_and_accumulate().norms, torch.stack(norms))


def test_a_bag_of_one_sample_is_one_sample():
    model = nn.EmbeddingBag(9, 4)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for offsets in ([0], [0, 2]):
        output = model(torch.tensor([1, 2, 3, 4, 5]), torch.tensor(offsets))
        assert output.shape == (len(offsets), 4)
        assert clipper.backward(output.sum(1)).norms.shape == (len(offsets),)


def test_transforms_of_functions_run_the_model_as_it_is():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    expected = torch.func.jacrev(model)(x)
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    assert_close(torch.func.jacrev(model)(x), expected)
    assert torch.vmap(model)(x).shape == (5, 2)


class Bare(nn.Module):
    """A module with a forward of its own and one parameter."""

    def __init__(self, use, *shape):
        super().__init__()
        self.use, self.lin, self.p = use, nn.Linear(3, 3), nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.use(self, x)


BARE = {
    "a class token": (lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), m.lin(x)], 1), (1, 1, 3)),
    "a layer scale": (lambda m, x: x + m.p * m.lin(x), (3,)),
    "a gate of functions": (lambda m, x: m.lin(x) * torch.sigmoid(m.p).cumsum(0), (3,)),
    "an operation that is not for rows": (lambda m, x: m.lin(x) @ m.p, (3, 3)),
    "in a list": (lambda m, x: torch.stack([m.lin(x), x + m.p], 1).flatten(1, 2), (3,)),
    "set in place": (lambda m, x: m.lin(x).index_fill(1, torch.tensor([0]), 0.0) + m.p[None, None], (3,)),
    "an attribute of it": (lambda m, x: m.lin(x) * (m.p if m.p.is_leaf else 2 * m.p), (3,)),
    "the weight of a submodule": (lambda m, x: nn.functional.linear(x, weight=m.lin.weight) * m.p, (3,)),
    "a layer norm": (lambda m, x: nn.functional.layer_norm(m.lin(x), (3,), m.p, eps=1e-3) * m.p, (3,)),
    "an error that is caught": (lambda m, x: caught(m, x), (3, 3)),
}


def caught(module, x):
    try:
        return module.lin(x) @ module.p
    except Exception:
        return x * module.p[0]


@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("name", BARE)
def test_parameters_beside_layers_are_right(name, count):
    use, shape = BARE[name]
    losses = (lambda output, dim: losses_of(output[:, :4])) if name == "the weight of a submodule" else losses_of
    model = Bare(use, *shape)
    if name == "the weight of a submodule":
        model.lin.bias.requires_grad_(False)
    assert_matches_loop(model, torch.randn(count, 4, 3), modes=("auto", "low"), losses=losses)


def test_a_size_that_was_not_the_batch_is_not_taken_for_it_later():
    def forward(m, x):
        h = torch.cat([m.lin(x), x[:, :1]], 1)
        return h * m.p.expand(h.shape[1], 3)

    model = Bare(forward, 1, 3).double()
    with PerSampleGradientClipper(model, ConstantFlatClipper(1e9)) as clipper:
        for length in (2, 3, 4):  # 4 samples: as many as positions in the second step
            x = torch.randn(4, length, 3).double()
            norms = norms_of(loop(copy.deepcopy(model), [x]))
            for key, found in clipper.backward(losses_of(model(x))).param_norms.items():
                assert_close(found, norms[key])


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
def test_hooks_of_a_row_are_refused_and_those_of_a_parameter_are_too(hook):
    def positions(m, x):
        row = m.lin(m.p[None])
        getattr(row, hook)(*([abs] if hook == "register_hook" else []))
        return x + row

    model = Bare(positions, 4, 3)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)), pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(5, 4, 3))


def test_an_input_that_an_attempt_has_changed_is_refused():
    def forward(m, x):
        x += m.p
        return m.lin(x) @ torch.ones(3, 3) + x @ m.p.diag()

    model = Bare(forward, 3)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)):
        for _ in range(2):  # a second try is not another one
            with pytest.raises(RuntimeError, match=r"Bare changes its input in place.*whole=\(Bare,\)"):
                model(torch.randn(5, 4, 3))


def test_a_use_that_changes_asks_for_the_forward_again():
    def forward(m, x):
        return m.lin(x) * m.p if not m.turned else m.lin(x) * (x @ m.p.diag())

    model, x = Bare(forward, 3).double(), torch.randn(5, 4, 3).double()
    model.turned = False
    with PerSampleGradientClipper(model, ConstantFlatClipper(1e9)) as clipper:
        clipper.backward(losses_of(model(x)))
        model.turned = True
        with pytest.raises(RuntimeError, match=r"Bare used a parameter in another way .* run the forward again"):
            model(x)
        norms = norms_of(loop(copy.deepcopy(model), [x]))
        for key, found in clipper.backward(losses_of(model(x))).param_norms.items():
            assert_close(found, norms[key])


def test_a_first_state_of_a_recurrent_network_is_right():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.h, self.gru = nn.Parameter(torch.randn(1, 1, 4)), nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.gru(x, self.h.expand(1, len(x), 4).contiguous())[0]

    assert_matches_loop(Net(), torch.randn(5, 6, 3), modes=("auto", "low"))
