"""What the other projects do when they are imported is no error of a test."""

import contextlib
import importlib
import sys
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("torchvision")
    except RuntimeError:  # timm needs it, and its kernels for CUDA do not load beside a torch for CPUs
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in ("pytorch_tabnet.tab_model", "skorch", "stable_baselines3", "timm"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models are faster so, and sums have the same order in each run."""
    given = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(given)
