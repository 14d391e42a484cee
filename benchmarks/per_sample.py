"""Time and peak memory of per-sample clipping against plain training, interleaved in one run.

Every method runs forward, backward, clipping and an SGD step. Times are medians over rounds of the ratio to plain
training in the same round. Memory is the peak above what is held before the first step, each method in a process of its
own: that of the process, which depends on how the allocator places things, and that of all tensors.
Most steps of a clipper do not check that samples do not mix, and these are timed; a step with the check and the first
step of a new clipper have rows of their own. Peers that are not installed are left out, a peer that raises for a model
"fails", and gradients that differ from those of one backward for each sample are "wrong". Use the ratios; absolute
times on a shared machine drift.

    python -m benchmarks.per_sample --models mlp cnn gpt
    python -m benchmarks.per_sample --models lstm gru rnn packed_lstm packed_gru packed_rnn

With transformers installed, models of Hugging Face join, in small configurations:

    python -m benchmarks.per_sample --models vit llama bert convnext

    python -m benchmarks.per_sample --models mixtral qwen3_moe olmoe gpt_oss toy_mixtral

With peft installed too, adapters on the Llama join:

    python -m benchmarks.per_sample --models lora lora_checkpoints dora loha oft
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.memory import peak_of as peak_in_tensors
from benchmarks.timing import Step, Timed, interleaved, ratios
from torchzero_clip import (
    ConstantFlatClipper,
    GradSampleModuleFastGradientClipping,
    PerSampleGradientClipper,
    PrivateGradientClipper,
    per_example_global_norm_clip,
)

Batch = tuple[Tensor, Tensor]

LIMIT = 1.0
LR = 1e-3
NOISE = 1e-6
WRONG = 1e-2  # relative error of the gradients; a ReLU whose input rounds to the other side of 0 makes 2e-3 in the MLP
WARNINGS_OF_PEERS = "Full backward hook is firing", "There is a performance drop", "In CPU autocast"


class ConvNet(nn.Module):
    """Convolutions of 32, 64 and 128 channels with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in widths[1:])
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A block of a transformer, with the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """A decoder like GPT-2's, with a head of its own."""

    def __init__(self, width: int = 256, layers: int = 4, length: int = 128, words: int = 4096, heads: int = 8) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, index: Tensor) -> Tensor:
        positions = torch.arange(index.shape[1], device=index.device).repeat(len(index), 1)
        x = self.words(index) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """A classifier of sequences of words, padded with the word 0, by its states at their words."""

    def __init__(self, kind: Callable[..., nn.Module], *, packed: bool, words: int = 2000, width: int = 128) -> None:
        super().__init__()
        self.packed = packed
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, 10)
        self.rnn = kind(width, width, num_layers=2, batch_first=True)

    def forward(self, index: Tensor) -> Tensor:
        x, mask = self.words(index), index != 0
        if self.packed:
            packed = pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        else:
            x, _ = self.rnn(x)
        return self.head((x * mask[:, : x.shape[1], None]).sum(1) / mask.sum(1, keepdim=True))


def mlp() -> tuple[nn.Module, Batch]:
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers), (torch.randn(256, 784), torch.randint(0, 10, (256,)))


def cnn() -> tuple[nn.Module, Batch]:
    return ConvNet(), (torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))


def gpt() -> tuple[nn.Module, Batch]:
    return Transformer(), (torch.randint(0, 4096, (16, 128)), torch.randint(0, 4096, (16, 128)))


def long() -> tuple[nn.Module, Batch]:
    model = Transformer(layers=1, length=1024, words=50_000)
    return model, (torch.randint(0, 50_000, (2, 1024)), torch.randint(0, 50_000, (2, 1024)))


def recurrent(kind: Callable[..., nn.Module], *, packed: bool = False) -> tuple[nn.Module, Batch]:
    index, lengths = torch.randint(1, 2000, (32, 64)), torch.randint(8, 65, (32,))
    index = index.masked_fill(torch.arange(64) >= lengths[:, None], 0)
    return Recurrent(kind, packed=packed), (index, torch.randint(0, 10, (32,)))


def published(kind: str, **settings: Any) -> nn.Module:
    """A model of a class of transformers."""
    transformers: Any = __import__("transformers")
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**settings)).train()


def images(count: int, size: int) -> Batch:
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def vit() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 3}
    return published("ViTForImageClassification", image_size=32, patch_size=4, num_labels=10, **sizes), images(16, 32)


def llama() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = published("LlamaForCausalLM", vocab_size=4096, num_key_value_heads=4, **sizes)
    return model, (torch.randint(0, 4096, (8, 64)), torch.randint(0, 4096, (8, 64)))


def experts(kind: str, **settings: Any) -> tuple[nn.Module, Batch]:
    """A decoder of transformers with a mixture of experts in each block."""
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3}
    sizes |= {"num_experts_per_tok": 2, "pad_token_id": 0}
    model = published(kind, vocab_size=4096, **sizes | settings)
    return model, (torch.randint(1, 4096, (8, 64)), torch.randint(1, 4096, (8, 64)))


def adapted(config: str, *, checkpoints: bool = False, **settings: Any) -> tuple[nn.Module, Batch]:
    """The model of `llama`, frozen, with adapters of peft at all linear layers of its blocks."""
    peft: Any = __import__("peft")
    model, batch = llama()
    if checkpoints:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    return peft.get_peft_model(model, getattr(peft, config)(target_modules=targets, **settings)).train(), batch


def bert() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = published("BertForSequenceClassification", vocab_size=4096, **sizes, **no_dropout)
    return model, (torch.randint(0, 4096, (16, 64)), torch.randint(0, 2, (16,)))


def convnext() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2]}
    return published("ConvNextForImageClassification", num_labels=10, **sizes), images(16, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt, "long": long}
for name, kind in {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}.items():
    MODELS.update({name: partial(recurrent, kind), f"packed_{name}": partial(recurrent, kind, packed=True)})
if find_spec("transformers"):
    MODELS.update({"vit": vit, "llama": llama, "bert": bert, "convnext": convnext})
    MODELS["mixtral"] = partial(experts, "MixtralForCausalLM", intermediate_size=384, num_local_experts=8)
    MODELS["qwen3_moe"] = partial(
        experts, "Qwen3MoeForCausalLM", intermediate_size=384, moe_intermediate_size=192, num_experts=16, head_dim=32
    )
    MODELS["olmoe"] = partial(experts, "OlmoeForCausalLM", intermediate_size=192, num_experts=16)
    MODELS["gpt_oss"] = partial(
        experts, "GptOssForCausalLM", intermediate_size=192, num_local_experts=8, head_dim=32, sliding_window=32
    )
    MODELS["toy_mixtral"] = partial(
        experts, "MixtralForCausalLM", hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_local_experts=4
    )
    if find_spec("peft"):
        MODELS.update({"lora": partial(adapted, "LoraConfig"), "dora": partial(adapted, "LoraConfig", use_dora=True)})
        MODELS.update({"loha": partial(adapted, "LoHaConfig"), "oft": partial(adapted, "OFTConfig")})
        MODELS["lora_checkpoints"] = partial(adapted, "LoraConfig", checkpoints=True)


def losses_of(output: Any, target: Tensor) -> Tensor:
    """The mean loss of each sample, from the logits or from the output of a model of Hugging Face."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    each = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return each.view(len(logits), -1).mean(1)


def plain(model: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        losses_of(model(batch[0]), batch[1]).mean().backward()
        optimizer.step()

    return step


def ours(**settings: Any) -> Callable[[nn.Module, Batch], Step]:
    def make(model: nn.Module, batch: Batch) -> Step:
        clipper = PerSampleGradientClipper(model, ConstantFlatClipper(LIMIT), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def step() -> None:
            optimizer.zero_grad()
            clipper.backward(losses_of(model(batch[0]), batch[1]))
            optimizer.step()

        return step

    return make


def private(seed: int | None) -> Callable[[nn.Module, Batch], Step]:
    """With noise of a generator with a seed, or of the operating system: so little that gradients can be checked."""

    def make(model: nn.Module, batch: Batch) -> Step:
        clipper = PrivateGradientClipper(
            model,
            ConstantFlatClipper(LIMIT),
            noise_multiplier=NOISE,
            expected_batch_size=len(batch[0]),
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )
        clipper._engine.prover.schedule._never = True  # as verify="never", which it refuses: other rows have the check
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def step() -> None:
            clipper.backward(losses_of(model(batch[0]), batch[1]))
            clipper.pre_step()
            optimizer.step()

        return step

    return make


def two_passes(model: nn.Module, batch: Batch) -> Step:
    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=LIMIT, strict=False)  # some have position ids
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        losses = losses_of(module(batch[0]), batch[1])
        losses.mean().backward(retain_graph=True)
        coef = module.get_clipping_coef()
        module.disable_hooks()
        (coef * losses).mean().backward()
        module.enable_hooks()
        optimizer.step()

    return step


def by_vmap(model: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return losses_of(functional_call(model, params, (x[None],)), y[None]).sum()

    def step() -> None:
        detached = {name: p.detach() for name, p in params.items()}
        sums, _ = per_example_global_norm_clip(vmap(grad(loss), in_dims=(None, 0, 0))(detached, *batch), LIMIT)
        for name, p in params.items():
            p.grad = sums[name] / len(batch[0])
        optimizer.step()

    return step


def opacus_hooks(mode: str) -> Callable[[nn.Module, Batch], Step]:
    def make(model: nn.Module, batch: Batch) -> Step:
        grad_sample: Any = __import__("opacus.grad_sample", fromlist=["wrap_model"])
        wrapped = grad_sample.wrap_model(model, grad_sample_mode=mode, strict=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def step() -> None:
            losses_of(wrapped(batch[0]), batch[1]).mean().backward()
            params: dict[str, Any] = dict(model.named_parameters())
            sums, _ = per_example_global_norm_clip({name: p.grad_sample for name, p in params.items()}, LIMIT)
            for name, p in params.items():
                p.grad, p.grad_sample = sums[name] / len(batch[0]), None
            optimizer.step()

        return step

    return make


def opacus_fast(*, ghost: bool) -> Callable[[nn.Module, Batch], Step]:
    def make(model: nn.Module, batch: Batch) -> Step:
        module: Any = __import__(
            "opacus.grad_sample.grad_sample_module_fast_gradient_clipping",
            fromlist=["GradSampleModuleFastGradientClipping"],
        )
        wrapped = module.GradSampleModuleFastGradientClipping(
            model, max_grad_norm=LIMIT, use_ghost_clipping=ghost, strict=False
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def step() -> None:
            losses = losses_of(wrapped(batch[0]), batch[1])
            losses.mean().backward(retain_graph=True)
            optimizer.zero_grad()
            coef = wrapped.get_clipping_coef()
            wrapped.disable_hooks()
            (coef * losses).mean().backward()
            wrapped.enable_hooks()
            optimizer.step()

        return step

    return make


def opacus_private(model: nn.Module, batch: Batch) -> Step:
    """Ghost clipping, and noise of a generator."""
    module: Any = __import__(
        "opacus.grad_sample.grad_sample_module_fast_gradient_clipping",
        fromlist=["GradSampleModuleFastGradientClipping"],
    )
    optimizers: Any = __import__("opacus.optimizers", fromlist=["DPOptimizerFastGradientClipping"])
    wrapped = module.GradSampleModuleFastGradientClipping(model, max_grad_norm=LIMIT, strict=False)
    optimizer = optimizers.DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=LR),
        noise_multiplier=NOISE,
        max_grad_norm=LIMIT,
        expected_batch_size=len(batch[0]),
        generator=torch.Generator().manual_seed(0),
    )

    def step() -> None:
        losses = losses_of(wrapped(batch[0]), batch[1])
        losses.mean().backward(retain_graph=True)
        optimizer.zero_grad()
        coef = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (coef * losses).sum().backward()
        wrapped.enable_hooks()
        optimizer.step()

    return step


FIRST = "torchzero_clip, first step"
METHODS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "plain training": plain,
    "torchzero_clip": ours(verify="never"),
    'torchzero_clip, memory="low"': ours(verify="never", memory="low"),
    "torchzero_clip, two passes": two_passes,
    "torchzero_clip, with a check": ours(verify="always"),
    FIRST: ours(),
    "torchzero_clip, private": private(None),
    "torchzero_clip, private by a generator": private(0),
    "vmap(grad)": by_vmap,
}
if find_spec("opacus"):
    METHODS.update(
        {
            "Opacus hooks": opacus_hooks("hooks"),
            "Opacus functorch": opacus_hooks("functorch"),
            "Opacus fast": opacus_fast(ghost=False),
            "Opacus ghost": opacus_fast(ghost=True),
            "Opacus ghost, private": opacus_private,
        }
    )


def made(model: str, method: str) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    module, batch = MODELS[model]()
    return module, METHODS[method](module, batch)


def by_loop(model: str) -> dict[str, Tensor]:
    """The clipped gradients by one backward for each sample."""
    torch.manual_seed(0)
    module, (x, y) = MODELS[model]()
    sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for i in range(len(x)):
        module.zero_grad()
        losses_of(module(x[i : i + 1]), y[i : i + 1]).sum().backward()
        norm = total_norm([p.grad for p in module.parameters() if p.grad is not None])
        for name, p in module.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad * min(1.0, LIMIT / (norm + 1e-6)) / len(x)
    return sums


def error(module: nn.Module, right: dict[str, Tensor]) -> float:
    """The distance of the gradients from the right ones, relative to their norm."""
    differences = [p.grad - right[name] for name, p in module.named_parameters() if p.grad is not None]
    return total_norm(differences) / total_norm(right.values())


def total_norm(tensors: Iterable[Tensor]) -> float:
    """In float64, because the float32 norm of a million elements is off by a thousandth."""
    return nn.utils.get_total_norm([tensor.double() for tensor in tensors]).item()


def measured(model: str, methods: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """The median over rounds of each method's time, relative to the first, and its error. A peer that raises has none.

    Args:
        model: The name of the model.
        methods: The names of the methods.
        rounds: The timed rounds.
    """
    right = by_loop(model)
    runs: dict[str, Timed] = {}
    rows: dict[str, dict[str, float]] = {method: {} for method in methods}
    for method in methods:
        try:
            module, step = made(model, method)
            step()
        except Exception as reason:
            if method.startswith(("plain", "torchzero_clip")):
                raise
            print(f"{method} raises for {model}: {str(reason).splitlines()[0]:.200}", file=sys.stderr)
            continue
        if method != "plain training":
            rows[method]["error"] = error(module, right)
        runs[method] = first_steps(model) if method == FIRST else Timed(step)
    seconds = interleaved(runs, rounds, warm_up=1)
    for method, own in seconds.items():
        rows[method]["time"] = statistics.median(ratios(own, seconds[methods[0]]))
    return rows


def first_steps(model: str) -> Timed:
    """The first step of a new clipper, which is made outside of the timed part."""
    steps: list[Step] = []
    return Timed(lambda: steps.pop()(), before=lambda: steps.append(made(model, FIRST)[1]))


def peak(model: str, method: str) -> tuple[float, float]:
    """The peaks of this process and of its tensors above what is held before the step, in MB. Call it once."""
    module, step = made(model, method)
    before = memory("VmRSS")
    step()
    step()
    most = memory("VmHWM") - before
    peak_in_tensors(step, "cpu")  # from here on, the profiler knows the sizes of the gradients that a step frees first
    gradients = sum(param.grad.nbytes for param in module.parameters() if param.grad is not None)
    return most, (gradients + peak_in_tensors(step, "cpu")) / 2**20


def memory(line: str) -> float:
    """What the kernel says about this process: VmRSS is held now, VmHWM was the most ever. In MB."""
    fields = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return int(fields[line].split()[0]) / 1024


def peaks_of(model: str, method: str) -> dict[str, float]:
    """The medians of three processes: how an allocator places things differs from one to the next."""
    command = [sys.executable, "-m", "benchmarks.per_sample", "--peak", model, method]
    root = Path(__file__).parents[1]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, cwd=root) for _ in range(3)]
    columns = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    return dict(zip(("peak", "tensors"), map(statistics.median, columns), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.per_sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "gpt"], choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for message in WARNINGS_OF_PEERS:
        warnings.filterwarnings("ignore", message)
    if args.peak:
        print(*peak(*args.peak))
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    for model in args.models:
        results[model] = measured(model, args.methods, args.rounds)
        print(f"{model}: time relative to {args.methods[0]}, peak memory of the process and of its tensors in MB")
        for method, row in results[model].items():
            if not row:
                print(f"  {method:30} {'fails':>8}", flush=True)
                continue
            if not args.no_memory:
                row |= peaks_of(model, method)
            wrong = "  wrong gradients" if row.get("error", 0) > WRONG else ""
            megabytes = "".join(f" {row.get(key, 0):8.0f}" for key in ("peak", "tensors"))
            print(f"  {method:30} {row['time']:8.2f}{megabytes}{wrong}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
