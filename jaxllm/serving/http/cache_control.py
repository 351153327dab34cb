"""A hint that Anthropic's API has, and that SDKs of several providers put into OpenAI's messages."""

from __future__ import annotations

from typing import Literal

from jaxllm.serving.http.request_model import RequestModel


class CacheControl(RequestModel):
    """Accepted, without effect: prefixes are cached by themselves, for as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """Accepted, without effect: prefixes are cached by themselves."""
