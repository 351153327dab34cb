"""How tool servers are reached, and mcp.json, which has one of three shapes.

{"mcpServers": {"files": {"command": "…", "args": ["…"], "env": {…}}}}     Claude's, Cursor's, LM Studio's
{"servers": [{"name": "weather", "url": "https://…", "auth": "Bearer …"}]}   vLLM's relatives
[{"name": "weather", "url": "https://…"}]
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxllm.errors import ConfigError, one_line
from jaxllm.wording import did_you_mean, wrong_setting

logger = logging.getLogger(__name__)

Transport = Literal["stdio", "http", "sse"]

LABEL = r"[a-zA-Z0-9_-]{1,48}"  # it leaves room for a tool's own name in the 64 characters of a function's

_SHORTEST_SECRET = 6  # shorter values, as "1" or "true", are no secrets, and removing them would garble everything

DEFAULT_PATH = Path("mcp.json")  # the usual name of such a file, which has to be named here
OFF = Path("off")  # given instead of a file for no servers

PYTHONS = ("python", "python3")  # the interpreter that runs jaxllm, which has tool servers' packages

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_LISTS = ("mcpServers", "servers")
_TRANSPORTS: Mapping[str, Transport] = {  # the transport for each `type`
    "stdio": "stdio", "http": "http", "streamable-http": "http", "streamable_http": "http", "streamableHttp": "http",
    "sse": "sse",
}  # fmt: skip


@dataclass(frozen=True)
class ServerSettings:
    """One server. Fields that may hold a secret are not in its repr."""

    label: str  # the beginning of its tools' names; matches LABEL
    transport: Transport
    command: str | None = None  # the program of a stdio server: a path, or a name that is looked up in PATH
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # besides the few that are inherited
    cwd: str | None = None
    url: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # sent with every request to url
    timeout: float = 30.0  # seconds that starting, listing and each call may take
    description: str | None = None  # the server's purpose, in the operator's words
    allowed_tools: tuple[str, ...] | None = None  # the server's own names of the tools that may be used; by default all
    public_only: bool = False  # reach url only by https and at public addresses: for urls that came in requests
    secrets: frozenset[str] = field(default=frozenset(), repr=False)  # others, such as values of variables

    def shown(self, text: object) -> str:
        """Words about this server, or by it, on one line and without its secrets."""
        url = urlsplit(self.url or "")
        secrets = {*self.secrets, *self.env.values(), *self.headers.values()}
        secrets |= {value.partition(" ")[2] for value in self.headers.values()}  # of "Bearer KEY"
        secrets |= {url.query, url.username or "", url.password or ""}
        line = one_line(text, most=100_000)
        for secret in sorted(secrets, key=len, reverse=True):
            line = line.replace(secret, "***") if len(secret) >= _SHORTEST_SECRET else line
        return one_line(line)


Text = Annotated[str, Field(min_length=1)]


class Entry(BaseModel):
    """One server, as the file has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    type: Literal["stdio", "http", "streamable-http", "streamable_http", "streamableHttp", "sse"] | None = None
    command: Text | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: Text | None = None
    url: Text | None = None
    auth: Text | None = None
    headers: dict[str, str] = {}
    timeout_secs: Annotated[float, Field(gt=0, le=3600)] = 30.0
    instructions: str | None = None
    allowed_tools: list[str] | None = None
    disabled: bool = False


def find_settings(path: Path | None) -> tuple[Path | None, list[ServerSettings]]:
    """The file to use, and its servers; None and OFF mean none.

    A ./mcp.json that was not named starts nothing: a folder of somebody else's would run its programs here.
    Raises ConfigError: see `read_settings`.
    """
    if path is None and DEFAULT_PATH.is_file():
        logger.warning("mcp.json in this folder is not used; start its tool servers with --mcp-config mcp.json")
    if path is None or path == OFF:
        return None, []
    return path, read_settings(path)


def read_settings(path: Path, environ: Mapping[str, str] = os.environ) -> list[ServerSettings]:
    """The servers of a file, in its order, without disabled ones. Paths in it begin at its folder.

    Raises ConfigError if the file cannot be read, or a server in it cannot be used; one line says where and why.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ConfigError(f"mcp_config is {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    return parse_settings(str(path), document, environ, folder=Path(os.path.abspath(path)).parent)


def parse_settings(
    source: str, document: Any, environ: Mapping[str, str] = os.environ, *, folder: Path | None = None
) -> list[ServerSettings]:
    """The servers of a parsed file; `source` is its name in errors. Raises ConfigError.

    Programs run in `folder` unless they have a cwd, which begins there; by default in the working directory.
    """
    found: dict[str, ServerSettings] = {}
    for place, label, value in _entries(source, document):
        if not re.fullmatch(LABEL, label):
            raise ConfigError(f"{place}: the name is {label!r}; it must be 1 to 48 letters, digits, _ and -")
        if label in found:
            raise ConfigError(f"{place}: there are two servers named {label!r}")
        entry = _entry(place, value)
        if entry.name is not None and entry.name != label:
            raise ConfigError(f"{place}: name is {entry.name!r}, but its key is {label!r}; leave name out")
        if not entry.disabled:
            found[label] = _settings(place, label, entry, environ, folder)
    refuse_collisions(source, list(found))
    return list(found.values())


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json would keep the last of several fields of one name."""
    for at, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:at]):
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)


def _entries(source: str, document: Any) -> Iterator[tuple[str, str, Any]]:
    servers = document
    if isinstance(document, dict):
        given = [key for key in _LISTS if key in document]
        others = [key for key in document if key not in _LISTS]
        if others or len(given) != 1:
            wrong = f"has {one_line(others[0])!r}" if others else f"has {' and '.join(given) or 'neither'}"
            raise ConfigError(f"{source}: {wrong}; it must have one of {' and '.join(_LISTS)}, and nothing else")
        servers = document[given[0]]
    if isinstance(servers, dict):
        for label, value in servers.items():
            yield f"{source}: server {one_line(label)!r}", label, value
    elif isinstance(servers, list):
        for at, value in enumerate(servers):
            label = value.get("name") if isinstance(value, dict) else None
            if not isinstance(label, str):
                raise ConfigError(f"{source}: servers[{at}] has no name; it must be an object with a name")
            yield f"{source}: server {one_line(label)!r}", label, value
    else:
        raise ConfigError(
            f"{source}: the servers are {one_line(json.dumps(servers), 80)}; they must be a list or an object"
        )


def _entry(place: str, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: is {one_line(json.dumps(value), 80)}; it must be an object")
    try:
        return Entry.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{place}: unknown field {one_line(name)!r}{did_you_mean(name, Entry.model_fields)}"
            ) from None
        secret = first["loc"][0] in ("env", "auth", "headers", "url")
        shown = "not what it must be" if secret else one_line(json.dumps(first["input"]), 80)
        raise ConfigError(f"{place}: {one_line(name)} is {shown}: {wrong_setting(first)}") from None


def _settings(place: str, label: str, entry: Entry, environ: Mapping[str, str], folder: Path | None) -> ServerSettings:
    transport = _transport(place, entry)
    given: set[str] = set()

    def filled(field: str, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default = match.groups()
            found = environ.get(name) or default
            if found is None:
                raise ConfigError(f"{place}: {field} needs the environment variable {name}, which is not set")
            given.add(found)
            return found

        return _VARIABLE.sub(value, text)

    url = entry.url and filled("url", entry.url)
    if url is not None and not re.match(r"https?://[^/]", url):
        raise ConfigError(f"{place}: url must begin with http:// or https://")
    headers = {name: filled(f"headers.{name}", value) for name, value in entry.headers.items()}
    if entry.auth is not None:
        if any(name.lower() == "authorization" for name in headers):
            raise ConfigError(f"{place}: auth and headers.Authorization are one setting, give one of them")
        headers["Authorization"] = filled("auth", entry.auth)
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ConfigError(f"{place}: headers.{one_line(name)} must be printable ASCII")
    return ServerSettings(
        label=label, transport=transport, command=entry.command and _program(filled("command", entry.command), folder),
        args=tuple(filled(f"args.{at}", value) for at, value in enumerate(entry.args)),
        env={name: filled(f"env.{name}", value) for name, value in entry.env.items()},
        cwd=None if transport != "stdio" else _directory(entry.cwd and filled("cwd", entry.cwd), folder), url=url,
        headers=headers, timeout=entry.timeout_secs, description=entry.instructions,
        allowed_tools=None if entry.allowed_tools is None else tuple(entry.allowed_tools), secrets=frozenset(given),
    )  # fmt: skip


def _program(command: str, folder: Path | None) -> str:
    """A name that is looked up in PATH, or a path that begins at `folder`."""
    if command in PYTHONS:
        return sys.executable or command
    path = os.path.expanduser(command)
    if folder is None or os.path.basename(path) == path:
        return path
    return os.path.normpath(os.path.join(folder, path))


def _directory(cwd: str | None, folder: Path | None) -> str | None:
    if folder is None:
        return cwd and os.path.expanduser(cwd)
    return os.path.normpath(os.path.join(folder, os.path.expanduser(cwd or "")))


def _transport(place: str, entry: Entry) -> Transport:
    if (entry.command is None) == (entry.url is None):
        problem = "neither command nor url" if entry.url is None else "both command and url"
        raise ConfigError(f"{place}: has {problem}; it must have one of them")
    transport = _TRANSPORTS[entry.type or ("stdio" if entry.url is None else "http")]
    needed = "command" if transport == "stdio" else "url"
    if getattr(entry, needed) is None:
        raise ConfigError(f"{place}: type is {entry.type!r}, which needs a {needed}")
    foreign, other = (("auth", "headers"), "url") if transport == "stdio" else (("args", "env", "cwd"), "command")
    for name in foreign:
        if getattr(entry, name):
            raise ConfigError(f"{place}: {name} belongs to servers with a {other}")
    return transport


def refuse_collisions(source: str, labels: list[str]) -> None:
    """Raises ConfigError for names like `a`, whose tool `b_c` would have the same name as the tool `c` of `a_b`."""
    for short, long in itertools.permutations(labels, 2):
        if long.startswith(f"{short}_"):
            better = long.replace(f"{short}_", f"{short}-", 1)
            raise ConfigError(
                f"{source}: tools of servers {short!r} and {long!r} could have the same name; "
                f"rename the second, as {better!r}"
            )
