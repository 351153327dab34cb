"""How one tool server is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from jaxllm.errors import one_line

Transport = Literal["stdio", "http", "sse"]

LABEL = r"[a-zA-Z0-9_-]{1,48}"
"""Leaves room for a tool's own name in the 64 characters of a function's."""

_SHORTEST_SECRET = 6
"""Shorter values, as "1" or "true", are no secrets, and striking them out would garble everything."""


@dataclass(frozen=True)
class ServerSettings:
    """One server. What may hold a secret is not in its repr."""

    label: str
    """What its tools' names begin with; matches LABEL."""
    transport: Transport
    command: str | None = None
    """The program of a stdio server: a path, or a name that is looked up in PATH."""
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
    allowed_tools: tuple[str, ...] | None = None
    """The server's own names of those that may be used; by default all."""
    public_only: bool = False
    """Reach url only by https and at public addresses: for urls that came in requests."""
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    """Further values that are nobody's to read, such as those that variables gave."""

    def shown(self, text: object) -> str:
        """Words about this server, or by it, on one line and without its secrets."""
        line = one_line(text, most=100_000)
        for secret in sorted(self._secrets(), key=len, reverse=True):
            line = line.replace(secret, "***")
        return one_line(line)

    def _secrets(self) -> set[str]:
        found = {*self.secrets, *self.env.values(), *self.headers.values()}
        found |= {value.partition(" ")[2] for value in self.headers.values()}  # of "Bearer KEY"
        if self.url is not None:
            url = urlsplit(self.url)
            found |= {url.query, url.username or "", url.password or ""}
        return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}
