"""One transform's keys in a dict that the whole chain shares."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any


class Namespace(MutableMapping[str, Any]):
    """A view: ``Namespace(data, "adam")["exp_avg"]`` is ``data["adam/exp_avg"]``."""

    def __init__(self, data: Any, name: str) -> None:
        # no typing.cast: torch.compile takes what it returns for another dict, and writes to that
        self._data: MutableMapping[str, Any] = data
        self._prefix = f"{name}/"

    def __getitem__(self, key: str) -> Any:
        return self._data[self._prefix + key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._data[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[self._prefix + key]

    def __contains__(self, key: object) -> bool:
        return f"{self._prefix}{key}" in self._data

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._data if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class GroupSettings(Mapping[str, Any]):
    """A param group seen by qualified keys: ``["adam/betas"]`` is wherever the group keeps that setting."""

    def __init__(self, group: Mapping[str, Any], stored_as: Mapping[str, str]) -> None:
        self._group = group
        self._stored_as = stored_as

    def __getitem__(self, key: str) -> Any:
        return self._group[self._stored_as[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_as)

    def __len__(self) -> int:
        return len(self._stored_as)
