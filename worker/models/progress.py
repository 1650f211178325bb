"""How long steps are reported: a function that takes one line of text for a person."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Report nothing."""
