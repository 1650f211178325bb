"""After a step that failed: which of its rows can't be run, found by running halves of the batch apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.worker.engine.generate import Engine
from headrace.worker.engine.rows import Row
from headrace.worker.engine.sampling import SamplingParams, noise_key
from headrace.worker.engine.stopping import StopParams

Step = Callable[[], list[Row]]


@dataclass(kw_only=True)
class Isolated:
    """The rows of a failed step, apart: those that fail even alone with their errors, those done meanwhile, the rest.

    The rest have their tokens so far, of which the search has given each some more, and are in no engine.
    """

    culprits: list[tuple[Row, Exception]] = field(default_factory=list)
    done: list[Row] = field(default_factory=list)
    rest: list[Row] = field(default_factory=list)


def works(engine: Engine, step: Step) -> Exception | None:
    """None if an empty engine can run the simplest row there is; else what it raises."""
    probe = Row(
        row_id="probe",
        prompt_ids=[0],
        sampling=SamplingParams(temperature=0.0, noise_key=noise_key(0)),
        stopping=StopParams(max_tokens=2),
    )
    return _run(engine, step, [probe])


def isolate(engine: Engine, step: Step, rows: Sequence[Row], *, suspects: frozenset[str] = frozenset()) -> Isolated:
    """Find the rows that make an empty engine's step fail. `suspects` are ids of rows to try alone first.

    One culprit among B rows takes about 2 log2(B) steps. `step` runs the engine's.
    """
    found = Isolated()
    together = [row for row in rows if row.row_id not in suspects]
    groups = [together, *([row] for row in rows if row.row_id in suspects)]
    while groups:
        group = [row for row in groups.pop() if row.finish is None]
        error = _run(engine, step, group)
        if error is not None and len(group) == 1:
            found.culprits.append((group[0], error))
        elif error is not None:
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
    failed = {row.row_id for row, _ in found.culprits}
    found.done = [row for row in rows if row.finish is not None]
    found.rest = [row for row in rows if row.finish is None and row.row_id not in failed]
    return found


def _run(engine: Engine, step: Step, rows: Sequence[Row]) -> Exception | None:
    """Let each of the rows get a token, as many at once as there are slots; None, or what was raised."""
    try:
        for first in range(0, len(rows), engine.num_slots):
            together = rows[first : first + engine.num_slots]
            for row in together:
                engine.submit(row)
            while any(row.finish is None and not row.is_decoding for row in together):
                step()
            engine.drop_all()
    except Exception as error:
        return error
    finally:
        engine.drop_all()
    return None
