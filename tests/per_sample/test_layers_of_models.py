"""Every layer equals one backward per sample: a line each."""

import pytest
import torch
from per_sample.harness import assert_close, assert_matches_loop, frozen, losses_of
from torch import nn
from versions import TORCH

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

B = 5


def x(*shape):
    return torch.randn(B, *shape) * torch.linspace(0.1, 3, B).view(-1, *[1] * len(shape))


def tokens(*shape, high=6):
    return torch.randint(0, high, (B, *shape))


class Padded(nn.Module):
    """A module with a parameter of its own around an embedding with padding, whose weight is used again."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.embedding = nn.Embedding(6, 3, padding_idx=2)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.embedding(index) * self.scale)


class Bare(nn.Module):
    """A module with parameters of its own, and one with a rule inside."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return self.inner(x * self.scale)


LAYERS = {
    "linear 2-D": (lambda: nn.Linear(3, 2), lambda: x(3)),
    "linear 3-D": (lambda: nn.Linear(3, 2), lambda: x(4, 3)),
    "linear 4-D": (lambda: nn.Linear(3, 2), lambda: x(2, 3, 3)),
    "linear 5-D": (lambda: nn.Linear(3, 2), lambda: x(2, 2, 2, 3)),
    "linear of one position": (lambda: nn.Linear(3, 2), lambda: x(1, 3)),
    "linear, gradients kept": (lambda: nn.Linear(3, 2), lambda: x(40, 3)),
    "linear, gradients formed in pieces": (lambda: nn.Linear(3, 2), lambda: x(7, 3)),
    "linear, Gram matrices": (lambda: nn.Linear(30, 20), lambda: x(4, 30)),
    "linear, Gram matrices in parts": (lambda: nn.Linear(200, 150), lambda: x(71, 200)),
    "linear, Gram matrices in parts of parts": (lambda: nn.Linear(300, 280), lambda: x(131, 300)),
    "linear, wider in than out": (lambda: nn.Linear(30, 2), lambda: x(4, 30)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), lambda: x(4, 3)),
    "linear, frozen weight": (lambda: frozen(nn.Linear(3, 2), "weight"), lambda: x(4, 3)),
    "linear, frozen bias": (lambda: frozen(nn.Linear(3, 2), "bias"), lambda: x(4, 3)),
    "linear twice": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: x(4, 3)),
    "linear, expanded input": (lambda: nn.Linear(3, 2), lambda: x(1, 3).expand(B, 4, 3)),
    "linear, strided input": (lambda: nn.Linear(3, 2), lambda: x(3, 4).transpose(1, 2)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), lambda: x(3, 8)),
    "conv1d, strided and dilated": (lambda: nn.Conv1d(3, 4, 3, stride=2, dilation=2, padding=1), lambda: x(3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), lambda: x(3, 6, 6)),
    "conv2d, few positions": (lambda: nn.Conv2d(9, 30, 3), lambda: x(9, 5, 5)),
    "conv2d, few positions and few channels": (lambda: nn.Conv2d(5, 60, 4), lambda: x(5, 5, 5)),
    "conv2d, gradients dropped": (lambda: nn.Conv2d(9, 20, 3), lambda: x(9, 4, 4)),
    "conv2d, many channels": (lambda: nn.Conv2d(9, 4, 3, padding=1), lambda: x(9, 6, 5)),
    "conv2d, uneven": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2)), lambda: x(3, 6, 5)),
    "conv2d, dilated": (lambda: nn.Conv2d(9, 4, 3, dilation=(2, 1), stride=2), lambda: x(9, 8, 7)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: x(4, 5, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(8, 16, 3, groups=8), lambda: x(8, 5, 5)),
    "conv2d, same with an even kernel": (lambda: nn.Conv2d(3, 4, 4, padding="same"), lambda: x(3, 6, 6)),
    "conv2d, same and dilated": (lambda: nn.Conv2d(9, 4, 2, padding="same", dilation=3), lambda: x(9, 6, 6)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), lambda: x(3, 6, 6)),
    "conv2d, circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), lambda: x(3, 6, 6)),
    "conv2d, reflect": (lambda: nn.Conv2d(9, 4, 3, padding=(1, 2), padding_mode="reflect"), lambda: x(9, 6, 6)),
    "conv2d, replicate": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), lambda: x(3, 6, 6)),
    "conv2d, same, circular, even": (
        lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"),
        lambda: x(3, 6, 6),
    ),
    "conv2d without bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), lambda: x(3, 5, 5)),
    "conv2d, frozen weight": (lambda: frozen(nn.Conv2d(3, 4, 3), "weight"), lambda: x(3, 5, 5)),
    "conv2d twice": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 2)), lambda: x(3, 6, 6)),
    "conv2d, channels last": (lambda: nn.Conv2d(9, 4, 3), lambda: x(9, 5, 5).to(memory_format=torch.channels_last)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, stride=(1, 2, 1)), lambda: x(2, 3, 4, 4)),
    "conv3d, many channels": (lambda: nn.Conv3d(8, 3, (1, 2, 2)), lambda: x(8, 3, 4, 4)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), lambda: x(3, 5)),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, padding=1), lambda: x(4, 5, 5)),
    "embedding": (lambda: nn.Embedding(6, 3), lambda: tokens(7)),
    "embedding, one index": (lambda: nn.Embedding(6, 3), lambda: tokens()),
    "embedding, 3-D": (lambda: nn.Embedding(6, 3), lambda: tokens(2, 3)),
    "embedding, padding": (lambda: nn.Embedding(6, 3, padding_idx=2), lambda: tokens(9)),
    "embedding and linear": (lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 4)), lambda: tokens(7)),
    "bag, sum": (lambda: nn.EmbeddingBag(6, 3, mode="sum"), lambda: tokens(7)),
    "bag, mean": (lambda: nn.EmbeddingBag(6, 3), lambda: tokens(7)),
    "bag, mean with padding": (lambda: nn.EmbeddingBag(6, 3, padding_idx=1), lambda: tokens(7)),
    "layer norm": (lambda: nn.LayerNorm(6), lambda: x(4, 6)),
    "layer norm, 2-D": (lambda: nn.LayerNorm(6), lambda: x(6)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((4, 6)), lambda: x(3, 4, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), lambda: x(4, 6)),
    "layer norm, nothing to train": (
        lambda: nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2)),
        lambda: x(4, 6),
    ),
    "layer norm, frozen bias": (lambda: frozen(nn.LayerNorm(6), "bias"), lambda: x(4, 6)),
    "layer norm behind linear": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), lambda: x(4, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), lambda: x(4, 6)),
    "rms norm, eps": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6, eps=0.1)), lambda: x(4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda: x(6, 4, 4)),
    "group norm, 2-D": (lambda: nn.GroupNorm(2, 6), lambda: x(6)),
    "group norm behind conv": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6)), lambda: x(3, 5, 5)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True), lambda: x(4, 6)),
    "instance norm 2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.InstanceNorm2d(4, affine=True)),
        lambda: x(3, 5, 5),
    ),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(4, affine=True), lambda: x(4, 3, 3, 3)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4)), lambda: x(3)),
    "lstm, batch first": (lambda: nn.LSTM(3, 4, batch_first=True), lambda: x(6, 3)),
    "lstm, two layers, both directions": (
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        lambda: x(5, 3),
    ),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), lambda: x(6, 3)),
    "rnn behind linear": (lambda: nn.Sequential(nn.Linear(3, 3), nn.RNN(3, 4, batch_first=True)), lambda: x(6, 3)),
    "bare parameters": (Bare, lambda: x(3)),
    "bare parameters behind linear": (lambda: nn.Sequential(nn.Linear(4, 3), Bare()), lambda: x(4)),
    "padding in a module with bare parameters": (Padded, lambda: tokens(9)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        lambda: x(4, 8),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), lambda: x(4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_equals_one_backward_per_sample(name):
    make_layer, make_input = LAYERS[name]
    assert_matches_loop(make_layer(), make_input())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_equals_one_backward_per_sample_on_a_gpu(name):
    make_layer, make_input = LAYERS[name]
    assert_matches_loop(make_layer().cuda(), make_input().cuda(), modes=("auto", "low"))


def test_bilinear_and_bags_with_weights_take_several_inputs():
    assert_matches_loop(nn.Bilinear(3, 4, 2), x(3), x(4))
    assert_matches_loop(nn.EmbeddingBag(6, 3, mode="sum"), tokens(7), None, x(7), modes=("auto", "low", "kept"))


@pytest.mark.skipif(TORCH < (2, 11), reason="this torch reads beyond the offsets in embedding_bag, and may crash")
@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_different_sizes_are_samples(mode, include_last):
    bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=2, include_last_offset=include_last).double()
    index, starts = torch.tensor([0, 1, 1, 2, 5, 2, 3, 0]), [0, 3, 3, 4]  # the second bag is empty
    offsets = torch.tensor([*starts, len(index)] if include_last else starts)
    expected = []
    for part in index.tensor_split(starts[1:]):
        (grad,) = torch.autograd.grad(
            losses_of(bag(part[None])).sum() if len(part) else bag.weight.sum() * 0, bag.weight
        )
        expected.append(grad)
    for memory in ("auto", "low"):
        with PerSampleGradientClipper(bag, ConstantFlatClipper(1e9), loss_reduction="sum", memory=memory) as clipper:
            bag.zero_grad()
            result = clipper.backward(losses_of(bag(index, offsets)))
        assert_close(result.norms, torch.stack(expected).flatten(1).norm(dim=1))
        assert_close(bag.weight.grad, torch.stack(expected).sum(0))


def test_attention_equals_one_backward_per_sample():
    query = x(4, 8)
    assert_matches_loop(nn.MultiheadAttention(8, 2, batch_first=True), query, x(6, 8), x(6, 8))
    padding = torch.zeros(B, 6, dtype=torch.bool)
    padding[:, -2:] = torch.rand(B, 2) < 0.5
    assert_matches_loop(nn.MultiheadAttention(8, 2, batch_first=True), query, x(6, 8), x(6, 8), padding)


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), nn.LSTM(3, 4), nn.GRU(3, 4), nn.RMSNorm(3)],
    ids=lambda layer: type(layer).__name__,
)
def test_sequences_may_come_first(layer):
    assert_matches_loop(layer, x(6, 3).transpose(0, 1), batch_first=False)
    assert_matches_loop(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2)), tokens(7).t(), batch_first=False)
