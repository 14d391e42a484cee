"""Names, settings and texts of transforms."""

import pytest
import torch
from contract.entries import LimitRMS, Mul, TrackJointNorm, warm_up
from contract.training import parameters

from torchzero_clip import SGD, Adam, AdamW, Chain, ClipNorm, ClipValue, Modular, Transform, UpdateRule
from torchzero_clip.checks import non_negative


@pytest.mark.parametrize("base", [Transform, UpdateRule])
def test_the_learning_rate_is_no_setting_of_an_author(base):
    def construct(self):
        base.__init__(self, {"lr": 0.1})

    kind = type("Own", (base,), {"__init__": construct, "apply_tensors": lambda self, updates, step: updates})
    with pytest.raises(ValueError, match=r"Own\(\) has a setting 'lr', .* pass lr= to super\(\).__init__"):
        Modular(parameters(), kind(), SGD(0.1))


def test_a_check_of_a_setting_that_does_not_exist_is_an_error():
    class Mistyped(Mul):
        checks = {"ohter": non_negative}

    with pytest.raises(ValueError, match="checks of Mistyped has 'ohter', which is none of its settings"):
        Mistyped(1.0)


def test_repr_of_an_author_shows_what_it_can():
    class Own(Mul):
        def __init__(self, other, hidden=3, *args, name=None, **kwargs):
            super().__init__(other)

    assert repr(Own(2.0)) == "Own(2.0)"


@pytest.mark.parametrize("key", ["params", "a.b"])
def test_names_that_a_setting_cannot_have(key):
    class Bad(ClipNorm):
        def __init__(self):
            TrackJointNorm.__bases__[0].__init__(self, {key: 1.0})

    with pytest.raises(ValueError, match="cannot be the name of a setting"):
        Bad()


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (ClipNorm(1, "mad", (0, 1), True, 3), "ClipNorm(1, ord='mad', dim=(0, 1), inverse_dims=True, min_size=3)"),
        (ClipNorm(1.0, target="grad"), "ClipNorm(1.0, target='grad')"),
        (Adam(amsgrad=True, state_dtype=torch.float32), "Adam(amsgrad=True, state_dtype=torch.float32)"),
        (Adam(lr=torch.tensor(0.5)), "Adam(lr=tensor(0.5000))"),
        (SGD(0.1, 0.9, nesterov=True), "SGD(lr=0.1, momentum=0.9, nesterov=True)"),
        (AdamW(0.1), "AdamW(lr=0.1)"),
        (AdamW(eps=0.5, weight_decay=0.1).only("a"), "AdamW(eps=0.5, weight_decay=0.1).only('a')"),
        (Chain(ClipValue(1), target="grad"), "Chain(ClipValue(1), target='grad')"),
        (LimitRMS(0.5), "LimitRMS(0.5)"),
        (ClipNorm(warm_up), f"ClipNorm({warm_up!r})"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,  # an address differs between processes
)  # fmt: skip
def test_repr_of_transforms(transform, expected):
    assert repr(transform) == expected


class WithSlots(LimitRMS):
    __slots__ = ("own",)

    def __init__(self, max_rms=1.0):
        super().__init__(max_rms)
        self.own = 3


class CopiedByItsConstructor(LimitRMS):
    def __init__(self, max_rms=1.0):
        super().__init__(max_rms)
        self.own = 3

    def __copy__(self):
        return type(self)(self.defaults["max_rms"])


class PickledByItsConstructor(CopiedByItsConstructor):
    __copy__ = None

    def __reduce_ex__(self, protocol):
        return type(self), (self.defaults["max_rms"],)


@pytest.mark.parametrize("kind", [WithSlots, CopiedByItsConstructor, PickledByItsConstructor])
def test_an_authors_way_of_copying_keeps_scope_and_overrides(kind):
    first, second = parameters(shapes=[(1,), (1,)])
    old = kind()
    new = old.set_param_groups([{"params": second, "max_rms": 0.5}]).only("first", "second").without("first")
    assert (repr(new), new.own) == (f"{kind.__name__}().only('first', 'second').without('first')", 3)
    assert repr(old) == f"{kind.__name__}()"
    named = [("first", first), ("second", second)]
    assert [group["max_rms"] for group in Modular(named, new).param_groups] == [1.0, 0.5]
    assert [group["max_rms"] for group in Modular(named, old).param_groups] == [1.0]


def test_a_copy_that_is_the_transform_itself_is_refused():
    class Same(LimitRMS):
        def __copy__(self):
            return self

    transform = Same(1.0)
    with pytest.raises(TypeError, match=r"Same\.__copy__ returns the transform itself"):
        transform.only("a")
    assert repr(transform) == "Same(1.0)"
