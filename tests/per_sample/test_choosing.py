"""Functions that choose by values: rows that they give to other samples in another step."""

import pytest
import torch
from per_sample.harness import Net, assert_close, losses_of, norms_in_batch
from torch import nn

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

B, WIDTH = 3, 4
POOLING = {
    "where": lambda h, mine: torch.where(mine[..., None], h[None], 0.0).sum(1),
    "masked_fill": lambda h, mine: h[None].masked_fill(~mine[..., None], 0.0).sum(1),
    "amax": lambda h, mine: h[None].masked_fill(~mine[..., None], -1e9).amax(1),
    "max": lambda h, mine: (h[None] + (~mine[..., None]) * -1e9).max(1).values,
    "relu": lambda h, mine: (h.exp()[None] - 1e9 * (~mine[..., None])).relu().sum(1),
    "topk": lambda h, mine: (h[None] + (~mine[..., None]) * -1e9).topk(2, 1).values.mean(1),
    "sort": lambda h, mine: (h[None] + (~mine[..., None]) * -1e9).sort(1).values[:, -2:].mean(1),
    "gather": lambda h, mine: (
        h[None]
        .expand(B, -1, -1)
        .gather(1, torch.argsort(mine.float(), dim=1, descending=True, stable=True)[:, :3, None].expand(-1, -1, WIDTH))
        .mean(1)
    ),
    "pooling": lambda h, mine: (h.T[None] + (~mine[:, None]) * -1e9).amax(2),
}


def pooled(pool):
    def forward(m, x, mask):
        sample = mask.nonzero()[:, 0]
        return pool(m.layers(x[mask]), sample[None] == torch.arange(len(x))[:, None])

    return Net(forward, layers=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def assert_right(clipper, model, *inputs):
    found = clipper.backward(losses_of(model(*inputs))).norms
    with clipper.paused():
        assert_close(found, norms_in_batch(model, *inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("name", POOLING)
def test_rows_that_are_chosen_by_values_are_proved_in_every_step(name, verify):
    torch.manual_seed(0)
    model = pooled(POOLING[name])
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), verify=verify)
    for sizes in ([4, 4, 4], [4, 4, 4], [3, 6, 3], [5, 4, 3]):  # equally many first
        x, mask = torch.randn(B, 6, WIDTH), torch.arange(6)[None] < torch.tensor(sizes)[:, None]
        assert_right(clipper, model, x, mask)


def swapped(model, x, k):
    """Layers on B · T and on T · B rows change places."""
    one, other = (model.a, model.b) if k < 2 else (model.b, model.a)
    first = one(x.flatten(0, 1)).view(x.shape)
    return first.tanh() + other(x.transpose(0, 1).flatten(0, 1)).view(*x.transpose(0, 1).shape).transpose(0, 1)


def rolled(model, x, k):
    """-1 and 7, which Python gives one hash."""
    return model.b(model.a(x).roll(-1 if k < 2 else 7, 0).roll(1 if k < 2 else -7, 0))


def hidden_half(model, x, k):
    """The second half of the rows gets zeros at first, so that it might be in any order."""
    rows = torch.cat([x[:, 0], x[:, 0].flip(0)])
    h = model.a(rows)
    return h[:B] + (h[B:].flip(0) if k >= 2 else (h[B:].flip(0) - 1e6).relu()) + model.b(x[:, 1])


@pytest.mark.parametrize("act", [swapped, rolled, hidden_half])
def test_graphs_that_look_alike_are_told_apart(act):
    torch.manual_seed(0)
    model = Net(act, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for k in range(4):
        assert_right(clipper, model, torch.randn(B, 2, WIDTH), k)


def test_a_gate_between_two_samples_is_found_before_it_opens_or_at_the_next_proof():
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))

    def losses(gate):
        h = model(torch.randn(4, WIDTH))
        return torch.cat([h[:1] + gate * h[1:2], h[1:]]).square().mean(1)

    for _ in range(3):
        clipper.backward(losses(torch.tensor(0.0)))
    with pytest.raises(RuntimeError, match="mixes samples"):
        clipper.backward(losses(torch.tensor(1.0)))


def test_the_classic_form_proves_in_the_steps_of_the_schedule():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    passes: list[int] = []
    model[1].register_forward_hook(lambda _, __, output: output.register_hook(lambda _: passes.append(1)) and None)
    proved = []
    for _ in range(9):
        passes.clear()
        model(torch.randn(B, WIDTH)).square().mean(1).mean().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        proved.append(len(passes) > 1)
    assert proved == [True, True, False, True, False, False, False, True, False]


def test_losses_may_select_from_a_trainable_tensor_outside_of_the_model():
    model, table = nn.Linear(WIDTH, WIDTH), torch.zeros(9, requires_grad=True)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for k in range(1, 4):
        x, index = torch.randn(B, WIDTH), torch.randint(9, (B,))
        with clipper.paused():
            expected = norms_in_batch(model, x)
        assert_close(clipper.backward(losses_of(model(x)) + table[index]).norms, expected, rtol=1e-4, atol=1e-5)
        assert table.grad.sum() == k * B


@pytest.mark.parametrize("classic", [True, False])
def test_a_hook_that_begins_to_reorder_gradients_is_found_at_the_next_proof(classic):
    model, reorders = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double(), []
    model[1].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: grad.flip(0)) and None if reorders else None
    )
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))

    def step():
        losses = losses_of(model(torch.randn(B + 1, WIDTH).double()))
        if classic:
            losses.mean().backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()
        else:
            clipper.backward(losses)

    for _ in range(3):  # the third one is not proved
        step()
    reorders.append(True)
    with pytest.raises(RuntimeError, match="belong to other samples than in earlier steps with the same graph"):
        step()
