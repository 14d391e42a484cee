"""Parameters that are shards without saying so are refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchzero_clip import SGD, ClipNorm, Modular


@pytest.mark.parametrize("mark", ["_is_flat_param", "_fsdp_flattened"])
def test_parameters_of_fsdp1_are_refused(mark):
    model = nn.Linear(2, 1)
    setattr(model.bias, mark, True)
    with pytest.raises(ValueError, match=r"bias belongs to FSDP1 .*: use fully_shard"):
        Modular(model, ClipNorm(1.0, dim="global"))
    optimizer = Modular([model.weight], ClipNorm(1.0))
    with pytest.raises(ValueError, match=r"belongs to FSDP1"):
        optimizer.add_param_group({"params": [model.bias]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own import
def test_zero_redundancy_optimizer_is_refused(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        params = [nn.Parameter(torch.zeros(2))]

        def chain(params, **kwargs):
            return Modular(params, ClipNorm(1.0, dim="global"), SGD(0.1))

        with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer gives each process .*: use fully_shard"):
            ZeroRedundancyOptimizer(params, optimizer_class=chain)
        Modular(params, SGD())  # alone it may be made in the same process
    finally:
        dist.destroy_process_group()
