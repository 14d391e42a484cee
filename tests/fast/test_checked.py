"""Mistakes of authors are explained in planned steps too."""

import pytest
import torch
from contract.training import gradients, parameters, train
from engine.test_checked import SHAPES, put

from torchzero_clip import Adam, Modular, Scaling


def test_planned_steps_check_metrics_and_factors():
    class Slips(Scaling):
        def factors(self, measured, updates, step):
            if slip:
                slip[0](step)
            return torch.full_like(measured.vector, 0.5)

    for effect, message in [
        (lambda step: put(step.metrics, "x", 1.0), r"Slips\({}\) has 1.0 \(float\) as metric 'x'"),
        (lambda step: step.settings[0]["x"], r"Slips\({}\) looked up 'x', which does not exist"),
    ]:
        slip = []
        params = parameters(shapes=SHAPES)
        optimizer = Modular(params, Slips({}), Adam())
        train(optimizer, params, gradients(params, 1) * 8)
        assert optimizer.runner.fast_way.plan is not None
        before = [param.detach().clone() for param in params]
        slip.append(effect)
        with pytest.raises(RuntimeError, match=message):
            train(optimizer, params, gradients(params, 1))
        assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
