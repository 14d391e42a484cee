"""Only the clock misses the fast way: the package without the folder `fast/` passes all tests that are not about it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchzero_clip.fast.door import FastWay

ROOT = Path(__file__).parents[1]
FOLDERS = ["core", "engine", "modular", "checkpoints", "contract", "optimizers"]
DOOR = '''"""What is left of the fast way: every step takes the readable one."""

from torchzero_clip.engine.readable import ReadableExecutor


class FastWay:
    """Has no layout, no plan, and the executor of the readable way."""

    plan = None

    def of_part(self, key):
        return self

    def columns(self, table):
        return None

    def executor(self, updates, columns):
        return ReadableExecutor(updates)

    def learn(self, walk, options):
        pass
'''


def test_the_stub_has_no_name_that_the_real_one_lacks():
    names = {}
    exec(DOOR, names)
    real = FastWay()
    assert [name for name in vars(names["FastWay"]) if not hasattr(real, name)] == []


@pytest.mark.slow
def test_the_suite_passes_without_the_folder_of_the_fast_way(tmp_path):
    for name in ("torchzero_clip", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    fast = tmp_path / "torchzero_clip" / "fast"
    shutil.rmtree(fast)
    fast.mkdir()
    (fast / "__init__.py").write_text("")
    (fast / "door.py").write_text(DOOR)
    tests = [f"tests/{name}" for name in FOLDERS]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not fast_way", *tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    environment |= {"PYTHONPATH": str(tmp_path), "QUICK_CASES": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=480)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert not failed, "\n".join(failed)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 600
