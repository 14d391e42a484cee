"""The text of an optimizer."""

import torch
from torch import nn

from torchzero_clip import Adam, AdamW, Chain, ClipNorm, ClipValue, ClipValueByEMA, Modular, Wrap


def test_repr_reads_like_the_code_that_made_it():
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))]
    optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW(lr=3e-4, weight_decay=0.1), maximize=True)
    assert repr(optimizer) == (
        "Modular(\n    <2 tensors, 9 elements>,\n    ClipNorm(1, dim='global'),\n    AdamW(lr=0.0003, "
        "weight_decay=0.1),\n    maximize=True,\n)"
    )


def test_repr_shows_no_number_that_no_group_uses():
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))]
    unit = Chain(ClipValue(5), target="update_difference")
    optimizer = Modular(params, ClipNorm(1), [unit, AdamW(0.1)], ClipNorm(2))
    optimizer.param_groups[0] |= {"max_norm": 0.5, "value": 4, "lr": 0.01, "weight_decay": 0.3}
    optimizer.param_groups[0]["clip_norm_2/max_norm"] = 7
    unit_repr = "Chain(ClipValue(4), target='update_difference')"
    assert repr(optimizer) == (
        f"Modular(\n    <2 tensors, 9 elements>,\n    ClipNorm(0.5),\n    {unit_repr},\n"
        "    AdamW(lr=0.01, weight_decay=0.3),\n    ClipNorm(7),\n)"
    )
    groups = [{"params": params[:1], "max_norm": 3}, {"params": params[1:], "max_norm": 4}]
    assert repr(Modular(groups, ClipNorm(1), Adam())) == (
        "Modular(\n    [<1 tensors, 6 elements>, {'params': <1 tensors, 3 elements>, 'max_norm': 4}],\n"
        "    ClipNorm(3),\n    Adam(),\n)"
    )


def test_the_text_shows_a_rate_that_no_rule_names():
    optimizer = Modular([nn.Parameter(torch.ones(2))], Adam())
    assert "'lr'" not in repr(optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    assert "'lr': 7.0" in repr(optimizer)


def test_the_text_is_what_was_written_with_the_numbers_in_use_at_any_depth():
    def text(*chain, **settings):
        optimizer = Modular([nn.Parameter(torch.ones(2))], *chain)
        assert settings.keys() <= optimizer.param_groups[0].keys()
        optimizer.param_groups[0].update(settings)
        return repr(optimizer)

    assert "Chain(ClipNorm(3), AdamW(lr=0.1))," in text(Chain(ClipNorm(3), AdamW(0.1)))
    assert "Chain(ClipNorm(3), AdamW(lr=0.2))," in text(Chain(ClipNorm(3), AdamW(0.1)), lr=0.2)
    nested = Chain(ClipNorm(3), Chain(ClipNorm(4)), target="update_difference")
    assert "Chain(ClipNorm(3), Chain(ClipNorm(7)), target" in text(nested, **{"chain/clip_norm_2/max_norm": 7})
    child = {"clip_value_by_ema/ema_tfm/clip_norm/max_norm": 9}
    assert "ema_tfm=ClipNorm(9)" in text(ClipValueByEMA(ema_tfm=ClipNorm(3)), **child)
    assert "ema_tfm=[ClipNorm(9)]" in text(ClipValueByEMA(ema_tfm=[ClipNorm(3)]), **child)
    assert "ema_tfm=Chain(ClipNorm(9))" in text(ClipValueByEMA(ema_tfm=Chain(ClipNorm(3))), **child)
    wrapped = text(Wrap(torch.optim.Adagrad, lr=0.1, lr_decay=0.5), lr_decay=0.25)
    assert "Wrap(Adagrad, lr=0.1, lr_decay=0.25)," in wrapped
