"""One entry for each model of the table, and how to make small random models of ``transformers``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from per_sample.harness import losses_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

SAMPLES, WORDS, WIDTH = 4, 20, 12


def sample_of(batch: Any, index: int) -> Any:
    """One sample of a batch in which every tensor has the samples first."""
    return pytree.tree_map_only(Tensor, lambda x: x[index : index + 1], batch)


def output_losses(model: nn.Module, batch: Sequence[Any]) -> Tensor:
    return losses_of(model(*batch))


@dataclass(frozen=True)
class Entry:
    """A model, its batch and its losses.

    Args:
        make: Returns the model, in the mode in which it trains, without dropout.
        batch: Returns a batch of `SAMPLES` samples.
        losses: Returns the loss of each sample, from the model and the batch.
        sample: Returns one sample of the batch, as a batch.
        whole: The modules that the generic rule runs with all modules inside.
        tolerance: The largest error, relative to the true value: 1e-6 if the model computes in float32 inside.
        published: True if the model comes from ``transformers`` or ``peft``.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    losses: Callable[[Any, Any], Tensor] = output_losses
    sample: Callable[[Any, int], Any] = sample_of
    whole: tuple[Any, ...] = ()
    tolerance: float = 1e-8
    published: bool = False

    def model(self) -> nn.Module:
        """The model in float64. All parameters get noise, because a parameter of 0 hides errors in its factors."""
        model = self.make().double()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.3 * torch.randn_like(param))
        return model


def normal(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def words(length: int = 5) -> Tensor:
    """Words that are no special tokens."""
    return torch.randint(3, WORDS, (SAMPLES, length))


# Models of transformers

SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 10}
LANGUAGE = {"vocab_size": WORDS, "max_position_embeddings": 16, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
PATCHES = {"image_size": 6, "patch_size": 2, "num_labels": 7}


def small(kind: str, **settings: Any) -> Any:
    """A model of a class of transformers, without dropout."""
    import transformers

    model_class = getattr(transformers, kind)
    config = model_class.config_class(**{**SIZES, **LANGUAGE, **settings})
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return model_class(config).train()


def text() -> dict[str, Tensor]:
    """Words, which padding follows in the last sample."""
    index, mask = words(), torch.ones(SAMPLES, 5, dtype=torch.int64)
    index[-1, 3:], mask[-1, 3:] = 1, 0
    return {"input_ids": index, "attention_mask": mask, "targets": words().masked_fill(mask == 0, -100)}


def translation() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": words(6), "targets": words(6)}


def speech() -> dict[str, Tensor]:
    return {"input_features": normal(5, 14), "decoder_input_ids": words(6), "targets": words(6)}


def waves() -> dict[str, Tensor]:
    return {"input_values": normal(60), "targets": words(9)}


def images(size: int = 6) -> dict[str, Tensor]:
    return {"pixel_values": normal(3, size, size), "targets": torch.randint(0, 7, (SAMPLES,))}


def captions() -> dict[str, Tensor]:
    return {name: value for name, value in {**text(), **images()}.items() if name != "targets"}


def target_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross entropy of each sample, over its positions."""
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    logits = model(**inputs).logits.movedim(-1, 1)
    return F.cross_entropy(logits, batch["targets"], reduction="none").view(len(logits), -1).mean(1)


def pair_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The distance of each image from its caption."""
    output = model(**batch)
    return 1 - (output.text_embeds * output.image_embeds).sum(1)


def published(
    kind: str,
    batch: Callable[[], Any] = text,
    losses: Callable[[Any, Any], Tensor] = target_losses,
    *,
    make: Callable[..., nn.Module] = small,
    tolerance: float = 1e-8,
    **settings: Any,
) -> Entry:
    return Entry(partial(make, kind, **settings), batch, losses, tolerance=tolerance, published=True)


published_32 = partial(published, tolerance=1e-6)


def checkpointed(kind: str, **settings: Any) -> nn.Module:
    model = small(kind, **settings)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def without_cache(kind: str, **settings: Any) -> nn.Module:
    model = small(kind, **settings)
    model.config.use_cache = False
    return model


def with_frozen_experts(kind: str, **settings: Any) -> nn.Module:
    model = small(kind, num_local_experts=3, **settings)
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(False)
    return model


def small_clip(kind: str) -> nn.Module:
    return small(kind, text_config={**SIZES, **LANGUAGE}, vision_config={**SIZES, **PATCHES}, projection_dim=8)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones, as in peft."""

    def __init__(self, base: nn.Linear, rank: int = 2, alpha: int = 5) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name, lora_a in self.lora_A.items():
            x = x.to(lora_a.weight.dtype)
            result = result + self.lora_B[name](lora_a(self.lora_dropout[name](x))) * self.scaling[name]
        return result


def with_lora(kind: str, **settings: Any) -> nn.Module:
    model = small(kind, **settings).requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if hasattr(module, name):
                setattr(module, name, LoraLinear(getattr(module, name)))
    return model
