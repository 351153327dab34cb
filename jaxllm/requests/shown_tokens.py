"""Tokens as HTML, tinted by how likely they were: what notebooks show of an output."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple, Protocol

MOST_TOKENS = 2000
"""Of a text; what follows is counted only."""
_ORANGE = (230, 120, 0)
_STRONGEST = 0.6
"""How opaque the tint of an impossible token is: text remains readable on it, on light pages and on dark ones."""


class Likely(Protocol):
    """What is read of a `Logprob`."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def decoded_token(self) -> str | None: ...
    @property
    def token_bytes(self) -> bytes | None: ...


class ShownToken(NamedTuple):
    """A token's text, as far as it completes characters, and what hovering over it says."""

    text: str
    probability: float | None
    hint: str


def shown_tokens(
    token_ids: Sequence[int], steps: Sequence[Mapping[int, Likely] | None], whole: str | None = None
) -> list[ShownToken]:
    """The tokens of one text with their log-probabilities; a step is None where nothing predicts its token.

    A character of several tokens is shown at its last one. Tokens without a text are shown by their ids, but for the
    first of a text that is known as a `whole`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    found = []
    for token_id, step in zip(token_ids, steps, strict=True):
        entry = None if step is None else step.get(token_id)
        if entry is None or entry.token_bytes is None:
            text = f"⟨{token_id}⟩"
        else:
            text = decoder.decode(entry.token_bytes) or "·"
        probability = None if entry is None else math.exp(entry.logprob)
        found.append(ShownToken(text, probability, _hint(token_id, step)))
    rest = "".join(token.text for token in found[1:])
    if found and found[0].probability is None and whole is not None and whole.endswith(rest) and whole != rest:
        found[0] = found[0]._replace(text=whole.removesuffix(rest))
    return found


def _hint(token_id: int, step: Mapping[int, Likely] | None) -> str:
    if step is None or token_id not in step:
        return f"token {token_id}"
    own = step[token_id]
    ranked = "" if own.rank is None else f", rank {own.rank}"
    exact = f"log-probability {own.logprob:.3f}{ranked}, token {token_id}"
    first = f"{_named(token_id, own)}: {_percent(own.logprob)} ({exact})"
    others = [
        f"{_named(other, entry)}: {_percent(entry.logprob)}" for other, entry in step.items() if other != token_id
    ]
    return "\n".join([first, *others])


def _named(token_id: int, entry: Likely) -> str:
    return str(token_id) if entry.decoded_token is None else repr(entry.decoded_token)


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.3g} %"


def tinted(tokens: Iterable[ShownToken]) -> str:
    """Spans whose background is the stronger the less likely the token was, each with its hint as a tooltip."""
    return "".join(_span(token) for token in tokens)


def _span(token: ShownToken) -> str:
    style = ""
    if token.probability is not None:
        opacity = _STRONGEST * (1 - min(max(token.probability, 0.0), 1.0))
        style = f' style="background-color:rgba({",".join(map(str, _ORANGE))},{opacity:.3f})"'
    return f'<span title="{escape(token.hint)}"{style}>{escape(token.text)}</span>'


def text_block(html: str, *, faint: bool = False) -> str:
    """A part of a text, with its spaces and line ends as they are."""
    style = ' style="opacity:.65"' if faint else ""
    return f"<span{style}>{html}</span>"


def panel(texts: Sequence[str], note: str) -> str:
    """One output: texts under each other, and a line about them."""
    shown = "".join(
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6">{text}</div>' for text in texts
    )
    return f'<div style="margin:.4em 0">{shown}<div style="font-size:85%;opacity:.7">{escape(note)}</div></div>'


def shortened(text: str, most: int = 60) -> str:
    """A text as `repr` writes it, of which the middle may be left out."""
    half = most // 2
    return repr(text) if len(text) <= most else f"{text[:half]!r} … {text[-half:]!r}"
