"""Fetching a model from the Hugging Face Hub: its safetensors, configuration and tokenizer, and nothing that runs."""

from __future__ import annotations

from pathlib import Path

from headrace.shared.errors import ModelError
from headrace.worker.models.catalog import CATALOG

_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
_TIMEOUT_S = 5.0


def download(repo_id: str) -> Path:
    """Return the local folder of a Hub repository, fetching what isn't in the Hub's own cache yet.

    Works without a network if all of it is there. Raises ModelError, which says what to do instead, otherwise.
    """
    from huggingface_hub import HfApi, errors, snapshot_download  # slow to import, and few models come from the Hub

    try:
        # Fetching a snapshot waits for an answer without limit, so ask something that has one first.
        HfApi().model_info(repo_id, timeout=_TIMEOUT_S)
        return Path(snapshot_download(repo_id, allow_patterns=list(_WANTED), etag_timeout=_TIMEOUT_S))
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo_id} asks for its terms to be accepted on the Hugging Face Hub; "
            "accept them there, then set HF_TOKEN to a token of yours"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no model {repo_id} on the Hugging Face Hub, or it is private (then set HF_TOKEN)"
        ) from None
    # The kinds differ between versions of the library, whose transport has changed: all mean that it can't be had.
    except Exception as error:
        return _from_cache(repo_id, error)


def _from_cache(repo_id: str, reason: Exception) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_WANTED), local_files_only=True))
    except (OSError, ValueError):
        raise ModelError(
            f"can't fetch {repo_id} from the Hugging Face Hub: {_first_line(reason)}. Without a network, give --model "
            f"a local folder in the Hugging Face layout, a .gguf file, or one of {', '.join(sorted(CATALOG))}."
        ) from reason


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
