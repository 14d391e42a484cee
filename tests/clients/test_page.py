"""The blocks of the page "With your framework" run as they are."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

for package in ("pytorch_tabnet", "schedulefree", "skorch", "stable_baselines3", "timm"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def test_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 10
    assert names["agent"].policy.optimizer.param_groups[0]["max_norm"] == 0.5


@pytest.mark.parametrize(
    "name",
    [
        "bitsandbytes",
        "prodigyopt",
        "pytorch_optimizer",
        "pytorch-tabnet",
        "schedulefree",
        "skorch",
        "stable-baselines3",
    ],
)
def test_the_page_names_the_versions(name):
    assert f"{name} {'.'.join(version(name).split('.')[:2])}" in " ".join(PAGE.read_text().split())
