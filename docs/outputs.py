"""Runs the programs of the recipes and stores what they print, which their pages show.

``python docs/outputs.py`` runs all of them, ``python docs/outputs.py ppo lora`` two.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "recipes"
PROGRAMS = sorted(path.stem for path in RECIPES.glob("*.txt"))


def printed(name: str) -> str:
    """What an example prints."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "examples" / f"{name}.py"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return "\n".join(line.rstrip() for line in found.stdout.splitlines()) + "\n"


def main() -> None:
    for name in sys.argv[1:] or PROGRAMS:
        (RECIPES / f"{name}.txt").write_text(printed(name), encoding="utf-8")


if __name__ == "__main__":
    main()
