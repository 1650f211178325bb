"""Finding ids that stand twice in an input, in memory that does not grow with it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from types import TracebackType

from headrace.shared.errors import DuplicateIds

MAX_NAMED = 5
_CACHE_KIB = 32 * 1024


class IdIndex:
    """The ids seen so far with their positions, in a temporary database that lives on disk when it is large."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, position INTEGER) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def add(self, item_id: str, position: int) -> int | None:
        """Remember the id. Returns the position where it stood before, if it did."""
        added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (_key(item_id), position))
        return None if added.rowcount == 1 else self.position(item_id)

    def position(self, item_id: str) -> int | None:
        """The position of an id that was added, else None."""
        found = self._database.execute("SELECT position FROM ids WHERE id = ?", (_key(item_id),)).fetchone()
        return None if found is None else int(found[0])

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> IdIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key(item_id: str) -> bytes:
    return hashlib.blake2b(item_id.encode(errors="surrogatepass"), digest_size=16).digest()


def refuse_duplicates(ids: Iterable[tuple[str, int]], unit: str) -> None:
    """Raise DuplicateIds that names the first ids which stand twice, and both places of each. `unit`: line or item."""
    found: list[str] = []
    with IdIndex() as index:
        for item_id, position in ids:
            earlier = index.add(item_id, position)
            if earlier is not None:
                found.append(duplicate_text(item_id, earlier, position, unit))
                if len(found) > MAX_NAMED:
                    break
    raise_duplicates(found)


def raise_duplicates(found: list[str]) -> None:
    """Raise DuplicateIds for the texts found, if any; at most MAX_NAMED are shown."""
    if found:
        more = "; and more" if len(found) > MAX_NAMED else ""
        raise DuplicateIds(
            f"each id may stand once in an input: {'; '.join(found[:MAX_NAMED])}{more}. Nothing was sent"
        )


def duplicate_text(item_id: str, earlier: int, position: int, unit: str) -> str:
    """One duplicate for an error text."""
    return f"id {item_id[:80]!r} is on {unit}s {earlier} and {position}"
