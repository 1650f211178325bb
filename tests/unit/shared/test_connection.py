"""What is said of a server never has its password."""

from __future__ import annotations

import pytest

from headrace.shared.connection import connect, connect_async, without_password
from headrace.shared.errors import HeadraceError

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        (f"redis://:{SECRET}@h:6379/0", "redis://:***@h:6379/0"),
        (f"rediss://me:{SECRET}@h/0?ssl_ca_certs=/ca.pem", "rediss://me:***@h/0?ssl_ca_certs=/ca.pem"),
        (f"redis://h/0?password={SECRET}&db=1", "redis://h/0?password=***&db=1"),
        (f"unix:///run/r.sock?username=me&password={SECRET}", "unix:///run/r.sock?username=me&password=***"),
        (f"rediss://h/0?ssl_password={SECRET}", "rediss://h/0?ssl_password=***"),
        (f"redis://:{SECRET}/x@h:6379/0", "redis://***"),
        (f"redis://:{SECRET}#x@h:6379/0", "redis://***"),
        (f"redis://:x@{SECRET}@h:6379/0", "redis://***"),
        (f"redis://:{SECRET}@[::1/0", "redis://***"),
        (f"{SECRET}@h", "***"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@127.0.0.1:1/0",
        f"redis://127.0.0.1:1/0?password={SECRET}",
        f"redis://:{SECRET}/x@127.0.0.1:1/0",
        f"redis://:{SECRET}@127.0.0.1:port/0",
        f"redis://:{SECRET}@[::1/0",
        f"https://:{SECRET}@127.0.0.1:1/0",
        f"redis://:{SECRET}@127.0.0.1:1/0?socket_timeout=soon",
        f"rediss://:{SECRET}@127.0.0.1:1/0?ssl_ca_certs=/none",
    ],
)
def test_no_error_has_the_password(url: str) -> None:
    with pytest.raises(HeadraceError) as raised:
        connect(url).close()
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)
    for broken in (f"https://:{SECRET}@h", f"redis://:{SECRET}/x@h:1/0"):
        with pytest.raises(HeadraceError) as raised:
            connect_async(broken)
        assert SECRET not in str(raised.value)


def test_a_wrong_password_is_not_repeated(redis_url: str) -> None:
    with pytest.raises(HeadraceError, match="no answer") as raised:
        connect(f"{redis_url}?username=me&password={SECRET}")
    assert SECRET not in str(raised.value)
