"""One entry for each kind of adapter of ``peft``, in a small random Phi or in convolutions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from per_sample.harness import Net
from per_sample.published import Entry, normal, output_losses, small, target_losses, text
from torch import Tensor, nn

ATTENTION, MLP, CONVS = ["q_proj", "v_proj"], ["fc1", "fc2"], ["first", "second"]
LANGUAGE = {"task_type": "CAUSAL_LM"}


def phi() -> nn.Module:
    return small("PhiForCausalLM", hidden_size=16)


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2)
    return Net(lambda m, x: m.second(m.first(x).tanh()), first=first, second=second)


def with_adapter(base: Callable[[], nn.Module], config: str, **settings: Any) -> nn.Module:
    """A frozen model with an adapter that trains."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(base(), getattr(peft, config)(**settings)).train()


def losses_of_last(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As `target_losses`, without the positions of virtual tokens."""
    length = batch["targets"].shape[1]
    return target_losses(lambda **inputs: _Last(model(**inputs).logits[:, -length:]), batch)


class _Last:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def adapted(config: str, *, tolerance: float = 1e-8, **settings: Any) -> Entry:
    make = partial(with_adapter, phi, config, **settings)
    return Entry(make, text, losses_of_last, tolerance=tolerance, published=True)


def adapted_convolutions(config: str, **settings: Any) -> Entry:
    make = partial(with_adapter, convolutions, config, target_modules=CONVS, **settings)
    return Entry(make, lambda: (normal(4, 6, 6),), output_losses, published=True)


BLOCKS = {"r": 0, "oft_block_size": 2}
RANKS = {"init_r": 3, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 2}
ADAPTERS = {
    "LoRA": adapted("LoraConfig", r=2, target_modules=[*ATTENTION, *MLP], bias="all", lora_bias=True),
    "LoRA of embeddings": adapted("LoraConfig", r=2, target_modules=[*ATTENTION, "embed_tokens"]),
    "LoRA with a trained head": adapted("LoraConfig", r=2, target_modules=ATTENTION, modules_to_save=["lm_head"]),
    "LoRA with trained tokens": adapted("LoraConfig", r=2, target_modules=ATTENTION, trainable_token_indices=[3, 5, 7]),
    "LoRA of convolutions": adapted_convolutions("LoraConfig", r=2),
    "AdaLoRA": adapted("AdaLoraConfig", target_modules=ATTENTION, **RANKS, **LANGUAGE),
    "DoRA": adapted("LoraConfig", r=2, target_modules=[*ATTENTION, *MLP], use_dora=True),
    "DoRA of embeddings": adapted("LoraConfig", r=2, target_modules=["embed_tokens"], use_dora=True),
    "DoRA of convolutions": adapted_convolutions("LoraConfig", r=2, use_dora=True),
    "LoHa": adapted("LoHaConfig", r=2, target_modules=[*ATTENTION, *MLP]),
    "LoHa of convolutions": adapted_convolutions("LoHaConfig", r=2, use_effective_conv2d=True),
    "LoKr": adapted("LoKrConfig", r=2, target_modules=ATTENTION),
    "OFT": adapted("OFTConfig", target_modules=[*ATTENTION, *MLP], **BLOCKS),
    "OFT of convolutions": adapted_convolutions("OFTConfig", **BLOCKS),
    "HRA": adapted("HRAConfig", r=2, target_modules=ATTENTION),
    "IA3": adapted("IA3Config", target_modules=["v_proj", "fc2"], feedforward_modules=["fc2"]),
    "VeRA": adapted("VeraConfig", r=2, target_modules=["fc1"]),
    "VB-LoRA": adapted("VBLoRAConfig", r=2, target_modules=ATTENTION, vector_length=2, num_vectors=6),
    "FourierFT": adapted("FourierFTConfig", tolerance=1e-6, n_frequency=20, target_modules=ATTENTION),
    "prompt tuning": adapted("PromptTuningConfig", num_virtual_tokens=3, **LANGUAGE),
    "P-tuning": adapted("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=6, **LANGUAGE),
    "prefix tuning": adapted("PrefixTuningConfig", num_virtual_tokens=3, **LANGUAGE),
}
