"""Pictures of a record."""

from typing import Any


def draw_series(series: Any, limits: Any, path: Any) -> Any: ...
def draw_record(record: Any, path: Any) -> Any: ...
