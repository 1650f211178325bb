"""The bridge between requests and engine rows: text becomes tokens on the way in, tokens text on the way out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from headrace.shared.errors import InvalidRequest
from headrace.shared.schema import (
    DEFAULT_MAX_TOKENS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Message,
    Output,
    Request,
    Timing,
    Usage,
)
from headrace.worker.checkpoint import InvalidCheckpoint
from headrace.worker.engine.rows import Row, now_s
from headrace.worker.engine.sampling import SamplingParams, noise_key
from headrace.worker.engine.stopping import StopParams, StopStrings, finish_of
from headrace.worker.settings import Limits

NO_LIMITS_SET = Limits()


class TokenStream(Protocol):
    """Incremental decoding of one row."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""


class Codec(Protocol):
    """Between text and token ids; headrace.worker.models.TextCodec is one."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def stream(self) -> TokenStream: ...


class Rejected(Exception):
    """A request that this worker can't run; `error` is what its result will say."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = ErrorInfo(code=code, message=message, param=param)


class Runner:
    """Makes rows of requests for one model, and outputs of finished rows.

    `vocab_size` is the model's, if it is known: a tokenizer may have more tokens than the model was made with.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        model_name: str,
        max_context: int,
        vocab_size: int | None = None,
        limits: Limits = NO_LIMITS_SET,
    ) -> None:
        self._codec = codec
        self._vocab_size = min(codec.vocab_size, vocab_size or codec.vocab_size)
        self._max_context = max_context
        self.model_name = model_name
        self.limits = limits

    def row(self, request: Request, job_id: str, *, deadline_s: float | None = None) -> Row:
        """The row that answers `request`. `deadline_s` is on time.monotonic's clock. Raises Rejected."""
        if request.model not in (None, self.model_name):
            text = f"the request asks for model {request.model!r}; this worker serves {self.model_name!r}"
            raise Rejected(ErrorCode.MODEL_MISMATCH, text, "model")
        max_tokens = self._allowed_tokens(request)
        prompt_ids = self._prompt_ids(request)
        stopping = StopParams(
            max_tokens=min(max_tokens, self._max_context - len(prompt_ids)),
            min_tokens=request.min_tokens,
            eos_ids=frozenset() if request.ignore_eos else self._codec.eos_token_ids,
            stop_ids=frozenset(request.stop_token_ids),
        )
        sampling = SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            noise_key=noise_key(job_id if request.seed is None else request.seed),
        )
        strings = None
        if request.stop:
            strings = StopStrings(tuple(request.stop), self._codec.stream().push, request.min_tokens)
        return Row(
            row_id=job_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            stopping=stopping,
            strings=strings,
            deadline_s=deadline_s,
        )

    def resume(self, row: Row, token_ids: Sequence[int]) -> None:
        """Let a new row go on from tokens that an earlier attempt had made, its stop strings having seen them.

        Raises InvalidCheckpoint if the row could not have come to these tokens; then it is spoilt, and to be made anew.
        """
        if any(token_id >= self._vocab_size for token_id in token_ids):
            raise InvalidCheckpoint(f"it has a token id beyond the vocabulary's end at {self._vocab_size - 1}")
        for token_id in token_ids:
            row.token_ids.append(token_id)
            if finish_of(row.stopping, len(row.token_ids), token_id, row.strings) is not None:
                raise InvalidCheckpoint(f"the job would have ended at its token {len(row.token_ids)}")

    def output(self, row: Row) -> Output:
        """What a finished row came to."""
        assert row.finish is not None
        stopped_by = row.finish.stopped_by
        if isinstance(stopped_by, str) and row.strings is not None:
            text = row.strings.text
        else:
            ended_by_token = row.finish.reason is FinishReason.STOP
            text = self._codec.decode(row.token_ids[:-1] if ended_by_token else row.token_ids)
        return Output(text=text, token_ids=row.token_ids, finish_reason=row.finish.reason, stop_reason=stopped_by)

    def _allowed_tokens(self, request: Request) -> int:
        """The request's max_tokens, or as much of the default as is allowed. Raises Rejected over a limit."""
        for name, stops in (("stop", request.stop), ("stop_token_ids", request.stop_token_ids)):
            if len(stops) > self.limits.stops:
                text = f"{name} has {len(stops)} entries; this worker allows {self.limits.stops} (--limit-stops)"
                raise Rejected(ErrorCode.INVALID_REQUEST, text, name)
        limit = self.limits.max_tokens
        if limit is None or request.max_tokens <= limit:
            return request.max_tokens
        if request.max_tokens == DEFAULT_MAX_TOKENS:  # nobody asked for it
            return limit
        text = f"max_tokens is {request.max_tokens:,}; this worker allows {limit:,} (--limit-max-tokens)"
        raise Rejected(ErrorCode.INVALID_REQUEST, text, "max_tokens")

    def _prompt_ids(self, request: Request) -> list[int]:
        try:
            if request.messages is not None:
                param, ids = "messages", self._codec.encode_chat(request.messages)
            elif isinstance(request.prompt, str):
                param, ids = "prompt", self._codec.encode_prompt(request.prompt)
            else:
                param, ids = "prompt", list(request.prompt or ())
        except InvalidRequest as error:
            raise Rejected(ErrorCode.INVALID_REQUEST, str(error), error.param) from None
        if not ids:
            raise Rejected(ErrorCode.INVALID_REQUEST, f"{param} has no tokens", param)
        if len(ids) >= self._max_context:
            text = (
                f"the prompt has {len(ids):,} tokens; the context holds {self._max_context:,} "
                "and needs one free to generate"
            )
            raise Rejected(ErrorCode.PROMPT_TOO_LONG, text, param)
        if max(ids) >= self._vocab_size:
            text = f"{param} has the token id {max(ids)}; the model's vocabulary ends at {self._vocab_size - 1}"
            raise Rejected(ErrorCode.INVALID_REQUEST, text, param)
        return ids


_ENDINGS = {
    FinishReason.CANCELLED: ErrorInfo(code=ErrorCode.CANCELLED, message="cancelled while running; the text is partial"),
    FinishReason.TIMEOUT: ErrorInfo(code=ErrorCode.TIMEOUT, message="ran out of its time; the text is partial"),
}


def error_of(row: Row) -> ErrorInfo | None:
    """What the result of a finished row says went wrong, if anything did."""
    assert row.finish is not None
    if row.error is not None:
        return ErrorInfo(code=ErrorCode.INTERNAL_ERROR, message=row.error)
    return _ENDINGS.get(row.finish.reason)


def deadline(request: Request, rq_timeout_s: float | None) -> float | None:
    """When a job that starts now has to end, on time.monotonic's clock: the earliest of what is asked for.

    RQ's timeout counts from the job's start; -1 and none at all mean no limit.
    """
    limits_s = [limit for limit in (rq_timeout_s, request.timeout) if limit is not None and limit > 0]
    if request.expires_at is not None:
        limits_s.append(request.expires_at - time.time())
    return now_s() + min(limits_s) if limits_s else None


def usage(row: Row, *, num_resumed: int = 0) -> Usage:
    """Tokens that a row took and made, `num_resumed` of them in an earlier attempt."""
    return Usage(
        prompt_tokens=len(row.prompt_ids),
        completion_tokens=len(row.token_ids),
        cached_tokens=row.num_reused,
        resumed_tokens=num_resumed,
    )


def computed_tokens(row: Row, *, num_resumed: int = 0) -> int:
    """Tokens that an attempt took to compute: those of the prompt that were not copied, and the new ones."""
    prompt = len(row.prompt_ids) - row.num_reused if row.admitted_at_s > 0 else 0
    return prompt + len(row.token_ids) - num_resumed


def timing(row: Row, queued_s: float) -> Timing:
    """Where a row's time went; zeros for a row that never reached the model."""
    admitted = row.admitted_at_s > 0
    return Timing(
        queued_s=round(max(0.0, queued_s), 6),
        prefill_s=round(row.first_token_at_s - row.admitted_at_s, 6) if admitted else 0.0,
        decode_s=round(max(0.0, row.finished_at_s - row.first_token_at_s), 6) if admitted else 0.0,
    )
