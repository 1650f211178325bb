"""What is said of a server never has its password."""

from __future__ import annotations

import pytest

from headrace.shared.connection import connect, connect_async, without_password
from headrace.shared.errors import HeadraceError, SettingsError
from headrace.shared.sentinel import parse_sentinel_url

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
        (
            f"redis+sentinel://me:{SECRET}@h1:26379,h2/night/0?sentinel_password={SECRET}&db=1",
            "redis+sentinel://me:***@h1:26379,h2/night/0?sentinel_password=***&db=1",
        ),
        (f"redis+sentinel://:{SECRET}/x@h1:1,h2:2/night", "redis+sentinel://***"),
        (f"redis+sentinel://:{SECRET}@h1:1,h2:two/night", "redis+sentinel://***"),
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
        f"redis+sentinel://:{SECRET}@127.0.0.1:1,127.0.0.1:2/night?sentinel_password={SECRET}",
        f"redis+sentinel://:{SECRET}@127.0.0.1:1/night/first",
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


def test_a_sentinel_url_says_all_that_a_client_needs() -> None:
    found = parse_sentinel_url(
        "rediss+sentinel://me:s%2Fcret@h1,h2:5,[::1]:6/night/3?sentinel_username=it&sentinel_password=p%40ss"
        "&ssl_ca_certs=/ca.pem&socket_timeout=1.5"
    )
    assert found.addresses == (("h1", 26379), ("h2", 5), ("::1", 6))
    assert found.service == "night"
    server = {"username": "me", "password": "s/cret", "db": 3, "socket_timeout": 1.5}
    assert found.server_arguments == {**server, "ssl": True, "ssl_ca_certs": "/ca.pem"}
    own = {name: found.sentinel_arguments[name] for name in ("username", "password", "ssl", "ssl_ca_certs")}
    assert own == {"username": "it", "password": "p@ss", "ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert parse_sentinel_url("redis+sentinel://h/night").server_arguments == {}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://h1:1,h2:2", "it names no service; the form is redis"),
        ("redis+sentinel://h1:1,h2:2/", "it names no service"),
        ("redis+sentinel://h1:1,,h2:2/night", "it has an empty host"),
        ("redis+sentinel:///night", "it has an empty host"),
        ("redis+sentinel://h/night/first", "its database is 'first' and must be a number"),
        ("redis+sentinel://h/night?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("redis+sentinel://h/night?sentinal_password=x", "knows no argument 'sentinal_password'"),
        ("redis://h/0?passwort=x", "knows no argument 'passwort'"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, says: str) -> None:
    for opened in (connect, connect_async):
        with pytest.raises(SettingsError, match="is not a Redis URL") as raised:
            opened(url)
        assert says in str(raised.value)
