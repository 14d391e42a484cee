"""Importing the package, and asking for each of its names, changes nothing outside of it."""

import json
import sys

import pytest
from ranks import run_program

SEEN = """
import atexit, builtins, copyreg, json, pickle, signal, sys, warnings
import torch, torch.distributed

OWNERS = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
OWNERS |= {module.__name__: module for module in (atexit, builtins, copyreg, pickle, signal, sys, warnings)}
for path, owner in list(OWNERS.items()):
    OWNERS |= {f"{path}.{key}": value for key, value in vars(owner).items() if type(value) is type}

def content(value):
    if isinstance(value, dict) and value is not sys.modules and value is not sys.path_importer_cache:
        return [(repr(key), id(item)) for key, item in value.items()]
    return sorted(map(id, value)) if isinstance(value, list | set | tuple) else id(value)

def seen():
    attributes = {f"{path}: {k}": content(v) for path, owner in OWNERS.items() for k, v in list(vars(owner).items())}
    return attributes | {"handlers at exit": atexit._ncallbacks()}

warnings.simplefilter("ignore")  # torch warns of names that are read
seen()  # which fills caches
before = seen()
"""
CHANGED = """
after = seen()
print(json.dumps(sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))))
"""


def printed(code):
    done = run_program([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_importing_changes_nothing():
    code = """
import torchzero_clip, torchzero_clip.integrations
assert len([getattr(torchzero_clip, name) for name in dir(torchzero_clip)]) > 60
"""
    own = ["copyreg: dispatch_table", "pickle: dispatch_table"]  # how the classes of Modular.of are pickled
    assert printed(SEEN + code + CHANGED) == own


@pytest.mark.slow
def test_the_check_of_importing_sees_hooks_and_handlers():
    code = """
from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *_: None)
atexit.register(int)
warnings.filterwarnings("ignore", "Mine")
torch.nn.Module.train = torch.relu = None
"""
    found = printed(SEEN + code + CHANGED)
    hooked = {"torch.optim.optimizer: _global_optimizer_pre_hooks", "handlers at exit", "warnings: filters"}
    assert hooked | {"torch.nn.Module: train", "torch: relu"} <= set(found)


@pytest.mark.slow
def test_the_first_use_registers_one_hook_and_one_handler():
    code = """
import atexit, json, torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torchzero_clip import ClipNorm, Recorder, before_step

def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])

optimizers = [optimizer() for _ in range(4)]
before = atexit._ncallbacks()  # torch registers two with the first optimizer
counts = [len(hooks)]
for i in range(2):
    before_step(optimizers[i], ClipNorm(1))
    counts.append(len(hooks))
has_handlers = [atexit._ncallbacks() - before]
kept = []
for i in range(2):
    kept.append(Recorder(optimizers[2 + i]))
    has_handlers.append(atexit._ncallbacks() - before)
print(json.dumps([counts, has_handlers]))
"""
    assert printed(code) == [[0, 1, 1], [0, 1, 1]]
