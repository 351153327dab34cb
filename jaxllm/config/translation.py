"""Command lines and variables of other servers in our own words, by the table of `jaxllm.config.others`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

from pydantic import BaseModel

from jaxllm.config import ServeConfig
from jaxllm.config.others import LLAMA_SERVER, Row, by_name, of_variable
from jaxllm.config.server import OTHER_KEY_VARIABLES, SEVERAL_MODELS
from jaxllm.config.values import members, merged, parse_object
from jaxllm.errors import ConfigError


def flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


SETTINGS = frozenset(map(flag, ServeConfig.model_fields))
OBJECTS = frozenset(
    flag(name)
    for name, field in ServeConfig.model_fields.items()
    for kind in members(field.annotation)
    if getattr(kind, "__origin__", kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))
) - {"--isq-map"}
"""Flags whose value is a JSON object: --speculative-config.method mtp is one of its values."""
SWITCHES = frozenset(
    flag(name) for name, field in ServeConfig.model_fields.items() if bool in members(field.annotation)
)
DEFAULTS = "--override-generation-config."
"""What the flags of other servers for sampling are values of."""
LISTS = ("--api-key", "--served-model-name", "--allowed-origins", "--allowed-media-domains")
"""Flags that take several values after MODEL, as with vLLM; here commas separate them."""

REFINED = {
    "--attention-backend", "--block-size", "--dry-multiplier", "--host", "--kv-cache-dtype", "--load-format",
    "--log-level", "--model", "--pooling", "--seed", "--threads", "--top-n-sigma", "--typical-p", "--xtc-probability",
}  # fmt: skip
"""Flags of ours of which the table of others says how values of other servers are read."""


class Translated(NamedTuple):
    """A command line in our own words, environment variables that it stands for, and what has no effect."""

    arguments: list[str]
    variables: dict[str, str]
    said: list[str]


def translated(arguments: Sequence[str], own: Collection[str] = SETTINGS, server: str | None = None) -> Translated:
    """Read what follows a command, with flags of other servers, where a command's `own` flags mean what they mean.

    A name that several servers have is read as that of the server whose other flags are given, or of `server`. Raises
    ConfigError for a flag, or a value of one, that cannot be honoured.
    """
    return _Reader(arguments, frozenset(own), server).read()


class _Reader:
    def __init__(self, arguments: Sequence[str], own: frozenset[str], server: str | None):
        self._left = deque(arguments)
        self._own, self._server, self._arguments = own, server, arguments
        self._found: list[str] = []
        self._has_model = False
        self._objects: dict[str, list[str]] = {}  # as they are given whole
        self._inside: dict[str, dict[str, Any]] = {}  # single values of them
        self._parts: dict[str, str] = {}  # of a model's name, or of a coordinator's address
        self._variables: dict[str, str] = {}
        self._said: list[str] = []

    def read(self) -> Translated:
        while self._left and self._left[0] != "--":
            argument = self._left.popleft()
            if _is_flag(argument):
                self._flag(*_parted(argument))
            else:
                self._has_model = True
                self._found.append(argument)
        repo, file = self._parts.get("@repo"), self._parts.get("@file")
        if repo or file:
            self._found.append(f"--model={_model(repo, file)}")
        if host := self._parts.get("@address"):
            self._found.append(f"--coordinator-address={host}:{self._parts.get('@port', '29501')}")
        elif "@port" in self._parts:
            raise ConfigError(f"--master-port is {self._parts['@port']!r}: it needs --master-addr")
        given = as_settings(self._found)
        if str(given.get("preload_model")).endswith(".gguf") and not given.keys() & {*SEVERAL_MODELS, "config"}:
            self._found.append("--model-directory=models")  # where rust_de_llama looks for files
        for name in dict.fromkeys([*self._objects, *self._inside]):
            whole = self._objects.get(name, [])
            if name in self._inside and len(whole) < 2:
                try:
                    one = parse_object(whole[0]) if whole else {}
                except ValueError as error:
                    raise ConfigError(f"{name} is {whole[0]!r}: {error}") from None
                whole = [json.dumps(merged(one, self._inside[name]))]
            self._found += [f"{name}={value}" for value in whole]
        return Translated([*self._found, *self._left], self._variables, self._said)

    def _flag(self, name: str, inside: str, value: str | None) -> None:
        row, base = self._row(name), "--" + name.removeprefix("--no-")
        if name in self._own and (row is None or not _refines(row, name)):
            self._take_own(name, inside, value)
        elif row is not None:
            self._take(row, name, inside, value)
        elif base in self._own or (opposite := self._row(base)) is None or (opposite.takes and opposite.ours):
            self._found.append(joined(name, value, inside))  # whoever reads the arguments says what is wrong
        elif value is not None:
            raise ConfigError(f"{name} is {value!r}; it takes no value")
        elif opposite.meaning.keys() == {"is"} and opposite.ours in SETTINGS:
            self._put("--no-" + opposite.ours[2:], None)
        else:
            self._said.append(f"{name} has no effect: {opposite.why or 'it is so without it'}")

    @cached_property
    def _order(self) -> list[str]:
        return sorted(_servers(self._arguments, self._own), key=lambda one: one != self._server)

    def _row(self, name: str) -> Row | None:
        found = [] if name in self._own - REFINED else by_name().get(name, [])
        return min(found, key=lambda row: self._order.index(row.server), default=None)

    def _take_own(self, name: str, inside: str, value: str | None) -> None:
        if name in OBJECTS and inside:
            self._put(f"{name}.{inside}", self._value(f"{name}.{inside}", value))
        elif name in OBJECTS and (value is not None or self._left):
            self._put(name, self._value(name, value))
        elif name in LISTS and self._has_model and value is None:
            values = self._values()
            self._found.append(joined(name, ",".join(values) if values else None))
        elif name == "--lora-modules" and value is None:  # a=x b=y, or objects
            modules = self._values("=", "{")
            self._found.append(joined(name, json.dumps(modules) if len(modules) > 1 else next(iter(modules), None)))
        else:
            self._has_model |= name == "--model"
            if value is None and name in SETTINGS - SWITCHES and self._left and not _is_flag(self._left[0]):
                value = self._left.popleft()
            self._found.append(joined(name, value, inside))

    def _take(self, row: Row, name: str, inside: str, value: str | None) -> None:
        if (inside and row.takes) or row.takes == "1":
            value = self._value(name, value)
        elif row.takes == "?" and value is None and self._left and not _is_flag(self._left[0]):
            value = self._left.popleft()
        elif row.takes == "*" and value is None:
            value = " ".join(self._values())
        elif not row.takes and value is not None:
            raise ConfigError(f"{name} is {value!r}; it takes no value")
        if row.fate == "refused":
            raise ConfigError(f"{name} is not available: {row.why}")
        if row.accepts(value or ""):
            if row.fate == "ignored":
                self._said.append(f"{name} has no effect: {row.why}")
            elif inside and row.ours.partition(".")[0] not in OBJECTS:
                raise ConfigError(f"{name} has no key {inside!r}: it is no object")
            else:
                try:
                    meant = {f"{row.ours}.{inside}": value} if inside else row.means(value)
                except ValueError as error:
                    raise ConfigError(f"{name} is {value!r}: {error}") from None
                for ours, text in meant.items():
                    sampled = flag(ours.removeprefix(DEFAULTS))  # a command that samples itself has the flag
                    self._put(sampled if ours.startswith(DEFAULTS) and sampled in self._own else ours, text)
        elif name in self._own:  # a value of ours
            self._found.append(joined(name, value))
        else:
            accepted = "" if row.why.startswith("accepted") else f"; accepted is {' or '.join(row.only)}"
            raise ConfigError(f"{name} is {value!r}: {row.why}{accepted}")

    def _put(self, ours: str, value: str | None) -> None:
        if ours[0] in "$@":
            (self._variables if ours[0] == "$" else self._parts)[ours.lstrip("$")] = value or ""
            self._has_model |= ours in ("@repo", "@file")
        elif "." in ours:
            name, *path = ours.split(".")
            _set(self._inside.setdefault(name, {}), path, value or "", ours)
        elif ours in OBJECTS:
            self._objects.setdefault(ours, []).append(value or "")
        elif (text := joined(ours, value)) not in self._found:  # K and V are kept alike, and two flags say so
            self._has_model |= ours == "--model"
            self._found.append(text)

    def _value(self, name: str, value: str | None) -> str:
        if value is None and not self._left:
            raise ConfigError(f"{name} requires an argument")
        return self._left.popleft() if value is None else value

    def _values(self, *having: str) -> list[str]:
        """All that follow and are no flags, and have one of these signs."""
        found = []
        while self._left and not _is_flag(self._left[0]) and (not having or set(having) & {*self._left[0]}):
            found.append(self._left.popleft())
        return found


def _servers(arguments: Collection[str], own: Collection[str]) -> list[str]:
    """The servers, first the one that has most of those flags which one alone has."""
    names = [_parted(argument)[0] for argument in arguments if _is_flag(argument)]
    found = [{row.server for row in by_name().get(name, ())} for name in names if name not in own]
    counted = Counter(server for servers in found if len(servers) == 1 for server in servers)
    order = dict.fromkeys(row.server for rows in by_name().values() for row in rows)
    return sorted(order, key=lambda server: -counted[server])


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not re.match(r"-\d|-\.\d", argument)


def _parted(argument: str) -> tuple[str, str, str | None]:
    """`--a_b.c_d=e` -> `--a-b`, `c_d`, `e`; and `-O3` -> `-O`, 3."""
    name, equals, value = argument.partition("=")
    if re.fullmatch(r"-O\d", name):
        return "-O", "", name[2:]
    if re.fullmatch(r"-[^.]+(\.[^.]+)+", name) and argument not in by_name():
        name, _, inside = name.partition(".")
    else:
        inside = ""
    return name.replace("_", "-") if name.startswith("--") else name, inside, value if equals else None


def joined(name: str, value: str | None, inside: str = "") -> str:
    """An argument, in one: values may begin with a dash."""
    return name + (f".{inside}" if inside else "") + ("" if value is None else f"={value}")


def _refines(row: Row, name: str) -> bool:
    """Whether a row says of one of our own flags how another server's values are read."""
    return row.ours == name or (row.fate == "ignored" and bool(row.only))


def _model(repo: str | None, file: str | None) -> str:
    if repo is None or file is None:
        return repo or file or ""
    if repo.startswith(("/", ".", "~")) or os.path.isdir(repo):
        return os.path.join(repo, file)
    return f"{repo.partition(':')[0]}:{file}"


def _set(values: dict[str, Any], path: Sequence[str], text: str, flag: str) -> None:
    """Set one value; `a.b+` adds to a list, as with vLLM. Raises ConfigError where `a` or `b` is something else."""
    *outer, last = path
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        for key in outer:
            values = values.setdefault(key, {})
        if last.endswith("+"):
            values.setdefault(last[:-1], []).extend(text.split(","))
        else:
            values[last] = value
    except (AttributeError, TypeError):  # a number, a text or a list has no keys, and an object no end
        raise ConfigError(f"{flag} is {text!r}: a part of it has another value already") from None


def as_settings(arguments: Iterable[str]) -> dict[str, Any]:
    """`--host=::1 --no-web` -> {"host": "::1", "web": False}"""
    found: dict[str, Any] = {}
    for name, equals, value in (text[2:].partition("=") for text in arguments if text.startswith("--")):
        if equals:
            found[name.replace("-", "_")] = value
        else:
            found[name.removeprefix("no-").replace("-", "_")] = not name.startswith("no-")
    return found


class Variable(NamedTuple):
    """A variable of another server that is set: the settings here that it stands for, or why there are none."""

    name: str
    flags: list[str]
    why: str

    def __str__(self) -> str:
        stated = " ".join("--api-key" if flag.startswith("--api-key=") else flag for flag in self.flags)
        return f"{self.name} is set: {f'it stands for {stated} where that is not given' if stated else self.why}"


OTHER_PREFIXES = ("VLLM_", "LLAMA_ARG_", "OLLAMA_")
_LINKS = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)|=\w+://)")
"""Variables that Kubernetes sets for a service that is called vllm, as VLLM_PORT=tcp://10.0.0.7:80."""


def other_variables(environ: Mapping[str, str]) -> Iterator[Variable]:
    """Every variable of another server that is set, but for its key, which is honoured under its own name."""
    for name in sorted(environ):
        value = environ[name]
        is_key = name in OTHER_KEY_VARIABLES
        if is_key or not name.startswith(OTHER_PREFIXES) or _LINKS.search(f"{name}={value}"):
            continue
        flags = of_variable(name, value, SETTINGS)
        if isinstance(flags, str):
            yield Variable(name, [], flags)
            continue
        try:
            found = translated(list(starmap(joined, flags.items())), server=LLAMA_SERVER)
        except ConfigError as error:
            yield Variable(name, [], str(error))
            continue
        why = [line.partition(" has no effect: ")[2] for line in found.said]
        why += [f"see {variable}" for variable in found.variables]
        yield Variable(name, found.arguments, "; ".join(why) or "it changes nothing here")
