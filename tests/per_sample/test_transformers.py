"""GPT-2 and BERT of Hugging Face, small and random, as they come."""

import copy
import warnings

import pytest
import torch
from per_sample.harness import assert_close
from torch.nn import functional as F

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def gpt_2():
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def losses_of(model, index):
    logits = model(input_ids=index, attention_mask=torch.ones_like(index)).logits
    return F.cross_entropy(logits.flatten(0, 1), index.flatten(), reduction="none").view(len(index), -1).mean(1)


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("make", [gpt_2, bert])
def test_norms_are_those_of_one_backward_per_sample(make, memory):
    model, index = make().double().train(), torch.randint(0, 20, (5, 7))
    twin, rows = copy.deepcopy(model), []
    for i in range(5):
        twin.zero_grad()
        losses_of(twin, index[i : i + 1]).sum().backward()
        rows.append({name: p.grad.norm() for name, p in twin.named_parameters() if p.grad is not None})
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), memory=memory)
    result = clipper.backward(losses_of(model, index))
    for name in rows[0]:
        assert_close(result.param_norms[name], torch.stack([row[name] for row in rows]))
