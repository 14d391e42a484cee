"""stable-baselines3: PPO with a chain as its optimizer, and with transforms before the steps of its own."""

import numpy
import pytest
import torch
from clients.runs import weights

from torchzero_clip import Adam, ClipNorm, Modular, Recorder, SkipStep, ZClip, before_step

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
from stable_baselines3 import A2C, PPO

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OFF = float("inf")  # the limit of PPO's own clip


def ppo(max_grad_norm=OFF, **policy):
    policy = {"net_arch": [8], **policy}
    sizes = {"n_steps": 64, "batch_size": 32, "n_epochs": 4, "learning_rate": 0.01}
    return PPO(
        "MlpPolicy", "CartPole-v1", max_grad_norm=max_grad_norm, policy_kwargs=policy, seed=0, device="cpu", **sizes
    )


def learn(model, seed):
    """A part of a run. PPO saves neither its environment nor its random numbers, so each part has its own."""
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model.get_env().seed(seed)
    model.env.reset()
    model._last_obs = None
    model.learn(128, reset_num_timesteps=False)
    return model


def gate(model):
    return before_step(model.policy.optimizer, SkipStep(max_ratio=1.1), ZClip(warmup_steps=4))


CHAIN = Modular.of(ClipNorm(0.5, dim="global"), Adam(eps=1e-5))
GATED = Modular.of(SkipStep(max_ratio=1.1), ZClip(warmup_steps=4), Adam(eps=1e-5))


@pytest.mark.parametrize("way", ["chain", "handle"])
def test_a_limit_is_the_clip_of_ppo(way):
    expected = ppo(0.5)
    found = ppo(optimizer_class=CHAIN) if way == "chain" else ppo()
    measured = found.policy.optimizer
    if way == "handle":
        measured = before_step(measured, ClipNorm(0.5, dim="global"))
    start = weights(found.policy)
    for model in (expected, found):
        learn(model, 1)
    torch.testing.assert_close(weights(found.policy), weights(expected.policy), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(found.policy), start)
    assert measured.metrics()["clip_norm/factor"].item() < 1
    assert measured.steps_taken == 2 * 4 * 2  # twice 64 samples, four times, in two batches


@pytest.mark.parametrize("way", ["chain", "handle before the load", "handle after the load"])
def test_ppo_resumes_from_its_checkpoint(way, tmp_path):
    model = ppo(optimizer_class=GATED) if way == "chain" else ppo()
    if way != "chain":
        gate(model)
    learn(model, 1).save(tmp_path / "model.zip")
    if way == "handle before the load":
        resumed = ppo()
        handle = gate(resumed)
        resumed.set_parameters(tmp_path / "model.zip", device="cpu")
        resumed.num_timesteps, resumed._n_updates = model.num_timesteps, model._n_updates
    else:
        resumed = PPO.load(tmp_path / "model.zip", env=ppo().get_env(), device="cpu")
        handle = resumed.policy.optimizer if way == "chain" else gate(resumed)
    for run in (model, resumed):
        learn(run, 2)
    assert torch.equal(weights(resumed.policy), weights(model.policy))
    assert 0 < handle.steps_taken < 16  # the gate has refused some


def test_a_recorder_beside_the_transforms_of_ppo():
    plain, found = ppo(), ppo()
    handles = [gate(model) for model in (plain, found)]
    recorder = Recorder(found.policy.optimizer)
    for model in (plain, found):
        learn(model, 1)
    assert torch.equal(weights(found.policy), weights(plain.policy))
    record = recorder.record()
    assert len(record.steps) == 16
    assert record.reasons.count("skip_step") == handles[1].skipped_steps > 0


def test_a_limit_is_the_clip_of_a2c():
    def a2c(max_grad_norm):
        return A2C(
            "MlpPolicy",
            "CartPole-v1",
            policy_kwargs={"net_arch": [8]},
            seed=0,
            device="cpu",
            max_grad_norm=max_grad_norm,
        )

    expected, found = a2c(0.5), a2c(OFF)
    handle = before_step(found.policy.optimizer, ClipNorm(0.5, dim="global"))
    for model in (expected, found):
        learn(model, 1)
    torch.testing.assert_close(weights(found.policy), weights(expected.policy), rtol=1e-5, atol=1e-6)
    assert handle.metrics()["clip_norm/factor"].item() < 1
