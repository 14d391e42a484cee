"""Chains that end in Adam or SGD are torch's optimizers to the last bit, with an inactive clip before them.

The default is torch's fused optimizer, and ``fused=False`` its loop.
"""

import copy

import pytest
import torch
from contract.training import assert_equal, train
from optimizers.twins import same, same_gradients, two_of
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from torchzero_clip import LR, SGD, Adam, AdamW, ClipNorm, Modular, TensorwiseTransform, WeightDecay

REAL = [torch.float32, torch.float64, torch.bfloat16]
WIDE = [torch.float32, torch.float64]
ALL = [*REAL, torch.complex64]
SHAPES = [(40, 33), (7,), (7, 5, 3), (), (0, 3)]
"""SGD's kernel rounds unlike the loop only in the elements that do not fill a vector register: all 7 of the second."""

JOINT = ClipNorm(1e9, dim="global")
"""A limit that is never reached."""

ADAMS = {
    "Adam": same(Adam, optim.Adam, 0.01),
    "AdamW": same(AdamW, optim.AdamW, 0.01),
    "AdamW amsgrad": same(AdamW, optim.AdamW, 0.01, (0.5, 0.6), eps=1e-3, weight_decay=0.1, amsgrad=True),
    "AdamW written out": (
        lambda **fused: [Adam(**fused), WeightDecay(0.01), LR(0.1)],
        lambda p, **fused: optim.AdamW(p, 0.1, **fused),
    ),
    "AdamW tensor lr": same(AdamW, optim.AdamW, torch.tensor(0.1)),
}
SGDS = {
    "SGD": same(SGD, optim.SGD, 0.01),
    "SGD momentum": same(SGD, optim.SGD, 0.01, 0.9),
    "SGD dampening": same(SGD, optim.SGD, 0.01, 0.9, dampening=0.3),
    "SGD nesterov": same(SGD, optim.SGD, 0.01, 0.9, nesterov=True),
}
LOOPS = {
    **ADAMS,
    **SGDS,
    "AdamW foreach": (ADAMS["AdamW"][0], lambda p: optim.AdamW(p, 0.01, foreach=True)),
    "SGD foreach": (SGDS["SGD nesterov"][0], lambda p: optim.SGD(p, 0.01, 0.9, nesterov=True, foreach=True)),
    "Adam L2": same(Adam, optim.Adam, 0.01, decay=0.1),
    "SGD nesterov L2": same(SGD, optim.SGD, 0.01, 0.9, nesterov=True, decay=0.1),
}
KERNELS = {
    **ADAMS,
    **SGDS,
    "SGD tensor lr": same(SGD, optim.SGD, torch.tensor(0.1)),
    "SGD momentum tensor lr": same(SGD, optim.SGD, torch.tensor(0.1), 0.9),
}
# torch's foreach SGD on CPU rounds its numbers to bfloat16
LOOP_CASES = [(n, d, {"fused": False}) for n in LOOPS for d in ALL if (n, d) != ("SGD foreach", torch.bfloat16)]
# the default where the kernel is not right: it takes no complex parameters, and torch 2.13's for SGD in bfloat16 is off
# by a third of a step
LOOP_CASES += [(n, torch.complex64, {}) for n in LOOPS]
LOOP_CASES += [(n, torch.bfloat16, {}) for n in LOOPS if n in SGDS or n == "SGD nesterov L2"]
KERNEL_CASES = [(name, dtype) for name in KERNELS for dtype in (REAL if "Adam" in name else WIDE)]

each_direction = pytest.mark.parametrize("maximize", [False, pytest.param(True, marks=pytest.mark.slow)])
each_way = pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"fused": False}, {}), ({}, {"fused": True}), ({"fused": True}, {"fused": True})],
    ids=["loop", "default", "fused"],
)


def twins(dtype):
    return two_of([torch.randn(shape, dtype=dtype) for shape in SHAPES])


def assert_same_steps(optimizers, params, other, *, steps=12, zeros_first=True, scheduled=True, change=None):
    """Ours is the first of the optimizers. ``change`` changes the gradients of a step, by its number."""
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in optimizers if scheduled]
    for k in range(steps):
        same_gradients(params, other, (k if zeros_first else k + 1) % 3)  # all zero now and then
        if change is not None:
            change(k)
        for each in (*optimizers, *schedulers):
            each.step()
        assert_equal(params, other)


def assert_same_run(chain, make, params, other, maximize, **options):
    reference = make(other)
    reference.param_groups[0]["maximize"] = maximize
    assert_same_steps([Modular(params, *chain, maximize=maximize), reference], params, other, **options)


@each_direction
@pytest.mark.parametrize(("name", "dtype", "fused"), LOOP_CASES, ids=str)
def test_every_bit_is_that_of_torchs_loop(name, dtype, fused, maximize):
    ours, theirs = LOOPS[name]
    assert_same_run([JOINT, ours(**fused)], theirs, *twins(dtype), maximize)


@pytest.mark.parametrize(
    ("clip", "fused", "images"),
    [
        ([], {}, torch.contiguous_format),
        ([JOINT], {}, torch.channels_last),
        ([ClipNorm(1e9)], {}, torch.channels_last),
        ([JOINT], {"fused": True}, torch.contiguous_format),
    ],
    ids=["no clip", "one limit", "limits", "fused"],
)
@each_direction
@pytest.mark.parametrize(("name", "dtype"), KERNEL_CASES, ids=str)
def test_every_bit_is_that_of_torchs_kernel(name, dtype, maximize, clip, fused, images):
    ours, theirs = KERNELS[name]
    image = torch.randn(8, 5, 3, 3, dtype=dtype).contiguous(memory_format=images)
    pair = two_of([*(torch.randn(shape, dtype=dtype) for shape in SHAPES), image])
    assert_same_run([*clip, ours(**fused)], lambda p: theirs(p, fused=True), *pair, maximize, zeros_first=False)


class Kernels(TorchDispatchMode):
    """Counts calls of torch's fused kernels."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith("aten._fused_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "dtype"), KERNEL_CASES, ids=str)
def test_the_default_is_one_call_of_torchs_kernel(name, dtype):
    """Two optimizers may agree in every bit without it: SGD without momentum rounds as the loop does."""
    counts = []
    for fused in ({}, {"fused": True}, {"fused": False}):
        params, _ = twins(dtype)
        optimizer = Modular(params, JOINT, KERNELS[name][0](**fused))
        same_gradients(params, params)
        optimizer.step()
        with Kernels() as kernels:
            optimizer.step()
        counts.append(kernels.count)
    assert counts == [1, 1, 0]


GROUPS = {
    "AdamW": (same(AdamW, optim.AdamW), {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3, "lr": 0.3}),
    "AdamW tensor lr": (same(AdamW, optim.AdamW, torch.tensor(0.1)), {"lr": torch.tensor(0.3)}),
    "SGD": (same(SGD, optim.SGD), {"lr": 0.3}),
    "SGD momentum": (same(SGD, optim.SGD, momentum=0.9), {"momentum": 0.5, "dampening": 0.3, "lr": 0.3}),
    "SGD nesterov": (same(SGD, optim.SGD, momentum=0.9, nesterov=True), {"momentum": 0.5, "lr": 0.3}),
    "SGD tensor lr": (same(SGD, optim.SGD, torch.tensor(0.1), 0.9), {"lr": torch.tensor(0.3)}),
    "SGD some momentum": (same(SGD, optim.SGD, momentum=0.9), {"momentum": 0.0, "lr": 0.3}),
}


@pytest.mark.parametrize("pauses", [False, True], ids=["steady", "one joins later and pauses"])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_every_bit_is_that_of_torchs_kernel_in_several_groups(name, dtype, pauses):
    (ours, theirs), second = GROUPS[name]
    params, other = twins(dtype)

    def groups(tensors):
        return [
            {"params": tensors[:2]},
            {"params": tensors[2:], **copy.deepcopy(second)},
        ]  # schedulers write to tensors

    def pause(k):
        for param in [*params[2:], *other[2:]] if pauses and k in (0, 1, 2, 6) else ():
            param.grad = None

    optimizers = Modular(groups(params), ours()), theirs(groups(other), fused=True)
    assert_same_steps(optimizers, params, other, zeros_first=False, scheduled=not pauses, change=pause)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD momentum"])
def test_gradients_laid_out_unlike_their_parameters_take_the_loop(name, dtype):
    """torch's kernels go through memory without looking at strides."""
    (ours, theirs), _ = GROUPS[name]
    params, other = two_of([torch.randn(8, 5, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)])
    optimizer, reference = Modular(params, ours()), theirs(other)
    for _ in range(4):
        grad = torch.randn(8, 5, 3, 3, dtype=dtype)
        train(optimizer, params, [[grad]])
        train(reference, other, [[grad]])
        assert_equal(params, other)


class LaidOutUnlike(TensorwiseTransform):
    """Returns matrices with their columns one after the other, as `SoftSpectralClip` returns tall ones."""

    def __init__(self):
        super().__init__({})

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD momentum", "SGD nesterov", "SGD tensor lr"])
def test_only_an_update_of_another_layout_takes_the_loop(name, dtype):
    (ours, theirs), _ = GROUPS[name]
    params, other = two_of([torch.randn(shape, dtype=dtype) for shape in [(40, 33), (7,), (5, 3, 2)]])
    optimizer = Modular(params, LaidOutUnlike(), ours())
    references = theirs(other[:1]), theirs(other[1:], fused=True)
    assert_same_steps([optimizer, *references], params, other, zeros_first=False, scheduled=False)
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.count == 1


@each_way
def test_every_bit_is_torchs_within_scopes_and_groups(ours, theirs):
    params, other = twins(torch.float32)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5, "lr": 0.1}]
    is_wide = {id(params[0]), id(params[2])}
    rest = AdamW(0.01, **ours).without(lambda p: id(p) in is_wide)
    optimizer = Modular(groups, SGD(momentum=0.9, **ours).only(lambda p: id(p) in is_wide), rest)
    first = [{"params": other[0], "lr": 0.01}, {"params": other[2], "lr": 0.1}]
    sgd = optim.SGD(first, momentum=0.9, **theirs)
    small = [{"params": other[1]}, {"params": [other[3], other[4]], "lr": 0.1, "weight_decay": 0.5}]
    adamw = optim.AdamW(small, 0.01, weight_decay=0.01, **theirs)
    assert_same_steps([optimizer, sgd, adamw], params, other, steps=6, scheduled=False)


@each_way
def test_every_bit_is_torchs_where_only_some_parameters_decay(ours, theirs):
    """The usual recipe: no decay for biases and norms."""
    params, other = twins(torch.float32)
    optimizer = Modular(params, Adam(0.1, **ours), WeightDecay(0.3).only(lambda p: p.ndim > 1))
    chosen = [p for p in other if p.ndim > 1], [p for p in other if p.ndim <= 1]
    groups = [{"params": chosen[0], "weight_decay": 0.3}, {"params": chosen[1], "weight_decay": 0.0}]
    reference = optim.AdamW(groups, 0.1, **theirs)
    assert_same_steps([optimizer, reference], params, other, steps=6, scheduled=False)


@each_way
def test_every_bit_is_torchs_beside_parameters_of_other_dtypes_and_layouts(ours, theirs):
    values = [torch.randn(4, 4), torch.randn(3).half(), torch.randn(3, dtype=torch.complex64), torch.randn(8, 1, 3, 3)]
    params, other = two_of(values)
    optimizer = Modular(params, AdamW(0.1, **ours))
    reference = optim.AdamW([other[0], other[3]], 0.1, **theirs)
    for k in range(1, 4):
        same_gradients(params, other, k % 3)
        params[3].grad = params[3].grad.contiguous(memory_format=torch.channels_last)
        optimizer.step()
        reference.step()
        assert_equal([params[0], params[3]], [other[0], other[3]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fused", [{}, {"fused": True}], ids=["default", "fused"])
@pytest.mark.parametrize(("name", "dtype"), KERNEL_CASES, ids=str)
def test_every_bit_is_that_of_torchs_kernel_on_cuda(name, dtype, fused):
    ours, theirs = KERNELS[name]
    params, other = ([nn.Parameter(p.detach().cuda()) for p in group] for group in twins(dtype))
    optimizer, reference = Modular(params, ours(**fused)), theirs(other, fused=True)
    assert_same_steps([optimizer, reference], params, other, zeros_first=False)
