"""autoclip and smartclip: the same numbers where the rules are the same, and what else their users get."""

import math

import pytest
import torch
from torch import nn

from torchzero_clip import AdaptiveGradientClip, AutoClip, SkipStep, ZClip, before_step, integrations

autoclip = pytest.importorskip("autoclip.torch", reason="autoclip is not installed")
smartclip = pytest.importorskip("smartclip", reason="smartclip is not installed")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SPIKE, NAN = 250, 200


def norms(with_nan=False):
    found = (1 + 0.2 * torch.randn(300, generator=torch.Generator().manual_seed(1))).abs()
    found[SPIKE] = 100.0
    if with_nan:
        found[NAN] = math.nan
    return found


def moved(attach, given=None):
    """How far SGD moves a weight in each step, whose gradients have given norms."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    kept = attach(model, optimizer)
    optimizer = kept if isinstance(kept, torch.optim.Optimizer) else optimizer
    found = []
    for norm in norms() if given is None else given:
        model.weight.data.zero_()
        model.weight.grad = torch.tensor([[0.6, 0.8]]) * norm
        optimizer.step()
        found.append(model.weight.norm().item())
    return torch.tensor(found)


def ours(*transforms, **options):
    return lambda model, optimizer: before_step(optimizer, *transforms, **options)


def theirs(clipper=None):
    def attach(model, optimizer):
        context = smartclip.clip_context(model, optimizer, clipper)
        context.__enter__()
        return context

    return attach


def by_quantile(**options):
    return lambda model, optimizer: autoclip.QuantileClip.as_optimizer(optimizer, **options)


@pytest.mark.slow
def test_smartclips_window_is_auto_clip():
    clipper = smartclip.AutoClip(
        mode="percentile", history="window", percentile=95.0, window_size=100, warmup_steps=0, min_history=0
    )
    torch.testing.assert_close(moved(theirs(clipper)), moved(ours(AutoClip(95, 100))), rtol=1e-6, atol=1e-6)


def test_smartclips_agc_is_that_of_one_unit():
    def all_moved(attach):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        context = attach(model, optimizer)
        for _ in range(5):
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
        del context
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    transform = AdaptiveGradientClip(0.01).only(lambda param: param.ndim > 1)
    torch.testing.assert_close(all_moved(theirs(smartclip.AGC())), all_moved(ours(transform)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_autoclips_quantile_leaves_out_the_current_norm():
    found, own = moved(by_quantile(quantile=0.9, global_threshold=True)), moved(ours(AutoClip(90, 1000)))
    assert torch.equal(found, moved(by_quantile(quantile=0.9)))  # one tensor
    assert (found - own).abs()[100:].max() < 0.03
    first, second = norms()[:2].tolist()  # the second is clipped to the first, and with ours to 0.9 of the way
    assert found[:2].tolist() == pytest.approx([first, first], rel=1e-5)
    assert own[:2].tolist() == pytest.approx([first, 0.1 * first + 0.9 * second], rel=1e-5)
    assert [round(row[SPIKE].item(), 2) for row in (found, own)] == [1.3, 1.3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attach", "spike"),
    [
        (theirs(), 19.8),
        (theirs(smartclip.ZScoreClip()), 31.6),
        (ours(ZClip(z_thresh=3.0, max_norm=None, warmup_steps=100)), 1.04),
        (ours(SkipStep(max_ratio=10.0), ZClip(max_norm=None)), 0.0),
    ],
    ids=["smartclip's default", "ZScoreClip", "ZClip", "SkipStep, ZClip"],
)
def test_what_a_spike_of_a_hundred_becomes(attach, spike):
    assert moved(attach)[SPIKE].item() == pytest.approx(spike, abs=0.06)


@pytest.mark.parametrize(
    ("attach", "lost"),
    [
        (by_quantile(quantile=0.9, global_threshold=True), 100),
        (by_quantile(quantile=0.9), 100),
        (theirs(), 1),
        (ours(AutoClip(90, 1000)), 1),
        (ours(AutoClip(90, 1000), nonfinite="skip"), 0),
        (ours(SkipStep(max_ratio=10.0), ZClip()), 0),
    ],
    ids=["QuantileClip", "QuantileClip of each tensor", "smartclip", "AutoClip", "AutoClip and skip", "SkipStep"],
)
def test_in_how_many_steps_one_nan_makes_the_parameters_nan(attach, lost):
    assert moved(attach, norms(with_nan=True)).isnan().sum() == lost


@pytest.mark.parametrize("jointly", [True, False])
def test_standard_clip_makes_all_gradients_nan_in_the_second_step(jointly):
    found = moved(lambda model, o: autoclip.StandardClip.as_optimizer(o, global_threshold=jointly))
    assert found[:2].isnan().tolist() == [False, True]


def test_the_checkpoint_of_as_optimizer_is_not_one_of_the_optimizer():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    wrapped = autoclip.QuantileClip.as_optimizer(optimizer)
    assert type(wrapped) is not torch.optim.SGD
    assert set(wrapped.state_dict()) == {"optimizer", "clipper"}
    with pytest.raises(KeyError):
        wrapped.load_state_dict(optimizer.state_dict())
    context = smartclip.clip_context(model, optimizer)
    with context:
        assert repr(optimizer.state_dict()) == repr(torch.optim.SGD(model.parameters(), 1.0).state_dict())


@pytest.mark.slow
def test_smartclips_callback_for_hugging_face_has_no_effect(tmp_path):
    """It acts after the step, with the newest Trainer."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for package in ("accelerate", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    made = pytest.importorskip("smartclip.backends.torch.integrate").SmartClipTrainerCallback

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean()}

    def trained(callbacks):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=5,
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            optim="sgd",
            learning_rate=0.1,
            save_strategy="no",
        )
        data = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i))} for i in range(40)]
        trainer = transformers.Trainer(Net(), arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        return torch.cat([param.detach().reshape(-1) for param in trainer.model.parameters()])

    plain = trained([])
    assert torch.equal(plain, trained([made(smartclip.AGC(clipping=1e-3))]))
    transform = AdaptiveGradientClip(1e-3)
    assert not torch.equal(plain, trained([integrations.TrainerCallback(transforms=[transform])]))
