"""PPO balances a pole, with one limit for policy and value function together, and with a limit for each.

The environment is the cart-pole of Barto, Sutton and Anderson, 16 of them in one tensor. The value function learns
returns of up to 50, so its gradients are large at first. Under a joint limit they shrink the steps of the policy.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from torchzero_clip import Adam, ClipNorm, Modular, Transform

GAMMA, LAMBDA, EPS = 0.98, 0.95, 0.2
ENVS, HORIZON, LONGEST = 16, 64, 200

CHAINS: dict[str, list[Transform]] = {
    "no limit": [],
    "one limit": [ClipNorm(0.5, dim="global")],
    "one for each": [
        ClipNorm(0.5, dim="global", name="policy_limit").only("policy"),
        ClipNorm(0.5, dim="global", name="value_limit").only("value"),
    ],
}


class CartPole:
    """Carts with poles; a reward of 1 for each step that a pole stands."""

    def __init__(self, count: int) -> None:
        self.state = torch.rand(count, 4) * 0.1 - 0.05
        self.age = torch.zeros(count)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Push the carts to the left or to the right. Return the new states, and whether episodes ended."""
        speed, angle, turn = self.state[:, 1:].unbind(1)
        push = (20.0 * actions - 10.0 + 0.05 * turn.square() * angle.sin()) / 1.1
        spin = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        force = push - 0.05 * spin * angle.cos() / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, force, turn, spin], dim=1)
        self.age += 1
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12)) | (self.age >= LONGEST)
        self.state = torch.where(done[:, None], torch.rand_like(self.state) * 0.1 - 0.05, self.state)
        return self.state, done


class Agent(nn.Module):
    """A policy and a value function."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


def advantages(values: Tensor, dones: Tensor, last: Tensor) -> Tensor:
    """Generalized advantage estimates of rewards of 1."""
    found, estimate, following = [], torch.zeros_like(last), last
    for value, done in zip(values.flip(0), dones.flip(0), strict=True):
        going = 1 - done
        estimate = 1 + GAMMA * going * following - value + GAMMA * LAMBDA * going * estimate
        following = value
        found.append(estimate)
    return torch.stack(found[::-1])


def train(chain: list[Transform], updates: int, seed: int) -> tuple[list[float], float]:
    """Return the mean length of episodes in four parts of the run, and the largest norm before a clip."""
    torch.manual_seed(seed)
    agent, world = Agent(), CartPole(ENVS)
    optimizer = Modular(agent, chain, Adam(lr=3e-3, eps=1e-5))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    lengths: list[list[float]] = [[] for _ in range(4)]
    largest = 0.0
    for update in range(updates):
        rows: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(HORIZON):
                state = world.state
                choice = Categorical(logits=agent.policy(state))
                action = choice.sample()
                _, done = world.step(action)
                lengths[update * 4 // updates] += world.age[done].tolist()
                world.age[done] = 0
                rows.append((state, action, choice.log_prob(action), agent.value(state).squeeze(1), done.float()))
            states, actions, old, values, dones = (torch.stack(column) for column in zip(*rows, strict=True))
            gains = advantages(values, dones, agent.value(world.state).squeeze(1))
        data = [part.flatten(0, 1) for part in (states, actions, old, gains, gains + values)]
        for batch in torch.randperm(ENVS * HORIZON).repeat(4).chunk(16):
            state, action, before, gain, aim = (part[batch] for part in data)
            choice = Categorical(logits=agent.policy(state))
            ratio = (choice.log_prob(action) - before).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            gained = torch.minimum(ratio * gain, ratio.clamp(1 - EPS, 1 + EPS) * gain).mean()
            missed = (agent.value(state).squeeze(1) - aim).square().mean()
            optimizer.zero_grad()
            (0.5 * missed - gained - 0.01 * choice.entropy().mean()).backward()
            optimizer.step()
            norms = [value.item() for name, value in optimizer.metrics().items() if name.endswith("/norm")]
            largest = max([largest, *norms])
        schedule.step()
    return [sum(part) / max(len(part), 1) for part in lengths], largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="updates, each with 16 steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'length of episodes':20}" + "".join(f"{part:>7}" for part in ("1/4", "1/2", "3/4", "end")))
    for name, chain in CHAINS.items():
        runs = [train(chain, args.steps, seed) for seed in range(args.seeds)]
        means = torch.tensor([lengths for lengths, _ in runs]).mean(dim=0).tolist()
        norm = max(largest for _, largest in runs)
        print(
            f"  {name:18}" + "".join(f"{mean:7.1f}" for mean in means) + (f"  largest norm {norm:.0f}" if norm else "")
        )


if __name__ == "__main__":
    main()
