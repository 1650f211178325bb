"""Lanes: the queues beside a model's queue in which jobs of another priority, or of a tenant, wait.

A lane is an ordinary RQ queue, `{queue}~{priority}` or `{queue}~{priority}~{tenant}`. The queue itself is the lane of
what has neither. No queue that `headrace.shared.keys.queue_name` makes has a `~` in its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from headrace.shared.errors import InvalidRequest, SettingsError

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # who is served first, first
DEFAULT_PRIORITY: Priority = "normal"
MARK = "~"
# No hyphen: "a-b-1" could be a job of tenant "a" or of tenant "a-b".
TENANT_PATTERN = r"^[A-Za-z0-9_]{1,64}$"
_TENANT = re.compile(TENANT_PATTERN)
_NAME = re.compile(r"([^~]+)(?:~(high|normal|low)(?:~([A-Za-z0-9_]{1,64}))?)?")


def lane_name(queue: str, priority: str, tenant: str | None) -> str:
    """The RQ queue that a lane is."""
    if tenant is not None:
        return MARK.join((queue, priority, tenant))
    return queue if priority == DEFAULT_PRIORITY else MARK.join((queue, priority))


@dataclass(frozen=True)
class Lane:
    """Where a job waits: the model's queue, its priority and whose it is."""

    queue: str
    priority: Priority = DEFAULT_PRIORITY
    tenant: str | None = None

    @property
    def name(self) -> str:
        """The RQ queue that it is."""
        return lane_name(self.queue, self.priority, self.tenant)


def lane_of(name: str) -> Lane | None:
    """The lane that an RQ queue is, or None if its name is that of no lane."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    queue, named, tenant = found.groups()
    priority: Priority = next((each for each in PRIORITIES if each == named), DEFAULT_PRIORITY)
    lane = Lane(queue, priority, tenant)
    return lane if lane.name == name else None  # there is no "{queue}~normal": that is the queue itself


def check_queue_name(name: str) -> str:
    """The name, if it can't be taken for a lane's. Raises SettingsError."""
    if MARK in name:
        raise SettingsError(
            f"the queue's name is {name[:140]!r}; it can't have a {MARK!r}, which sets its lanes apart "
            "(name the queue alone; --priority and --tenant choose the lane)"
        )
    return name


def check_tenant_name(name: str) -> str:
    """The name, if a tenant may be called so. Raises SettingsError."""
    if _TENANT.fullmatch(name) is None:
        raise SettingsError(f"the tenant is {name[:140]!r}; use 1 to 64 letters, digits or '_'")
    return name


def job_id_prefix(tenant: str | None) -> str:
    """What the ids of a tenant's jobs begin with."""
    return "" if tenant is None else f"{tenant}-"


def batch_prefix(tenant: str | None) -> str:
    """What the names of a tenant's batches begin with."""
    return "" if tenant is None else f"{tenant}."


def check_batch_of(tenant: str | None, batch: str | None) -> None:
    """Raise InvalidRequest if a tenant's job belongs to a batch that is not this tenant's."""
    prefix = batch_prefix(tenant)
    if batch is not None and not batch.startswith(prefix):
        raise InvalidRequest(
            f"the batch is {batch[:140]!r}; with the tenant {tenant!r} its name must begin with {prefix!r}", "batch"
        )


def check_tenant_of(tenant: str | None, claimed: str | None) -> None:
    """Raise InvalidRequest if a request names another tenant than the one in whose lane it waited."""
    if claimed is not None and claimed != tenant:
        whose = "of no tenant" if tenant is None else f"of the tenant {tenant!r}"
        raise InvalidRequest(f"the request's tenant is {claimed!r}, but it waited in a lane {whose}", "tenant")
