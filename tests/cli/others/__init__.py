"""Command lines and flags of other servers, as their sources and documentation have them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from jaxllm.config import ServeConfig
from jaxllm.config.sources import read_settings
from jaxllm.config.translation import as_settings, translated

FOLDER = Path(__file__).parent


class TheirFlag(NamedTuple):
    """`-c/--ctx-size= LLAMA_ARG_CTX_SIZE`: its names, what it takes (as in `jaxllm.config.others`), its variable."""

    names: tuple[str, ...]
    values: list[str]
    variable: str


def flags(server: str) -> list[TheirFlag]:
    """Every flag of vLLM 0.33 (`vllm`) or of llama-server b11434 (`llama_server`)."""
    found = []
    for line in (FOLDER / f"{server}_flags.txt").read_text().splitlines():
        text, _, variable = line.partition(" ")
        names, equals, takes = text.partition("=")
        values = ["1"] * (2 if takes in ("*", "2") else 1) if equals and takes != "?" else []
        found.append(TheirFlag(tuple(names.split("/")), values, variable))
    return found


def settled(words: list[str]) -> ServeConfig:
    """The settings of a command line of `serve`. Raises ConfigError; what is no flag of ours fails the test."""
    model, *flags = translated(words).arguments if not words[0].startswith("-") else ["", *translated(words).arguments]
    given = as_settings(flags) | ({"model": model} if model else {})
    assert not given.keys() - ServeConfig.model_fields.keys()
    assert sum(flag.startswith("--") for flag in flags) + bool(model) == len(given), "one is given twice"
    return read_settings(ServeConfig, given, environ={})


def lines(name: str) -> list[list[str]]:
    """Command lines, without the program's name."""
    return [shlex.split(line) for line in (FOLDER / f"{name}.txt").read_text().splitlines()]
