"""The flags and variables of other servers, and what becomes of each here: others.toml, as rows."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.config.values import comma_separated, parse_object, parse_seconds

Flags = Mapping[str, str | None]
"""Flags of ours with their values; None is a switch's. See others.toml for those that begin with $ and @."""
LLAMA_SERVER = "llama-server"
SERVERS = ("vLLM", LLAMA_SERVER, "candle-vllm", "rust_de_llama")
ON, OFF = ("1", "true", "on", "enabled"), ("0", "false", "off", "disabled")
"""What a variable of llama-server may say of a flag that takes no value; nothing is on too."""


def _number(value: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    raise ValueError("accepted is a number")


def _devices(numbers: str) -> Flags:
    """`0,1`, of which each has a part of the model."""
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise ValueError("accepted are numbers of devices, as 0,1")
    return {"$CUDA_VISIBLE_DEVICES": numbers, "--tensor-parallel-size": str(numbers.count(",") + 1)}


def address(value: str, host: str = "--host", port: str = "--port", default: str | None = None) -> Flags:
    """`0.0.0.0:8080`, `:8080`, `http://localhost` or `[::1]:80` as two flags; the ones that are not there are not."""
    found = re.fullmatch(r"(?:\w+://)?(\[[^]]*\]|[^:/]*)(?::(\d*))?/*", value.strip())
    if found is None:
        raise ValueError("accepted is HOST:PORT")
    both = {host: found[1].strip("[]"), port: found[2] or default or ""}
    return {flag: text for flag, text in both.items() if text}


def _lifetime(value: str) -> str | Flags:
    seconds = parse_seconds(value)
    if seconds == 0:
        raise ValueError("a model that is loaded stays for the next request; see --model-ttl")
    return {} if seconds < 0 else str(seconds)


def _plain_origins(value: str) -> str:
    if any("*" in origin and origin != "*" for origin in comma_separated(value)):
        raise ValueError("origins are whole here; see --allowed-origins")
    return value


def _inverse(value: str) -> Flags:
    if (scale := _number(value)) <= 0:
        raise ValueError("accepted is a number above 0")
    scaled = "--hf-overrides.rope_parameters"
    return {f"{scaled}.rope_type": "linear", f"{scaled}.factor": str(1 / scale)}


READERS: Mapping[str, Callable[[str], str | Flags]] = {
    "lower": str.lower,
    "whole": lambda value: str(int(_number(value))),
    "object": lambda value: json.dumps(parse_object(value)),
    "host": lambda value: {"--uds": value} if value.endswith(".sock") else value,
    "address": address,
    "monitor": lambda value: address(value, "--monitor-host", "--monitor-port"),
    "ollama": lambda value: address(value, default="11434"),
    "devices": _devices,
    "lifetime": _lifetime,
    "origins": _plain_origins,
    "inverse": _inverse,
}


class Row(NamedTuple):
    """One flag of one server: its names, what it takes, and what becomes of it or the reason."""

    server: str
    names: tuple[str, ...]
    takes: str
    only: tuple[str, ...]
    fate: str
    """renamed, ignored or refused."""
    meaning: Mapping[str, Any]
    why: str

    @property
    def ours(self) -> str:
        return str(self.meaning.get("is", ""))

    def accepts(self, value: str) -> bool:
        return not self.only or any(fnmatchcase(value.lower(), pattern) for pattern in self.only)

    def means(self, value: str | None) -> Flags:
        """The flags here that it stands for with this value. Raises ValueError where it cannot be honoured."""
        text, meaning = value or "", self.meaning
        if text.lower() in meaning.get("unless", ()):
            return {}
        found: str | Flags | None = meaning.get("value", value)
        if "unit" in meaning:
            found = text + meaning["unit"]
        elif "read" in meaning:
            found = READERS[meaning["read"]](text)
        elif words := meaning.get("words"):
            if text.lower() in words:
                found = words[text.lower()] or {}
            elif meaning.get("others") == "nothing":
                found = {}
            elif meaning.get("others") != "same":
                raise ValueError(f"accepted are {', '.join(words)}")
        return found if isinstance(found, Mapping) else {self.ours: found}


def _row(server: str, text: str, fate: str, meaning: str | Mapping[str, Any] = "", why: str = "") -> Row:
    names, equals, takes = text.partition("=")
    number = takes if takes in ("*", "?") else "1" if equals else ""
    only = tuple(takes.split("|")) if takes not in ("", "*", "?") else ()
    meaning = {"is": meaning} if isinstance(meaning, str) else meaning
    return Row(server, tuple(names.split("/")), number, only, fate, meaning, why)


@cache
def read_table() -> Mapping[str, Mapping[str, Any]]:
    """What others.toml holds."""
    return tomllib.loads(Path(__file__).with_name("others.toml").read_text(encoding="utf-8"))


@cache
def rows() -> list[Row]:
    """Every flag of every server."""
    found = []
    for servers, flags in read_table()["renamed"].items():
        for server in servers.split():
            found += [_row(server, names, "renamed", meaning) for names, meaning in flags.items() if server in SERVERS]
    for fate in ("ignored", "refused"):
        for why, by_server in read_table()[fate].items():
            said = ((server, flag) for server in SERVERS for flag in by_server.get(server, "").split())
            found += [_row(server, flag, fate, why=why) for server, flag in said]
    return found


@cache
def by_name() -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows():
        for name in row.names:
            found.setdefault(name, []).append(row)
    return found


def of_variable(name: str, value: str, ours: Collection[str]) -> Flags | str:
    """The flags, as their server has them, that an environment variable of it stands for, or why it has no effect."""
    if name in (ours_by_name := read_table()["renamed"]["variables"]):
        try:
            return _row("", f"{name}=", "renamed", ours_by_name[name]).means(value)
        except ValueError as error:
            return str(error)
    if name.startswith("LLAMA_ARG_"):
        name = name.removeprefix("LLAMA_ARG_")
        flag = f"--{read_table()['llama_variables'].get(name, name.lower().replace('_', '-'))}"
        row = next((row for row in by_name().get(flag.replace("--no-", "--"), ()) if row.server == LLAMA_SERVER), None)
        if (row is None and flag in ours) or (row is not None and row.takes and flag in row.names):
            return {flag: value}
        if row is not None:
            if value.lower() not in ("", *ON, *OFF):
                return f"accepted are {', '.join((*ON, *OFF))}"
            opposite = flag.replace("--no-", "--") if "--no-" in flag else f"--no-{flag[2:]}"
            return {opposite if value.lower() in OFF else flag: None}
    patterns = ((why, one) for why, by in read_table()["ignored"].items() for one in by.get("variables", "").split())
    return next(why for why, pattern in patterns if fnmatchcase(name, pattern))
