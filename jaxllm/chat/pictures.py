"""Images in messages: as callers give them, and as a prompt with places for them is written."""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxllm.engine.doors.eyes import Eyes, GivenImage, RowLimits
from jaxllm.engine.messages import SeenImage
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.wording import shown

Detail = Literal["auto", "low", "high", "original"]
LOW_ROWS = 256
"""Most tokens of an image of which a client wants a low detail, where the model has images of several sizes."""

SEAM = f"seam{secrets.token_hex(8)}"
"""Written into a caller's text where it spells a token of images, which is encoded in two pieces then."""
PLACE = f"place{secrets.token_hex(8)}"
"""Stands for an image in a text until the template is rendered. No caller can guess either of the two."""


class Sent(NamedTuple):
    """An image as a client sends it: in base64, as a URL, or as the id of a file."""

    text: str
    is_file: bool = False

    @property
    def is_elsewhere(self) -> bool:
        return self.is_file or (":" in self.text[:16] and self.text[:5].lower() != "data:")

    def data(self) -> bytes:
        """Raises InvalidRequestError: it is no base64, or is not in the request itself."""
        head, comma, text = self.text.partition(",")
        if self.is_elsewhere or (comma and not head.lower().endswith(";base64")):
            raise InvalidRequestError(f"{shown(self.text)} is not read here; send data:image/png;base64,…")
        text = "".join((text if comma else head).split())
        try:
            return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
        except ValueError:
            raise InvalidRequestError(f"{shown(text)} is no base64") from None


@dataclass(eq=False)
class Picture:
    """An image in a message; `place` is where a request has it, by default its part of the message's content."""

    given: GivenImage | Sent
    detail: str | None = None
    place: Field | None = None

    def look(self, eyes: Eyes, limits: RowLimits) -> SeenImage:
        """Raises InvalidRequestError."""
        if self.detail == "low":
            limits = limits._replace(most=min(limits.most or LOW_ROWS, LOW_ROWS))
        try:
            return eyes.look(self.given.data() if isinstance(self.given, Sent) else self.given, limits)
        except InvalidRequestError as error:
            raise self.refused(f": {error}") from None

    def refused(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError([self.place or Field("messages"), problem])


Part = str | Picture


def row_limits(sizes: Mapping[Any, int], eyes: Eyes) -> RowLimits:
    """The tightest of a request's `mm_processor_kwargs`. Raises InvalidRequestError: images have sizes of their own."""
    if not sizes:
        return RowLimits()
    if eyes.row_pixels is None:
        raise InvalidRequestError(
            [Field("mm_processor_kwargs"), " is set, but this model's images have no other sizes"]
        )
    rows = {name: size // (eyes.row_pixels if name.endswith("pixels") else 1) or 1 for name, size in sizes.items()}
    least, most = ([count for name, count in rows.items() if name.startswith(end)] for end in ("min", "max"))
    return RowLimits(max(least, default=None), min(most, default=None))


def given_picture(part: Any) -> Picture | None:
    """The image of a notebook's part, where a text is a path, as its owner may read all files; else None."""
    match part:
        case {"type": "image", "image": image} | {"type": "image_pil", "image_pil": image} if len(part) == 2:
            return Picture(image)
        case {"type": "image_url", "image_url": {"url": str(url), **others}} if others.keys() <= {"detail"}:
            return Picture(Sent(url), str(others.get("detail")))
    return None


def content_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """For templates: the places of images alone."""
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]


def as_text(content: Any) -> Any:
    """A content for templates as one string, in which PLACE stands for an image."""
    if not isinstance(content, list):
        return content
    return "\n".join(PLACE if part["type"] == "image" else part["text"] for part in content)


def without_marks(value: Any, marks: Sequence[str]) -> Any:
    """JSON values in which no text spells a token of images: a SEAM is in its middle."""
    if isinstance(value, str):
        for mark in marks:
            value = value.replace(mark, f"{mark[:1]}{SEAM}{mark[1:]}")
            if any(value.endswith(mark[:count]) for count in range(1, len(mark))):
                value += SEAM  # the next part may begin with the rest
    elif isinstance(value, Mapping):
        return {without_marks(name, marks): without_marks(one, marks) for name, one in value.items()}
    elif isinstance(value, list | tuple):
        return [without_marks(one, marks) for one in value]
    return value
