"""Who may import whom, read from the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [path for side in ("shared", "producer", "worker") for path in sorted((ROOT / side).rglob("*.py"))]


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(path: Path) -> tuple[str, ...]:
    place = path.relative_to(ROOT).parts
    heavy = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "huggingface_hub")
    if place[0] == "shared":
        return ("headrace.producer", "headrace.worker", "rq", *heavy)
    if place[0] == "producer":
        return ("headrace.worker", "rq", *heavy)
    if place[1] == "engine":
        return ("headrace.producer", "headrace.worker.models", "redis", "rq", "transformers", "tokenizers")
    return ("headrace.producer",)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    banned = forbidden(path)
    bare = ("shared", "producer", "worker")
    wrong = [
        name
        for name in imports_of(path)
        if any(name == each or name.startswith(f"{each}.") for each in (*banned, *bare))
    ]
    assert wrong == []


def test_rqs_worker_internals_are_touched_in_one_package() -> None:
    public = ("rq.Queue", "rq.get_current_job")
    users = {
        path.parent.relative_to(ROOT).as_posix()
        for path in SOURCES
        for name in imports_of(path)
        if name.startswith("rq.") and name not in public
    }
    assert users == {"worker/rq_adapter"}


def test_the_engine_knows_no_worker_modules() -> None:
    allowed = ("headrace.worker.engine", "headrace.shared.schema", "headrace.shared.errors")
    for path in (ROOT / "worker" / "engine").glob("*.py"):
        ours = [name for name in imports_of(path) if name.startswith("headrace.")]
        assert [name for name in ours if not name.startswith(allowed)] == [], path


def test_nothing_unpickles_or_evaluates() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name = ast.unparse(called) if called is not None else ""
            assert name not in ("eval", "exec", "torch.load", "pickle.loads", "pickle.load"), f"{path}: {name}"
        assert "pickle" not in set(imports_of(path)), path
