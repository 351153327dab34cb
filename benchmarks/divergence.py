"""How far each engine's log-probabilities are from those of the float32 model with the same weights.

python benchmarks/divergence.py [--engines jaxllm ik_llama.cpp xllamacpp] [--tokens 256]

A passage of a book is read a token at a time, as an answer is generated. After each token the engine says how likely
every token of the vocabulary is to be next. The reference is jaxllm with the file's weights expanded to float32, which
equals transformers on the same weights. Shown are the mean of the Kullback-Leibler divergence from the reference to the
engine, in nats, its largest value, and at how many tokens in a hundred the most likely one is the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from peers.install import HERE, JAXLLM, PEERS, CannotRunError, environment_variables, last_line, prepare
from rich.console import Console
from rich.table import Table

from jaxllm.cli.bench.comparing import TEXT
from jaxllm.config import CACHE_DIR, EngineConfig
from jaxllm.engine.start.tokenizer import resolve_tokenizer
from jaxllm.weights.source import resolve_model

FIRST = 32
"""Tokens that are given before the first one is predicted."""
GIVING = ("jaxllm", "ik_llama.cpp", "xllamacpp")
"""Engines that say how likely every token is."""


def main() -> None:
    arguments = parse_arguments()
    gguf = resolve_model(arguments.model)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.json"
        text.write_text(json.dumps(passage(arguments.model, arguments.tokens)))
        reference = ask("jaxllm", gguf, text, arguments, "--dtype", "float32", "--expanded")
        for engine in arguments.engines:
            for dtype in ("bfloat16", "float32") if engine == JAXLLM.name else (None,):
                print(f"asking {engine} {dtype or ''}", file=sys.stderr, flush=True)
                found = ask(engine, gguf, text, arguments, *(["--dtype", dtype] if dtype else []))
                rows[f"{engine} {dtype or ''}".strip()] = difference(reference, found)
    about = describe_machine() | {"model": gguf.name, "tokens": arguments.tokens}
    Console(width=140).print(table_of(rows, about))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"about": about, "engines": rows}, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="built-in name or .gguf file (default %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=GIVING, default=GIVING, help="which to ask (default all)")
    parser.add_argument("--tokens", type=int, default=256, help="how many are predicted (default %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "divergence.json")
    parser.add_argument("--cache", type=Path, default=CACHE_DIR / "peers", help="where the peers' environments live")
    return parser.parse_args()


def passage(model: str, count: int) -> dict[str, Any]:
    """The book's first tokens, and the size of the vocabulary."""
    tokenizer = resolve_tokenizer(EngineConfig(model=model))
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: FIRST + count]
    if len(ids) < FIRST + count:
        raise SystemExit(f"--tokens is {count}: the text has {len(ids) - FIRST} after the first {FIRST}")
    return {"ids": ids, "first": FIRST, "vocabulary": tokenizer.vocab_size}


def ask(engine: str, gguf: Path, text: Path, arguments: argparse.Namespace, *more: str) -> np.ndarray:
    """[tokens, vocabulary] log-probabilities, float64. Raises CannotRunError with the engine's last words."""
    peer = next(peer for peer in (JAXLLM, *PEERS) if peer.name == engine)
    python, model = prepare(peer, gguf, arguments.cache)
    output = text.with_name("output")
    command = [python, HERE / peer.runner, "--model", model, "--text", text, "--output", output, *more]
    variables = None if peer is JAXLLM else environment_variables(python.parent.parent)
    done = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True)
    if done.returncode:
        raise CannotRunError(f"{engine} ended with {done.returncode}: {last_line(done.stderr)}")
    return np.fromfile(output, np.float32).reshape(arguments.tokens, -1).astype(np.float64)


def difference(reference: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """What is shown of an engine. Rows are normalised first: engines say their numbers with few digits."""
    found = found - np.logaddexp.reduce(found, axis=1, keepdims=True)
    reference = reference - np.logaddexp.reduce(reference, axis=1, keepdims=True)
    divergence = (np.exp(reference) * (reference - found)).sum(axis=1)
    same = float((reference.argmax(1) == found.argmax(1)).mean())
    return {"mean": float(divergence.mean()), "largest": float(divergence.max()), "same_percent": 100 * same}


def table_of(rows: dict[str, dict[str, float]], about: dict[str, Any]) -> Table:
    table = Table(title=f"Divergence from the float32 model, nats; {about}", title_justify="left")
    for header in ("", "mean", "largest", "same most likely token, %"):
        table.add_column(header, justify="left" if not header else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['mean']:.2e}", f"{row['largest']:.2e}", f"{row['same_percent']:.1f}")
    return table


if __name__ == "__main__":
    main()
