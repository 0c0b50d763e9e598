"""The one line a request leaves in the log when it ends, fields in fixed order."""

from __future__ import annotations

import logging
import time

from ultraflash.server.messages import StepOf

_log = logging.getLogger(__name__)


class RequestRecord:
    """Collects what `request_end` tells of one request.

    Units: prefill_ms and average_iteration_ms are time in the engine; tokens_per_s runs from the
        first to the last token as they arrived here.
    """

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        """Nothing has happened yet."""
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.finish = "cancelled"  # unless something else ends it
        self._prefill_ms = self._decode_ms = 0.0
        self._iterations = self._decoded = self._rows = 0
        self._first = self._last = 0.0
        self._first_tokens = 0
        self._written = False

    def step(self, step: StepOf) -> None:
        """One step of the engine."""
        self.cached_tokens = step.cached_tokens
        self._prefill_ms = step.prefill_ms  # of the whole prompt, in every step
        if step.decode_ms > 0:
            self._decode_ms += step.decode_ms
            self._iterations += 1
            self._rows += step.rows
            # The token that ended the answer was decoded too, though it is no output.
            self._decoded += len(step.tokens) + (step.finish == "stop")
        if step.tokens:
            self._last = time.monotonic()
            if not self._first:
                self._first, self._first_tokens = self._last, len(step.tokens)

    def write(self) -> None:
        """Write the line; further calls do nothing."""
        if self._written:
            return
        self._written = True
        seconds = self._last - self._first
        later = self.completion_tokens - self._first_tokens
        fields = {
            "id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "prefill_ms": f"{self._prefill_ms:.1f}",
            "average_iteration_ms": f"{_ratio(self._decode_ms, self._iterations):.2f}",
            "average_accept_length": f"{_ratio(self._decoded, self._iterations):.2f}",
            "average_rows": f"{_ratio(self._rows, self._iterations):.2f}",
            "tokens_per_s": f"{_ratio(max(0, later), seconds):.1f}",
            "kv_source": "device" if self.cached_tokens else "none",
            "finish": self.finish,
        }
        _log.info("request_end %s", " ".join(f"{name}={value}" for name, value in fields.items()))


def _ratio(total: float, count: float) -> float:
    return total / count if count > 0 else 0.0
