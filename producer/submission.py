"""Submitting a batch: items in, chunks of commands out. Shared by the sync and the asyncio client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headrace.producer import enqueue
from headrace.producer.duplicates import IdIndex, duplicate_text, refuse_duplicates
from headrace.producer.enqueue import Entry
from headrace.producer.lines import Defaults, Line, check_defaults, explicit_id, line_from_item
from headrace.producer.steps import Call, Steps, text
from headrace.shared import keys
from headrace.shared.errors import BatchExists, BatchNotFound, DuplicateIds, InvalidRequest
from headrace.shared.lanes import DEFAULT_PRIORITY, Priority
from headrace.shared.schema import Request

CHUNK_JOBS = 500
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Route:
    """Where requests go: an explicit queue takes all; without one, each goes to the queue of its model.

    There they wait in the lane of their priority and tenant; `priority` and `tenant` are for those that name none.
    """

    model: str
    queue: str | None
    priority: Priority = DEFAULT_PRIORITY
    tenant: str | None = None

    def queue_for(self, request_model: str | None) -> str:
        """The queue for a request that names this model, or none."""
        return self.queue or keys.queue_name(request_model or self.model)

    def request_for(self, request: Request, tenant: str | None) -> Request:
        """The request with its priority, and its tenant, which is `tenant`. Raises InvalidRequest for another's."""
        if request.tenant not in (None, tenant):
            whose = f"those of the tenant {tenant!r}" if tenant is not None else "those without a tenant"
            text = f"the request's tenant is {request.tenant!r}; it stands among {whose}"
            raise InvalidRequest(f"{text} (a batch, and a producer that has a tenant, take one tenant's)", "tenant")
        priority = request.priority if "priority" in request.model_fields_set else self.priority
        if (priority, tenant) == (request.priority, request.tenant):
            return request
        return request.model_copy(update={"priority": priority, "tenant": tenant})


def tenant_of(route: Route, given: Mapping[str, Any]) -> str | None:
    """The tenant of a batch or job, by its own word or the producer's. Raises InvalidRequest if they differ."""
    tenant: str | None = given.get("tenant") or route.tenant
    if route.tenant not in (None, tenant):
        raise InvalidRequest(f"the tenant is {tenant!r}, but this producer's is {route.tenant!r}", "tenant")
    return tenant


class Submission:
    """A batch being submitted. Run `open`, then `add` each item and `send` when it says so, then `close`.

    It holds one chunk of at most CHUNK_JOBS jobs and about CHUNK_BYTES, however many pass through. `stopped` becomes
    true when somebody has cancelled the batch meanwhile; what is added from then on is dropped.

    `fingerprint` stands for the items and all that is done with them. A batch that was left open is gone on with by
    whoever has the same: what it has already is skipped. With `also_closed`, so is one that has them all.
    """

    def __init__(
        self,
        name: str,
        *,
        route: Route,
        defaults: Defaults,
        ttl_s: int,
        source: str = "requests",
        listed: bool = True,
        fingerprint: str | None = None,
        also_closed: bool = False,
    ) -> None:
        self._defaults = check_defaults(defaults)
        self._tenant = tenant_of(route, self._defaults)
        self.name = enqueue.check_batch_name(name, self._tenant)
        self.num_sent = 0
        self.stopped = False
        self.fingerprint = fingerprint
        self._also_closed = also_closed
        self._skip = 0  # so many items are on the server already
        self._route = route
        self._ttl_s = ttl_s
        self._source = source
        self._listed = listed
        self._chunk: list[Entry] = []
        self._chunk_bytes = 0
        self._position = 0
        self._seen: IdIndex | None = None

    def check_sequence(self, items: Sequence[object]) -> None:
        """Raise DuplicateIds if two items have one id. For input that can be looked at before anything is sent."""
        refuse_duplicates(((explicit_id(item) or str(at), at) for at, item in enumerate(items)), "item")

    def watch_duplicates(self) -> None:
        """Let `add` raise DuplicateIds. For input that can be read only once."""
        self._seen = IdIndex()

    def open(self) -> Steps[None]:
        """Create the batch. Raises BatchExists."""
        now = datetime.now(UTC)
        create = enqueue.create_batch(
            self.name,
            created_at=now,
            queue=self._route.queue_for(None),
            model=self._route.model,
            source=self._source,
            ttl_s=self._ttl_s,
            fingerprint=self.fingerprint,
            tenant=self._tenant,
        )
        (reply,) = yield Call([create])
        if reply != enqueue.APPLIED and text(reply) != now.isoformat() and not (yield from self._is_resumed()):
            raise BatchExists(
                f"there is a batch {self.name!r} already, created at {text(reply)}; take another name, or run what "
                f"failed of it again: headrace retry {self.name}"
            )

    def _is_resumed(self) -> Steps[bool]:
        """True if the batch that is there is this one and can be gone on with; its jobs are then skipped."""
        key = keys.batch(self.name)
        fingerprint, submitted, total = yield Call(
            [("HGET", key, name) for name in ("fingerprint", "submitted", "total")]
        )
        if self.fingerprint is None or text(fingerprint) != self.fingerprint:
            return False
        if text(submitted) != "0" and not self._also_closed:
            return False
        self.num_sent = self._skip = int(text(total))
        return True

    def add(self, item: object) -> bool:
        """Take an item; True if the chunk is full and `send` is due."""
        if self._position < self._skip:
            self._position += 1
            return False
        line = line_from_item(item, self._position, self._defaults)
        self._refuse_if_seen(line.id)
        self._position += 1
        entry = self._entry(line)
        self._chunk.append(entry)
        self._chunk_bytes += entry.num_bytes
        return len(self._chunk) >= CHUNK_JOBS or self._chunk_bytes >= CHUNK_BYTES

    def _entry(self, line: Line) -> Entry:
        error = line.error
        if line.request is not None:
            try:
                request = self._route.request_for(line.request, self._tenant)
                return enqueue.entry_for(request, queue=self._route.queue_for(request.model), batch=self.name)
            except InvalidRequest as invalid:
                error = invalid
        assert error is not None
        return enqueue.entry_rejected(
            error, request_id=line.id, queue=self._route.queue_for(None), batch=self.name, tenant=self._tenant
        )

    def send(self) -> Steps[None]:
        """Send the chunk. Sending it again after a broken connection does no harm.

        Raises BatchNotFound if the batch was deleted while it was being submitted.
        """
        chunk, self._chunk, self._chunk_bytes = self._chunk, [], 0
        if not chunk or self.stopped:
            return
        command = enqueue.send_chunk(
            chunk, batch=self.name, total_before=self.num_sent, ttl_s=self._ttl_s, listed=self._listed
        )
        reply, cancelled_at = yield Call([command, ("HGET", keys.batch(self.name), "cancelled_at")])
        if reply != enqueue.APPLIED and text(reply) != str(self.num_sent + len(chunk)):
            raise BatchNotFound(
                f"batch {self.name!r} was deleted while it was being submitted, or a failover has lost a part of it"
            )
        self.num_sent += len(chunk)
        self.stopped = cancelled_at is not None

    def close(self) -> Steps[None]:
        """Say that the batch is complete, so that collecting it can come to an end."""
        if self._seen is not None:
            self._seen.close()
        key = keys.batch(self.name)
        yield Call([enqueue.fenced(key, "submitted", "0", [("HSET", key, "submitted", 1)])])

    def _refuse_if_seen(self, item_id: str) -> None:
        earlier = self._seen.add(item_id, self._position) if self._seen is not None else None
        if earlier is not None:
            place = duplicate_text(item_id, earlier, self._position, "item")
            raise DuplicateIds(f"each id may stand once in a batch: {place}. The batch ends before it")
