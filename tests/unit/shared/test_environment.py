"""Settings from environment variables."""

from __future__ import annotations

import pytest

from headrace.shared import environment
from headrace.shared.errors import SettingsError


def test_a_whole_number_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.RESULT_TTL, "60")
    assert environment.whole_number(environment.RESULT_TTL) == 60
    monkeypatch.setenv(environment.RESULT_TTL, "")
    assert environment.whole_number(environment.RESULT_TTL) is None
    monkeypatch.delenv(environment.RESULT_TTL)
    assert environment.whole_number(environment.RESULT_TTL) is None


@pytest.mark.parametrize("text", ["soon", "1.5", "1e3"])
def test_anything_else_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(environment.RESULT_TTL, text)
    with pytest.raises(SettingsError, match=f"HEADRACE_RESULT_TTL is '{text}'; it must be a whole number"):
        environment.whole_number(environment.RESULT_TTL)
