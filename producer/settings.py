"""A producer's settings: arguments win over HEADRACE_* variables, and those over the defaults."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.producer.enqueue import Entry, entry_for
from headrace.producer.submission import Route, tenant_of
from headrace.shared import environment
from headrace.shared.connection import DEFAULT_URL
from headrace.shared.errors import InvalidRequest, SettingsError
from headrace.shared.lanes import (
    DEFAULT_PRIORITY,
    PRIORITIES,
    Priority,
    batch_prefix,
    check_queue_name,
    check_tenant_name,
)
from headrace.shared.schema import parse_request


@dataclass(frozen=True, kw_only=True)
class ProducerSettings:
    """What a producer needs to know; both clients are built on it."""

    url: str
    route: Route
    result_ttl_s: int


def resolve(
    url: str | None,
    model: str | None,
    queue: str | None,
    result_ttl_s: int | None,
    tenant: str | None = None,
    priority: str | None = None,
) -> ProducerSettings:
    """Fill what was not given from the environment. Raises SettingsError."""
    given = os.environ.get
    tenant = tenant or given(environment.TENANT) or None
    ttl = result_ttl_s if result_ttl_s is not None else given(environment.RESULT_TTL)
    return ProducerSettings(
        url=url or given(environment.REDIS_URL) or DEFAULT_URL,
        route=Route(
            model=model or given(environment.MODEL) or environment.DEFAULT_MODEL,
            queue=check_queue_name(queue or given(environment.QUEUE) or "") or None,
            priority=_priority(priority),
            tenant=check_tenant_name(tenant) if tenant is not None else None,
        ),
        result_ttl_s=_seconds(ttl) if ttl else environment.DEFAULT_RESULT_TTL_S,
    )


def new_batch_name(tenant: str | None = None) -> str:
    """A name for a batch whose submitter gives none: the time and a few random letters."""
    return f"{batch_prefix(tenant)}{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def single_entry(route: Route, prompt: object, messages: object, params: Mapping[str, Any]) -> Entry:
    """One job without a batch, checked. Raises InvalidRequest."""
    body = {**params, "prompt": prompt, "messages": messages}
    if "batch" in params:
        raise InvalidRequest("a single job has no batch; use submit_many(..., batch=...)", "batch")
    request = parse_request({name: value for name, value in body.items() if value is not None})
    request = route.request_for(request, tenant_of(route, {"tenant": request.tenant}))
    return entry_for(request, queue=route.queue_for(request.model), batch=None)


def _priority(name: str | None) -> Priority:
    found = next((each for each in PRIORITIES if each == name), None if name else DEFAULT_PRIORITY)
    if found is None:
        raise SettingsError(f"the priority is {name!r}; it is one of {', '.join(PRIORITIES)}")
    return found


def _seconds(value: int | str) -> int:
    try:
        seconds = int(value)
    except ValueError:
        seconds = 0
    if seconds < 1:
        raise SettingsError(
            f"the result TTL (or {environment.RESULT_TTL}) is {value!r}; it is whole seconds, from 1 up"
        )
    return seconds
