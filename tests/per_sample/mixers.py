"""Models that mix samples, and models that do not though they look like it, for `check_per_sample`."""

import torch
from per_sample.harness import Net, weight
from per_sample.layers import LAYERS, MODELS
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Layer(Net):
    """A module that errors and ``whole=`` name."""


def squares(model, batch):
    output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return output.square().flatten(1).sum(1)


def linear(*sizes):
    return nn.Linear(*(sizes or (3, 3)))


def gated(gate, shape):
    """What it adds cannot be seen as long as the gate is closed."""
    layer = Layer(lambda m, x: x + m.gate * (x + x.mean(0, keepdim=True)), gate=weight(5, value=gate))
    return layer, torch.randn(shape)


def masked(m, x):
    return ((x - x.mean(0)) * m.scale).masked_fill(torch.tensor([False, False, True]), -1e9)


def added_next(m, x):
    return x + m.gate * torch.cat([x[1:], x[-1:]])


def centered(_, x):
    return x - x.mean(0)


def attends_first(m, x):
    return m.attention(x, x, x)[0]


MIXERS = {
    "centered": lambda: (Layer(lambda m, x: centered(m, x) * m.scale, scale=weight(5, value=1.0)), torch.randn(4, 5)),
    "dropout": lambda: (
        Layer(lambda m, x: F.dropout(centered(m, x), 0.5, m.training) * m.scale, scale=weight(5)).eval(),
        torch.randn(4, 5),
    ),
    **{
        f"gate {gate}, {shape}": lambda settings=(gate, shape): gated(*settings)
        for gate in (0.0, 1.0)
        for shape in ((4, 5), (4, 4, 5))
    },
    "the next": lambda: (Layer(added_next, gate=weight(3, value=0.0)), torch.randn(4, 3)),
    "the next, with dropout": lambda: (
        Layer(lambda m, x: F.dropout(x, 0.1, m.training) * m.gate + added_next(m, x), gate=weight(3, value=0.0)).eval(),
        torch.randn(4, 3),
    ),
    "before a mask": lambda: (Layer(masked, scale=weight(3, value=0.0)), torch.randn(4, 3)),
    "without parameters": lambda: (nn.Sequential(nn.Linear(3, 3), Layer(centered), nn.Linear(3, 2)), torch.randn(4, 3)),
    "without noise": lambda: (
        Layer(
            lambda m, x: (h := m.head(x) @ torch.linalg.cholesky(m.kernel)) - h.mean(0), head=linear(), kernel=KERNEL
        ),
        torch.randn(4, 3),
    ),
    "in integers": lambda: (
        Layer(lambda m, x: (h := m.weight[x]) - h.mean(0), weight=weight(6, 3)),
        torch.tensor([[0, 0], [1, 2], [3, 1]]),
    ),
    "reversed": lambda: (nn.Sequential(nn.Linear(3, 3), Layer(lambda _, x: x.flip(0))), torch.randn(4, 3)),
    "samples as positions": lambda: (Layer(attends_first, attention=nn.MultiheadAttention(4, 2)), torch.randn(3, 5, 4)),
}
NAMED = {
    "without parameters": "'0' (Linear)",
    "without noise": "'head' (Linear)",
    "reversed": "'0' (Linear)",
    "samples as positions": "'attention' (MultiheadAttention)",
}
"""The first layer whose gradients are of several samples, if it is not the model itself."""


def contrastive(model, batch):
    left, right = (F.normalize(model(x), dim=1) for x in batch)
    return F.cross_entropy(left @ right.T, torch.arange(len(left)), reduction="none")


def shifted(m, x):
    return m.head(x + m.table(torch.arange(x.shape[1]) + 2))


def turned(m, x):
    return m.head(torch.tanh(m.first(x.transpose(0, 1)))).transpose(0, 1)


TOLD_APART = {
    "positions": lambda: Layer(shifted, table=nn.Embedding(9, 3), head=nn.Linear(3, 2)),
    "another order": lambda: Layer(turned, first=nn.Linear(3, 3), head=nn.Linear(3, 2)),
    "a table": lambda: Layer(
        lambda m, x: x + m.gate * m.table, gate=weight(3, value=1.0), table=torch.randn(4, 3).double()
    ),
    "a table behind a closed gate": lambda: Layer(
        lambda m, x: x + m.gate * m.table, gate=weight(3, value=0.0), table=torch.randn(4, 3).double()
    ),
}
LENGTHS = torch.tensor([2, 4, 3, 1])
MASK = torch.arange(5)[None] < LENGTHS[:, None]
WORDS = (torch.arange(20).view(4, 5) % 8 + 1) * MASK


def truncated_mean(m, x, lengths):
    """Zeros in padding, up to the longest sample, add nothing."""
    return m.head(m.first(x[:, : int(lengths.max())]).sum(1) / lengths[:, None])


def truncated_by_mask(m, x, mask):
    return truncated_mean(m, x, mask.sum(1))


def encoded(m, x, mask):
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype)
    padding = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)
    return m.encoder(x, mask=causal, src_key_padding_mask=padding, is_causal=True) * mask[..., None]


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), 2)


def in_dict(m, x):
    return {"logits": (h := m.head(x)), "others": (h.argmax(1), h > 0, None, h.mean(), h.amax(0))}


def float32_inside(m, x):
    return m.head(F.linear(x.float(), m.head.weight.float()).softmax(-1).to(x.dtype))


def sorted_by_length(m, x, lengths):
    order = m.order(lengths)
    packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
    return pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0][order.argsort()].sum(1)


def experts(m, x):
    weights, chosen = m.router(x).softmax(-1).topk(2)
    output = torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        rows, place = (chosen == i).nonzero(as_tuple=True)
        if len(rows):
            output = output.index_add(0, rows, m.act(expert(x[rows])) * weights[rows, place, None])
    return output


def pairs_at_once(m, x, y):
    h = m.head(torch.cat([x, y])).tanh()
    return h[: len(x)] * h[len(x) :]


def counted(m, x):
    m.calls += 1
    return m.head(x) * m.calls


def weighted(m, x):
    """The gradient of the bias of `head` is 0, but for rounding."""
    return (m.first(x) @ m.head(x).mT).softmax(-1) @ x


def masked_scores(m, x):
    scores = m.scores(m.first(x), m.head(x)).softmax(-1)
    return scores @ x


def rounding(_, x):
    """Zeros, but for rounding, that of a sample alone is another."""
    return x @ TABLE - (x[:, :, None] * TABLE).sum(1)


TABLE = torch.arange(64 * 64).double().cos().view(64, 64)
ROUNDING = Layer(rounding)
BESIDE = Layer(lambda m, x: 1e9 * torch.cat([x, rounding(m, x)], 1))
BY_LENGTH = Layer(lambda _, lengths: lengths.argsort(descending=True))
SCORES = Layer(lambda _, q, k: (q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9))
KERNEL = nn.Parameter(1e-3 * torch.eye(3), requires_grad=False)
OF_TABLE = (  # right models
    *("activations in place", "group norm behind conv", "transformer layer"),
    *("Linear called twice, 4", "positions of shape (-1,), 7", "GRU cells", "in dicts"),
)
RIGHT = {
    "batch norm in eval": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).eval(),
        torch.randn(4, 2, 3, 3),
    ),
    **{name: lambda name=name: [make() for make in {**LAYERS, **MODELS}[name][:2]] for name in OF_TABLE},
    "encoder": lambda: (Layer(encoded, encoder=encoder()), (torch.randn(4, 5, 4), MASK)),
    "embedding": lambda: (
        Layer(truncated_mean, first=nn.Embedding(9, 3, padding_idx=0), head=linear()),
        (WORDS, LENGTHS),
    ),
    "padding": lambda: (
        Layer(truncated_by_mask, first=nn.Linear(3, 3, bias=False), head=linear()),
        (torch.randn(4, 5, 3) * MASK[..., None], MASK.float()),
    ),
    "dict": lambda: (Layer(in_dict, head=linear()), torch.randn(4, 3), lambda m, x: m(x)["logits"].square().sum(1)),
    "float32, whole": lambda: (Layer(float32_inside, head=linear(32, 32)), torch.randn(4, 32)),
    "no noise": lambda: (
        Layer(lambda m, x: m.head(x) @ torch.linalg.cholesky(m.kernel), head=linear(), kernel=KERNEL),
        torch.randn(4, 3),
    ),
    "rounding": lambda: (
        Layer(lambda m, x: m.head(x) + m.rounding(x), head=linear(64, 64), rounding=ROUNDING),
        torch.randn(4, 64),
    ),
    "rounding beside": lambda: (
        Layer(lambda m, x: m.head(m.beside(x)), head=linear(128, 3), beside=BESIDE),
        torch.randn(4, 64),
    ),
    "input in place": lambda: (Layer(lambda m, x: m.head(x.mul_(2)), head=linear()), torch.randn(4, 3)),
    "nested": lambda: (
        Layer(
            lambda m, x, mask: m.head(m.encoder(x, src_key_padding_mask=~mask)).sum(1),
            encoder=encoder().requires_grad_(False),
            head=nn.Linear(4, 2, bias=False),
        ).eval(),
        (torch.randn(4, 5, 4), MASK),
    ),
    "sparse": lambda: (
        Layer(lambda m, x, graph: m.head((m.graph(graph) @ x.T).T), head=linear(5, 2), graph=nn.Identity()),
        (torch.randn(4, 5), torch.eye(5).to_sparse()),
    ),
    "scores": lambda: (Layer(masked_scores, scores=SCORES, first=linear(), head=linear()), torch.randn(4, 5, 3)),
    "bias of keys": lambda: (Layer(weighted, first=linear(16, 16), head=linear(16, 16)), torch.randn(4, 5, 16)),
    "state": lambda: (Layer(counted, head=linear(), calls=0), torch.randn(4, 3)),
    "scalar": lambda: (Layer(lambda m, x: m.head(x) * m.scale, head=linear(), scale=weight()), torch.randn(4, 3)),
    "sorted, whole": lambda: (
        Layer(sorted_by_length, order=BY_LENGTH, lstm=nn.LSTM(3, 2, batch_first=True)),
        (torch.randn(4, 5, 3), LENGTHS),
    ),
    "experts, whole": lambda: (
        Layer(experts, router=linear(), act=nn.SiLU(), experts=nn.ModuleList(linear() for _ in range(3))),
        torch.randn(4, 3),
    ),
    "pairs, whole": lambda: (Layer(pairs_at_once, head=linear()), (torch.randn(4, 3), torch.randn(4, 3))),
}


class Scale(Net):
    def __init__(self, size):
        super().__init__(lambda m, x: x * m.weight, weight=weight(size))


class Shift(Scale):
    pass


class Wrong(Scale):
    def forward(self, x):
        return x * self.weight
