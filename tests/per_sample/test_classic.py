"""The classic form: gradients that come another way than through outputs, graphs that run once, and blocks of rows."""

import copy
import threading
from functools import partial

import pytest
import torch
from per_sample.harness import Net, assert_close, clip, losses_of, norms_in_batch
from torch import nn

W = 4
SAMPLES = torch.tensor([0, 0, 1, 2, 2, 2, 1])


def model_of():
    """It keeps what its first layer makes, which gets the rows in another order."""
    first = nn.Linear(W, W)
    model = Net(lambda m, x: m.head(m.first(x.flip(0)).flip(0)), first=first, head=nn.Linear(W, W)).double()
    first.register_forward_hook(lambda module, args, output: setattr(model, "seen", output))
    return model


def test_a_gradient_that_does_not_come_through_an_output_is_refused():
    model = model_of()
    with clip(model) as clipper:
        loss = losses_of(model(torch.randn(4, W).double())).mean()
        with pytest.raises(ValueError, match="a part of their gradient did not come through the outputs of the model"):
            (loss + model.seen.square().mean()).backward()
        losses_of(model(torch.randn(4, W).double())).mean().backward()  # the clipper goes on
        assert len(clipper.clip_and_accumulate().norms) == 4


@pytest.mark.parametrize("form", ["losses", "classic"])
def test_memory_that_is_lacking_in_a_proof_is_not_taken_for_another_error(form):
    runs = []

    def hook(grad):
        runs.append(1)
        if len(runs) == 3:
            raise torch.OutOfMemoryError("out of memory")

    model = nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))
    with clip(model) as clipper:
        output = model(torch.randn(4, W))
        losses = losses_of(output)
        output.register_hook(hook)
        backward = partial(clipper.backward, losses) if form == "losses" else losses.mean().backward
        with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory$"):
            backward()


class Once(torch.autograd.Function):
    """Has a backward that cannot run again."""

    @staticmethod
    def forward(ctx, x, left):
        ctx.left = left
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        ctx.left.pop()
        return 2 * grad, None


def test_a_graph_that_cannot_run_twice_is_refused():
    model = Net(lambda m, x, left: Once.apply(m.first(x), left), first=nn.Linear(W, W)).double()
    with (
        clip(model),
        pytest.raises(RuntimeError, match=r"because the graph cannot run backward twice \(pop from empty"),
    ):
        losses_of(model(torch.randn(4, W).double(), [0])).mean().backward()


@pytest.mark.parametrize("read", [lambda model, output: output, lambda model, output: model.seen])
def test_rows_have_the_samples_of_the_block_also_where_no_output_has_a_gradient(read):
    def losses(model, output):
        return torch.zeros(3, dtype=torch.float64).index_add(0, SAMPLES, read(model, output).square().sum(1))

    model, x = model_of(), torch.randn(len(SAMPLES), W).double()
    params = list(model.parameters())
    each = losses(model, model(x))
    rows = [torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True) for loss in each]
    with clip(model) as clipper:
        with clipper.rows(SAMPLES, batch_size=3):
            output = model(x)
        losses(model, output).mean().backward()
        found = clipper.clip_and_accumulate().norms
    assert_close(found, torch.stack([torch.stack([grad.norm() for grad in row]).norm() for row in rows]))


@pytest.mark.parametrize("says", [True, False])
def test_a_block_of_rows_holds_for_layers_that_are_called_by_themselves(says):
    first, last, x = nn.Linear(W, W).double(), nn.Linear(W, 2).double(), torch.randn(len(SAMPLES), W).double()
    model = nn.ModuleList([first, last])

    def losses():
        zeros = torch.zeros(3, 2, dtype=torch.float64)
        return zeros.index_add(0, SAMPLES, last(first(x).tanh())).square().sum(1)

    rows = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for loss in losses()]
    with clip(model) as clipper:
        losses().mean().backward()
        clipper.discard()
        with clipper.rows(*[SAMPLES] * says, batch_size=3):
            loss = losses().mean()
        if not says:  # it does not take each row for a sample, as without a block
            with pytest.raises(ValueError, match="got rows whose samples are not known"):
                loss.backward()
            return
        loss.backward()
        found = clipper.clip_and_accumulate().norms
    assert_close(found, torch.stack([torch.stack([grad.norm() for grad in row]).norm() for row in rows]))


def test_a_process_runs_as_many_backwards_as_the_one_that_needs_most(monkeypatch):
    x, counts = torch.randn(4, W).double(), []
    model = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W)).double()
    expected = norms_in_batch(model, x)
    for more in (0, 2):
        own, passes = copy.deepcopy(model), []
        own[1].register_forward_hook(
            lambda module, args, output, passes=passes: output.register_hook(lambda _: passes.append(1)) and None
        )
        with clip(own) as clipper:
            monkeypatch.setattr(
                type(clipper._engine), "agreed", lambda self, first, *rest, more=more: [first + more, *rest]
            )
            losses_of(own(x)).mean().backward()
            assert_close(clipper.clip_and_accumulate().norms, expected)
        counts.append(len(passes))
    assert counts[1] == counts[0] + 2


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_backward_of_losses_of_another_clipper_brings_gradients_of_a_sum(reduction):
    model, other, x = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), torch.randn(5, 3).double()
    expected = norms_in_batch(other, model(x).detach())
    with clip(model) as first, clip(other, loss_reduction=reduction) as second:
        first.backward(losses_of(other(model(x))))
        assert_close(second.clip_and_accumulate().norms, expected)
        second.pre_step()


def test_gradients_of_a_mean_and_of_a_sum_are_not_added():
    model, other, x = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), torch.randn(5, 3).double()
    with clip(model) as first, clip(other) as second:
        losses = losses_of(other(model(x)))
        losses.mean().backward(retain_graph=True)
        first.discard()
        with pytest.raises(
            RuntimeError, match=r"call clip_and_accumulate\(\) or discard\(\) between the two backwards"
        ):
            first.backward(losses)
        second.discard()
        first.backward(losses_of(other(model(x))))
        second.discard()


def test_a_mean_in_another_thread_stays_one_while_losses_are_in_a_backward():
    model, other, x = nn.Linear(3, 4).double(), nn.Linear(3, 2).double(), torch.randn(5, 3).double()
    expected, found = norms_in_batch(other, x), []
    with clip(model) as first, clip(other) as second:

        def train_other():
            losses_of(other(x)).mean().backward()
            found.append(second.clip_and_accumulate().norms)

        def meanwhile(grad):
            if not found:
                thread = threading.Thread(target=train_other)
                thread.start()
                thread.join()

        output = model(x)
        output.register_hook(meanwhile)
        first.backward(losses_of(output))
        second.pre_step()
    assert_close(found[0], expected)


class OwnGraph(torch.autograd.Function):
    """Runs a module in a graph of its own, as functions do that free memory."""

    @staticmethod
    def forward(ctx, x, module):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad):
        torch.autograd.backward(ctx.y, grad)
        return ctx.x.grad, None


def test_a_backward_inside_that_of_losses_of_another_clipper_may_be_of_a_mean_or_of_a_sum():
    model, other, x = nn.Linear(4, 3).double(), nn.Linear(3, 4).double(), torch.randn(5, 3).double()
    losses = losses_of(model(other(x)))
    expected = torch.stack([torch.autograd.grad(loss, [*other.parameters()], retain_graph=True)[0] for loss in losses])
    with clip(model) as first:
        with clip(other), pytest.raises(RuntimeError, match=r'a mean: with loss_reduction="sum"'):
            first.backward(losses_of(model(OwnGraph.apply(x.clone().requires_grad_(), other))))
        first.discard()
        with clip(other, loss_reduction="sum") as second:
            first.backward(losses_of(model(OwnGraph.apply(x.clone().requires_grad_(), other))))
            norms = second.clip_and_accumulate().param_norms["weight"]
            second.pre_step()
    assert_close(norms, expected.flatten(1).norm(dim=1))
