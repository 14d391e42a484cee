"""What the graph says of a function of torch: whether values that it saves may give rows to other samples."""

import gc
import itertools
import sys
import types
import unittest
import weakref
from functools import partial

import pytest
import torch
from per_sample.harness import Net, assert_close, clip, losses_of, norms_in_batch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torchzero_clip.per_sample.samples.graph import Graph
from torchzero_clip.per_sample.samples.graph_nodes import kind_of

COUNT = 3


@pytest.fixture(scope="module")
def database():
    """Torch's own database of operations, with inputs for each."""
    if "expecttest" not in sys.modules:  # which the tests of torch import, and need for nothing here
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.backends, "disable_global_flags", lambda: None
        )  # the import would lock torch's flags for later tests
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db

        # for each input, torch looks for the name of a test in the source of all frames: half of the time
        patch.setattr(common_utils, "extract_test_fn", lambda: None)
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)  # see conftest.py
        yield op_db


def graph_of(output):
    return Graph([output.grad_fn], COUNT)


def outputs_of(operation, sample):
    # sums, because rows of a leaf are none of a layer
    zero = torch.zeros((), requires_grad=True)
    given = pytree.tree_map(lambda x: x + zero if wants(x) else x, (sample.input, sample.args, sample.kwargs))
    found = pytree.tree_leaves(operation(given[0], *given[1], **given[2]))
    return [x for x in found if isinstance(x, torch.Tensor) and x.grad_fn is not None and x.is_floating_point()]


def labels(output, leaves, dim):
    """Whose gradient each entry of the leaves gets, if the entries of the output along a dimension are samples."""
    shape = [1] * output.ndim
    shape[dim] = -1
    powers = (2.0 ** torch.arange(1, 1 + output.shape[dim]).double()).view(shape)
    seed = torch.rand(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    seeds = (seed, seed * powers.to(output.dtype))
    one, many = (torch.autograd.grad(output, leaves, x, retain_graph=True, materialize_grads=True) for x in seeds)
    found = []
    for a, b in zip(one, many, strict=True):
        number = (b / a).log2()
        known = (a != 0) & number.isfinite() & (number == number.round())
        found.append(torch.where(known, number, -1))
    return found


def sure(found, output, leaves, dim):
    """The labels, with -1 where NaN shows that values decide."""
    pairs = zip(found, reached_by_nan(output, leaves, dim), strict=True)
    return [torch.where(reached > 1, -1, part) for part, reached in pairs]


def reached_by_nan(output, leaves, dim):
    """How many samples may give a gradient to each entry of the leaves."""
    counts = [torch.zeros(x.shape) for x in leaves]
    for i in range(output.shape[dim]):
        seed = torch.zeros_like(output)
        seed.narrow(dim, i, 1).fill_(torch.nan)
        grads = torch.autograd.grad(output, leaves, seed, retain_graph=True, materialize_grads=True)
        for count, grad in zip(counts, grads, strict=True):
            count += grad.isnan()
    return counts


def other_values(sample, generator):
    """The same tensors with their values in another order, so that indices are valid."""

    def turned(x):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or not x.numel():
            return x
        flat = x.detach().reshape(-1)
        return flat[torch.randperm(len(flat), generator=generator)].view(x.shape).requires_grad_(x.requires_grad)

    args, kwargs = pytree.tree_map(turned, (sample.args, sample.kwargs))
    return type(sample)(pytree.tree_map(turned, sample.input), args=args, kwargs=kwargs)


def free_dims(graph, output):
    """The dimensions of an output along which its graph says that samples stay where they are."""
    if graph.moves_anywhere:
        return []
    taken = set()
    for node, axes in graph.sites:
        if node is not output.grad_fn:
            return []  # of another shape
        taken |= {*axes}
    return [dim for dim in range(output.ndim) if dim not in taken and 1 < output.shape[dim] <= 10]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_functions_of_torch_that_move_rows_by_values_have_another_hash_or_count_as_moving(database):
    wrong, checked, generator = set(), 0, torch.Generator().manual_seed(0)
    for operation in database:
        if not operation.supports_autograd:
            continue
        try:
            samples = list(operation.sample_inputs("cpu", torch.float64, requires_grad=True))[:12]
        except Exception:  # it needs what is not installed
            continue
        for sample in samples:
            found = []
            for given in (sample, other_values(sample, generator), other_values(sample, generator)):
                try:
                    outputs = outputs_of(operation, given)
                except Exception:  # other values are no valid arguments
                    break
                leaves = [x for x in pytree.tree_leaves((given.input, given.args, given.kwargs)) if wants(x)]
                found.append((outputs, leaves))
            for number in range(min((len(outputs) for outputs, _ in found), default=0)):
                graphs = [graph_of(outputs[number]) for outputs, _ in found]
                if len(found) < 2 or len({(graph.outline, graph.key) for graph in graphs}) > 1 or not found[0][1]:
                    continue
                for dim in free_dims(graphs[0], found[0][0][number]):
                    checked += 1
                    places = [(outputs[number], leaves, dim) for outputs, leaves in found]
                    try:
                        each = [labels(*place) for place in places]
                        is_wrong = clash(each) and clash(
                            [sure(x, *place) for x, place in zip(each, places, strict=True)]
                        )
                    except RuntimeError:  # its backward raises for these values
                        continue
                    if is_wrong:
                        wrong.add((operation.name, found[0][0][number].grad_fn.name()))
    assert checked > 1000
    assert not sorted(wrong), sorted(wrong)


def wants(x):
    return isinstance(x, torch.Tensor) and x.requires_grad and x.layout == torch.strided


def clash(each):
    """True if an entry belongs to different samples for different values."""
    pairs = (pair for others in zip(*each, strict=True) for pair in itertools.pairwise(others))
    return any(bool(((one != other) & (one >= 0) & (other >= 0)).any()) for one, other in pairs)


def proofs(model, losses, steps=3):
    """The numbers of backwards of some steps."""
    found = []
    with clip(model, verify="never") as clipper:
        for _ in range(steps):
            calls = []
            each = losses(model)
            each.register_hook(calls.append)
            clipper.backward(each)
            found.append(len(calls))
    return found


def words(count=4, length=5):
    return torch.randint(0, 9, (count, length))


def lin(out=3):
    return nn.Linear(3, out)


def pooling():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 4)
    )


def last(m, x):
    return m.lin(m.table(x))[torch.arange(len(x)), (x > 0).sum(1) - 1]


def decoded(m, x):
    h = m.table(x) + m.places(torch.arange(x.shape[1]))
    heads = [part[:, None] for part in m.attention(h).chunk(3, -1)]
    return m.head(h + F.scaled_dot_product_attention(*heads, is_causal=True)[:, 0])


def decoder():
    return Net(decoded, table=nn.Embedding(9, 3), places=nn.Embedding(9, 3), attention=nn.Linear(3, 9), head=lin(9))


def entropy(logits, classes):
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten(), reduction="none").view(len(logits), -1).mean(1)


STEADY = {
    "classes": (lambda: nn.Sequential(lin(), nn.ReLU(), lin(9)), lambda m: entropy(m(torch.randn(4, 3)), words(4, 1))),
    "images": (pooling, lambda m: entropy(m(torch.randn(4, 1, 6, 6)), torch.randint(0, 4, (4,)))),
    "sequences": (lambda: Net(lambda m, x: m.rnn(x)[0][:, -1], rnn=nn.LSTM(3, 3, batch_first=True)), None),
    "tokens": (decoder, lambda m: entropy(m(x := words())[:, :-1], x[:, 1:])),
    "chances of tokens": (
        decoder,
        lambda m: m(x := words()).log_softmax(-1).gather(-1, x[..., None]).squeeze(-1).mean(1),
    ),
    "the last token": (lambda: Net(last, table=nn.Embedding(9, 3), lin=lin()), lambda m: losses_of(m(words() + 0))),
    "the largest of positions": (lambda: Net(lambda m, x: m.lin(x).max(1).values, lin=lin()), None),
    "masks": (lambda: Net(lambda m, x: m.lin(x).masked_fill(x > 0, 0.0), lin=lin()), None),
}


@pytest.mark.parametrize("name", STEADY)
def test_common_models_are_proved_once(name):
    make, losses = STEADY[name]
    torch.manual_seed(0)
    found = proofs(make(), losses or (lambda m: losses_of(m(torch.randn(4, 5, 3)))))
    assert found[0] > 1
    assert found[1:] == [1, 1]


MOVING = {
    "an index": lambda h, order: h[order],
    "slices in place": lambda h, order: h.clone().index_put_((order,), h),
    "a function of the user": lambda h, order: Same.apply(h),
    "a choice": lambda h, order: torch.where(h > 0, h, 2 * h),
    "a matrix of zeros and ones": lambda h, order: torch.einsum("ij,jk->ik", F.one_hot(order).to(h), h),
}


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Kept(Same):
    keeps_rows = True


@pytest.mark.parametrize("name", MOVING)
def test_values_that_may_move_rows_are_proved_in_each_step(name):
    order = torch.tensor([1, 0, 3, 2])
    model = Net(lambda m, x: MOVING[name](m.lin(x), order), lin=lin())
    assert min(proofs(model, lambda m: losses_of(m(torch.randn(4, 3))))) > 1


@pytest.mark.parametrize("way", [lambda f, x: f(x), partial(checkpoint, use_reentrant=False)])
def test_in_a_checkpoint_an_index_along_another_dimension_may_move_rows_too(way):
    """To read the index would run the checkpoint again."""
    model = Net(lambda m, x: way(lambda h: m.lin(h)[:, [2, 0, 1]], x), lin=lin())
    assert (min(proofs(model, lambda m: losses_of(m(torch.randn(4, 3))))) == 1) == (not isinstance(way, partial))


def test_a_function_may_say_that_it_keeps_rows():
    model = Net(lambda m, x: Kept.apply(m.lin(x)), lin=lin())
    assert proofs(model, lambda m: losses_of(m(torch.randn(4, 3))))[1:] == [1, 1]


@pytest.mark.parametrize("module", [__name__, "torch._functorch"])
def test_a_function_that_is_defined_again_is_not_kept_alive(module):
    """The compiler makes a class of torch for each function that it compiles."""
    kinds = []
    model = Net(lambda m, x: made().apply(m.lin(x)), lin=lin())

    def made():
        globals()["_Again"] = kind = type("_Again", (Kept,), {"__module__": module})
        kinds.append(weakref.ref(kind))
        return kind

    proofs(model, lambda m: losses_of(m(torch.randn(4, 3))))
    del globals()["_Again"]
    gc.collect()
    assert [kind() for kind in kinds] == [None] * 3


def test_what_is_not_known_moves():
    x = torch.randn(4, 3, requires_grad=True)
    changed = x.clone()
    changed[0] = 0
    assert type(changed.grad_fn).__name__ == "CopySlices"
    assert kind_of(changed.grad_fn).moves_anywhere is not None


class Named(torch.autograd.Function):
    """A function of a user, with an attribute of the name under which watched layers keep their call."""

    @staticmethod
    def forward(ctx, x):
        ctx.call = "of the user"
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_an_attribute_of_a_function_of_a_user_is_no_call_of_a_layer():
    def forward(m, index):
        return Named.apply(m.last(F.embedding(index, Named.apply(m.table)))).mean(1)

    model = Net(forward, table=nn.Parameter(torch.randn(9, 4)), last=nn.Linear(4, 3)).double()
    index = torch.randint(0, 9, (5, 6))
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"whole=\(Net,\)"):
        clipper.backward(losses_of(model(index)))
    with clip(model, whole=(Net,)) as clipper:
        assert_close(clipper.backward(losses_of(model(index))).norms, norms_in_batch(model, index))


def permuted(layout, way):
    """Rows that a sparse matrix moves between layers: a layer gets them in another order, and the next one back."""

    def forward(m, x):
        def body(h):
            h = m.second(way(m.order.to_sparse(layout=layout), h)).square()
            return way(m.order.mT.to_sparse(layout=layout), h)

        return m.around(body, m.first(x))

    model = Net(forward, first=lin(5), second=nn.Linear(5, 5))
    model.order, model.around = torch.eye(4, dtype=torch.float64), lambda f, h: f(h)
    return model.double()


SPARSE = {
    "product": lambda order, h: order @ h,
    "sum": lambda order, h: torch.addmm(torch.zeros_like(h), order, h),
    "from the right": lambda order, h: (h.mT @ order.to_dense().mT.to_sparse(layout=order.layout)).mT,
    "columns": lambda order, h: torch.stack([order @ column for column in h.unbind(1)], 1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["", "in a checkpoint"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_products_with_sparse_matrices_may_move_rows_in_each_step(name, layout, inside):
    model, x = permuted(layout, SPARSE[name]), torch.randn(4, 3).double()
    if inside:
        model.around = partial(checkpoint, use_reentrant=False)
    with clip(model, 1e9) as clipper:
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]):
            model.order = torch.eye(4, dtype=torch.float64)[order]
            expected = norms_in_batch(model, x)
            assert_close(clipper.backward(losses_of(model(x))).norms, expected)


@pytest.mark.parametrize("inside", [False, True], ids=["", "in a checkpoint"])
def test_products_with_frozen_weights_need_no_proof_in_each_step(inside):
    """As those of a model that LoRA trains."""

    def forward(m, x):
        return (partial(checkpoint, use_reentrant=False) if inside else lambda f, h: f(h))(m.block, x)

    block = nn.Sequential(lin(5), nn.Linear(5, 5).requires_grad_(False), nn.GELU(), nn.Linear(5, 5))
    model = Net(forward, block=block)
    assert proofs(model, lambda m: losses_of(m(torch.randn(4, 3))))[1:] == [1, 1]


@pytest.mark.parametrize("entries", [(1.0, -2.0, 1.0), (2.0, -1.0, -1.0)])
def test_entries_of_several_samples_in_one_row_do_not_hide_each_other_in_a_checkpoint(entries):
    """The gradients of a row are proved by one number, in which entries with simple weights would cancel."""
    count, way = 3, partial(checkpoint, use_reentrant=False)

    def moved(order, h):
        return torch.bmm(torch.eye(count, dtype=h.dtype)[order].expand(count, count, count).to_sparse(), h)

    def forward(m, x):  # the samples are in dimension 1, along which the matrix moves rows
        h = m.second(way(lambda h: moved(m.order, h), m.first(x)))
        return way(lambda h: moved(m.order.argsort(), h), h)

    def losses(output):
        shares = torch.tensor([1.0, 0.0, 0.0]).expand(count, count, count).clone()
        shares[~torch.eye(count, dtype=torch.bool)] = torch.tensor(entries)
        return (output * shares).sum((0, 2))

    model = Net(forward, first=lin(), second=nn.Linear(3, 3)).double()
    model.second.weight.data = 2 * torch.eye(3).double()
    x = torch.randn(count, count, 3).double()
    with clip(model, 1e9, verify="never", batch_first=False) as clipper:
        for order in ([0, 1, 2], [0, 1, 2], [2, 1, 0]):
            model.order = torch.tensor(order)
            expected = norms_in_batch(model, x, losses=losses)
            assert_close(clipper.backward(losses(model(x))).norms, expected)
