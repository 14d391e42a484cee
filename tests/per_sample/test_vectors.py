"""The cases of kinds clipper and per_sample of ``vectors.json``."""

import itertools

import pytest
import torch
from contract.test_vectors import assert_agrees, cases, tensor
from torch import nn

from torchzero_clip import ConstantFlatClipper, ConstantPerLayerClipper, PerSampleGradientClipper

CLIPPERS = {cls.__name__: cls for cls in (ConstantFlatClipper, ConstantPerLayerClipper)}


class Given(nn.Module):
    """A loss whose gradients are what it is called with."""

    def __init__(self, shapes):
        super().__init__()
        self.given = nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in shapes)

    def forward(self, *grads):
        count = grads[0].shape[0]
        return sum((p * g).reshape(count, -1).sum(1) for p, g in zip(self.given, grads, strict=True))


@cases("clipper")
def test_clipper(case):
    clipper = CLIPPERS[case["target"]](**case["args"])
    assert_agrees([clipper.thresholds], [case["expected_thresholds_before"]])
    factors = clipper.calc_clipping_factors([tensor(norms) for norms in case["norms"]])
    assert isinstance(factors, list) == clipper.is_per_layer == case["expected_is_per_layer"]
    expected = case["expected_factors"]
    assert_agrees(list(itertools.islice(factors, len(expected))), expected)
    assert_agrees([clipper.thresholds], [case["expected_thresholds_after"]])


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("keep", [False, True])
@cases("per_sample")
def test_per_sample(case, memory, keep):
    module = Given(case["shapes"])
    clipper = PerSampleGradientClipper(
        module,
        CLIPPERS[case["clipper"]](**case["args"]),
        loss_reduction=case["loss_reduction"],
        memory=memory,
        keep_grad_samples=keep,
    )
    for batch in case["batches"]:
        grads = [tensor(values).reshape(-1, *shape) for values, shape in zip(batch, case["shapes"], strict=True)]
        losses = module(*grads)
        (losses.mean() if case["loss_reduction"] == "mean" else losses.sum()).backward()
        clipper.clip_and_accumulate()
    max_norm, batch_size = clipper.pre_step()
    assert_agrees(list(module.given), [torch.zeros(shape).tolist() for shape in case["shapes"]])
    assert_agrees([p.grad for p in module.given], case["expected_grads"])
    assert_agrees([max_norm], [case["expected_max_norm"]])
    assert batch_size == case["expected_batch_size"]
