"""What wraps an optimizer: transforms are inside, as a chain or before the steps of the wrapped optimizer."""

import pytest
import torch
from clients.runs import STEPS, small_model, through_a_file, train, weights

from torchzero_clip import SGD, AdamW, ClipNorm, ClipNormByEMA, Modular, SkipStep, ZClip, before_step

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LIMIT = 0.1
WRAPPERS = {
    "timm.optim.Lookahead": {"k": 3},
    "pytorch_optimizer.Lookahead": {"k": 3},
    "schedulefree.ScheduleFreeWrapper": {},
}


# the wrapper of schedulefree stores a buffer before the first step, and then torch's AdamW does not start its own state
RULES = {
    "timm.optim.Lookahead": (torch.optim.AdamW, AdamW),
    "pytorch_optimizer.Lookahead": (torch.optim.AdamW, AdamW),
    "schedulefree.ScheduleFreeWrapper": (torch.optim.SGD, SGD),
}
LIMITS = [ClipNorm(LIMIT, dim="global")]
GATES = [SkipStep(max_ratio=20.0), ZClip(warmup_steps=4), ClipNormByEMA()]


class Run:
    """An optimizer in a wrapper, with transforms that are a part of it (chain) or before its steps (handle)."""

    def __init__(self, wrapper, way="handle", transforms=()):
        package, _, kind = wrapper.rpartition(".")
        torchs, ours = RULES[wrapper]
        self.model = small_model()
        if way == "chain":
            self.inner = self.steps = Modular(self.model, transforms, ours(lr=0.05))
        else:
            self.inner = torchs(self.model.parameters(), lr=0.05)
            if transforms:
                self.steps = before_step(self.inner, *transforms)
        self.optimizer = getattr(pytest.importorskip(package), kind)(self.inner, **WRAPPERS[wrapper])

    def train(self, steps=range(STEPS), clip=None):
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        train(self.model, self.optimizer, steps, clip)
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


@pytest.mark.parametrize("way", ["chain", "handle"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_limit_inside_is_a_clip_in_the_loop(wrapper, way):
    expected, found = Run(wrapper), Run(wrapper, way, LIMITS)
    start = weights(found.model)
    expected.train(clip=lambda params: torch.nn.utils.clip_grad_norm_(params, LIMIT))
    found.train()
    torch.testing.assert_close(weights(found.model), weights(expected.model), rtol=1e-5, atol=1e-6)
    assert (weights(found.model) - start).norm().item() > 0.01


@pytest.mark.parametrize("way", ["chain", "handle"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_gate_inside_resumes_with_the_wrapper(wrapper, way):
    whole, half, resumed = (Run(wrapper, way, GATES) for _ in range(3))
    for part in (range(8), range(8, STEPS)):
        whole.train(part)
    half.train(range(8))
    resumed.model.load_state_dict(through_a_file(half.model.state_dict()))
    resumed.optimizer.load_state_dict(through_a_file(half.optimizer.state_dict()))
    resumed.train(range(8, STEPS))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.steps.steps_taken == STEPS - 8 - 1  # all but the spike


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_itself_is_refused(wrapper):
    run = Run(wrapper)
    inside = next(key for key, value in vars(run.optimizer).items() if value is run.inner)
    with pytest.raises(TypeError, match=rf"call before_step on optimizer\.{inside}"):
        before_step(run.optimizer, ClipNorm(1))
