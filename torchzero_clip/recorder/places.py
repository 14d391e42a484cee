"""Where pictures, tables and pages are written."""

import re
from pathlib import Path
from typing import TypeAlias

Place: TypeAlias = str | Path


def not_a_record(path: Place) -> None:
    """Raise a ValueError if this path is the file of a recorder, which must not be overwritten."""
    try:
        with Path(path).open("rb") as file:
            begin = file.read(100)
    except OSError:  # there is no such file, or writing to it will raise a better error
        return
    if re.match(rb'\s*\{\s*"kind"\s*:\s*"run"', begin):
        raise ValueError(
            f"path={str(path)!r} is the file of a Recorder. Choose another path, so that it is not overwritten"
        )
