"""The README's picture of speed, from benchmarks/results/cpu.md: `python benchmarks/bar_chart.py` writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, PICTURE = ROOT / "benchmarks/results/cpu.md", ROOT / "docs/images/speed.svg"
ENGINES = ("jaxllm", "OpenVINO GenAI", "ik_llama.cpp")
STREAMS = ("1 stream", "4 streams", "16 streams", "32 streams")
TITLE = "Decode, tokens a second over all streams: SmolLM2-135M in four bits, two cores of an AMD EPYC"
COLOURS = ("#4e79d7", "#e0a030", "#8a8f98")
INK = "#808080"  # seen on white and on black
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, BAR = 720, 240, 16, 56, 28, 48


def bar_chart(title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """A group of bars for each label, one bar a series, each with its number above it."""
    top = max(max(values) for values in series.values())
    floor, across = HEIGHT - BOTTOM, (WIDTH - 2 * LEFT) / len(groups)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<text x="{LEFT}" y="16" font-size="14">{escape(title)}</text>',
    ]
    for at, (name, values) in enumerate(series.items()):
        parts.append(f'<rect x="{LEFT + 150 * at}" y="26" width="12" height="12" fill="{COLOURS[at]}"/>')
        parts.append(f'<text x="{LEFT + 150 * at + 18}" y="36">{escape(name)}</text>')
        for group, value in enumerate(values):
            x, high = LEFT + group * across + at * (BAR + 4), (floor - TOP - 14) * value / top
            parts.append(
                f'<rect x="{x:.0f}" y="{floor - high:.1f}" width="{BAR}" height="{high:.1f}" fill="{COLOURS[at]}"/>'
            )
            parts.append(
                f'<text x="{x + BAR / 2:.0f}" y="{floor - high - 4:.1f}" text-anchor="middle">{value:,.0f}</text>'
            )
    for group, label in enumerate(groups):
        middle = LEFT + group * across + len(series) * (BAR + 4) / 2
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def speed() -> str:
    """From the table in which all three engines took turns."""
    text = RESULTS.read_text(encoding="utf-8")
    rows = text[: text.index(f"| {ENGINES[-1]} |")].rpartition("\n\n")[2] + text[text.index(f"| {ENGINES[-1]} |") :]
    found = {}
    for engine in ENGINES:
        match = re.search(rf"^\| {re.escape(engine)} \|(.*)$", rows, re.MULTILINE)
        assert match
        found[engine] = [float(cell.replace(",", "")) for cell in match[1].split("|")[: len(STREAMS)]]
    return bar_chart(TITLE, STREAMS, found)


if __name__ == "__main__":
    PICTURE.write_text(speed(), encoding="utf-8")
