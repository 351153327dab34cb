"""A small chart as SVG, which a repository's page and the documentation's site both show without any script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 64, 24, 40, 48
LINE = "#4e79d7"
INK = "#808080"  # seen on white and on black


def line_chart(title: str, axis: str, xs: Sequence[int], ys: Sequence[float]) -> str:
    """A line through `ys` over the labels `xs` at equal distances; the vertical axis begins at 0."""
    top = 1.1 * max(ys)
    across, down = (WIDTH - LEFT - RIGHT) / (len(xs) - 1), HEIGHT - TOP - BOTTOM

    def x(i: int) -> float:
        return round(LEFT + i * across, 1)

    def y(value: float) -> float:
        return round(TOP + down * (1 - value / top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axis)}</text>',
    ]
    for quarter in range(5):
        value = top * quarter / 4
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    parts += [f'<text x="{x(i)}" y="{HEIGHT - 28}" text-anchor="middle">{at:,}</text>' for i, at in enumerate(xs)]
    path = " ".join(f"{x(i)},{y(value)}" for i, value in enumerate(ys))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])
