"""Models of real shapes with random weights: jaxllm beside its peers, one engine after another, each in a process.

    python -m benchmarks.shapes --shapes llama-3.2-1b --engines jaxllm,xllamacpp --kinds q4_k_m

A shape may also be a GGUF file or a model that jaxllm knows by name. An engine has three processes in a round: the
first finds the file out of the page cache and nothing compiled, the second is timed until it is ready alone, and the
third computes long prompts. Lines of JSON are added to OUTPUT.jsonl, and OUTPUT.md has the medians of all its lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine
from benchmarks.peers.install import HERE, JAXLLM, PEERS, CannotRunError, Peer, prepare
from benchmarks.peers.process import run
from benchmarks.peers.workload import Work
from benchmarks.shape_files import KINDS, SHAPES, bytes_a_token, write_file
from jaxllm.config import CACHE_DIR
from jaxllm.engine.start.schemes import host_bandwidth
from jaxllm.weights.source import resolve_model

TOGETHER = "1x128+65,4x128+65,16x128+65,8x128+1"
ALONE = "1x512+1,1x2048+1,1x8192+49"
STORED = "stored"
"""The kind of a file that was not made here."""
LEAST_READ, MOST_READ = 2**30, 2**31
"""Bytes that are read to find out the memory's rate, of as many as a token reads: caches hold little of that."""
COLUMNS = (
    r"prefill",
    r"decode ×1$",
    r"allowed",
    r"decode ×\d+$",
    r"decode ×\d+ ",
    r"first",
    r"load ",
    r"(loading|running) GB",
)
"""Patterns of their names; what the memory allows stands beside decode of one stream."""
LESS_IS_BETTER = ("first token", "load", "GB")
"""How the names of such columns begin, or end."""

Row = dict[str, Any]


class TreeMemory:
    """The most that a process and its children have had resident, by phases that the caller names."""

    def __init__(self) -> None:
        self.phase, self.peaks = "loading", {"loading": 0, "running": 0}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._watch, args=(psutil.Process(pid),))
        self._thread.start()

    def _watch(self, root: psutil.Process) -> None:
        while not self._over.wait(0.1 if self.phase == "loading" else 0.5):
            total, phase = 0, self.phase
            try:
                for process in (root, *root.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # one has just ended: the next look counts
            self.peaks[phase] = max(self.peaks[phase], total)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()


def title(work: Work) -> str:
    """Its column: prefill of a work that generates one token, otherwise decode."""
    streams, prompt = work.streams, f"{work.prompt_tokens:,}"
    if work.new_tokens == 1:
        return f"prefill {prompt}" if streams == 1 else f"prefill {streams}×{prompt}"
    return f"decode ×{streams}" if work.prompt_tokens <= 128 else f"decode ×{streams} after {prompt}"


class Measurement:
    """One engine's round on one file."""

    def __init__(self, peer: Peer, gguf: Path, folder: Path, compiled: str) -> None:
        self._peer, self._log = peer, folder / "shapes" / f"{peer.name}.log"
        self._python, self._model = prepare(peer, gguf, folder / "peers")
        self._flags = ["--compile-cache", compiled] if peer is JAXLLM else []
        self.row: Row = {}

    def first(self, works: Sequence[Work], read: int) -> None:
        """Loading from scratch, then short prompts of several streams; the memory's own rate before and after."""
        forget(self._model)
        memory, size = TreeMemory(), min(max(read, LEAST_READ), MOST_READ)
        rates = [host_bandwidth(size)]
        begin = time.perf_counter()
        try:
            for line in run(self._peer, self._python, self._model, works, self._log, self._flags, memory.watch):
                if "what" in line:
                    self.row.setdefault("load first", time.perf_counter() - begin)
                    memory.phase = "running"
                else:
                    self._take(line, works)
        finally:
            memory.close()
            rate = statistics.mean([*rates, host_bandwidth(size)])
            self.row |= {f"{phase} GB": peak / 1e9 for phase, peak in memory.peaks.items()}
            self.row |= {"memory GB/s": rate / 1e9, "read a token GB": read / 1e9, "allowed ×1": rate / read}

    def second(self, works: Sequence[Work]) -> None:
        """Until it is ready once more, with the same settings."""
        begin, flags = time.perf_counter(), [*self._flags, "--ready"]
        for _ in run(self._peer, self._python, self._model, works, self._log, flags):
            self.row.setdefault("load second", time.perf_counter() - begin)

    def alone(self, works: Sequence[Work]) -> None:
        for line in run(self._peer, self._python, self._model, works, self._log, [*self._flags, "--cached"]):
            if "what" not in line:
                self._take(line, works)

    def _take(self, line: Row, works: Sequence[Work]) -> None:
        work = next(w for w in works if vars(w).items() <= line.items())
        self.row[title(work)] = line["decode_tok_s" if work.new_tokens > 1 else "prefill_tok_s"]
        if work.streams == 1:
            self.row.setdefault("first token", line["first_token_s"])


def forget(path: Path) -> None:
    """Take a file out of the page cache, for it was just written or read by another engine."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files(shapes: Iterable[str], kinds: Sequence[str], folder: Path) -> Iterable[tuple[str, str, Path]]:
    """(shape, kind, file) of each that is asked for and exists, made where it is missing."""
    for name in shapes:
        if name not in SHAPES:
            yield Path(name).stem, STORED, resolve_model(name)
            continue
        for kind in (kind for kind in kinds if kind in SHAPES[name].kinds):
            path = folder / f"{name}-{SHAPES[name].layers}-{kind}.gguf"
            if not path.exists():
                print(f"writing {path}", file=sys.stderr, flush=True)
                folder.mkdir(parents=True, exist_ok=True)
                write_file(SHAPES[name], kind, path, name)
            yield name, kind, path


def measure(given: argparse.Namespace) -> None:
    """All rounds of all files, a line for each engine as soon as it is done."""
    peers = [peer for name in given.engines for peer in (JAXLLM, *PEERS) if peer.name == name]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    for shape, kind, path in files(given.shapes, given.kinds, given.cache / "shapes") if given.rounds else ():
        read, of = bytes_a_token(path), SHAPES[shape].of if shape in SHAPES else None
        layers = f" ({SHAPES[shape].layers} of {of} layers)" if of else ""
        for number in range(given.rounds):
            for peer in peers:
                print(f"{shape} {kind}: {peer.name}, round {number + 1}", file=sys.stderr, flush=True)
                about = describe_machine() | {"shape": shape + layers, "kind": kind, "engine": peer.name}
                with tempfile.TemporaryDirectory() as compiled:
                    row = of_engine(peer, path, compiled, read, given)
                with given.output.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(about | row, ensure_ascii=False) + "\n")


def of_engine(peer: Peer, path: Path, compiled: str, read: int, given: argparse.Namespace) -> Row:
    """What was measured, and the engine's last words where it could not do all."""
    row: Row = {}
    try:
        measurement = Measurement(peer, path, given.cache, compiled)
        row = measurement.row
        if given.together:
            measurement.first(given.together, read)
            measurement.second(given.together)
        if given.alone:
            measurement.alone(given.alone)
    except CannotRunError as error:
        print(f"{peer.name} {error}", file=sys.stderr, flush=True)
        row["cannot run"] = str(error)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def medians(rows: Sequence[Row]) -> Row:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, float))
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def ratios(ours: Row, theirs: Sequence[Row]) -> Row:
    """Of the best peer in each column; above 1 jaxllm is better."""
    found = {}
    for name, value in ours.items():
        others = [row[name] for row in theirs if row.get(name)]
        if others and value and not name.startswith("allowed"):
            less = name.startswith(LESS_IS_BETTER) or name.endswith(LESS_IS_BETTER)
            found[name] = min(others) / value if less else value / max(others)
    return found


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A table for each machine: a line for each engine on each file, and one of ratios."""
    parts = ["# Shapes of models beside peers\n\nWritten by `python -m benchmarks.shapes`."]
    grouped: dict[str, dict[str, dict[str, list[Row]]]] = {}
    for row in rows:
        machine = f"{row['processor']}, {row['cores']} cores ({', '.join(row['vector_units'])})"
        of_file = grouped.setdefault(machine, {}).setdefault(f"{row['shape']} {row['kind']}", {})
        of_file.setdefault(row["engine"], []).append(row)
    for machine, by_file in grouped.items():
        lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
        failed = []
        for name, by_engine in by_file.items():
            found = {engine: medians(of_engine) for engine, of_engine in by_engine.items()}
            lines += [line(f"{name}: {engine}", row, columns) for engine, row in found.items()]
            peers = [row for engine, row in found.items() if engine != JAXLLM.name]
            if JAXLLM.name in found and peers:
                lines.append(line("**jaxllm / best peer**", ratios(found[JAXLLM.name], peers), columns, ratio=True))
            failed += [
                f"{name}: {row['engine']} {row['cannot run']}"
                for of_engine in by_engine.values()
                for row in of_engine
                if "cannot run" in row
            ]
        parts.append("\n".join([f"## {machine}\n", *lines, "", *(f"- {words}" for words in dict.fromkeys(failed))]))
    return "\n\n".join(parts) + "\n"


def line(label: str, row: Row, columns: Sequence[str], ratio: bool = False) -> str:
    cells = ("–" if row.get(name) is None else _shown(row[name], ratio) for name in columns)
    return f"| {label} | {' | '.join(cells)} |"


def _shown(value: float, ratio: bool) -> str:
    return f"{value:.2f}" if ratio or value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Figures in the order of `COLUMNS`; there is no column for the others."""
    found = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, float))
    places = {name: [i for i, pattern in enumerate(COLUMNS) if re.match(pattern, name)] for name in found}
    return sorted((name for name in found if places[name]), key=lambda name: places[name])


def parse_arguments() -> argparse.Namespace:
    def several(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    def works(text: str) -> list[Work]:
        return list(map(Work.parse, several(text)))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=several, default=list(SHAPES), help=f"of {', '.join(SHAPES)}; or files")
    parser.add_argument(
        "--kinds", type=several, default=list(KINDS), help=f"of {', '.join(KINDS)}, as a shape has them"
    )
    names = [JAXLLM.name, "xllamacpp", "ik_llama.cpp", "openvino-genai"]
    parser.add_argument("--engines", type=several, default=names, help=f"default {','.join(names)}")
    parser.add_argument("--together", type=works, default=TOGETHER, help=f"short works (default {TOGETHER})")
    parser.add_argument("--alone", type=works, default=ALONE, help=f"long ones of one stream (default {ALONE})")
    parser.add_argument("--rounds", type=int, default=1, help="0 only writes the table anew")
    parser.add_argument("--cache", type=Path, default=CACHE_DIR, help="files and the peers' environments")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "shapes", help="path without suffix")
    given = parser.parse_args()
    known = {"engines": [JAXLLM.name, *(peer.name for peer in PEERS)], "kinds": list(KINDS)}
    for option, accepted in known.items():
        if unknown := set(getattr(given, option)) - set(accepted):
            parser.error(f"--{option} has {', '.join(sorted(unknown))}; accepted are {', '.join(accepted)}")
    return given


def main() -> None:
    given = parse_arguments()
    measure(given)
    lines = given.output.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    rows = list(map(json.loads, lines))
    given.output.with_suffix(".md").write_text(markdown(rows, columns_of(rows)), encoding="utf-8")
    print(given.output.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
