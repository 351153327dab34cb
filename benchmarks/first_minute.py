"""A fresh process of each engine: seconds until it is ready, and until its first work is done.

python benchmarks/first_minute.py [--engines jaxllm openvino-genai llama.cpp] [--rounds 5] [--cold]

With --cold jaxllm has compiled nothing before, and without it has been started once; peers keep nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine
from peers.install import HERE, JAXLLM, PEERS, Peer, prepare
from peers.process import run
from peers.workload import Work
from rich.console import Console
from rich.table import Table

from jaxllm.config import CACHE_DIR
from jaxllm.weights.source import resolve_model

WORKS = ("1x128+64", "8x128+128")
"""STREAMSxPROMPT+NEW, each in a process of its own."""


def main() -> None:
    arguments = parse_arguments()
    gguf = resolve_model(arguments.model)
    found: dict[str, dict[str, list[float]]] = {}
    if not arguments.cold and JAXLLM.name in arguments.engines:
        measure(JAXLLM, gguf, arguments)  # so that its executables are saved
    for number in range(arguments.rounds):
        for peer in (JAXLLM, *PEERS):
            if peer.name in arguments.engines:
                print(f"round {number + 1} of {arguments.rounds}: {peer.name}", file=sys.stderr, flush=True)
                for what, seconds in measure(peer, gguf, arguments).items():
                    found.setdefault(peer.name, {}).setdefault(what, []).append(seconds)
    medians = {name: {what: statistics.median(all) for what, all in row.items()} for name, row in found.items()}
    about = describe_machine() | {"model": gguf.name, "rounds": arguments.rounds, "cold": arguments.cold}
    Console(width=140).print(table_of(medians, about))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"about": about, "medians": medians, "seconds": found}, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    names = [JAXLLM.name, *(peer.name for peer in PEERS)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="built-in name or .gguf file (default %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=names, default=["jaxllm", "openvino-genai"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="jaxllm compiles everything anew")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "first_minute.json")
    parser.add_argument("--cache", type=Path, default=CACHE_DIR / "peers", help="where the peers' environments live")
    return parser.parse_args()


def measure(peer: Peer, gguf: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds since the start of a process until it was ready, and until each work was done. Raises CannotRunError."""
    python, model = prepare(peer, gguf, arguments.cache)
    seconds: dict[str, float] = {}
    for work in map(Work.parse, WORKS):
        with tempfile.TemporaryDirectory() as empty:
            flags = ["--compile-cache", empty] if arguments.cold and peer is JAXLLM else []
            log, begin = arguments.cache / f"{peer.name}.log", time.perf_counter()
            for line in run(peer, python, model, [work], log, ["--once", *flags]):
                seconds[line["what"]] = time.perf_counter() - begin
    return seconds


def table_of(medians: dict[str, dict[str, float]], about: dict[str, object]) -> Table:
    table = Table(title=f"Seconds from the start of a process; {about}", title_justify="left")
    for header in ("", "ready", *WORKS):
        table.add_column(header, justify="left" if not header else "right")
    for name, row in medians.items():
        table.add_row(name, *(f"{row[what]:.2f}" for what in ("ready", *WORKS)))
    ours = medians.get(JAXLLM.name)
    for name, row in medians.items():
        if ours is not None and name != JAXLLM.name:
            table.add_row(f"jaxllm / {name}", *(f"{ours[what] / row[what]:.2f}" for what in ("ready", *WORKS)))
    return table


if __name__ == "__main__":
    main()
