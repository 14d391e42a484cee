"""A plan repeats a step: at most one scaling, then a rule whose kernel does the rest, or a write into ``.grad``.

In a small model, an ordinary step spends more time on deciding what to do than on doing it. After steps that looked the
same, the next ones follow a plan while everything that decides the course of a step stays the same. Otherwise the
optimizer takes an ordinary step. The results are the same, bit for bit. A plan has three parts:

* **When**: this file. On CPU and CUDA, the chain is at most one scaling and then a rule, without scopes and other
  targets. Kernels take one factor, so a chain with a second scaling, or with `WeightDecay` before the rule, has no
  plan. A chain that delivers its updates to another optimizer is one scaling. Gates may stand anywhere, because they
  decide before the first transform. Nobody else takes part: no other processes, and no parts of the step in the
  backward.
* **What is compared** in each step before anything changes: `fast.compared`.
* **What is done**: `fast.repeated`. It calls what ordinary steps call. A policy and a listener see a `Walk` and the
  norms of an ordinary step. A usual joint norm answers ``nonfinite`` alone, and if a policy refuses the step, nothing
  has changed. A plan has no tensor of a step, so that ``zero_grad()`` frees the gradients. Metrics are computed when
  they are read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.transform import is_pure
from torchzero_clip.engine.ordinary_step import StepOptions
from torchzero_clip.engine.walk import Walk
from torchzero_clip.fast.compared import SameSettings, SameTensors
from torchzero_clip.fast.kernels import EndedByDelivery, EndedByKernel
from torchzero_clip.fast.repeated import ByDelivery, ByRule, Course, RepeatedScaling, without_gates


class Plan(NamedTuple):
    """What a step did, and with what later steps are compared before they do it again."""

    options: StepOptions
    course: Course
    tensors: SameTensors
    settings: SameSettings

    @classmethod
    def of(cls, walk: Walk, ended: EndedByKernel | EndedByDelivery, options: StepOptions) -> "Plan | None":
        """A plan of a step; None if it cannot be repeated."""
        table, acting = walk.table, without_gates(walk.nodes)
        first = [node for node in acting[:1] if isinstance(node.transform, Scaling)]
        last = [ended.node, *ended.rest] if isinstance(ended, EndedByKernel) else []
        # state that is new enters the optimizer after the step, so the next one gathers other tensors
        is_alone = options.parts is None and options.process_group is None
        if not is_alone or not acting or acting != [*first, *last] or table.new_states:
            return None
        if any(node.transform.scope.limited or node.transform.target != "update" for node in walk.nodes):
            return None
        if not all(is_pure(node.transform) for node in last):
            return None
        ending = ByRule(ended, table.group_of) if isinstance(ended, EndedByKernel) else ByDelivery(ended)
        tensors = SameTensors.of(table, ended.columns, ended.layout, ending.counters)
        if tensors is None:
            return None
        first_param = table.params[0]
        # joint norms of other dtypes are computed in another way, and an empty tensor does not have a norm to join
        is_usual = not options.maximize and first_param.dtype == torch.float32 and all(map(Tensor.numel, table.params))
        may_read = is_usual and first_param.is_cpu
        scaling = RepeatedScaling(first[0], table.group_of, may_read=may_read) if first else None
        with_settings = [part for part in (scaling, ending) if isinstance(part, RepeatedScaling | ByRule)]
        course = Course(
            nodes=walk.nodes,
            norm_needs=walk.gradient_norms.norm_needs,
            end=walk.end,
            layout=ended.layout,
            group_of=table.group_of,
            options=options,
            scaling=scaling,
            ending=ending,
        )
        return cls(options, course, tensors, SameSettings(walk, with_settings))
