"""Launches, bytes and kept memory of a step on the pretended device."""


def check_costs() -> None: ...
