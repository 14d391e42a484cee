"""The table of models that authors publish, with a batch and a loss for each sample.

Those that are not in ``transformers`` are written here in the structure of the published code. No sequence is as long
as the batch has samples.
"""

import math
from functools import partial

import torch
from per_sample.adapters import ADAPTERS
from per_sample.harness import Net, weight
from per_sample.published import (
    PATCHES,
    SAMPLES,
    WIDTH,
    WORDS,
    Entry,
    captions,
    checkpointed,
    images,
    normal,
    pair_losses,
    published,
    published_32,
    small_clip,
    speech,
    text,
    translation,
    waves,
    with_frozen_experts,
    with_lora,
    without_cache,
    words,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def bare_layer_norm(width, bias):
    """The normalization of nanoGPT, whose bias may be None."""
    held = {"weight": weight(width, value=1.0), "bias": weight(width, value=0.0) if bias else None}
    return Net(lambda m, x: F.layer_norm(x, m.weight.shape, m.weight, m.bias, 1e-5), **held)


def attention(width, bias, *, causal):
    def forward(m, x):
        b, t, c = x.size()
        heads = [part.view(b, t, 2, c // 2).transpose(1, 2) for part in m.c_attn(x).split(c, 2)]
        y = F.scaled_dot_product_attention(*heads, attn_mask=None, dropout_p=0.0, is_causal=causal)
        return m.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))

    return Net(forward, c_attn=nn.Linear(width, 3 * width, bias), c_proj=nn.Linear(width, width, bias))


def mlp(width, bias=True):
    return nn.Sequential(nn.Linear(width, 10, bias), nn.GELU(), nn.Linear(10, width, bias))


def gpt_block(bias):
    def forward(m, x):
        x = x + m.attn(m.ln_1(x))
        return x + m.mlp(m.ln_2(x))

    norms = {name: bare_layer_norm(WIDTH, bias) for name in ("ln_1", "ln_2")}
    return Net(forward, attn=attention(WIDTH, bias, causal=True), mlp=mlp(WIDTH, bias), **norms)


def nano_gpt(bias):
    def forward(m, idx):
        x = m.drop(m.wte(idx) + m.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)))
        for block in m.h:
            x = block(x)
        return m.lm_head(m.ln_f(x))

    held = {"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(16, WIDTH), "drop": nn.Dropout(0.0)}
    held |= {"h": nn.ModuleList(gpt_block(bias) for _ in range(2)), "ln_f": bare_layer_norm(WIDTH, bias)}
    model = Net(forward, **held, lm_head=nn.Linear(WIDTH, WORDS, bias=False))
    model.wte.weight = model.lm_head.weight
    return model


class TiedHead(nn.Module):
    """The head multiplies by the weight of the embedding, outside of the embedding."""

    def __init__(self):
        super().__init__()
        self.emb, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, index):
        return torch.tanh(self.mix(self.emb(index))) @ self.emb.weight.T


def scaled_block():
    """One layer scale has a module of its own. The other one is a bare parameter of the block."""

    def forward(m, x):
        x = x + m.ls1(m.attn(m.norm1(x)))
        return x + m.gamma_2 * m.mlp(m.norm2(x))

    held = {"norm1": nn.LayerNorm(WIDTH), "attn": attention(WIDTH, True, causal=False), "norm2": nn.LayerNorm(WIDTH)}
    scale = Net(lambda m, x: x * m.gamma, gamma=weight(WIDTH, value=1.0))
    return Net(forward, **held, mlp=mlp(WIDTH), ls1=scale, gamma_2=weight(WIDTH, value=1.0))


def vision_transformer():
    """The class token, the register and the positions are bare parameters of the model."""

    def forward(m, x):
        x = m.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = [token.expand(x.shape[0], -1, -1) for token in (m.cls_token, m.reg_token)]
        x = torch.cat([*tokens, x], dim=1) + m.pos_embed
        return m.head(m.norm(m.blocks(x))[:, 0])

    held = {"patch_embed": nn.Conv2d(3, WIDTH, 2, 2), "pos_embed": weight(1, 11, WIDTH)}
    held |= {"cls_token": weight(1, 1, WIDTH), "reg_token": weight(1, 1, WIDTH)}
    blocks = nn.Sequential(scaled_block(), scaled_block())
    return Net(forward, **held, blocks=blocks, norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 7))


def basic_block(channels, out, stride, norm):
    def forward(m, x):
        result = m.bn2(m.conv2(m.relu(m.bn1(m.conv1(x)))))
        result += m.downsample(x)
        return m.relu(result)

    first, second = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
    down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out)) if stride > 1 else nn.Identity()
    held = {"conv1": first, "bn1": norm(out), "conv2": second, "bn2": norm(out)}
    return Net(forward, **held, relu=nn.ReLU(inplace=True), downsample=down)


def resnet(norm):
    stem = nn.Conv2d(3, 6, 3, 1, 1, bias=False), norm(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks = basic_block(6, 6, 1, norm), basic_block(6, 8, 2, norm)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 7))


def trained_resnet():
    """In eval mode, with running statistics of a batch."""
    model = resnet(nn.BatchNorm2d)
    model(torch.randn(16, 3, 9, 9))
    return model.eval()


def conv(channels, out, stride=1):
    return nn.Conv2d(channels, out, 3, stride, padding=1)


def timed_block(channels, out, times=10):
    """Two convolutions, between which the block adds the embedding of the time."""

    def forward(m, x, emb):
        return m.skip(x) + m.out_layers(m.in_layers(x) + m.emb_layers(emb)[:, :, None, None])

    return Net(
        forward,
        in_layers=nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU(), conv(channels, out)),
        emb_layers=nn.Sequential(nn.SiLU(), nn.Linear(times, out)),
        out_layers=nn.Sequential(nn.GroupNorm(2, out), nn.SiLU(), conv(out, out)),
        skip=nn.Identity() if channels == out else nn.Conv2d(channels, out, 1),
    )


def pixel_attention(channels):
    """Attention over the pixels, with the heads folded into the batch."""

    def forward(m, x):
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        q, k, v = m.qkv(m.norm(x)).reshape(b * 2, -1, x.shape[2]).chunk(3, dim=1)
        scores = torch.einsum("bct,bcs->bts", q, k).div(math.sqrt(q.shape[1])).softmax(-1)
        h = torch.einsum("bts,bcs->bct", scores, v).reshape(b, c, -1)
        return (x + m.proj_out(h)).reshape(b, c, *spatial)

    held = {"qkv": nn.Conv1d(channels, 3 * channels, 1), "proj_out": nn.Conv1d(channels, channels, 1)}
    return Net(forward, norm=nn.GroupNorm(2, channels), **held)


def unet():
    """A diffusion model with one level."""

    def forward(m, x, timesteps):
        freqs = torch.exp(-math.log(1e4) * torch.arange(3, dtype=x.dtype, device=x.device) / 3)
        angles = timesteps[:, None].to(x.dtype) * freqs[None]
        emb = m.time_embed(torch.cat([angles.cos(), angles.sin()], dim=-1))
        h = skip = m.down(m.conv_in(x), emb)
        h = m.middle[0](m.downsample(h), emb)
        h = m.middle[2](m.middle[1](h), emb)
        h = m.upsample(F.interpolate(h, scale_factor=2, mode="nearest"))
        return m.out(m.up(torch.cat([h, skip], dim=1), emb))

    return Net(
        forward,
        time_embed=nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 10)),
        conv_in=conv(3, 6),
        down=timed_block(6, 6),
        downsample=conv(6, 6, stride=2),
        middle=nn.ModuleList([timed_block(6, 10), pixel_attention(10), timed_block(10, 10)]),
        upsample=conv(10, 10),
        up=timed_block(16, 6),
        out=nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU(), conv(6, 3)),
    )


class Frames(nn.Module):
    """A network for images on the frames of a video, which it folds into the batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x):
        return self.net(x.flatten(0, 1)).flatten(1).unflatten(0, x.shape[:2])


def video():
    held = {"frames": Frames(), "temporal": nn.Conv1d(6, 8, 3), "head": nn.Linear(8, 7)}
    return Net(lambda m, x: m.head(m.temporal(m.frames(x).transpose(1, 2)).mean(2)), **held)


def translator():
    def forward(m, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=m.embedding.weight.dtype)
        padding = {"src_key_padding_mask": source == 1, "memory_key_padding_mask": source == 1}
        source, target = m.embedding(source), m.embedding(target)
        return m.head(m.transformer(source, target, tgt_mask=mask, tgt_is_causal=True, **padding))

    transformer = nn.Transformer(WIDTH, 2, 1, 1, 10, dropout=0.0, batch_first=True)
    return Net(forward, embedding=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, WORDS), transformer=transformer)


class Recurrent(nn.Module):
    """A classifier of sequences, by the mean of the states at their words, padded or packed."""

    def __init__(self, kind, *, packed):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6, padding_idx=0), nn.Linear(20, 7)
        self.rnn = kind(6, 10, num_layers=3, batch_first=True, bidirectional=True)
        self.packed = packed

    def forward(self, index, lengths):
        hidden = self.embedding(index)
        if self.packed:
            hidden = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.rnn(hidden)
        if self.packed:
            hidden, _ = pad_packed_sequence(hidden, batch_first=True)
        mask = torch.arange(hidden.shape[1]) < lengths[:, None]
        return self.head((hidden * mask[:, :, None]).sum(1) / lengths[:, None])


def sequences():
    lengths = torch.tensor([3, 6, 2, 5])
    return words(6).masked_fill(torch.arange(6) >= lengths[:, None], 0), lengths


def cells():
    def forward(m, x):
        h, c = x.new_zeros(len(x), 10), x.new_zeros(len(x), 10)
        for step in x.unbind(1):
            h, c = m.cell(step, (h, c))
        return m.head(h)

    return Net(forward, cell=nn.LSTMCell(6, 10), head=nn.Linear(10, 7))


def graph_attention(features, out):
    """Graph attention on dense graphs, with bare parameters, as the authors published it."""

    def forward(m, h, adjacency):
        h = h @ m.W
        scores = F.leaky_relu(h @ m.a[:out] + (h @ m.a[out:]).transpose(-2, -1), 0.2)
        return F.elu(scores.masked_fill(adjacency == 0, -9e15).softmax(-1) @ h)

    return Net(forward, W=weight(features, out), a=weight(2 * out, 1))


def graph_net():
    def forward(m, x, adjacency):
        return m.out(torch.cat([head(x, adjacency) for head in m.heads], -1), adjacency).mean(1)

    heads = nn.ModuleList(graph_attention(6, 5) for _ in range(2))
    return Net(forward, heads=heads, out=graph_attention(10, 7))


def graphs():
    return normal(5, 6), torch.maximum(torch.randint(0, 2, (SAMPLES, 5, 5)), torch.eye(5, dtype=torch.int64))


def attention_block():
    """The attention of the set transformer, which folds the heads into the batch."""

    def forward(m, q, k):
        q, k, v = (torch.cat(x.split(x.shape[2] // 2, 2), 0) for x in (m.fc_q(q), m.fc_k(k), m.fc_v(k)))
        scores = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(q.shape[2]), 2)
        o = m.ln0(torch.cat((q + scores.bmm(v)).split(q.size(0) // 2, 0), 2))
        return m.ln1(o + F.relu(m.fc_o(o)))

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("fc_q", "fc_k", "fc_v", "fc_o")}
    return Net(forward, **layers, ln0=nn.LayerNorm(WIDTH), ln1=nn.LayerNorm(WIDTH))


def induced_block():
    held = {"I": weight(1, 5, WIDTH), "mab0": attention_block(), "mab1": attention_block()}
    return Net(lambda m, x: m.mab1(x, m.mab0(m.I.repeat(x.size(0), 1, 1), x)), **held)


def set_transformer():
    pooling = Net(lambda m, x: m.mab(m.S.repeat(x.size(0), 1, 1), x), S=weight(1, 2, WIDTH), mab=attention_block())
    return nn.Sequential(nn.Linear(3, WIDTH), induced_block(), induced_block(), pooling, nn.Linear(WIDTH, 7))


def dlrm():
    """A recommendation model: tables of categories, and the products of all pairs of features."""

    def forward(m, dense, offsets, indices):
        x = m.bot_l(dense)
        tables = [table(index, offset) for table, index, offset in zip(m.emb_l, indices, offsets, strict=True)]
        features = torch.stack([x, *tables], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, offset=-1)
        return m.top_l(torch.cat([x, products[:, rows, columns]], dim=1))

    return Net(
        forward,
        bot_l=nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU()),
        emb_l=nn.ModuleList(nn.EmbeddingBag(rows, 6, mode="sum") for rows in (9, 13)),
        top_l=nn.Sequential(nn.Linear(6 + 3, 10), nn.ReLU(), nn.Linear(10, 1), nn.Sigmoid()),
    )


def clicks():
    """The first bag of the second table is empty."""
    offsets = [torch.tensor([0, 2, 3, 6]), torch.tensor([0, 0, 4, 5])]
    return normal(5), offsets, [torch.randint(0, 9, (8,)), torch.randint(0, 13, (7,))]


def one_click(batch, index):
    dense, offsets, indices = batch
    bags = [x.tensor_split(offset[1:])[index] for x, offset in zip(indices, offsets, strict=True)]
    return dense[index : index + 1], [offset[:1] for offset in offsets], bags


def normed(norm):
    """Layers with parametrized weights."""
    layers = norm(nn.Conv2d(3, 6, 3)), nn.Tanh(), norm(nn.Conv2d(6, 5, 3)), nn.Flatten(), nn.Tanh()
    return nn.Sequential(*layers, norm(nn.Linear(5, 7)))


GROUPED = {"num_key_value_heads": 1, "head_dim": 6}
ROUTED = {"num_key_value_heads": 1, "experts_implementation": "eager"}  # the default, grouped_mm, has no float64
CHOSEN = {"num_experts_per_tok": 2}
SHARED_EXPERT = {"moe_intermediate_size": 10, "shared_expert_intermediate_size": 10, **CHOSEN}
LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6} | {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 10,
    **CHOSEN,
}
HYBRID = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 3,
    "mamba_d_conv": 2,
    "mamba_dt_rank": 2,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_buckets": 6}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 0, "decoder_ffn_dim": 10}
MELS = {"num_mel_bins": 5, "max_source_positions": 7, "max_target_positions": 9, "encoder_ffn_dim": 10}
WAVES = {"conv_dim": (6, 8), "conv_stride": (3, 2), "conv_kernel": (5, 3), "num_feat_extract_layers": 2}
POSITIONS = {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
WINDOWS = {"patch_size": 2, "window_size": 3, "embed_dim": 6, "depths": [2, 1], "num_attention_heads": [2, 2]}
STAGES = {"num_stages": 2, "hidden_sizes": [6, 8], "depths": [1, 2]}
TABLE = {
    "gpt2": published("GPT2LMHeadModel"),
    "gpt2 with checkpoints": published("GPT2LMHeadModel", make=checkpointed),
    "gpt_neo": published_32("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=3),
    "gpt_neox": published("GPTNeoXForCausalLM", hidden_size=16),
    "opt": published("OPTForCausalLM", ffn_dim=10, word_embed_proj_dim=WIDTH),
    "bloom": published_32("BloomForCausalLM"),
    "falcon": published("FalconForCausalLM"),
    "phi": published("PhiForCausalLM", hidden_size=16),
    "llama": published_32("LlamaForCausalLM", **GROUPED),
    "llama with lora": published_32("LlamaForCausalLM", make=with_lora, **GROUPED),
    "mistral": published_32("MistralForCausalLM", sliding_window=3, **GROUPED),
    "qwen2": published_32("Qwen2ForCausalLM", num_key_value_heads=1),
    "qwen3": published_32("Qwen3ForCausalLM", **GROUPED),
    "gemma": published_32("GemmaForCausalLM", **GROUPED),
    "gemma2": published_32("Gemma2ForCausalLM", sliding_window=3, **GROUPED),
    "mixtral": published_32("MixtralForCausalLM", num_local_experts=3, **ROUTED),
    "qwen2_moe": published_32("Qwen2MoeForCausalLM", num_experts=3, **SHARED_EXPERT, **ROUTED),
    "qwen3_moe": published_32("Qwen3MoeForCausalLM", num_experts=3, moe_intermediate_size=10, **CHOSEN, **ROUTED),
    "olmoe": published_32("OlmoeForCausalLM", num_experts=3, **CHOSEN, **ROUTED),
    "gpt_oss": published_32("GptOssForCausalLM", num_local_experts=3, head_dim=6, **CHOSEN, **ROUTED),
    "deepseek_v3": published_32("DeepseekV3ForCausalLM", **LATENT, **ROUTED | {"num_key_value_heads": 2}),
    "jamba": published_32("JambaForCausalLM", make=without_cache, num_experts=3, **HYBRID, **CHOSEN, **ROUTED),
    "mixtral with frozen experts": published_32("MixtralForCausalLM", make=with_frozen_experts, **ROUTED),
    "mixtral with checkpoints": published_32("MixtralForCausalLM", make=checkpointed, num_local_experts=3, **ROUTED),
    "mamba": published_32("MambaForCausalLM", state_size=3, time_step_rank=2),
    "bert": published("BertForMaskedLM"),
    "roberta": published("RobertaForMaskedLM"),
    "distilbert": published("DistilBertForMaskedLM", hidden_dim=10),
    "electra": published("ElectraForMaskedLM", embedding_size=8),
    "albert": published("AlbertForMaskedLM", embedding_size=8),
    "deberta": published_32("DebertaForMaskedLM", **RELATIVE),
    "deberta_v2": published("DebertaV2ForMaskedLM", norm_rel_ebd="layer_norm", position_biased_input=False, **RELATIVE),
    "t5": published_32("T5ForConditionalGeneration", translation, d_kv=6, d_ff=10, decoder_start_token_id=0),
    "bart": published("BartForConditionalGeneration", translation, encoder_ffn_dim=10, **DECODER),
    "whisper": published("WhisperForConditionalGeneration", speech, **MELS, **DECODER),
    "wav2vec2": published("Wav2Vec2ForCTC", waves, **WAVES, **POSITIONS),
    "vit": published("ViTForImageClassification", images, **PATCHES),
    "deit": published("DeiTForImageClassification", images, **PATCHES),
    "dinov2": published("Dinov2ForImageClassification", images, mlp_ratio=1, **PATCHES),
    "beit": published("BeitForImageClassification", images, use_relative_position_bias=True, **PATCHES),
    "swin": published("SwinForImageClassification", partial(images, 12), image_size=12, num_labels=7, **WINDOWS),
    "convnext": published("ConvNextForImageClassification", partial(images, 12), num_labels=7, **STAGES),
    "clip": published("CLIPModel", captions, pair_losses, make=small_clip),
    "nanoGPT": Entry(partial(nano_gpt, bias=False), lambda: (words(),)),
    "nanoGPT with biases": Entry(partial(nano_gpt, bias=True), lambda: (words(),)),
    "tied head": Entry(TiedHead, lambda: (words(),), whole=(TiedHead,)),
    "resnet with group norm": Entry(partial(resnet, partial(nn.GroupNorm, 2)), lambda: (normal(3, 9, 9),)),
    "resnet with batch norm": Entry(trained_resnet, lambda: (normal(3, 9, 9),)),
    "unet": Entry(unet, lambda: (normal(3, 6, 6), torch.randint(0, 100, (SAMPLES,)))),
    "nn.Transformer": Entry(translator, lambda: (text()["input_ids"], words(6))),
    "lstm": Entry(partial(Recurrent, nn.LSTM, packed=False), sequences),
    "gru": Entry(partial(Recurrent, nn.GRU, packed=False), sequences),
    "packed lstm": Entry(partial(Recurrent, nn.LSTM, packed=True), sequences),
    "packed gru": Entry(partial(Recurrent, nn.GRU, packed=True), sequences),
    "lstm cells": Entry(cells, lambda: (normal(5, 6),)),
    "graph attention": Entry(graph_net, graphs),
    "set transformer": Entry(set_transformer, lambda: (normal(6, 3),)),
    "vit with bare tokens": Entry(vision_transformer, lambda: (normal(3, 6, 6),)),
    "dlrm": Entry(dlrm, clicks, sample=one_click),
    "weight norm": Entry(partial(normed, parametrizations.weight_norm), lambda: (normal(3, 5, 5),)),
    "spectral norm": Entry(partial(normed, parametrizations.spectral_norm), lambda: (normal(3, 5, 5),)),
    "video": Entry(video, lambda: (normal(5, 3, 6, 6),)),
    **ADAPTERS,
}
