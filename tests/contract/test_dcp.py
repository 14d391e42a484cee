"""torch.distributed.checkpoint in one process, without a process group; `test_sharded` does it in two."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract.entries import ENTRIES
from contract.training import Model, assert_equal, gradients, parameters, train, values
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from torchzero_clip import Modular

MOVES_WHATEVER_LR_IS = "target params"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True], ids=["plain", "flattened"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_resumes_exactly(entry, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    initial = values(parameters())
    model = Model(initial)
    params = list(model.parameters())
    grads = gradients(params, 4)
    optimizer = Modular(params, entry.make())
    train(optimizer, params, grads[:2])
    halfway = values(params)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    train(optimizer, params, grads[2:])

    second_model = Model(halfway)
    resumed = list(second_model.parameters())
    second = Modular(resumed, entry.make())
    saved = get_optimizer_state_dict(second_model, second, options=options)
    if entry.name != MOVES_WHATEVER_LR_IS:
        assert_equal(resumed, halfway)  # preparing the optimizer has moved nothing
    dcp.load({"optimizer": saved}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(second_model, second, saved, options=options)
    with torch.no_grad():
        for param, value in zip(resumed, halfway, strict=True):
            param.copy_(value)
    train(second, resumed, grads[2:])
    assert_equal(resumed, params)
