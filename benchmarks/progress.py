"""A progress bar in the terminal."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress(total: int) -> Generator[Callable[[str], None]]:
    """Show how many of the steps were taken; call what this yields with a name before each of them."""
    with tqdm(total=total, unit="step", leave=False, disable=None) as bar:

        def tick(name: str) -> None:
            bar.set_postfix_str(name.strip(), refresh=False)
            bar.update()

        yield tick
