"""What several processes do with a clipper of one model; `test_several_processes` starts them.

The oracle is one backward per sample, in each process, on the batch of all processes.
"""

import copy
import itertools
import traceback
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from contract.collectives import Collectives
from per_sample.harness import Net, frozen, loop, losses_of, norms_of, total_of
from per_sample.mixtures import Mixture
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torchzero_clip import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    PerSampleGradientClipper,
)

TOTAL = 6
SHARES = {
    2: {"equal": (3, 3), "unequal": (1, 5), "empty": (0, 6)},
    3: {"equal": (2, 2, 2), "unequal": (1, 3, 2), "empty": (1, 0, 5)},
}
"""The samples of each process, by the number of processes."""


class Block(nn.Module):
    """A block of a transformer, without attention to later positions."""

    def __init__(self, width, reentrant):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.reentrant = reentrant

    def forward(self, x):
        return self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)

    def run(self, x):
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(self.up(x).relu())


class GPT(nn.Module):
    """Tied embedding and head, positions that all samples share, two blocks, perhaps with checkpoints."""

    def __init__(self, reentrant=None, width=6, words=11):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList([Block(width, reentrant) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def cnn():
    features = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(16, 3))


MODELS = {
    "mlp": mlp,
    "frozen": lambda: frozen(mlp(), "0.weight", "2.bias"),
    "cnn": cnn,
    "gpt": GPT,
    "checkpoints": lambda: GPT(False),
    "bare": lambda: Net(lambda m, x: m.inner(x * m.scale) + m.shift, inner=mlp(), **bare()),
    "experts": lambda: Mixture(bias=True),
    "experts in checkpoints": lambda: Mixture(reentrant=False),
    "queries": lambda: Net(attended, query=nn.Parameter(torch.randn(5, 3)), **attention()),
    "frozen queries": lambda: Net(attended, query=nn.Parameter(torch.randn(5, 3), requires_grad=False), **attention()),
    "lstm": lambda: Net(lambda m, x: m.head(m.lstm(x)[0].mean(1)), lstm=nn.LSTM(3, 4, batch_first=True), head=mlp2()),
}


def mlp2():
    return nn.Linear(4, 2)


def bare():
    return {"scale": nn.Parameter(torch.rand(3)), "shift": nn.Parameter(torch.rand(2))}


def attended(m, x):
    """Several layers get the memory of a parameter."""
    query = m.query.expand(len(x), -1, -1)
    return (m.to_query(query) @ m.to_key(x).mT).softmax(-1) @ m.to_value(x) + m.to_value(query) + m.rnn(query)[0]


def attention():
    layers = {name: nn.Linear(3, 3) for name in ("to_query", "to_key", "to_value")}
    return {**layers, "rnn": nn.RNN(3, 3, batch_first=True)}


EXPERTS = "experts", "experts in checkpoints"


def batch_of(name):
    if name == "cnn":
        return torch.randn(TOTAL, 2, 6, 6, dtype=torch.float64)
    if name in ("gpt", "checkpoints"):
        return torch.randint(0, 11, (TOTAL, 5))
    sequences = dict.fromkeys(("lstm", "queries", "frozen queries"), (TOTAL, 4, 3))
    shape = {**sequences, **dict.fromkeys(EXPERTS, (TOTAL, 3, 4))}.get(name, (TOTAL, 3))
    return torch.randn(shape, dtype=torch.float64) * torch.arange(1, TOTAL + 1).view(-1, *[1] * (len(shape) - 1))


def made(name):
    """The same model and batch in each process."""
    torch.manual_seed(0)
    return MODELS[name]().double(), batch_of(name)


def own_share(batch, share):
    return batch.split(SHARES[dist.get_world_size()][share])[dist.get_rank()]


def replicated(model, **settings):
    return DistributedDataParallel(model, **settings)


def sharded(model, *, nested=False, partly=False, **settings):
    """The model with shards of all its parameters, and perhaps of each block by itself; or ``partly``, of one block."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    parts = blocks or [part for part in model.children() if next(part.parameters(), None) is not None]
    for module in parts[:1] if partly else (*(parts if nested else ()), model):
        fully_shard(module, **settings).set_force_sum_reduction_for_comms(True)  # gloo cannot divide
    return model


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def expected_of(model, batch, limit=None):
    """Norms, factors and clipped sums of the batch of all processes."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Block | Mixture):
            module.reentrant = None
    each = loop(model, [batch])
    norms = norms_of(each)
    total = total_of(norms)
    limit = total.median().item() if limit is None else limit
    factors = (limit / (total + 1e-6)).clamp(max=1)
    return limit, total, factors, {name: torch.tensordot(factors, grads, 1) for name, grads in each.items()}, norms


def assert_gradients(model, sums, divisor):
    module = getattr(model, "module", model)
    for name, param in module.named_parameters():
        if name in sums:
            assert_close(full(param.grad), sums[name] / divisor)
        else:
            assert param.grad is None


def assert_result(result, total, factors, share):
    assert_close(result.norms, own_share(total, share))
    assert_close(result.factors, own_share(factors, share))


# what is checked: each gets a function that wraps the model


def backward_equals_one_process(wrap, name, share, reduction, memory="auto"):
    model, batch = made(name)
    limit, total, factors, sums, norms = expected_of(model, batch)
    model = wrap(model)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(limit), loss_reduction=reduction, memory=memory)
    with clipper, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reentrant checkpoints are not checked
        for _ in range(3):  # with and without a check whether samples mix
            model.zero_grad()
            result = clipper.backward(losses_of(model(own_share(batch, share))))
            assert_result(result, total, factors, share)
            for key, norm in result.param_norms.items():
                assert_close(norm, own_share(norms[key], share))
            assert_gradients(model, sums, TOTAL if reduction == "mean" else 1)


def several_backwards_add_up(wrap, name, share):
    model, batch = made(name)
    parts = [made(name)[1], batch.flip(1)]
    found = [expected_of(model, part, 1.5) for part in parts]
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.5)) as clipper:
        for part in parts:
            clipper.backward(losses_of(model(own_share(part, share))))
    sums = {key: sum(each[3][key] for each in found) for key in found[0][3]}
    assert_gradients(model, sums, TOTAL)


def classic_equals_one_process(wrap, name, share, reduction):
    model, batch = made(name)
    limit, total, factors, sums, _ = expected_of(model, batch)
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(limit), loss_reduction=reduction) as clipper:
        for _ in range(2):
            for _ in range(2):
                losses = losses_of(model(own_share(batch, share)))
                (losses.mean() if reduction == "mean" and len(losses) else losses.sum()).backward()
                result = clipper.clip_and_accumulate()
                assert_result(result, total, factors, share)
            max_norm, count = clipper.pre_step()
            assert count == 2 * TOTAL
            assert_close(max_norm, torch.full((len(sums),), limit, dtype=torch.float64))
            assert_gradients(model, sums, TOTAL if reduction == "mean" else 0.5)


def classic_of_inputs_with_a_gradient(wrap, name):
    """The backward of the root module goes on to the inputs, and then hides its parameters."""
    model, batch = made(name)
    limit, total, factors, sums, _ = expected_of(model, batch)
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(limit)) as clipper:
        for _ in range(3):
            inputs = own_share(batch, "unequal").clone().requires_grad_()
            losses_of(model(inputs)).mean().backward()
            assert inputs.grad is not None
            assert_result(clipper.clip_and_accumulate(), total, factors, "unequal")
            clipper.pre_step()
            assert_gradients(model, sums, TOTAL)


def a_limit_for_each_parameter(wrap, name, share):
    model, batch = made(name)
    each = loop(copy.deepcopy(model), [batch])
    norms = norms_of(each)
    limits = [norm.mean().item() for norm in norms.values()]
    factors = [(limit / (norm + 1e-6)).clamp(max=1) for limit, norm in zip(limits, norms.values(), strict=True)]
    sums = {key: torch.tensordot(factor, each[key], 1) for key, factor in zip(each, factors, strict=True)}
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantPerLayerClipper(limits)) as clipper:
        result = clipper.backward(losses_of(model(own_share(batch, share))))
    for found, factor in zip(result.factors, factors, strict=True):
        assert_close(found, own_share(factor, share))
    assert_gradients(model, sums, TOTAL)


def a_nan_sample_is_left_out(wrap, name, share, value):
    model, batch = made(name)
    limit, _, factors, *_ = expected_of(model, batch)
    each = loop(copy.deepcopy(model), [batch])
    batch[4] = value
    factors[4] = 0
    sums = {key: torch.tensordot(factors, grads, 1) for key, grads in each.items()}
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(limit)) as clipper:
        for _ in range(2):
            model.zero_grad()
            result = clipper.backward(losses_of(model(own_share(batch, share))))
            assert result.nonfinite.tolist() == own_share(torch.arange(TOTAL) == 4, share).tolist()
            assert_gradients(model, sums, TOTAL)
        model.zero_grad()
        losses = losses_of(model(own_share(batch, share)))
        (losses.mean() if len(losses) else losses.sum()).backward()
        clipper.clip_and_accumulate()
        assert clipper.pre_step()[1] == TOTAL
        assert_gradients(model, sums, TOTAL)


class Raises(NormClipper):
    """Raises on one process."""

    is_per_layer = False
    thresholds = torch.ones(1)

    def calc_clipping_factors(self, norms):
        if dist.get_rank() == 1:
            raise ValueError("no factors today")
        return itertools.repeat(torch.ones_like(norms[0]))


def forward(model, batch, share):
    return losses_of(model(own_share(batch, share)))


def on_rank_1(model, batch, share, change):
    losses = forward(model, batch, share)
    return change(losses) if dist.get_rank() == 1 else losses


def with_nan(losses):
    return losses * torch.tensor([1, torch.nan, *[1] * (len(losses) - 2)], dtype=losses.dtype)


def backward_of_a_nan(model, clipper, batch, share):
    clipper.nonfinite = "raise"
    clipper.backward(on_rank_1(model, batch, share, with_nan))


def classic_of_a_nan(model, clipper, batch, share):
    clipper.nonfinite = "raise"
    on_rank_1(model, batch, share, with_nan).sum().backward()
    clipper.clip_and_accumulate()


def losses_of_another_shape(model, clipper, batch, share):
    clipper.backward(on_rank_1(model, batch, share, torch.Tensor.sum))


def losses_of_other_samples(model, clipper, batch, share):
    clipper.backward(on_rank_1(model, batch, share, lambda losses: losses[:-1]))


def another_batch_size(model, clipper, batch, share):
    forward(model, batch, share).sum().backward()
    clipper.clip_and_accumulate(batch_size=len(own_share(batch, share)) + (dist.get_rank() == 1))


def samples_that_mix(model, clipper, batch, share):
    clipper.backward(on_rank_1(model, batch, share, lambda losses: losses + losses.mean()))


def a_limit_that_raises(model, clipper, batch, share):
    clipper.norm_clipper = Raises()
    clipper.backward(forward(model, batch, share))


def a_paused_clipper(model, clipper, batch, share):
    losses = forward(model, batch, share)
    if dist.get_rank() == 1:
        with clipper.paused():
            clipper.backward(losses)
    clipper.backward(losses)


ERRORS = {
    backward_of_a_nan: r"gradients of samples \[1\] are not finite",
    classic_of_a_nan: r"gradients of samples \[1\] are not finite",
    losses_of_another_shape: r"losses must have shape \(B,\)",
    losses_of_other_samples: "the batch has",
    another_batch_size: "the batch has",
    samples_that_mix: "mixes samples",
    a_limit_that_raises: "no factors today",
    a_paused_clipper: "the clipper is paused",
}


def an_error_on_one_process_is_one_on_all(wrap, error, share):
    model, batch = made("mlp")
    *_, factors, sums, _ = expected = expected_of(model, batch, 1.0)
    model = wrap(model)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    call = next(call for call in ERRORS if call.__name__ == error)
    message = ERRORS[call] if dist.get_rank() == 1 else rf"process 1 raised \w+: .*{ERRORS[call]}"
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(model, clipper, batch, share)
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(ValueError, match="nothing was accumulated"):
        clipper.pre_step()
    clipper.nonfinite, clipper.norm_clipper = "zero", ConstantFlatClipper(1.0)
    clipper.discard()
    assert_result(clipper.backward(forward(model, batch, share)), expected[1], factors, share)
    assert_gradients(model, sums, TOTAL)


def other_calls_raise(wrap):
    model, batch = made("mlp")
    model = wrap(model)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses = forward(model, batch, "equal")
    with pytest.raises(RuntimeError, match=r"process 0 called backward\(\), process 1 called pre_step\(\)"):
        clipper.backward(losses) if dist.get_rank() == 0 else clipper.pre_step()


def other_arguments_raise(wrap):
    model, batch = made("mlp")
    model = wrap(model)
    reduction = ("mean", "sum")[dist.get_rank()]
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction=reduction)
    losses = forward(model, batch, "equal")
    with pytest.raises(RuntimeError, match="need the same trainable parameters, the same arguments of the clipper"):
        clipper.backward(losses)


def other_parameters_raise(wrap):
    model, batch = made("mlp")
    model = wrap(model)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    if dist.get_rank() == 1:
        next(model.parameters()).requires_grad_(False)
    losses = forward(model, batch, "equal")
    with pytest.raises(RuntimeError, match="need the same trainable parameters, the same arguments of the clipper"):
        clipper.backward(losses)


def a_share_without_forward(wrap):
    """A process without samples need not run the model."""
    model, batch = made("mlp")
    limit, total, factors, sums, _ = expected_of(model, batch)
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(limit)) as clipper:
        own = own_share(batch, "empty")
        assert_result(
            clipper.backward(losses_of(model(own)) if len(own) else own.new_zeros(0)), total, factors, "empty"
        )
        assert_gradients(model, sums, TOTAL)
        if len(own):
            losses_of(model(own)).mean().backward()
        assert_result(clipper.clip_and_accumulate(len(own)), total, factors, "empty")
        assert clipper.pre_step()[1] == TOTAL
        assert_gradients(model, sums, TOTAL)
        with pytest.raises(RuntimeError, match="no process has samples"):
            clipper.backward(torch.zeros(0))  # nobody has samples


def a_layer_that_one_process_uses(wrap):
    """Gradients that other processes lack count as zeros there; without gradients anywhere, `.grad` stays None."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(3, 3) for name in ("first", "second", "unused")}
    model = Net(lambda m, x, both: m.second(m.first(x)) if both else m.first(x), **layers).double()
    batch = torch.randn(4, 3, dtype=torch.float64)
    each = [loop(copy.deepcopy(model), [batch[i : i + 2], i == 2]) for i in (0, 2)]
    total = torch.cat([total_of(norms_of(grads)) for grads in each])
    factors = (1 / (total + 1e-6)).clamp(max=1)
    rank = dist.get_rank()
    wrapped = wrap(model)
    with PerSampleGradientClipper(wrapped, ConstantFlatClipper(1.0)) as clipper:
        result = clipper.backward(losses_of(wrapped(batch[2 * rank : 2 * rank + 2], rank == 1)))
    assert_close(result.norms, total[2 * rank : 2 * rank + 2])
    for name, param in model.named_parameters():
        parts = [torch.tensordot(factors[2 * i : 2 * i + 2], grads[name], 1) for i, grads in enumerate(each)]
        assert param.grad is None if "unused" in name else param.grad is not None
        if param.grad is not None:
            assert_close(full(param.grad), sum(parts) / 4)


def a_silent_layer_wakes(wrap, form):
    """Only a step in which a process gets a gradient there needs a proof, and all run equally many backwards."""
    torch.manual_seed(0)
    forward = lambda m, x, factor: m.head(x) + factor * m.last(m.branch(x).tanh())  # noqa: E731
    plain = Net(forward, head=nn.Linear(4, 4), branch=nn.Linear(4, 4), last=nn.Linear(4, 4)).double()
    model, rank, backwards = wrap(copy.deepcopy(plain)), dist.get_rank(), []
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        for step in range(1, 16):
            x, factor = torch.randn(3 + rank, 4).double(), float(step == 13 or (step == 7 and rank == 1))
            output, calls = model(x, factor), []
            output.grad_fn.register_prehook(lambda grads, calls=calls: calls.append(grads))
            if form == "losses":
                result = clipper.backward(losses_of(output))
            else:
                losses_of(output).mean().backward()
                result = clipper.clip_and_accumulate()
                clipper.pre_step()
            parts = [loop(copy.deepcopy(plain), [x[i : i + 1], factor]) for i in range(len(x))]
            assert_close(result.norms, torch.cat([total_of(norms_of(grads)) for grads in parts]))
            backwards.append(len(calls))
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, backwards)
    assert everywhere[0] == everywhere[1]
    assert [i + 1 for i, count in enumerate(backwards) if count > 2] == [1, 2, 4, 7, 8, 13]


def ordinary_steps_between_clipped_ones(wrap):
    model, batch = made("mlp")
    plain = copy.deepcopy(model)
    *_, sums, _ = expected_of(model, batch, 1.0)
    loss = losses_of(plain(batch)).mean()
    expected = torch.autograd.grad(loss, list(plain.parameters()))
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        for _ in range(2):
            model.zero_grad()
            with clipper.paused():
                forward(model, batch, "equal").mean().backward()
            for param, grad in zip(model.parameters(), expected, strict=True):
                assert_close(full(param.grad), grad)
            model.zero_grad()
            clipper.backward(forward(model, batch, "unequal"))
            assert_gradients(model, sums, TOTAL)
    model.zero_grad()
    forward(model, batch, "equal").mean().backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert_close(full(param.grad), grad)


def other_settings_of_ddp(wrap):
    settings = [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"bucket_cap_mb": 1e-5},
    ]
    for options in settings:
        wrapped = lambda model, options=options: wrap(model, **options)  # noqa: E731
        backward_equals_one_process(wrapped, "gpt", "unequal", "mean")
        classic_equals_one_process(wrapped, "mlp", "unequal", "mean")
        ordinary_steps_between_clipped_ones(wrapped)


def collectives_of_a_step(wrap):
    """Two messages, and a bucket for each dtype and for each 25 MiB."""
    torch.manual_seed(0)
    large = nn.Sequential(nn.Linear(3, 2_500_000), nn.Linear(2_500_000, 1)).float()  # 30, 10, 10 and 0 MB
    for model, buckets in (
        (mlp().double(), 1),
        (Net(mixed, a=nn.Linear(3, 3), b=nn.Linear(3, 2).double()), 2),
        (large, 2),
    ):
        x = torch.randn(2, 3, dtype=next(model.parameters()).dtype)
        clipper = PerSampleGradientClipper(wrap(model), ConstantFlatClipper(1.0))
        losses = losses_of(model(x))
        with Collectives() as found:
            clipper.backward(losses)
        assert found.counts == {"allgather_": 2, "allreduce_": buckets}
        losses_of(model(x)).mean().backward()
        with Collectives() as found:
            clipper.clip_and_accumulate()
        assert found.counts == {"allgather_": 1}
        with Collectives() as found:
            clipper.pre_step()
        assert found.counts == {"allgather_": 1, "allreduce_": buckets}


def mixed(m, x):
    return m.b(m.a(x).double())


class Tied(nn.Module):
    """Uses the table outside of the call of its module."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.table(x)) @ self.table.weight.T


def a_parameter_outside_of_its_layer_raises(wrap):
    model = wrap(Tied().double())
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses = losses_of(model(torch.randint(0, 11, (3, 5))))
    with pytest.raises(RuntimeError, match=r"'table\.weight' got a gradient from outside the call of its layer"):
        clipper.backward(losses)
    assert all(param.grad is None for param in model.parameters())


def losses_without_a_graph_raise(wrap):
    model, batch = made("mlp")
    clipper = PerSampleGradientClipper(model := wrap(model), ConstantFlatClipper(1.0))
    losses = forward(model, batch, "equal")
    with pytest.raises(RuntimeError, match="losses of a process do not require grad: with fully_shard"):
        clipper.backward(losses.detach() if dist.get_rank() else losses)
    assert all(param.grad is None for param in model.parameters())


def shards_inside_of_a_module_taken_whole_raise(wrap):
    model, batch = made("mlp")
    clipper = PerSampleGradientClipper(model := wrap(model), ConstantFlatClipper(1.0), whole=("",))
    with pytest.raises(ValueError, match="modules in it are sharded by themselves: call fully_shard on"):
        forward(model, batch, "equal")
    clipper.detach()


def a_module_taken_whole_is_right(wrap):
    model, batch = made("mlp")
    *_, sums, _ = expected_of(model, batch, 1.0)
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), whole=("",)) as clipper:
        for _ in range(2):
            model.zero_grad()
            clipper.backward(forward(model, batch, "unequal"))
            assert_gradients(model, sums, TOTAL)


def mixed_precision_is_about_right(wrap):
    torch.manual_seed(0)
    model, batch = GPT(), batch_of("gpt")
    _, total, _, sums, _ = expected_of(model.double(), batch, 1.0)
    model = wrap(model.float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        result = clipper.backward(losses_of(model(own_share(batch, "unequal")).float()))
    assert result.norms.dtype == torch.float32
    torch.testing.assert_close(result.norms.double(), own_share(total, "unequal"), rtol=0.05, atol=0)
    norm = torch.stack([value.norm() for value in sums.values()]).norm()
    for name, param in model.named_parameters():
        assert param.grad.dtype == torch.float32
        assert (full(param.grad) - sums[name] / TOTAL).norm() < 0.05 * norm / TOTAL


def frozen_later(wrap):
    """A parameter is frozen between two steps, after a forward that leaves the parameters in full."""
    model, batch = made("mlp")
    plain = copy.deepcopy(model)
    model = wrap(model)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        clipper.backward(forward(model, batch, "unequal"))
        model.zero_grad()
        frozen(model, "0.weight", "2.bias")
        with torch.no_grad():
            model(own_share(batch, "unequal"))
        *_, sums, _ = expected_of(frozen(plain, "0.weight", "2.bias"), batch, 1.0)
        result = clipper.backward(forward(model, batch, "unequal"))
        assert list(result.param_norms) == list(sums)
        model.reshard()
        assert_gradients(model, sums, TOTAL)


def steps_train_as_one_process(wrap):
    """The optimizer steps, and the next forward sees the new parameters."""
    model, batch = made("gpt")
    alone = copy.deepcopy(model)
    model = wrap(model)
    for each, share in ((alone, lambda x: x), (model, lambda x: own_share(x, "unequal"))):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        with PerSampleGradientClipper(each, ConstantFlatClipper(1.0)) as clipper:
            for _ in range(4):
                optimizer.zero_grad()
                clipper.backward(losses_of(each(share(batch))))
                optimizer.step()
    for mine, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other), mine, rtol=1e-8, atol=1e-8)


def messages_of_shards(wrap):
    model = wrap(mlp().double())
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), verify="never")
    losses = losses_of(model(torch.randn(2, 3, dtype=torch.float64)))
    with Collectives() as found:
        clipper.backward(losses)
    assert found.counts["allgather_"] == 2
    assert sum(number for name, number in found.counts.items() if "reduce_scatter" in name) == 6


def half_precision_adds_up_in_float32(wrap):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    model = wrap(model)
    rank = dist.get_rank()
    sizes = (256.0, 1.0)  # their sum is not a number of bfloat16: 257 rounds to 256, and 257 + 1 to 258
    with PerSampleGradientClipper(model, ConstantFlatClipper(1e9), loss_reduction="sum") as clipper:
        for _ in range(2):
            x = torch.full((1, 3), sizes[rank], dtype=torch.bfloat16)
            model(x).float().sum(1).sum().backward()
            clipper.clip_and_accumulate()
        clipper.pre_step()
    for param in model.parameters():
        expected = torch.full(param.shape, 514.0 if param.ndim == 2 else 4.0).bfloat16()
        assert torch.equal(full(param.grad), expected)


def cases(ranks, kind):
    """The checks for so many processes, by name: each takes the function that wraps the model."""
    found = []
    # equal shares go the way of unequal ones, and blocks that are sharded by themselves that of a sharded model
    shares = {"replicated": ("equal", "unequal", "empty"), "sharded": ("unequal", "empty")}
    for share in shares.get(kind, ("unequal",)) if ranks == 2 else ("unequal",):
        # an empty batch of each layer is a test in `test_weighting`; experts without a row wait for no other process.
        # Every model meets one of three kinds
        own = (
            list(MODELS)[list(WRAPS).index(kind) :: 3]
            if ranks == 2 and share == "unequal" and kind not in ("kept", "partly")
            else []
        )
        for name in dict.fromkeys(["mlp", "gpt", "experts", *own]):
            found.append((backward_equals_one_process, name, share, "mean"))
        found += (
            []
            if kind in ("nested", "kept", "partly") or ranks == 3
            else [
                (backward_equals_one_process, "gpt", share, "sum", "low"),
                (classic_equals_one_process, "frozen", share, "mean"),
                (classic_equals_one_process, "cnn", share, "sum"),
                (several_backwards_add_up, "mlp", share),
                (a_limit_for_each_parameter, "mlp", share),
                (a_nan_sample_is_left_out, "mlp", share, float("nan")),
                (a_nan_sample_is_left_out, "mlp", share, float("inf")),
            ]
        )
    errors = list(ERRORS)[(list(WRAPS).index(kind) + ranks) % 2 :: 2]
    found += [(an_error_on_one_process_is_one_on_all, error.__name__, "unequal") for error in errors]
    if ranks == 2:
        found += [(other_arguments_raise,), (other_parameters_raise,), (other_calls_raise,)]
        if kind != "partly":  # torch does not add up gradients of parameters that are not sharded
            found += [(half_precision_adds_up_in_float32,), (ordinary_steps_between_clipped_ones,)]
        found += [(a_layer_that_one_process_uses,)] if kind in ("replicated", "sharded") else []
        found += [(steps_train_as_one_process,)]
        if kind != "nested":  # there, torch refuses what is a shard again
            found += [(a_parameter_outside_of_its_layer_raises,)]
        if kind != "replicated":
            found += [(classic_of_inputs_with_a_gradient, "mlp")]
            found += [(classic_equals_one_process, name, "unequal", "mean") for name in ("mlp", "gpt", "checkpoints")]
            found += [(losses_without_a_graph_raise,)]
            found += [(a_silent_layer_wakes, form) for form in ("losses", "classic")] if kind == "sharded" else []
        if kind not in ("replicated", "partly"):
            found += [(mixed_precision_is_about_right,), (frozen_later,)]
        found += [
            (
                shards_inside_of_a_module_taken_whole_raise
                if kind in ("nested", "kept", "partly")
                else a_module_taken_whole_is_right,
            )
        ]
        found += [(messages_of_shards,)] if kind == "sharded" else []
    if kind == "replicated":
        found += [(a_share_without_forward,)]
        found += [(other_settings_of_ddp,), (collectives_of_a_step,)] if ranks == 2 else []
    return {" ".join([check.__name__, *map(str, args)]): (check, args) for check, *args in found}


WRAPS = {
    "replicated": replicated,
    "sharded": sharded,
    "nested": partial(sharded, nested=True),
    "kept": partial(sharded, nested=True, reshard_after_forward=False),
    "partly": partial(sharded, partly=True),
}


def run(kind, names):
    """The errors by the name of the check."""
    failures = {}
    for name in names:
        check, args = cases(dist.get_world_size(), kind)[name]
        try:
            check(WRAPS[kind], *args)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
            print(name, failures[name], flush=True)  # noqa: T201
    return failures
