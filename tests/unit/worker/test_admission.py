from __future__ import annotations

from factories import row

from headrace.worker.admission import Admission
from headrace.worker.engine.rows import Row


def ids(rows: list[Row]) -> list[str]:
    return [each.row_id for each in rows]


def test_rows_go_in_as_they_come() -> None:
    admission = Admission()
    admission.add(row("a"), alone=False)
    admission.add(row("b"), alone=False)
    assert ids(admission.admit(0)) == ["a", "b"]
    admission.add(row("c"), alone=False)
    assert ids(admission.admit(2)) == ["c"]
    assert len(admission) == 0


def test_a_row_on_its_last_attempt_waits_for_the_others_and_they_for_it() -> None:
    admission = Admission()
    admission.add(row("last"), alone=True)
    admission.add(row("too"), alone=True)
    admission.add(row("a"), alone=False)
    assert admission.admit(5) == []  # rows that came before it are still running
    assert ids(admission.admit(0)) == ["last"]
    assert admission.admit(1) == []
    assert ids(admission.admit(0)) == ["too"]
    assert admission.admit(1) == []
    assert ids(admission.admit(0)) == ["a"]
    admission.add(row("b"), alone=False)
    assert ids(admission.admit(1)) == ["b"]


def test_rows_can_be_taken_back() -> None:
    admission = Admission()
    for name in "abc":
        admission.add(row(name), alone=name == "b")
    admission.drop("a")
    assert ids(admission.take_all()) == ["b", "c"]
    assert len(admission) == 0
