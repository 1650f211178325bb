"""Finding, fetching and converting models, and their text: what a worker needs to know before it runs one."""

from headrace.worker.models.catalog import CATALOG, CatalogEntry
from headrace.worker.models.detokenize import TextStream
from headrace.worker.models.pull import pull
from headrace.worker.models.resolve import ModelFiles, resolve
from headrace.worker.models.tokenizer import TextCodec

__all__ = ["CATALOG", "CatalogEntry", "ModelFiles", "TextCodec", "TextStream", "pull", "resolve"]
