"""skorch: a net with a chain as its optimizer, and with transforms before the steps of any."""

import pickle

import numpy
import pytest
import torch
from clients.runs import weights
from torch import nn

from torchzero_clip import AdamW, ClipNorm, ClipNormByEMA, Modular, Recorder, SkipStep, ZClip, before_step

skorch = pytest.importorskip("skorch", reason="skorch is not installed")
from sklearn.base import clone  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from skorch.callbacks import GradientNormClipping  # noqa: E402

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = numpy.random.RandomState(0).randn(64, 4).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
X[60] *= 1e3  # a large gradient in the last batch of each epoch
Y[60] = 1 - Y[60]
CHAIN = Modular.of(ClipNorm(0.1, dim="global"), AdamW(weight_decay=0.0))
GATED = Modular.of(SkipStep(max_ratio=20.0), ZClip(warmup_steps=4), ClipNormByEMA(), AdamW(weight_decay=0.0))


class Net(skorch.NeuralNetClassifier):
    """A classifier that has transforms before the steps of its optimizer."""

    def __init__(self, *args, transforms=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.transforms = transforms

    def initialize_optimizer(self, triggered_directly=None):
        super().initialize_optimizer(triggered_directly)
        before_step(self.optimizer_, *self.transforms, model=self.module_)
        return self


def net(kind=skorch.NeuralNetClassifier, **options):
    torch.manual_seed(0)
    usual = {"optimizer": torch.optim.AdamW, "optimizer__weight_decay": 0.0} if "optimizer" not in options else {}
    shape = {"module__in_features": 4, "module__out_features": 2, "criterion": nn.CrossEntropyLoss}
    fitting = {"lr": 0.05, "batch_size": 16, "max_epochs": 4, "verbose": 0, "train_split": None}
    return kind(nn.Linear, **shape, **fitting, **usual, **options).initialize()


WAYS = {
    "chain": lambda: net(optimizer=CHAIN),
    "handle": lambda: net(Net, transforms=[ClipNorm(0.1, dim="global")]),
}
GATES = {
    "chain": lambda: net(optimizer=GATED),
    "handle": lambda: net(Net, transforms=[SkipStep(max_ratio=20.0), ZClip(warmup_steps=4), ClipNormByEMA()]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_limit_is_the_callback_of_skorch(way):
    expected, found = net(callbacks=[GradientNormClipping(0.1)]), WAYS[way]()
    start = weights(found.module_)
    expected.partial_fit(X, Y)
    found.partial_fit(X, Y)
    torch.testing.assert_close(weights(found.module_), weights(expected.module_), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(found.module_), start)


@pytest.mark.parametrize("way", GATES)
def test_a_net_resumes_from_its_checkpoint(way, tmp_path):
    whole, half, resumed = GATES[way](), GATES[way](), GATES[way]()
    recorder = Recorder(resumed.optimizer_)
    half.partial_fit(X, Y)
    files = {f"f_{name}": tmp_path / name for name in ("params", "optimizer", "criterion", "history")}
    half.save_params(**files)
    resumed.load_params(**files)
    whole.partial_fit(X, Y).partial_fit(X, Y)
    resumed.partial_fit(X, Y)
    assert torch.equal(weights(resumed.module_), weights(whole.module_))
    assert resumed.history[:, "train_loss"] == whole.history[:, "train_loss"]
    assert recorder.record().reasons == ["", "", "", "skip_step"] * 4


def test_settings_of_a_chain_are_parameters_of_the_net():
    found = net(optimizer=CHAIN, optimizer__max_norm=0.3)
    assert found.optimizer_.param_groups[0]["max_norm"] == 0.3
    assert clone(found).optimizer is CHAIN
    assert type(pickle.loads(pickle.dumps(found)).optimizer_) is CHAIN
    search = GridSearchCV(found, {"optimizer__max_norm": [1e-6, 1.0]}, cv=2).fit(X, Y)
    assert search.best_params_ == {"optimizer__max_norm": 1.0}


def test_a_pickle_has_no_transforms_before_its_optimizer():
    copied = pickle.loads(pickle.dumps(WAYS["handle"]()))
    with pytest.warns(UserWarning, match="call before_step on it"):
        copied.partial_fit(X, Y)
