"""A question before something is gone for good."""

from __future__ import annotations

import sys

from jaxllm.errors import ConfigError


def agrees(command: str, question: str) -> bool:
    """Whether the user says yes. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{command} asks before it removes, and standard input is no terminal; say --yes")
    return input(question).strip().lower() in ("y", "yes")
