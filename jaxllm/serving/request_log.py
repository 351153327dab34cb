"""The line of the log that tells of a request."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

from jaxllm.logs import FIELDS
from jaxllm.serving.http.records import Record

LOG = "jaxllm.requests"
logger = logging.getLogger(LOG)

PROBES = frozenset({"/livez", "/health", "/ping", "/ready", "/readyz", "/load", "/metrics"})
"""Routes that are asked every few seconds: a line tells of them only where they fail."""


def log_request(record: Record) -> None:
    """Write the line, in text or in JSON: prompts and answers are in the latter alone, if the record has them."""
    if record.path in PROBES and record.status < 400:
        return
    line = f'{record.client} "{record.method} {quote(record.path)}" {record.status}, request {record.request_id}'
    logger.info("%s%s", line, _spent(record), extra={FIELDS: fields(record)})


def fields(record: Record) -> dict[str, Any]:
    """What a log's reader looks for by name; null is what the request has not."""
    phases, calls = record.phases, record.calls
    found: dict[str, Any] = {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "method": record.method,
        "endpoint": record.path,
        "status": record.status,
        "client": record.client,
        "client_gone": record.client_gone,
        "key": record.key_name,
        "model": record.model,
        "duration_seconds": round(record.seconds, 6),
        "input_tokens": sum(call.prompt_tokens for call in calls),
        "cached_tokens": sum(call.cached_tokens for call in calls),
        "output_tokens": sum(call.completion_tokens for call in calls),
        "queue_seconds": _rounded(phases.queue),
        "prefill_seconds": _rounded(phases.prefill),
        "decode_seconds": _rounded(phases.decode),
        "finish_reasons": record.finish_reasons,
    }
    if record.keeps_texts:
        found["prompts"] = [text for call in calls for text in call.prompts]
        found["answers"] = [text for call in calls for text in call.answers]
    return found


def _spent(record: Record) -> str:
    """ ", 12 tokens in (3 cached), 5 out, queue 0.001 s, prefill 0.020 s, decode 0.100 s, stop", or nothing"""
    told = fields(record)
    parts = []
    if record.calls:
        parts.append(f"{told['input_tokens']} tokens in ({told['cached_tokens']} cached)")
        parts.append(f"{told['output_tokens']} out")
        for name in ("queue", "prefill", "decode"):
            seconds = told[f"{name}_seconds"]
            parts += [] if seconds is None else [f"{name} {seconds:.3f} s"]
        parts += dict.fromkeys(record.finish_reasons)
    if record.client_gone:
        parts.append("the client went away")
    return "".join(f", {part}" for part in parts)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
