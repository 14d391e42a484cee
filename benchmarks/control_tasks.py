"""Two tasks of control, many copies in one tensor, and PPO for them. `benchmarks.choices` compares limits with it."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal
from torch.optim.lr_scheduler import LambdaLR

from torchzero_clip import Adam, Modular, Transform

COPIES, HORIZON, EPOCHS, PARTS = 16, 128, 10, 16
LAMBDA, EPS = 0.95, 0.2


class World(Protocol):
    """Copies of an environment. An episode that ends begins anew at once."""

    age: Tensor  # steps since each episode began

    def seen(self) -> Tensor: ...
    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]: ...


class Pendulum:
    """A pendulum is swung up and held by a torque that is too weak to lift it. Each episode has 200 steps."""

    def __init__(self) -> None:
        self.angle, self.turn, self.age = torch.zeros(COPIES), torch.zeros(COPIES), torch.zeros(COPIES)
        self._begin(torch.ones(COPIES, dtype=torch.bool))

    def _begin(self, where: Tensor) -> None:
        self.angle = torch.where(where, (2 * torch.rand(COPIES) - 1) * math.pi, self.angle)
        self.turn = torch.where(where, 2 * torch.rand(COPIES) - 1, self.turn)
        self.age = torch.where(where, 0, self.age)

    def seen(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.turn / 8], dim=1)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Apply torques between -2 and 2. Return rewards, and which episodes ended."""
        torque = (2 * actions).clamp(-2, 2)
        angle = (self.angle + math.pi) % (2 * math.pi) - math.pi
        rewards = -(angle.square() + 0.1 * self.turn.square() + 0.001 * torque.square())
        self.turn = (self.turn + 0.05 * (15 * self.angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.turn
        self.age = self.age + 1
        ended = self.age >= 200
        self._begin(ended)
        return rewards, ended


class Acrobot:
    """Two rods swing until the lower end is high. The reward is -1 for each step; an episode has at most 500."""

    def __init__(self) -> None:
        self.state, self.age = torch.zeros(COPIES, 4), torch.zeros(COPIES)
        self._begin(torch.ones(COPIES, dtype=torch.bool))

    def _begin(self, where: Tensor) -> None:
        self.state = torch.where(where[:, None], 0.2 * torch.rand(COPIES, 4) - 0.1, self.state)
        self.age = torch.where(where, 0, self.age)

    def seen(self) -> Tensor:
        first, second, *turns = self.state.unbind(1)
        sides = [first.cos(), first.sin(), second.cos(), second.sin()]
        return torch.stack([*sides, turns[0] / (4 * math.pi), turns[1] / (9 * math.pi)], dim=1)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the joint to one side, not at all, or to the other. Return rewards, and which episodes ended."""
        state, torque, dt = self.state, actions - 1.0, 0.2
        k1 = self._slope(state, torque)
        k2 = self._slope(state + dt / 2 * k1, torque)
        k3 = self._slope(state + dt / 2 * k2, torque)
        k4 = self._slope(state + dt * k3, torque)
        first, second, turn, second_turn = (state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).unbind(1)
        first, second = ((angle + math.pi) % (2 * math.pi) - math.pi for angle in (first, second))
        turn = turn.clamp(-4 * math.pi, 4 * math.pi)
        second_turn = second_turn.clamp(-9 * math.pi, 9 * math.pi)
        self.state = torch.stack([first, second, turn, second_turn], dim=1)
        self.age = self.age + 1
        is_high = -first.cos() - (first + second).cos() > 1
        ended = is_high | (self.age >= 500)
        rewards = torch.where(is_high, 0.0, -1.0)
        self._begin(ended)
        return rewards, ended

    def _slope(self, state: Tensor, torque: Tensor) -> Tensor:
        """The derivative of the state. Rods have mass 1 and length 1, their middle is at .5, their inertia is 1."""
        first, second, turn, second_turn = state.unbind(1)
        gravity = 9.8
        inertia = 2.5 + 1.0 + second.cos()
        joint = 1.25 + 0.5 * second.cos()
        pull = 0.5 * gravity * (first + second - math.pi / 2).cos()
        push = (
            -0.5 * second_turn.square() * second.sin()
            - second_turn * turn * second.sin()
            + 1.5 * gravity * (first - math.pi / 2).cos()
            + pull
        )
        bend = torque + joint / inertia * push - 0.5 * turn.square() * second.sin() - pull
        bend = bend / (1.25 - joint.square() / inertia)
        return torch.stack([turn, second_turn, -(joint * bend + push) / inertia, bend], dim=1)


class ControlTask(NamedTuple):
    """An environment with the settings of PPO that suit it."""

    world: Callable[[], World]
    inputs: int
    actions: int
    is_continuous: bool  # one number instead of one of several actions
    steps: int
    gamma: float
    lr: float


CONTROL: dict[str, ControlTask] = {
    "pendulum": ControlTask(Pendulum, 3, 1, True, 80_000, 0.9, 1e-3),
    "acrobot": ControlTask(Acrobot, 6, 3, False, 60_000, 0.99, 1e-3),
}


class Agent(nn.Module):
    """A policy and a value function."""

    def __init__(self, task: ControlTask) -> None:
        super().__init__()
        self.is_continuous = task.is_continuous
        self.policy = _network(task.inputs, task.actions)
        self.value = _network(task.inputs, 1)
        if task.is_continuous:
            self.policy.register_parameter("spread", nn.Parameter(torch.zeros(task.actions)))

    def choice(self, seen: Tensor) -> Distribution:
        """The distribution of actions."""
        output = self.policy(seen)
        if self.is_continuous:
            return Normal(output.squeeze(1), self.policy.get_parameter("spread").exp())
        return Categorical(logits=output)


def _network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def advantages(rewards: Tensor, values: Tensor, ends: Tensor, last: Tensor, gamma: float) -> Tensor:
    """Generalized advantage estimates."""
    estimates: list[Tensor] = []
    estimate, following = torch.zeros_like(last), last
    for reward, value, end in zip(rewards.flip(0), values.flip(0), ends.flip(0), strict=True):
        going = gamma * (1 - end)
        estimate = reward + going * following - value + LAMBDA * going * estimate
        following = value
        estimates.append(estimate)
    return torch.stack(estimates[::-1])


def train_by_ppo(task: ControlTask, transforms: list[Transform], seed: int) -> float:
    """Train an agent, and return the mean return of the episodes that end in the last quarter of the steps."""
    torch.manual_seed(seed)
    agent, world = Agent(task), task.world()
    optimizer = Modular(agent, *transforms, Adam(lr=task.lr, eps=1e-5))
    updates = task.steps // (COPIES * HORIZON)
    schedule = LambdaLR(optimizer, lambda update: 1 - update / updates)
    returns, returned = torch.zeros(COPIES), list[float]()
    for update in range(updates):
        rows: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(HORIZON):
                seen = world.seen()
                choice = agent.choice(seen)
                action = choice.sample()
                rewards, ended = world.step(action)
                returns += rewards
                if update * 4 >= updates * 3:
                    returned += returns[ended].tolist()
                returns[ended] = 0
                value = agent.value(seen).squeeze(1)
                rows.append((seen, action, choice.log_prob(action), rewards, value, ended.float()))
            seen, actions, before, rewards, values, ends = (torch.stack(column) for column in zip(*rows, strict=True))
            gains = advantages(rewards, values, ends, agent.value(world.seen()).squeeze(1), task.gamma)
        data = [part.flatten(0, 1) for part in (seen, actions, before, gains, gains + values)]
        for _ in range(EPOCHS):
            for batch in torch.randperm(COPIES * HORIZON).chunk(PARTS):
                optimizer.zero_grad()
                _loss(agent, *(part[batch] for part in data)).backward()
                optimizer.step()
        schedule.step()
    return sum(returned) / max(len(returned), 1)


def _loss(agent: Agent, seen: Tensor, actions: Tensor, before: Tensor, gains: Tensor, aims: Tensor) -> Tensor:
    choice = agent.choice(seen)
    ratio = (choice.log_prob(actions) - before).exp()
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)
    gained = torch.minimum(ratio * gains, ratio.clamp(1 - EPS, 1 + EPS) * gains).mean()
    missed = (agent.value(seen).squeeze(1) - aims).square().mean()
    return 0.5 * missed - gained
