"""What a transform learns about the gradients that entered the chain."""

import pytest
import torch
from contract.entries import Mul
from contract.training import assert_equal, gradients, parameters, set_grads, train, trained

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipValueGrowth,
    Modular,
    SkipStep,
    Step,
    TensorwiseTransform,
    Transform,
)

pytestmark = pytest.mark.filterwarnings("ignore:a max_norm of 0")


def test_gradient_statistics_have_to_be_declared():
    class Undeclared(TensorwiseTransform):
        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            return tensor

        def apply_tensors(self, updates, step):
            return [update * step.finite.sum() for update in updates]

    with pytest.raises(RuntimeError, match="write keeps_statistics = True in the class of the transform"):
        trained(Undeclared({}))


class Asks(Transform):
    """Notes what it is told of gradients."""

    keeps_statistics = True

    def __init__(self):
        super().__init__({})
        self.told = []

    def apply_tensors(self, updates, step):
        self.told.append((step.finite.tolist(), step.nonzero.tolist()))
        return updates


@pytest.mark.parametrize(
    "before", [list, lambda: ClipNorm(0.1), lambda: ClipNorm(0.1, "linf"), lambda: ClipNorm(0.0, "std"),
               lambda: ClipNorm(0.0, dim=0),
               lambda: Mul(0.0), lambda: ClipNorm(0.1).only(lambda p: p.ndim == 2), lambda: SkipStep(1e9),
               lambda: Chain(ClipNorm(0.0), target="update_difference"), lambda: Adam(), lambda: Centralize()],
)  # fmt: skip
def test_gradients_are_described_as_they_entered_the_chain(before):
    params = parameters()
    asks = Asks()
    options = {} if isinstance(before(), SkipStep) else {"maximize": True}
    optimizer = Modular(params, before(), asks, LR(0.0), **options)
    rows = gradients(params, 1)[0]
    rows[1].zero_()
    if not isinstance(before(), SkipStep):
        rows[2][0, 0, 0], rows[3] = torch.inf, torch.tensor(torch.nan)
    train(optimizer, params, [rows])
    expected = [row.isfinite().all().item() for row in rows], [row.count_nonzero().item() > 0 for row in rows]
    assert asks.told == [expected]


@pytest.mark.parametrize("transform", [ClipNormGrowth, ClipValueGrowth])
@pytest.mark.parametrize("scoped", [False, True])
def test_statistics_in_a_chain_that_acts_on_the_gradients_of_a_closure(transform, scoped):
    def chain():
        unit = Chain(Mul(1.0), transform(), target="closure")
        return [unit.only(lambda p: p.ndim == 2) if scoped else unit, SGD(1.0)]

    params, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer = Modular(params, chain())
    inner = transform().only(lambda p: p.ndim == 2) if scoped else transform()
    reference = Modular(plain, inner, SGD(1.0))
    for row in gradients(params, 4):
        optimizer.step(lambda row=row: set_grads(params, row))
        train(reference, plain, [row])
    assert_equal(params, plain)


@pytest.mark.parametrize("started", [torch.ones(2) > 0, torch.ones(4), torch.tensor(True)])
def test_started_is_a_vector_of_booleans(started):
    class Careless(Transform):
        keeps_statistics = True

        def apply_tensors(self, updates, step):
            step.usable(started)
            return updates

    with pytest.raises(ValueError, match="started must be booleans, 4 of them, got"):
        trained(Careless({}))


def test_started_of_all_gradients_together_is_a_vector_too():
    step = Step([], [], None, [], [], gradient_norms=torch.ones(3))
    assert step.usable(torch.tensor([True]), joint=True).tolist() == [True]
    with pytest.raises(ValueError, match=r"booleans, 3 of them, got .*one statistic of all gradients: joint=True"):
        step.usable(torch.tensor([True]))
    with pytest.raises(ValueError, match=r"started must be booleans, 1 of them, got torch.bool of shape \(\)"):
        step.usable(torch.tensor(True), joint=True)
