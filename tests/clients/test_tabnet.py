"""pytorch-tabnet: `optimizer_fn=` takes a chain, or a function that puts transforms before each step."""

import numpy
import pytest
import torch
from clients.runs import weights

from torchzero_clip import AdamW, ClipNorm, Modular, Recorder, before_step

pytest.importorskip("pytorch_tabnet", reason="pytorch-tabnet is not installed")
from pytorch_tabnet.tab_model import TabNetRegressor

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = numpy.random.RandomState(0).randn(64, 4).astype("float32")
RECORDERS = []


def clipped(params, **options):
    optimizer = torch.optim.AdamW(params, **options)
    RECORDERS.append(Recorder(optimizer))
    before_step(optimizer, ClipNorm(0.1, dim="global"))
    return optimizer


def fitted(optimizer_fn=torch.optim.AdamW, clip_value=None):
    sizes = {"n_d": 4, "n_a": 4, "n_steps": 2, "seed": 0, "verbose": 0, "device_name": "cpu"}
    options = {"lr": 0.02, "weight_decay": 0.0}
    model = TabNetRegressor(optimizer_fn=optimizer_fn, optimizer_params=options, clip_value=clip_value, **sizes)
    numpy.random.seed(0)
    model.fit(X, X[:, :1] ** 2, max_epochs=4, batch_size=16, virtual_batch_size=8)
    return model


@pytest.mark.parametrize("optimizer_fn", [Modular.of(ClipNorm(0.1, dim="global"), AdamW()), clipped])
def test_a_limit_is_the_clip_of_tabnet(optimizer_fn):
    expected, found = fitted(clip_value=0.1), fitted(optimizer_fn)
    # torch clips to the limit / (norm + 1e-6), and steps of Adam enlarge this where gradients are near 0
    torch.testing.assert_close(weights(found.network), weights(expected.network), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(weights(fitted().network), weights(expected.network), atol=1e-3)


def test_a_recorder_of_tabnet_has_the_norms_before_the_limit():
    fitted(clipped)
    record = RECORDERS[-1].record()
    assert len(record.steps) == 16
    assert record.norm.max().item() > 0.1
    assert record.metrics["clip_norm/clipped"].sum().item() > 0
