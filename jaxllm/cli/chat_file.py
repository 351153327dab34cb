"""Chats in files: what was said, the system prompt, and the settings that were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.cli.sampling import sampling_flags, sampling_params
from jaxllm.errors import ConfigError, one_line, reason

ROLES = ("user", "assistant")
NOT_IN_CHATS = {
    "n", "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs", "thinking_markers",
    "shown_special_token_ids",
}  # fmt: skip
"""A chat shows one answer, as text."""


class SavedChat(NamedTuple):
    system: str | None
    messages: list[dict[str, str]]
    settings: dict[str, Any]


def save_chat(file: Path, chat: SavedChat) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        file.write_text(json.dumps(chat._asdict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None


def load_chat(file: Path) -> SavedChat:
    """Raises ConfigError when the file cannot be read or is no chat that /save has written."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read, as it is no JSON: {one_line(error)}") from None
    if not isinstance(found, dict) or found.keys() != set(SavedChat._fields):
        raise ConfigError(f"{file} is no saved chat: it must be an object with {', '.join(SavedChat._fields)}")
    system, messages, settings = (found[name] for name in SavedChat._fields)
    if not (system is None or isinstance(system, str)) or not isinstance(settings, dict):
        raise ConfigError(f"{file} is no saved chat: system must be text or null, and settings an object")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(
            f"{file} is no saved chat: messages must have a role ({' or '.join(ROLES)}) and a content that is text"
        )
    for name in settings:
        check_setting(settings, name)
    return SavedChat(system, messages, settings)


def check_setting(settings: dict[str, Any], name: str) -> None:
    """Raises ConfigError for a name that is no setting of a chat, and InvalidRequestError for a value out of range."""
    names = [*(flag.name for flag in sampling_flags() if flag.name not in NOT_IN_CHATS), "seed"]
    if name not in names:
        raise ConfigError(f"no setting {name}; there are {', '.join(names)}")
    sampling_params(settings)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        return False
    return message["role"] in ROLES and isinstance(message["content"], str)
