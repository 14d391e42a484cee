"""Numbers as text for people."""

import math
from zlib import crc32

LONGEST = 80


def number_text(value: float, otherwise: str = "unknown") -> str:
    return f"{value:.4g}" if math.isfinite(value) else otherwise


def as_ratio(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "" if math.isnan(ratio) else "inf"
    return f"{ratio:.3g}x" if not 100 <= ratio < 1e6 else f"{ratio:,.0f}x"


def as_percent(share: float) -> str:
    return "0%" if share < 1e-4 else f"{100 * share:{'.2g' if share < 0.1 else '.0f' if share < 0.99 else '.4g'}}%"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def was(count: int) -> str:
    return "was" if count == 1 else "were"


def short(name: str) -> str:
    """The name, or if it is longer than `LONGEST` characters, its ends and a number that few other names have."""
    if len(name) <= LONGEST:
        return name
    middle = f"…{crc32(name.encode(errors='replace')):08x}…"
    half = (LONGEST - len(middle)) // 2
    return f"{name[:half]}{middle}{name[-half:]}"


def as_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text; the first column is aligned to the left, the others to the right. Long cells are cut."""
    cells = [[cell if cell.isprintable() else cell.encode("unicode_escape").decode() for cell in row] for row in rows]
    shown = [list(map(short, row)) for row in cells]
    first, *others = (max(map(len, column)) for column in zip(*shown, strict=True))
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(line.format(*row).rstrip() for row in shown)
