"""How one tool server is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Transport = Literal["stdio", "http", "sse"]


@dataclass(frozen=True)
class ServerSettings:
    """One server. What may hold a secret is not in its repr."""

    label: str
    """What its tools' names begin with; of OpenAI's pattern for names of functions."""
    transport: Transport
    command: str | None = None
    """The program of a stdio server, looked up in PATH."""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of a stdio server's, besides the few that it inherits."""
    cwd: str | None = None
    url: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request to url, Authorization among them."""
    timeout: float = 30.0
    """Seconds that starting, listing and each call may take."""
    description: str | None = None
    """What the server is for, in the operator's words."""
    public_only: bool = False
    """Reach url, and whatever it redirects to, only by https and at public addresses: for urls that came in requests."""
