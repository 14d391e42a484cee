"""Packages of optimizers: transforms before their steps, a recorder beside them, and resumed runs."""

import pytest
import torch
from clients.runs import SPIKE, STEPS, small_model, through_a_file, train, weights

from torchzero_clip import AdaGC, ClipNorm, ClipNormByEMA, Modular, Recorder, SkipStep, Wrap, ZClip, before_step

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SCHEDULE_FREE = ["schedulefree.AdamWScheduleFree", "schedulefree.RAdamScheduleFree", "schedulefree.SGDScheduleFree"]
OTHERS = [
    "prodigyopt.Prodigy",
    "pytorch_optimizer.ADOPT",
    "pytorch_optimizer.AdaBelief",
    "pytorch_optimizer.Adan",
    "pytorch_optimizer.Lion",
    "pytorch_optimizer.LaProp",
    "pytorch_optimizer.StableAdamW",
    "timm.optim.Adafactor",
    "timm.optim.Lamb",
    "timm.optim.Lion",
    "timm.optim.NAdamW",
    "bitsandbytes.optim.AdamW",
    "bitsandbytes.optim.AdamW8bit",
]
ALL = [*SCHEDULE_FREE, *OTHERS]


def built(name, model):
    package, _, kind = name.rpartition(".")
    return getattr(pytest.importorskip(package), kind)(model.parameters())


class Run:
    """A model and an optimizer of a package."""

    def __init__(self, name, *transforms):
        self.model = small_model()
        self.optimizer = built(name, self.model)
        self.handle = before_step(self.optimizer, *transforms) if transforms else None

    def train(self, steps=range(STEPS), clip=None):
        mode(self.optimizer, "train")
        norms = train(self.model, self.optimizer, steps, clip)
        mode(self.optimizer, "eval")
        return norms


def mode(optimizer, name):
    """Optimizers of schedulefree have two modes."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def clip(params):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


@pytest.mark.parametrize("name", ALL)
def test_a_limit_before_the_optimizer_is_a_clip_in_the_loop(name):
    expected, found = Run(name), Run(name, ClipNorm(0.1, dim="global"))
    start = weights(found.model)
    expected.train(clip=clip)
    found.train()
    torch.testing.assert_close(weights(found.model), weights(expected.model), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(found.model), start)
    assert found.handle.metrics()["clip_norm/factor"].item() < 1


@pytest.mark.parametrize("early", [False, True], ids=["loaded after the call", "loaded before the call"])
@pytest.mark.parametrize("name", ALL)
def test_a_gate_and_statistics_resume_with_the_optimizer(name, early):
    chain = SkipStep(max_ratio=20.0), ZClip(warmup_steps=4), ClipNormByEMA()
    whole, half, resumed = Run(name, *chain), Run(name, *chain), Run(name, *(() if early else chain))
    half.train(range(8))
    resumed.model.load_state_dict(through_a_file(half.model.state_dict()))
    resumed.optimizer.load_state_dict(through_a_file(half.optimizer.state_dict()))
    resumed.handle = resumed.handle or before_step(resumed.optimizer, *chain)
    for part in (range(8), range(8, STEPS)):
        whole.train(part)
    resumed.train(range(8, STEPS))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert (resumed.handle.skipped_steps, resumed.handle.steps_taken) == (1, STEPS - 8 - 1)
    assert resumed.handle.metrics() == whole.handle.metrics()


@pytest.mark.parametrize("early", [False, True], ids=["loaded after the call", "loaded before the call"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_no_load_rounds_the_state_of_transforms(name, dtype, early):
    """Packages cast what they load in ways of their own."""

    def made():
        model = small_model().to(dtype)
        return model, built(name, model)

    model, optimizer = made()
    before_step(optimizer, ClipNormByEMA())
    mode(optimizer, "train")
    for scale in (1.0, 2.0, 0.5):
        for param in model.parameters():
            param.grad = torch.full_like(param, scale)
        optimizer.step()
    states = [optimizer.state[param]["before_step"] for param in model.parameters()]
    for state in states:
        state["clip_norm_by_ema/prev"].fill_(257 + 2**-40)
        state["clip_norm_by_ema/ema"].fill_(1 / 3)
    saved = through_a_file(optimizer.state_dict())
    others, second = made()
    if not early:
        before_step(second, ClipNormByEMA())
    second.load_state_dict(saved)
    if early:
        before_step(second, ClipNormByEMA())
    second.state_dict()  # puts the loaded state at its place
    for param, expected in zip(others.parameters(), states, strict=True):
        found = second.state[param]["before_step"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert all(found[key].dtype == expected[key].dtype for key in expected)


@pytest.mark.parametrize("name", ALL)
def test_a_refused_step_is_as_if_it_were_not_there(name):
    expected, found = Run(name, ZClip(warmup_steps=4)), Run(name, SkipStep(max_ratio=20.0), ZClip(warmup_steps=4))
    expected.train([step for step in range(STEPS) if step != SPIKE])
    found.train()
    assert found.handle.skipped_steps == 1
    assert torch.equal(weights(found.model), weights(expected.model))


@pytest.mark.parametrize("name", ALL)
def test_a_recorder_has_the_norms_before_the_transforms(name):
    plain, found = Run(name, AdaGC(warmup_steps=4)), Run(name, AdaGC(warmup_steps=4))
    plain.train()
    recorder = Recorder(found.optimizer)
    norms = found.train()
    assert recorder.record().norm.tolist() == pytest.approx(norms, rel=1e-5)
    assert torch.equal(weights(found.model), weights(plain.model))


@pytest.mark.parametrize("name", ["timm.optim.Lion", "timm.optim.NAdamW"])
def test_a_chain_takes_an_optimizer_of_another_package(name):
    package, _, kind = name.rpartition(".")
    expected, model = Run(name), small_model()
    optimizer = Modular(model, ClipNorm(0.1, dim="global"), Wrap(getattr(pytest.importorskip(package), kind)))
    expected.train(clip=clip)
    train(model, optimizer)
    torch.testing.assert_close(weights(model), weights(expected.model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["prodigyopt.Prodigy", "pytorch_optimizer.Lion", "timm.optim.Lamb", *SCHEDULE_FREE])
def test_a_chain_refuses_an_optimizer_that_counts_in_its_groups(name):
    package, _, kind = name.rpartition(".")
    with pytest.raises(ValueError, match=rf"Wrap takes no {kind}, whose step .*before_step"):
        Modular(small_model(), ClipNorm(0.1, dim="global"), Wrap(getattr(pytest.importorskip(package), kind)))
