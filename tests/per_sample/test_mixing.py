"""A loss that reaches other samples raises in the step in which it is seen, says which, and changes nothing."""

import copy
import itertools

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_grads,
    assert_step,
    clip,
    losses_of,
    norms_by_loop,
    norms_in_batch,
    reference,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchzero_clip import GradSampleModuleFastGradientClipping, check_per_sample

B = 6


def by_length(net, x):
    """Sorts the samples before a recurrent network, and back."""
    order = x.abs().sum((1, 2)).argsort(descending=True)
    return net.head(net.lstm(x[order])[0][order.argsort()].mean(1))


def experts(net, x):
    """Sends samples to two experts, which see as many of them as there are, in another order."""
    order = (x.sum((1, 2)) > 0).int().argsort(stable=True, descending=True)
    y = torch.empty_like(x)
    y[order] = net.expert(x[order])
    return net.head(y.mean(1))


def shifted_positions(net, x):
    return net.head((x + net.positions(2 * torch.arange(x.shape[1]) + 2)).tanh().mean(1))


def reversed_positions(net, x):
    return net.head((x + net.positions(torch.arange(x.shape[1]).flip(0))).tanh().mean(1))


def queries(net, x):
    q = net.linear(net.table + 0.0)
    return net.head((x @ q.t()).softmax(-1) @ q).mean(1)


def batch_statistic(net, x):
    h = net.linear(x)
    return net.head(((h - h.mean(0)) / (h.std(0) + 1)).mean(1))


def linear():
    return nn.Linear(4, 4)


IN_ANOTHER_ORDER = {
    "sorted by length": lambda: Net(by_length, lstm=nn.LSTM(4, 4, batch_first=True), head=linear()),
    "experts": lambda: Net(experts, expert=linear(), head=linear()),
    "shifted positions": lambda: Net(shifted_positions, positions=nn.Embedding(20, 4), head=linear()),
    "reversed positions": lambda: Net(reversed_positions, positions=nn.Embedding(20, 4), head=linear()),
}
MIXERS = {
    "a statistic of the batch": lambda: Net(batch_statistic, linear=linear(), head=linear()),
}


def batch(count=B, length=B):
    return torch.randn(count, length, 4) * torch.linspace(0.2, 2, count)[:, None, None]


def contrastive(output):
    similar = output @ output.t()
    return F.cross_entropy(similar, torch.arange(len(output)), reduction="none")


@pytest.mark.parametrize("name", MIXERS)
def test_models_that_mix_samples_raise_in_the_first_step_and_change_nothing(name):
    model, criterion = MIXERS[name](), nn.Linear(4, 1)
    before = copy.deepcopy(model.state_dict())
    for param in (*model.parameters(), *criterion.parameters()):
        param.grad = torch.ones_like(param)
    refused = pytest.raises(
        RuntimeError, match=r"losses of samples \d, \d.* change the gradient of one row of 'linear'"
    )
    with clip(model) as clipper, refused:
        clipper.backward(criterion(model(batch())).squeeze(1))
    assert all((p.grad == 1).all() for p in (*model.parameters(), *criterion.parameters()))
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_a_contrastive_loss_raises_in_every_form_that_sees_the_losses():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(B, 4)
    match = r"the losses of samples 0, 1, .* change the gradient of one row of '0'"
    with clip(model) as clipper:
        for _ in range(2):  # a step that raised is not taken for checked
            with pytest.raises(RuntimeError, match=match):
                clipper.backward(contrastive(model(x)))
        norms = clipper.backward(losses_of(model(x))).norms
        assert norms.isfinite().all()
    wrapper = GradSampleModuleFastGradientClipping(model)
    with pytest.raises(RuntimeError, match=match):
        wrapper.backward(contrastive(wrapper(x)))


@pytest.mark.parametrize("name", IN_ANOTHER_ORDER)
def test_samples_in_another_order_and_positions_are_told_apart(name):
    model = IN_ANOTHER_ORDER[name]().double()
    for settings in ({}, {"verify": "never"}):
        with clip(model, **settings) as clipper:
            assert_step(clipper, model, batch().double())


def test_a_table_with_as_many_rows_as_samples_is_refused_and_others_are_found_to_be_shared():
    model = Net(queries, linear=linear(), head=linear(), table=torch.randn(B, 4, dtype=torch.float64)).double()
    with clip(model) as clipper:
        refused = pytest.raises(RuntimeError, match=r"one row of 'linear'.* give them a first dimension of size 1")
        with refused:
            clipper.backward(losses_of(model(batch().double())))
        for count in (4, 5, 4):
            x = batch(count).double()
            assert_close(clipper.backward(losses_of(model(x))).norms, norms_in_batch(model, x))


def test_data_that_no_layer_gets_as_an_argument_are_not_taken_for_shared():
    model = Net(lambda net, x: batch_statistic(net, x / 2), linear=linear(), head=linear())
    with clip(model) as clipper, pytest.raises(RuntimeError, match="change the gradient of one row of 'linear'"):
        clipper.backward(losses_of(model(batch())))


def test_new_graphs_are_proved_also_with_never():
    model = nn.Linear(4, 4)
    with clip(model, verify="never") as clipper, pytest.raises(RuntimeError, match="mixes samples"):
        clipper.backward(contrastive(model(torch.randn(B, 4))))


def steps(clipper, losses, match, most):
    """Take steps until one raises."""

    def train():
        for _ in range(most):
            clipper.backward(losses())

    with pytest.raises(RuntimeError, match=match):
        train()


@pytest.mark.parametrize("pair", [(1, 2), (4, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_one_pair_of_samples_is_found_in_the_first_step_and_named(pair, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    a, b = pair

    def losses():
        output = model(torch.randn(B, 4))
        each, pair = output.square().sum(1), F.one_hot(torch.tensor([a, b]), B).sum(0)
        return each + pair * (output[a] * output[b]).sum()

    with clip(model) as clipper:
        steps(clipper, losses, f"the losses of samples {a}, {b} change the gradient of one row of Linear", 1)


@pytest.mark.parametrize("name", ["shifted positions", "reversed positions"])
def test_positions_that_were_shared_stay_so_where_they_are_as_many_as_samples(name):
    model = IN_ANOTHER_ORDER[name]().double()
    with clip(model) as clipper:
        for length in (4, B, 5):
            assert_step(clipper, model, batch(length=length).double())


def test_a_mode_that_is_new_makes_a_check_due():
    def forward(net, x):
        h = net.linear(x)
        return net.head((h - h.mean(0) if net.training else h).mean(1))

    model = Net(forward, linear=linear(), head=linear()).eval()
    with clip(model) as clipper:
        for _ in range(16):
            clipper.backward(model(batch()).square().sum(1))
        model.train()
        with pytest.raises(RuntimeError, match="the losses of samples"):
            clipper.backward(model(batch()).square().sum(1))


def due_steps(model, losses, steps=20, **kwargs):
    """The steps in which a backward ran twice."""
    found = []
    with clip(model, **kwargs) as clipper:
        for step in range(1, steps + 1):
            calls = []
            output = losses()
            output.register_hook(calls.append)
            clipper.backward(output)
            found += [step] * (len(calls) > 1)
    return found


def test_proofs_run_in_a_few_steps_from_the_first():
    model = nn.Linear(4, 4)
    assert due_steps(model, lambda: model(torch.randn(B, 4)).sum(1)) == [1, 2, 4, 8, 16]
    assert due_steps(model, lambda: model(torch.randn(B, 4)).sum(1), steps=260) == [2**i for i in range(9)]
    assert due_steps(model, lambda: model(torch.randn(B, 4)).sum(1), verify="always") == list(range(1, 21))
    assert due_steps(model, lambda: model(torch.randn(B, 4)).sum(1), verify=6) == [1, 2, 4, 6, 8, 12, 16, 18]
    assert due_steps(model, lambda: model(torch.randn(B, 4)).sum(1), verify="never") == [1]
    counts = iter([1, 1, 1, *[B] * 17])
    assert due_steps(model, lambda: model(torch.randn(next(counts), 4)).sum(1)) == [4, 5, 7, 11, 19]


@pytest.mark.slow
def test_every_loss_that_reads_another_sample_is_seen_also_if_it_reads_very_little():
    """All ordered pairs of 16 samples, in as many checks as are due."""
    model, x = nn.Linear(1, 1), torch.randn(16, 1)
    for giver, receiver in itertools.permutations(range(16), 2):
        reads = 1e-9 * F.one_hot(torch.tensor(giver), 16)

        def losses(reads=reads, receiver=receiver):
            output = model(x).squeeze(1)
            return output + reads * output[receiver]

        with clip(model, verify="always") as clipper:
            steps(clipper, losses, "mixes samples", 60)


@pytest.mark.parametrize("what", ["detach", "argmax"])
def test_values_without_a_gradient_mix_unseen_and_check_per_sample_sees_them(what):
    def losses(model, x):
        output = model(x)
        others = output.mean(0).detach() if what == "detach" else output.argmax(0)
        return (output - others).square().sum(1)

    model, x = nn.Linear(4, 4), torch.randn(B, 4)
    with clip(model, verify="always") as clipper:
        for _ in range(4):
            clipper.backward(losses(model, x))
    with pytest.raises(ValueError, match="or the loss of a sample depends on others"):
        check_per_sample(model, x, losses)


def test_parameters_without_gradients_are_checked_once_they_have_some():
    model = Net(lambda net, x: net.head(x) + net.gate * batch_statistic(net.inner, x[:, None]))
    model.head, model.inner, model.gate = linear(), Net(None, linear=linear(), head=linear()), 0.0
    with clip(model) as clipper:
        for _ in range(13):
            clipper.backward(model(torch.randn(B, 4)).square().sum(1))
        model.gate = 1.0
        steps(clipper, lambda: model(torch.randn(B, 4)).square().sum(1), r"'inner\.", 20)


def test_dead_layers_and_samples_that_are_not_finite_are_no_evidence():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    x = torch.randn(B, 4)
    x[3] = torch.nan
    with clip(model) as clipper:
        for _ in range(8):
            result = clipper.backward(model(x).sum(1))
    assert result.nonfinite.tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("verify", ["never", "always"])
def test_a_check_leaves_no_trace(verify):
    """Gradients of a criterion, those of activations, hooks and random numbers are as without a check."""
    torch.manual_seed(0)
    model, criterion, x = nn.Sequential(linear(), nn.Dropout(), linear()), nn.Linear(4, 1), torch.randn(B, 4)
    seen = []
    criterion.weight.register_post_accumulate_grad_hook(lambda p: seen.append("criterion"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("model"))
    x.requires_grad_()
    with clip(model, verify=verify) as clipper:
        hidden = model(x)
        hidden.retain_grad()
        clipper.backward(criterion(hidden).squeeze(1))
        state = torch.get_rng_state()
    assert seen == ["criterion", "model"]
    torch.manual_seed(0)
    other = nn.Sequential(linear(), nn.Dropout(), linear()), nn.Linear(4, 1)
    y = torch.randn(B, 4, requires_grad=True)
    output = other[0](y)
    output.retain_grad()
    other[1](output).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    assert_close(criterion.weight.grad, other[1].weight.grad, rtol=1e-6)
    assert_close(hidden.grad, output.grad)
    assert_close(x.grad, y.grad, rtol=1e-6)


@pytest.mark.parametrize("form", ["backward", "classic"])
def test_gradients_that_outputs_retain_are_as_without_a_check(form):
    model, x, outputs = nn.Sequential(linear(), nn.Tanh(), linear()), torch.randn(B, 4), []

    def retain(module, args, output):
        output.retain_grad()
        outputs.append(output)

    for module in (model, model[0]):
        module.register_forward_hook(retain)
    model(x).square().mean().backward()
    with clip(model, verify="always") as clipper:
        losses = model(x).square().mean(1)
        if form == "backward":
            clipper.backward(losses)
        else:
            losses.mean().backward()
            clipper.clip_and_accumulate()
    scale = B if form == "backward" else 1  # the losses are added up
    for before, output in zip(outputs[:2], outputs[2:], strict=True):
        assert_close(output.grad, before.grad * scale, rtol=1e-5, atol=1e-6)


def test_a_clipper_of_the_head_alone_sees_its_samples():
    body, head, x = nn.Linear(4, 4), linear(), torch.randn(B, 4)
    with clip(head) as clipper:
        clipper.backward(head(body(x).tanh()).square().sum(1))
        grad = body.weight.grad.clone()
        body.zero_grad()
        head(body(x).tanh()).square().sum().backward()
        assert_close(grad, body.weight.grad)
        clipper.discard()
        with pytest.raises(RuntimeError, match="the losses of samples"):
            clipper.backward(contrastive(head(body(x).tanh())))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_proved_and_reentrant_ones_refused(reentrant):
    body, head, x = nn.Sequential(linear(), nn.Tanh()), linear(), torch.randn(B, 4, requires_grad=True)
    model = Net(lambda net, x: net.head(checkpoint(net.body, x, use_reentrant=reentrant)), body=body, head=head)
    norms, sums = reference(nn.Sequential(body, head), x.detach())
    with clip(model) as clipper:
        if reentrant:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                clipper.backward(losses_of(model(x)))
            return
        assert_close(clipper.backward(losses_of(model(x))).norms, norms, rtol=1e-5)
        assert_grads(model, [total / B for total in sums], rtol=1e-4, atol=1e-6)
        with pytest.raises(RuntimeError, match="the losses of samples"):
            clipper.backward(contrastive(model(x)))


class GivesAway(torch.autograd.Function):
    """Refuses a second backward, as compiled functions with donated buffers do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise_if_retained()
        return grad


def raise_if_retained():
    if torch._C._autograd._get_current_graph_task_keep_graph():
        raise RuntimeError("This backward function was compiled with non-empty donated buffers which requires ...")


def test_compiled_functions_that_give_memory_away_are_refused_and_change_nothing():
    model, criterion, x = linear(), nn.Linear(4, 1), torch.randn(B, 4)
    with clip(model) as clipper:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"donated_buffer = False before the forward\. Nothing was changed"):
                clipper.backward(criterion(GivesAway.apply(model(x))).squeeze(1))
    assert criterion.weight.grad is None
    assert model.weight.grad is None


def test_a_loss_that_writes_in_place_in_its_backward_is_refused():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(2 * x)
            return x.square().sum(1)

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            return saved.mul_(grad[:, None])

    model, x = nn.Linear(4, 4).double(), torch.randn(B, 4).double()
    with clip(model) as clipper:
        with pytest.raises(RuntimeError, match=r"the graph cannot run backward twice .*one of the variables"):
            clipper.backward(InPlace.apply(model(x)))
        assert model.weight.grad is None


# the classic form


class Graphs:
    """A batch of three graphs: the numbers of nodes differ."""

    def __init__(self):
        self.nodes, self.graph = torch.randn(10, 4), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])


def test_a_batch_object_needs_its_size_in_the_classic_form():
    model = Net(lambda net, b: torch.zeros(3, 4).index_add_(0, b.graph, net.linear(b.nodes)), linear=linear())
    with clip(model) as clipper:
        model(Graphs()).square().mean().backward()
        with pytest.raises(
            ValueError, match=r"no tensor that tells how many samples.*clip_and_accumulate\(batch_size="
        ):
            clipper.clip_and_accumulate()
        with pytest.raises(ValueError, match="saw 10 samples, the batch has 3"):
            clipper.clip_and_accumulate(batch_size=3)
        model(Graphs()).square().mean().backward()
        assert clipper.clip_and_accumulate(batch_size=10).norms.shape == (10,)


PARTS = r"gradients of 2 calls of the model .* connected by outputs.* a backward for each part.* use backward\(losses\)"


@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("given", [False, True])
def test_several_calls_are_refused_in_the_classic_form_and_the_ways_out_are_right(given, size):
    model, x = linear().double(), torch.randn(2 * size, 4).double()
    one, other = x.split(size)
    with clip(model) as clipper:
        losses_of(model(one) * model(other)).mean().backward()
        with pytest.raises(ValueError, match=PARTS):
            clipper.clip_and_accumulate(**({"batch_size": size} if given else {}))
        pairs = Net(lambda net, one, other: net.linear(one) * net.linear(other), linear=model)
        norms = clipper.backward(losses_of(model(one) * model(other))).norms
        assert_close(norms, norms_in_batch(pairs, one, other))
        for part in (one, other):
            losses_of(model(part)).mean().backward()
            assert_close(clipper.clip_and_accumulate().norms, norms_by_loop(model, part))
    wrapper = GradSampleModuleFastGradientClipping(model)
    with pytest.raises(ValueError, match=PARTS):
        losses_of(wrapper(one) * wrapper(other)).mean().backward()
    losses_of(wrapper(x)).mean().backward()
    assert_close(wrapper.get_norm_sample(), norms_by_loop(model, x))


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("count", [5, 2, 1])
def test_calls_of_the_model_that_a_graph_joins_are_right_in_the_classic_form(calls, count):
    model, x = Net(lambda net, x: net.linear(x).tanh(), linear=linear()).double(), torch.randn(count, 4).double()

    def unrolled(net, x):
        for _ in range(calls):
            x = net.model(x)
        return x

    around = Net(unrolled, model=model)
    expected = norms_in_batch(around, x)
    with clip(model) as clipper:
        losses_of(around(x)).mean().backward()
        with pytest.raises(ValueError, match=f"gradients of {calls} forwards have arrived, which may be parts"):
            clipper.clip_and_accumulate()
        assert_close(clipper.clip_and_accumulate(batch_size=count).norms, expected)


def test_inner_loops_whose_gradients_go_elsewhere_do_not_count():
    model, x = nn.Linear(4, 4).double(), torch.randn(6, 4).double()
    with clip(model) as clipper:
        for _ in range(3):
            noisy = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(noisy).square().sum(), noisy)
            x = x + 0.1 * grad.sign()
        losses_of(model(x)).mean().backward()
        assert_close(clipper.clip_and_accumulate().norms, norms_by_loop(model, x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["model", "loss"])
def test_compiled_models_and_losses_raise_no_false_alarm(what):
    model, x = nn.Sequential(linear(), nn.Tanh(), linear(), nn.GELU(), linear()), torch.randn(B, 4)
    compiled = torch.compile(model) if what == "model" else model
    loss = torch.compile(losses_of) if what == "loss" else losses_of
    expected = norms_by_loop(model, x)
    with clip(model) as clipper:
        for _ in range(2):
            assert_close(clipper.backward(loss(compiled(x))).norms, expected, rtol=1e-4)
