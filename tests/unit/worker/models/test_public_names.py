from __future__ import annotations

from headrace.worker import models


def test_the_public_names_are_these() -> None:
    assert sorted(models.__all__) == [
        "CATALOG",
        "CatalogEntry",
        "ModelFiles",
        "TextCodec",
        "TextStream",
        "pull",
        "resolve",
    ]
    assert all(hasattr(models, name) for name in models.__all__)
