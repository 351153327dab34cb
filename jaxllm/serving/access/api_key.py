"""A key of the file of keys: made, hashed, and read."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from jaxllm.config.values import read_mapping
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.serving.access.tenant import Tenant
from jaxllm.wording import did_you_mean, shown, wrong_setting

FLAG = "--api-key-file"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_PREFIX = "jaxllm-"
_HASH = "sha256:"
_RANDOM_BYTES = 32


def _in_utc(value: datetime) -> datetime:
    """What names no zone is meant in UTC."""
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


class ApiKey(Tenant):
    """A key by its hash, and what requests with it may do."""

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    """What metrics, logs and the owners of stored objects call it."""
    hash: Annotated[str, Field(pattern=f"^{_HASH}[0-9a-f]{{64}}$")]
    """The SHA-256 of the key, as `jaxllm keys new` prints it."""
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """When the key ends to be taken: a day, at whose beginning in UTC, or a time (default: never)."""
    priority_ceiling: int | None = 0
    """The lowest `priority` that its requests may ask for: lower runs earlier. Null allows any."""

    def cache_salt(self, asked: str | None) -> str | None:
        """With the hash, which no other can send, where the key has a cache of its own."""
        return f"{self.hash}:{asked or ''}" if self.own_cache else asked

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix(_HASH))


def new_key() -> str:
    """A fresh one, of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: str) -> bytes:
    """A random key has nothing that could be guessed, so that one fast hash protects it; passwords need slow ones."""
    return hashlib.sha256(key.encode()).digest()


def hash_of(key: str) -> str:
    """As the file of keys has it."""
    return _HASH + digest_of(key).hex()


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file, in its order.

    Raises:
        ConfigError: the file cannot be read, or a key in it is wrong; one line says where, and never shows a hash.
    """
    keys: list[ApiKey] = []
    for name, fields in read_mapping(in_home(path), FLAG, "names to keys").items():
        where = f"{path}: key {shown(name)}"
        if not isinstance(fields, dict):
            raise ConfigError(f"{where} must be a mapping of setting: value, and have at least a hash")
        key = _key(where, {"name": name}, fields)
        if same := next((other for other in keys if other.digest == key.digest), None):
            raise ConfigError(f"{where}: its hash is that of key {same.name!r}; each needs a key of its own")
        keys.append(key)
    return keys


def _key(where: str, named: dict[str, Any], fields: dict[Any, Any]) -> ApiKey:
    settings = [name for name in ApiKey.model_fields if name != "name"]
    if unknown := next((name for name in fields if name not in settings), None):
        raise ConfigError(f"{where}: unknown setting {shown(unknown)}{did_you_mean(str(unknown), settings)}")
    try:
        return ApiKey(**named, **fields)
    except ValidationError as error:
        first = error.errors()[0]
    setting = str(first["loc"][0])
    if setting == "name":
        raise ConfigError(f"{where}: a name must have 1 to 64 letters, digits, '.', '_' and '-'")
    if setting == "hash":  # somebody may have put the key itself there
        raise ConfigError(f"{where}: hash must be sha256: and 64 hexadecimal digits, as `jaxllm keys new` prints them")
    raise ConfigError(f"{where}: {setting} is {shown(first['input'])}: {wrong_setting(first)}")
