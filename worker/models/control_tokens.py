"""Control tokens named in the text of a message: there they are text, and only the template makes tokens of them.

Before the template runs, each such name in a message is covered by a mark; what the template writes itself is not.
Then the tokens that the template wrote get names that no message can have, the marks become the names that they cover,
and a second tokenizer that knows only the new names does the rest.
"""

from __future__ import annotations

import json
import re
import secrets
import threading

from tokenizers import Tokenizer


class ControlTokens:
    """The control tokens of a tokenizer: the special ones, and those that the chat template names."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._renamed: Tokenizer | None = None
        self._ids: dict[int, int] = {}  # from the renamed tokenizer's to the true ones
        # Random digits: nobody can write into a message what passes for a mark or for a new name.
        self._secret = f"{secrets.randbits(64):020}"
        added = tokenizer.get_added_tokens_decoder().values()
        names = {token.content for token in added if token.content and (token.special or token.content in template)}
        self._names = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or "(?!)")
        self._mark = re.compile(f"\ufdd0{self._secret}:([0-9]+)\ufdd1")

    def are_named_in(self, text: str) -> bool:
        """True if the text holds the name of one."""
        return self._pattern.search(text) is not None

    def cover(self, text: str) -> str:
        """The text with a mark in the place of each name."""
        return self._pattern.sub(lambda found: f"\ufdd0{self._secret}:{self._names.index(found.group())}\ufdd1", text)

    def encode_covered(self, rendered: str) -> list[int]:
        """The ids of a rendered chat: names are control tokens, marks the text that they cover."""
        renamed = self._pattern.sub(lambda found: self._new_name(found.group()), rendered)
        text = self._mark.sub(lambda mark: self._names[int(mark.group(1))], renamed)
        ids = self._renamed_tokenizer().encode(text, add_special_tokens=False).ids
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _new_name(self, name: str) -> str:
        return f"\ufdd2{self._secret}{name}\ufdd3"

    def _renamed_tokenizer(self) -> Tokenizer:
        """Made when it is first needed, since it takes as much memory as the other."""
        with self._lock:
            if self._renamed is None:
                described = json.loads(self._tokenizer.to_str())
                true_ids: dict[str, int] = {}
                for token in described["added_tokens"]:
                    if token["content"] in self._names:
                        token["content"] = self._new_name(token["content"])
                    true_ids[token["content"]] = token["id"]
                self._renamed = Tokenizer.from_str(json.dumps(described))
                renamed_ids = self._renamed.get_vocab()
                self._ids = {renamed_ids[name]: true_id for name, true_id in true_ids.items()}
            return self._renamed
