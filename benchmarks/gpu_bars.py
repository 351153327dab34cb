"""What Llama-3.1-8B should reach on a GPU, beside what `gpu.py` measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Found = tuple[float, Row]
"""A value, and the row that it rests on."""

ATTENTION_SHARE = 0.85
"""Of copy bandwidth; cells below it have a profile."""
ONE_STREAM = {"H100": 159, "H200": 228}
"""Tokens a second that are 85 % of the floor, by what the device's name contains."""


@dataclass(frozen=True)
class Bar:
    """A value to reach, or with `most` one not to exceed; `find` gives what was measured, None where nothing was."""

    name: str
    wanted: float
    find: Callable[[list[Row]], Found | None]
    most: bool = False


def decode(rows: list[Row], streams: int, weights: str = "") -> Row | None:
    """The greedy decode at the shortest context."""
    cells = [r for r in rows if (r["what"], r.get("variant"), r.get("isq", "")) == ("decode", "greedy", weights)]
    shortest = min((r["context"] for r in cells), default=0)
    return next((r for r in cells if (r["rows"], r["context"]) == (streams, shortest) and "toks" in r), None)


def of_decode(key: str, streams: int, weights: str = "") -> Callable[[list[Row]], Found | None]:
    def find(rows: list[Row]) -> Found | None:
        row = decode(rows, streams, weights)
        return row and (row[key], row)

    return find


def ratio(above: tuple[int, str], below: tuple[int, str]) -> Callable[[list[Row]], Found | None]:
    """Tokens a second of one decode over another's, each given by its streams and weights."""

    def find(rows: list[Row]) -> Found | None:
        a, b = decode(rows, *above), decode(rows, *below)
        return a and b and (a["toks"] / b["toks"], a)

    return find


def worst(what: str, key: str, where: Callable[[Row], bool] = lambda row: True, most: bool = False) -> Any:
    """The smallest of a part's values, or with `most` the greatest."""

    def find(rows: list[Row]) -> Found | None:
        cells = [(row[key], row) for row in rows if row["what"] == what and key in row and where(row)]
        return (max if most else min)(cells, key=lambda cell: cell[0], default=None)

    return find


BARS = (
    Bar(
        "attention's share of copy bandwidth, 8…256 rows",
        ATTENTION_SHARE,
        worst("attention", "share", lambda r: r["rows"] >= 8),
    ),
    Bar("1 stream's share of the floor", 0.85, of_decode("share", 1)),
    Bar("16 streams, times one", 12, ratio((16, ""), (1, ""))),
    Bar("64 streams' share of the floor", 0.75, of_decode("share", 64)),
    Bar("256 streams, tok/s", 11_000, of_decode("toks", 256)),
    Bar("prefill of 2,048 tokens and more, TFLOP/s", 400, worst("prefill", "TFLOPs", lambda r: r["tokens"] >= 2048)),
    *(
        Bar(f"{name} at one stream, times bf16", 2.2, ratio((1, name), (1, "")))
        for name in ("int4", "q4_0", "q4k", "q4_k_m", "gptq128", "mxfp4")
    ),
    *(
        Bar(f"{name}, 1 stream's share of the floor", 0.85, of_decode("share", 1, name))
        for name in ("q4_0", "q4k", "q4_k_m", "gptq128", "mxfp4", "fp8")
    ),
    Bar("host dispatch of a decode step, ms", 1, worst("decode", "host_ms", most=True), most=True),
)


def verdicts(rows: list[Row], device: str) -> list[Row]:
    """Each bar with what was measured, `pass`, `miss` or `not measured`, the cell that decides and its profile."""
    bars = [*BARS]
    for name, toks in ONE_STREAM.items():
        if name in device:
            bars.insert(2, Bar(f"1 stream on an {name}, tok/s", toks, of_decode("toks", 1)))
    return [_verdict(bar, rows) for bar in bars]


def _verdict(bar: Bar, rows: list[Row]) -> Row:
    found = bar.find(rows)
    wanted = f"{'≤' if bar.most else '≥'} {bar.wanted:,g}"
    if found is None:
        return {"bar": bar.name, "wanted": wanted, "measured": None, "verdict": "not measured"}
    value, row = found
    reached = value <= bar.wanted if bar.most else value >= bar.wanted
    cell = {key: row[key] for key in ("what", "variant", "rows", "tokens", "context") if key in row}
    verdict: Row = {"bar": bar.name, "wanted": wanted, "measured": value, "verdict": "pass" if reached else "miss"}
    verdict["where"] = " ".join(f"{v}" if k in ("what", "variant") else f"{k} {v}" for k, v in cell.items())
    return verdict | ({"profile": row["profile"]} if "profile" in row else {})
