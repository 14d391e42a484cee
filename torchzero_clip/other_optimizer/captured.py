"""The step of an optimizer as a CUDA graph, which is captured anew when something changes."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchzero_clip.checks import instance, scalar
from torchzero_clip.compat import warn_user
from torchzero_clip.core.chain_state import COUNTERS
from torchzero_clip.core.kinds import FinalRule
from torchzero_clip.core.transform import is_pure
from torchzero_clip.engine.listener import HasListener
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.functional.lists import params_of, same_objects
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.step_metrics import StepMetrics
from torchzero_clip.modular.wrappers import unwrap
from torchzero_clip.other_optimizer.before_step import BeforeStep, chain_of, hook_owner, warn_of_copy
from torchzero_clip.types import Closure, Group

ALIKE, WITHOUT_PLAN = 3, 12
"""How many steps in a row have to look the same before a step is captured, with a plan and without one."""
_FEW, MOST_CAPTURES = 10, 3
"""After so many captures in a row with fewer replays each, steps stay ordinary."""
_WARNED_AFTER = 50
"""After so many ordinary steps in a row, a warning says why no step was captured."""
IGNORED = {"params", "param_names", "name", "initial_lr", *COUNTERS}
"""Keys of param groups that do not change what a captured step does."""
OF_SCALER = "grad_scale", "found_inf"
"""What a gradient scaler gives to an optimizer of torch."""


class Replayable(Protocol):
    """A captured step."""

    def replay(self) -> object:
        """Take the step."""


def _captured_graph(call: Callable[[], object], device: torch.device) -> Replayable:
    graph = torch.cuda.CUDAGraph()
    # threads that load data may use CUDA meanwhile
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


class _Same:
    """Equal to the same object only. It keeps the object, so that no other one gets its id."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # pyright: ignore


class CapturedStep:
    """Takes the steps of an optimizer, as replays of a CUDA graph where it can. `captured` makes it."""

    capture: Callable[[Callable[[], object], torch.device], Replayable] = staticmethod(_captured_graph)
    """Captures a call on a device, without carrying it out. Tests on the CPU replace it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._find_chain()
        self._graph: Replayable | None = None
        self._inputs: list[tuple[Group, str, Tensor]] = []  # the numbers of param groups that stand in tensors
        self._filled: list[float] = []  # what was written to these tensors
        self._state: list[Tensor] = []  # what the captured step changes
        self._held: list[object] = []  # memory that the captured step uses
        self._facts: dict[str, object] = {}  # of the last step
        self._alike = self._ordinary = self._replays = self._loads = 0
        self._short = 0  # graphs in a row that were replayed a few times only
        self._is_off = False  # all steps are ordinary from now on
        self._is_rehearsed = False  # a step with tensors in place of numbers was taken
        self._has_loss = False
        self._metrics: StepMetrics | None = None  # where a replay leaves them
        self._refuse()
        self._hook = optimizer.register_load_state_dict_post_hook(self._note_load)
        # else torch warns of the first steps of a copy, which are ordinary, although capturable=True
        optimizer._warned_capturable_if_run_uncaptured = True  # pyright: ignore

    def __call__(self, closure: Closure | None = None) -> Any:
        """Take a step, as ``optimizer.step(closure)`` does, and return what the closure returned.

        Raises:
            ValueError: If steps cannot be captured any more, as in `captured`; as the step of the optimizer.
            RuntimeError: As the step of the optimizer.
        """
        step: Callable[..., Any] = self.optimizer.step
        if self._is_off or not self._is_on_device():
            return step() if closure is None else step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._compare(has_loss=result is not None)
        if self._graph is None:
            with self._tensors_in_groups():
                _ = step() if closure is None else step(lambda: result)  # with the loss, which transforms may read
            self._ordinary += 1
        else:
            self._replay(self._graph)
        return result

    def release(self) -> None:
        """Free the memory of the captured step. Later calls are ordinary steps."""
        self._hook.remove()
        self._drop()
        self._is_off = True

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a captured step cannot be copied or pickled: call captured on the copy of the optimizer")

    def _find_chain(self) -> None:
        """Find the transforms, because `before_step` may be called later, and `remove` of its handle too."""
        self._chain = chain_of(self.optimizer)
        self._runner = None if self._chain is None else self._chain.runner

    def _note_load(self, optimizer: Optimizer) -> None:
        self._loads += 1

    def _may_read_loss(self) -> bool:
        """True if a transform may read the loss of the step. Pure ones get none. Gates that do are refused."""
        return self._runner is not None and not all(is_pure(node.transform) for node in self._runner.nodes)

    def _reports_loss(self) -> bool:
        return self._runner is not None and self._runner.reported.count > 0

    def _is_on_device(self) -> bool:
        param = next((p for group in self.optimizer.param_groups for p in group["params"]), None)
        return param is not None and param.is_cuda

    def _refuse(self) -> None:
        """Raise if no step of the optimizer can be captured."""
        reason = self._why_never()
        if reason is not None:
            raise ValueError(f"the steps of this {type(self.optimizer).__name__} cannot be captured: {reason}")

    def _why_never(self) -> str | None:
        """Why no step can be captured, with the way out."""
        optimizer, runner = self.optimizer, self._runner
        if (runner is not None and runner.listener) or hook_owner(optimizer, HasListener) is not None:
            return "a Recorder sees each step on the host. Call close() of the recorder"
        if runner is not None:
            if runner.shared.group is not None or runner.has_meshes:
                return "other processes take part. Shard neither the parameters nor the chain, or call optimizer.step()"
            if runner.parts is not None:
                return "it steps in the backward. Call remove() of the handle that step_in_backward returned"
            if runner.policy.nonfinite == "raise":
                return 'nonfinite="raise" raises in the same step. Write nonfinite="skip"'
            if any(isinstance(t, FinalRule) and t.template is not None for t in runner.transforms.values()):
                return "a Wrap runs the code of another optimizer. Use before_step on that optimizer"
            if "closure" in runner.nodes.targets:
                return "a transform with target='closure' acts within the closure. Leave the target out"
            if reasons := runner.policy.host_reasons():
                return f"{reasons[0]}. Use SkipStep(max_ratio=...), or implement Gate.record"
            if runner.policy.may_skip and runner.schedules.any:
                return "settings are functions of the step, with a gate or nonfinite='skip'. Use schedulers of torch"
        devices = {param.device for param in params_of(optimizer.param_groups)}
        if len(devices) > 1:
            return "its parameters are on several devices. Make an optimizer for each device"
        are_capturable = isinstance(optimizer, Modular) or all(g.get("capturable") for g in optimizer.param_groups)
        if self._is_on_device() and not are_capturable:
            text = "it needs capturable=True in all groups"
            has_it = all("capturable" in group for group in optimizer.param_groups)
            return text if has_it else f"{text}. It has no such argument: use Modular, with Adam, AdamW or SGD"
        hooks = _hooks(optimizer)
        if not self._is_on_device():  # on a CPU, steps call them; those of all optimizers may be of other models
            hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
        hook = next(filter(None, map(_foreign, hooks)), None)
        way_out = "Remove the hook. If it belongs to a per-sample clipper, call its detach()"
        return None if hook is None else f"replays do not call {hook!r}, a hook of its steps. {way_out}"

    def _groups(self) -> list[Group]:
        """The param groups of the optimizer, and those of the transforms before its steps."""
        before = self._chain.param_groups if isinstance(self._chain, BeforeStep) else []
        return [*self.optimizer.param_groups, *before]

    def _numbers(self) -> Iterator[tuple[int, str, torch.dtype | None]]:
        """Which settings of param groups may be tensors: the index of the group, the key, a dtype; None for float64."""
        groups, own = self._groups(), len(self.optimizer.param_groups)
        limits = set[str]()
        for node in [] if self._runner is None else self._runner.nodes:
            limit = node.transform.limit_setting
            if limit is not None and node.transform.checks.get(limit) is scalar:
                limits.add(node.storage_keys[limit])
        for g, group in enumerate(groups):
            if g < own and "lr" in group:
                yield g, "lr", torch.float32  # as kernels of torch read it
            if g >= own or isinstance(self._chain, Modular):
                yield from ((g, key, None) for key in limits if key in group)

    def _facts_now(self) -> dict[str, object]:
        """What has to be the same for a replay, by what a warning calls it."""
        groups, runner = self._groups(), self._runner
        params = params_of(self.optimizer.param_groups)
        facts: dict[str, object] = {
            "the memory of the gradients": [0 if p.grad is None else p.grad.data_ptr() for p in params],
            "the memory of the parameters": list(map(Tensor.data_ptr, params)),
            "requires_grad of the parameters": [p.requires_grad for p in params],
            "a load": self._loads,
            "the dtype of norms": widest(params[0].device),
            "a loss": self._has_loss,
            "the hooks": list(map(_Same, _hooks(self.optimizer))),
            **{f"{name} of the optimizer": _Same(getattr(self.optimizer, name, None)) for name in OF_SCALER},
        }
        filled = {(g, key) for g, key, _ in self._numbers() if not _is_on_device(groups[g][key])}
        for g, group in enumerate(groups):
            keys = [key for key in group if not ((g, key) in filled or key in IGNORED or key.endswith(":initial_lr"))]
            facts |= {f"{key!r} of param group {g}": _comparable(group[key]) for key in keys}
        if runner is not None:
            arguments = runner.maximize, runner.keep_grads, runner.fast, runner.parts, runner.shared.group
            facts["an argument of the optimizer"] = _comparable((*arguments, runner.listener))
            values = [value for node in runner.nodes for value in vars(node.transform).values()]
            facts["an attribute of a transform"] = _comparable(tuple(values))
        return facts

    def _state_now(self) -> list[Tensor]:
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        nested = [value for inner in values if isinstance(inner, Mapping) for value in inner.values()]
        chain = [] if self._runner is None else self._runner.chain_state.values.values()
        return [value for value in (*values, *nested, *chain) if isinstance(value, Tensor)]

    def _compare(self, *, has_loss: bool) -> None:
        """Compare this step with the last one. Drop the graph if they differ, and capture a step if it is time."""
        self._find_chain()
        self._has_loss = self._may_read_loss() and (has_loss or self._reports_loss())
        if self._runner is not None and self._runner.chain_state.values:
            self._runner.schedules.catch_up(self._runner_groups())
        now, before = self._facts_now(), self._facts
        differing = [key for key in {**before, **now} if before.get(key, None) != now.get(key, None)]
        if differing:
            self._refuse()  # before the facts are noted, so that the next step is compared with the same ones
        self._facts = now
        self._alike = 0 if differing else self._alike + 1
        if self._graph is not None:
            state = self._state_now()
            if not differing and not same_objects(state, self._state):
                differing = ["the memory of the state"]
            if differing:
                self._give_up(differing[0])
            return
        if differing:
            self._drop()
        if self._is_ready():
            self._prepare()
        elif self._ordinary == _WARNED_AFTER:
            reasons = [] if self._chain is None else self._chain.host_decides
            reasons = ["a transform may read the loss"] if self._has_loss else reasons
            why = next(iter(reasons), f"{differing[0]} changes" if differing else "steps differ")
            warn_user(f"no step was captured in {_WARNED_AFTER} steps, because {why}{_way_out(why)}")

    def _is_ready(self) -> bool:
        runner = self._runner
        if self._is_off or self._has_loss or self._alike < ALIKE:
            return False
        if runner is None:
            return True
        params = params_of(self.optimizer.param_groups)
        if not any(param.requires_grad and param.grad is not None for param in params):
            return False  # such a step is not taken, and does not count
        if runner.policy.may_skip and (runner.decisions is None or runner.host_decides()):
            return False
        return runner.fast_way.plan is not None or self._alike >= WITHOUT_PLAN

    def _runner_groups(self) -> list[Group]:
        chain = self._chain
        return self.optimizer.param_groups if chain is None else chain.param_groups

    def _prepare(self) -> None:
        """Make tensors for numbers, with which the next step is an ordinary one. Capture the step after it."""
        groups = self._groups()
        device = groups[0]["params"][0].device
        if self._is_rehearsed:
            self._capture(groups, device)
            return
        self._inputs = [
            (groups[g], key, torch.full((), float(groups[g][key]), dtype=dtype or widest(device), device=device))
            for g, key, dtype in self._numbers()
            if not _is_on_device(groups[g][key])
        ]
        self._filled = [float(group[key]) for group, key, _ in self._inputs]
        self._is_rehearsed = True

    @contextmanager
    def _tensors_in_groups(self) -> Generator[None]:
        """Let tensors stand for numbers, so that a step makes all memory that a captured step must not make."""
        self._fill()
        numbers = [group[key] for group, key, _ in self._inputs]
        for group, key, tensor in self._inputs:
            group[key] = tensor
        try:
            yield
        finally:
            for (group, key, tensor), number in zip(self._inputs, numbers, strict=True):
                if group[key] is tensor:  # else a function of the step has given it another value
                    group[key] = number

    def _capture(self, groups: list[Group], device: torch.device) -> None:
        """Capture the step. Nothing is changed. If it cannot be captured, steps are ordinary."""
        runner = self._runner
        try:
            with self._host_unchanged(groups), self._tensors_in_groups():
                self._graph = self.capture(self.optimizer.step, device)
                self._metrics = None if runner is None else runner.step_metrics.copy()
        except RuntimeError as error:
            self._drop()
            self._is_off = True
            warn_user(f"the step could not be captured. Steps are ordinary from now on. {error}")
            return
        self._state, self._replays, self._ordinary = self._state_now(), 0, 0
        self._held = [] if runner is None else [runner.fast_way.held(), runner.decisions]

    @contextmanager
    def _host_unchanged(self, groups: list[Group]) -> Generator[None]:
        """Put back what the code of a step changes on the host, because a step is captured and not taken."""
        runner, put_back = self._runner, None
        if runner is not None:
            runner.read_decisions(self._runner_groups())  # which writes counts to the groups
            put_back = runner.counts_put_back()
        before = [dict(group) for group in groups]
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)
            if put_back is not None:
                put_back()

    def _replay(self, graph: Replayable) -> None:
        runner = self._runner
        self._fill()
        if runner is not None:
            runner.begin_replay()
        graph.replay()
        self._replays += 1
        if runner is not None and self._metrics is not None:
            runner.step_metrics = self._metrics.copy()
            runner.end_replay(self._runner_groups())

    def _fill(self) -> None:
        """Write the numbers of now to their tensors."""
        for k, (group, key, tensor) in enumerate(self._inputs):
            value = group[key]
            if isinstance(value, Tensor):
                scalar(key, value)  # a tensor of several elements has no !=
            if value != self._filled[k]:
                scalar(key, value)
                self._filled[k] = float(value)
                tensor.fill_(self._filled[k])

    def _drop(self) -> None:
        self._graph, self._is_rehearsed, self._metrics = None, False, None
        self._inputs, self._filled, self._state, self._held = [], [], [], []

    def _give_up(self, changed: str) -> None:
        """Take ordinary steps until a new capture."""
        self._drop()
        if self._runner is not None:
            self._runner.read_decisions(self._runner_groups())
        self._short = self._short + 1 if self._replays < _FEW else 0
        if self._short == MOST_CAPTURES:
            self._is_off = True
            warn_user(
                f"the step was captured {MOST_CAPTURES} times, and replayed fewer than {_FEW} times each, because "
                f"{changed} changed. Steps are ordinary from now on{_way_out(changed)}"
            )


def captured(optimizer: Optimizer) -> CapturedStep:
    """Return a function that takes the steps of an optimizer as replays of a CUDA graph.

    A replay launches all kernels of the step by one call. Before it, the host compares the memory of all parameters and
    gradients. The optimizer stays as it is, for schedulers, trainers and checkpoints: only call ``step()`` instead of
    ``optimizer.step()``.

    The first steps are ordinary. When a few looked the same, a step is captured, and later ones are replays. The rates
    ``lr`` and the limits of `ClipNorm`, `ClipRMS` and `ClipValue` may change in each step. Before each replay, the
    memory of gradients, all other settings and loads are compared. If one differs, the step is an ordinary one, and a
    new capture follows. On a CPU, all steps are ordinary.

    Args:
        optimizer: A `Modular`, or an optimizer of torch with ``capturable=True``, also with `before_step`.

    Returns:
        A callable, to which a closure may be passed. Its method ``release()`` frees the memory of the graph.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer, or is the wrapper of one.
        ValueError: If no step can be captured: with gates that read losses, ``nonfinite="raise"``, several processes, a
            `Recorder`, `step_in_backward`, `Wrap`, or other hooks of the steps; for an optimizer of torch that is not
            capturable. The error names the way out. It comes in a later step if one of these is added later.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AdamW, ClipNorm, Modular, SkipStep, captured
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Modular(model, SkipStep(max_ratio=10), ClipNorm(1, dim="global"), AdamW())
        >>> step = captured(optimizer)
        >>> for _ in range(3):
        ...     optimizer.zero_grad(set_to_none=False)
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     step()
        >>> optimizer.steps_taken
        3
    """
    instance("optimizer", optimizer, Optimizer)
    if unwrap(optimizer) is not optimizer:
        raise TypeError(f"{type(optimizer).__name__} is a wrapper: pass the optimizer in it")
    return CapturedStep(optimizer)


def _hooks(optimizer: Optimizer) -> list[object]:
    """The hooks of the steps of an optimizer, and of all optimizers. torch has no public way to list them."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    every = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    return [hook for hooks in (*own, *every) for hook in hooks.values()]


def _foreign(hook: object) -> Any:
    """The hook, if a replay would leave it out; None for those of `before_step`, which a replay repeats."""
    return None if isinstance(getattr(hook, "__self__", None), BeforeStep) or hook is warn_of_copy else hook


def _is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu


def _comparable(value: object) -> object:
    """The value, so that == reads no tensor."""
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Tensor) and value.is_cpu and not value.is_inference():
        return _Same(value), value._version  # a captured step has its numbers, which may change in place
    return value if isinstance(value, float | int | str | None) else _Same(value)


def _way_out(changed: str) -> str:
    return ": call zero_grad(set_to_none=False)" if "gradients" in changed else ""
