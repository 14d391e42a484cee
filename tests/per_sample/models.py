"""Models as their authors publish them, written here in the structure of the published code, and their batches."""

import math
from collections.abc import Callable
from typing import Any

import torch
from per_sample.published import SAMPLES, WIDTH, WORDS, normal, words
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class BareLayerNorm(nn.Module):
    """The normalization of nanoGPT, whose bias may be None."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class SelfAttention(nn.Module):
    def __init__(self, width: int, bias: bool, *, causal: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.n_head, self.causal = 2, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        heads = [part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(c, 2)]
        y = F.scaled_dot_product_attention(*heads, attn_mask=None, dropout_p=0.0, is_causal=self.causal)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


def mlp(width: int, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 10, bias), nn.GELU(), nn.Linear(10, width, bias))


class GPTBlock(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = BareLayerNorm(width, bias), SelfAttention(width, bias, causal=True)
        self.ln_2, self.mlp = BareLayerNorm(width, bias), mlp(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH), nn.Dropout(0.0)
        self.h, self.ln_f = nn.ModuleList(GPTBlock(WIDTH, bias) for _ in range(2)), BareLayerNorm(WIDTH, bias)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class TiedHead(nn.Module):
    """The head multiplies by the weight of the embedding, outside of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, index: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.emb(index)))
        return h @ self.emb.weight.T


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ScaledBlock(nn.Module):
    """One layer scale has a module of its own. The other one is a bare parameter of the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), SelfAttention(width, bias=True, causal=False)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp(width)
        self.ls1, self.gamma_2 = LayerScale(width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class BareVisionTransformer(nn.Module):
    """The class token, the register and the positions are bare parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(1, 11, WIDTH))
        self.cls_token, self.reg_token = (nn.Parameter(torch.randn(1, 1, WIDTH)) for _ in range(2))
        self.blocks, self.norm = nn.Sequential(ScaledBlock(WIDTH), ScaledBlock(WIDTH)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token)]
        x = torch.cat([*tokens, x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), norm(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm(out)
        self.relu, self.downsample = nn.ReLU(inplace=True), nn.Identity()
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


def resnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    stem = nn.Conv2d(3, 6, 3, 1, 1, bias=False), norm(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks = BasicBlock(6, 6, 1, norm), BasicBlock(6, 8, 2, norm)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 7))


def trained_resnet() -> nn.Module:
    """In eval mode, with running statistics of a batch."""
    model = resnet(nn.BatchNorm2d)
    model(torch.randn(16, 3, 9, 9))
    return model.eval()


def conv(channels: int, out: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels, out, 3, stride, padding=1)


class TimedBlock(nn.Module):
    """Two convolutions, between which the block adds the embedding of the time."""

    def __init__(self, channels: int, out: int, times: int = 10) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU(), conv(channels, out))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(times, out))
        self.out_layers = nn.Sequential(nn.GroupNorm(2, out), nn.SiLU(), conv(out, out))
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.skip(x) + self.out_layers(self.in_layers(x) + self.emb_layers(emb)[:, :, None, None])


class PixelAttention(nn.Module):
    """Attention over the pixels, with the heads folded into the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(2, channels), 2
        self.qkv, self.proj_out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        q, k, v = self.qkv(self.norm(x)).reshape(b * self.heads, -1, x.shape[2]).chunk(3, dim=1)
        weight = torch.einsum("bct,bcs->bts", q, k).div(math.sqrt(q.shape[1])).softmax(-1)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)
        return (x + self.proj_out(h)).reshape(b, c, *spatial)


class UNet(nn.Module):
    """A diffusion model with one level."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 10))
        self.conv_in, self.down, self.downsample = conv(3, 6), TimedBlock(6, 6), conv(6, 6, stride=2)
        self.middle = nn.ModuleList([TimedBlock(6, 10), PixelAttention(10), TimedBlock(10, 10)])
        self.upsample, self.up = conv(10, 10), TimedBlock(16, 6)
        self.out = nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU(), conv(6, 3))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        freqs = torch.exp(-math.log(1e4) * torch.arange(3, dtype=x.dtype, device=x.device) / 3)
        angles = timesteps[:, None].to(x.dtype) * freqs[None]
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], dim=-1))
        h = skip = self.down(self.conv_in(x), emb)
        h = self.middle[0](self.downsample(h), emb)
        h = self.middle[2](self.middle[1](h), emb)
        h = self.upsample(F.interpolate(h, scale_factor=2, mode="nearest"))
        return self.out(self.up(torch.cat([h, skip], dim=1), emb))


class Frames(nn.Module):
    """A network for images on the frames of a video, which it folds into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(0, 1)).flatten(1).unflatten(0, x.shape[:2])


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames, self.temporal, self.head = Frames(), nn.Conv1d(6, 8, 3), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.temporal(self.frames(x).transpose(1, 2)).mean(2))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 10, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.embedding.weight.dtype)
        padding = {"src_key_padding_mask": source == 1, "memory_key_padding_mask": source == 1}
        source, target = self.embedding(source), self.embedding(target)
        return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True, **padding))


class Recurrent(nn.Module):
    """A classifier of sequences, by the mean of the states at their words, padded or packed."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6, padding_idx=0), nn.Linear(20, 7)
        self.rnn = kind(6, 10, num_layers=3, batch_first=True, bidirectional=True)
        self.packed = packed

    def forward(self, index: Tensor, lengths: Tensor) -> Tensor:
        hidden: Any = self.embedding(index)
        if self.packed:
            hidden = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.rnn(hidden)
        if self.packed:
            hidden, _ = pad_packed_sequence(hidden, batch_first=True)
        mask = torch.arange(hidden.shape[1]) < lengths[:, None]
        return self.head((hidden * mask[:, :, None]).sum(1) / lengths[:, None])


def sequences() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([3, 6, 2, 5])
    return words(6).masked_fill(torch.arange(6) >= lengths[:, None], 0), lengths


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 10), nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(len(x), 10), x.new_zeros(len(x), 10)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.head(h)


class GraphAttention(nn.Module):
    """Graph attention on dense graphs, with bare parameters, as the authors published it."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.W, self.a = nn.Parameter(torch.randn(features, out)), nn.Parameter(torch.randn(2 * out, 1))

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        h = h @ self.W
        half = h.shape[-1]
        scores = F.leaky_relu(h @ self.a[:half] + (h @ self.a[half:]).transpose(-2, -1), 0.2)
        return F.elu(scores.masked_fill(adjacency == 0, -9e15).softmax(-1) @ h)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(GraphAttention(6, 5) for _ in range(2)), GraphAttention(10, 7)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.out(torch.cat([head(x, adjacency) for head in self.heads], -1), adjacency).mean(1)


def graphs() -> tuple[Tensor, Tensor]:
    return normal(5, 6), torch.maximum(torch.randint(0, 2, (SAMPLES, 5, 5)), torch.eye(5, dtype=torch.int64))


class AttentionBlock(nn.Module):
    """The attention of the set transformer, which folds the heads into the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(width, width) for _ in range(4))
        self.ln0, self.ln1 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = (torch.cat(x.split(x.shape[2] // 2, 2), 0) for x in (self.fc_q(q), self.fc_k(k), self.fc_v(k)))
        weight = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(q.shape[2]), 2)
        o = self.ln0(torch.cat((q + weight.bmm(v)).split(q.size(0) // 2, 0), 2))
        return self.ln1(o + F.relu(self.fc_o(o)))


class InducedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.I, self.mab0, self.mab1 = nn.Parameter(torch.randn(1, 5, width)), *map(AttentionBlock, [width] * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mab1(x, self.mab0(self.I.repeat(x.size(0), 1, 1), x))


class Pooling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.S, self.mab = nn.Parameter(torch.randn(1, 2, width)), AttentionBlock(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mab(self.S.repeat(x.size(0), 1, 1), x)


def set_transformer() -> nn.Module:
    encoder = nn.Linear(3, WIDTH), InducedBlock(WIDTH), InducedBlock(WIDTH)
    return nn.Sequential(*encoder, Pooling(WIDTH), nn.Linear(WIDTH, 7))


class DLRM(nn.Module):
    """A recommendation model: tables of categories, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bot_l = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU())
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, 6, mode="sum") for rows in (9, 13))
        self.top_l = nn.Sequential(nn.Linear(6 + 3, 10), nn.ReLU(), nn.Linear(10, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        tables = [table(index, offset) for table, index, offset in zip(self.emb_l, indices, offsets, strict=True)]
        features = torch.stack([x, *tables], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, offset=-1)
        return self.top_l(torch.cat([x, products[:, rows, columns]], dim=1))


def clicks() -> tuple[Any, ...]:
    """The first bag of the second table is empty."""
    offsets = [torch.tensor([0, 2, 3, 6]), torch.tensor([0, 0, 4, 5])]
    return normal(5), offsets, [torch.randint(0, 9, (8,)), torch.randint(0, 13, (7,))]


def one_click(batch: Any, index: int) -> tuple[Any, ...]:
    dense, offsets, indices = batch
    bags = [x.tensor_split(offset[1:])[index] for x, offset in zip(indices, offsets, strict=True)]
    return dense[index : index + 1], [offset[:1] for offset in offsets], bags


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Layers with parametrized weights."""
    layers = norm(nn.Conv2d(3, 6, 3)), nn.Tanh(), norm(nn.Conv2d(6, 5, 3)), nn.Flatten(), nn.Tanh()
    return nn.Sequential(*layers, norm(nn.Linear(5, 7)))
