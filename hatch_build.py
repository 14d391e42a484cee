"""The parts of the package's metadata that need the addresses of `addresses.toml`: description, links and authors."""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")


def read_addresses(root: Path) -> dict[str, Any]:
    """The content of `addresses.toml`."""
    return tomllib.loads((root / "addresses.toml").read_text(encoding="utf-8"))


def absolute(target: str, addresses: dict[str, Any]) -> str | None:
    """The address of a file of the repository on the web; None if it is not known.

    Pages and pictures are taken from the documentation, other files from the repository.
    """
    path, hash_, anchor = target.partition("#")
    documentation, repository = addresses.get("documentation"), addresses.get("repository")
    if documentation and path.startswith("docs/"):
        page = re.sub(r"(^|/)index\.md$", r"\1", path.removeprefix("docs/"))
        return urljoin(documentation.rstrip("/") + "/", re.sub(r"\.md$", "/", page)) + hash_ + anchor
    if repository and path:
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"{repository.rstrip('/')}/{kind}/{addresses['branch']}/{path}{hash_}{anchor}"
    return None


def with_absolute_links(text: str, addresses: dict[str, Any]) -> str:
    """The text with links that work on a page elsewhere; where an address is not known, the words without a link."""

    def replaced(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if target.startswith(("https:", "http:")):
            return match[0]
        address = absolute(target, addresses)
        if address is None:
            return "" if picture else words
        return f"{picture}[{words}]({address})"

    return LINK.sub(replaced, text)


def urls(addresses: dict[str, Any]) -> dict[str, str]:
    """The links that package indexes show beside the description."""
    found: dict[str, str] = {}
    if documentation := addresses.get("documentation"):
        found["Documentation"] = documentation
    if repository := addresses.get("repository"):
        found["Source"] = repository
        found["Issues"] = f"{repository.rstrip('/')}/issues"
    if changelog := absolute("docs/changelog.md", addresses):
        found["Changelog"] = changelog
    return found


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling when it builds the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description, the links and the authors."""
        root = Path(self.root)
        addresses = read_addresses(root)
        readme = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(readme, addresses)}
        metadata["urls"] = urls(addresses)
        metadata["authors"] = addresses["authors"]
