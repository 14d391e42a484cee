"""Base classes: what they may not be asked for, and slices of tensors."""

import pytest
from contract.training import assert_equal, gradients, parameters, train

from torchzero_clip import (
    Chain,
    ClipNorm,
    Gate,
    Modular,
    Scaling,
    SkipStep,
    TensorwiseTransform,
    Transform,
    UpdateRule,
    Wrap,
)
from torchzero_clip.core import chain, kinds


def test_base_classes_have_six_flags():
    bases = [Transform, TensorwiseTransform, chain.Composite, Chain, Scaling, UpdateRule, kinds.FinalRule, Gate]
    flags = {key for base in bases for key, value in vars(base).items() if isinstance(value, bool)}
    assert flags == {"each_alone", "pure", "keeps_statistics", "needs_loss", "has_factor", "has_kernel"}


@pytest.mark.parametrize(
    ("base", "kind"), [(ClipNorm, "Scaling"), (Scaling, "Scaling"), (SkipStep, "Gate"), (Wrap, "FinalRule")]
)
def test_a_kind_that_is_never_asked_for_tensors_refuses_to_be(base, kind):
    with pytest.raises(
        TypeError, match=rf"Own.apply_tensors would never be called, because Own is a {kind}: implement"
    ):
        type("Own", (base,), {"apply_tensors": lambda self, updates, step: updates})


@pytest.mark.parametrize(("dims", "wrong"), [((-1,), False), ((1, -1), False), ((5,), True), ((-3,), True)])
def test_dimensions_of_slices_may_count_from_the_end_and_have_to_exist(dims, wrong):
    class Rows(ClipNorm):
        def slice_dims(self, tensor):
            return dims

    param, plain = parameters(shapes=[(2, 3)]), parameters(shapes=[(2, 3)])
    rows = gradients(param, 1)
    if wrong:
        with pytest.raises(ValueError, match=r"slice_dims returned .* for a tensor of shape \(2, 3\)"):
            train(Modular(param, Rows(0.1)), param, rows)
    else:
        train(Modular(param, Rows(0.1)), param, rows)
        train(Modular(plain, ClipNorm(0.1, dim=1)), plain, rows)
        assert_equal(param, plain)
