"""What a person sees while results arrive, and the summary at the end; all of it on standard error."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from headrace.shared.schema import Result

LINE_INTERVAL_S = 10.0
_SHOWN_MESSAGES = 3


class Tally:
    """Counts results as they pass. `live` says that they are made meanwhile, so that a rate means something.

    `num_kept` are those of an earlier run that this one goes on with, `num_kept_failed` the failures among them.
    """

    def __init__(self, *, live: bool, num_kept: int = 0, num_kept_failed: int = 0) -> None:
        self.live = live
        self._num_kept = num_kept
        self._num_kept_failed = num_kept_failed
        self.started = time.monotonic()
        self._first_job_started: float | None = None
        self.jobs = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._codes: Counter[str] = Counter()
        self._messages: list[str] = []

    def add(self, results: Iterable[Result]) -> None:
        for result in results:
            self.jobs += 1
            self._note_start(result)
            if result.usage is not None:
                self.prompt_tokens += result.usage.prompt_tokens
                self.completion_tokens += result.usage.completion_tokens
            if result.error is not None:
                self.failed += 1
                self._codes[result.error.code.value] += 1
                if len(self._messages) < _SHOWN_MESSAGES:
                    self._messages.append(f"{result.id or result.job_id}: {result.error.message}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second since the first job started: loading a model does not count."""
        since = self._first_job_started
        return 0.0 if since is None else self.completion_tokens / max(time.monotonic() - since, 1e-9)

    def summary(self, answers: str, errors: str | None = None) -> str:
        """The lines to show at the end. `answers` and `errors` say where they were written."""
        lines = [
            f"jobs               {self.jobs:,}",
            f"failed             {self.failed:,}{self._by_code()}",
            *self._kept(),
            f"prompt tokens      {self.prompt_tokens:,}",
            f"generated tokens   {self.completion_tokens:,}",
        ]
        if self.live:
            lines.append(f"tokens per second  {self.tokens_per_s:,.1f}")
        lines.append(f"seconds            {self.seconds:,.1f}{self._until_first_job()}")
        lines.append(f"answers            {'standard output' if answers == '-' else answers}")
        if errors is not None and self.failed:
            lines.append(f"errors             {errors}")
        return "\n".join(lines + self._shown_messages())

    def _note_start(self, result: Result) -> None:
        if self._first_job_started is None and result.timing is not None:
            spent_s = result.timing.prefill_s + result.timing.decode_s
            self._first_job_started = max(self.started, time.monotonic() - spent_s)

    def _until_first_job(self) -> str:
        if not self.live or self._first_job_started is None:
            return ""
        return f", of which {self._first_job_started - self.started:,.1f} until the first job started"

    @property
    def any_failed(self) -> bool:
        """Whether a result was a failure, of an earlier run too."""
        return self.failed + self._num_kept_failed > 0

    def _kept(self) -> list[str]:
        failed = f", of which {self._num_kept_failed:,} failed" if self._num_kept_failed else ""
        return [f"done before        {self._num_kept:,}{failed}"] if self._num_kept else []

    def _by_code(self) -> str:
        if not self._codes:
            return ""
        return " (" + ", ".join(f"{code} {count:,}" for code, count in self._codes.most_common()) + ")"

    def _shown_messages(self) -> list[str]:
        more = self.failed - len(self._messages)
        return [f"  {message}" for message in self._messages] + ([f"  and {more:,} more"] if more else [])


class ProgressBar:
    """A bar on a terminal; elsewhere a line now and then. Use it as a context manager."""

    def __init__(self, total: int, tally: Tally) -> None:
        self._total = total
        self._tally = tally
        self._bar: Any = None
        self._last_line = time.monotonic()

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="job", file=sys.stderr, dynamic_ncols=True, desc="waiting")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, total: int | None = None) -> None:
        """Bring it up to the tally; `total` if more jobs have come."""
        self._total = total or self._total
        if self._bar is None:
            self._line()
            return
        if self._tally.jobs:
            self._bar.set_description("jobs", refresh=False)
            self._bar.set_postfix_str(self._rate().removeprefix(", "), refresh=False)
        self._bar.total = self._total
        self._bar.update(self._tally.jobs - self._bar.n)
        self._bar.refresh()

    def _line(self) -> None:
        now = time.monotonic()
        if now - self._last_line < LINE_INTERVAL_S:
            return
        self._last_line = now
        tally = self._tally
        left_s = (self._total - tally.jobs) * tally.seconds / tally.jobs if tally.jobs else 0.0
        eta = f", about {left_s:,.0f} s left" if tally.jobs else ""
        text = f"{tally.jobs:,} of {self._total:,} jobs, {tally.failed:,} failed{self._rate()}{eta}"
        print(text, file=sys.stderr, flush=True)

    def _rate(self) -> str:
        return f", {self._tally.tokens_per_s:,.0f} tokens/s" if self._tally.live else ""
