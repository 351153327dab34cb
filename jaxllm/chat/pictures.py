"""Images in messages: as callers give them, and as a prompt with places for them is written."""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from jaxllm.engine.doors.eyes import NO_LIMITS, Eyes, GivenImage, RowLimits
from jaxllm.engine.messages import SeenImage
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.wording import shown

DATA_URL = "data:"
Detail = Literal["auto", "low", "high", "original"]
LOW_ROWS = 256
"""Most tokens of an image of which a client wants a low detail, where the model has images of several sizes."""

SEAM = f"seam{secrets.token_hex(8)}"
"""Written into a caller's text where it spells a token of images, which is encoded in two pieces then."""
PLACE = f"place{secrets.token_hex(8)}"
"""Stands for an image in a text until the template is rendered. Neither can be guessed, so no caller writes it."""


class Sent(NamedTuple):
    """An image as a client sends it: in base64, as a URL, or as the id of a file."""

    kind: Literal["base64", "url", "file_id"]
    text: str

    @classmethod
    def at(cls, url: str) -> Sent:
        """One of llama.cpp's clients may send base64 in place of a URL."""
        return cls("url" if ":" in url[:16] else "base64", url)

    @property
    def is_elsewhere(self) -> bool:
        return self.kind != "base64" and self.text[: len(DATA_URL)].lower() != DATA_URL

    def data(self) -> bytes:
        """Raises InvalidRequestError: it is no base64, or is not in the request itself."""
        text = self.text
        if self.is_elsewhere:
            raise InvalidRequestError(f"{shown(text)} is only fetched by a server; send the image itself")
        if text[: len(DATA_URL)].lower() == DATA_URL:
            head, comma, text = text.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise InvalidRequestError(f"{shown(head)} is no beginning of an image; it must be data:image/…;base64,")
        try:
            text = "".join(text.split())
            found = binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
        except ValueError:
            found = b""
        if not found:
            raise InvalidRequestError(f"{shown(text)} is no image in base64")
        return found


@dataclass(eq=False)
class Picture:
    """An image in a message; `place` is where a request has it, by default its part of the message's content."""

    given: GivenImage | Sent
    detail: str | None = None
    place: Field | None = None

    def look(self, eyes: Eyes, limits: RowLimits) -> SeenImage:
        """Raises InvalidRequestError."""
        image = self.given.data() if isinstance(self.given, Sent) else self.given
        if self.detail == "low":
            limits = limits._replace(most=min(limits.most or LOW_ROWS, LOW_ROWS))
        return eyes.look(image, limits)


Part = str | Picture


class ImageLimits(NamedTuple):
    """The sizes that all images of a request are to have, in tokens or in pixels."""

    min_tokens: int | None = None
    max_tokens: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def rows(self, eyes: Eyes) -> RowLimits:
        """Raises InvalidRequestError: the model's images are of sizes that nobody chooses."""
        if self == ANY_SIZE:
            return NO_LIMITS
        if eyes.row_pixels is None:
            name = next(name for name, value in self._asdict().items() if value is not None)
            problem = " is set, but the sizes of this model's images cannot be chosen"
            raise InvalidRequestError([Field("mm_processor_kwargs", name), problem])
        least, most = (pixels and max(pixels // eyes.row_pixels, 1) for pixels in (self.min_pixels, self.max_pixels))
        return RowLimits(self.min_tokens or least, self.max_tokens or most)


ANY_SIZE = ImageLimits()


def given_picture(part: Any) -> Picture | None:
    """The image of a notebook's part; None for any other."""
    match part:
        case {"type": "image", "image": image, **rest} | {"type": "image_pil", "image_pil": image, **rest} if not rest:
            return Picture(_at_home(image))
        case {"type": "image_url", "image_url": {"url": str(url), **fields}, **rest}:
            detail = fields.pop("detail", None)
            if not fields and not rest and isinstance(detail, str | None):
                return Picture(_at_home(url), detail)
    return None


def _at_home(image: Any) -> Any:
    """A text is a path, a file's URL, or a data URL: a notebook may read what its owner may."""
    if not isinstance(image, str):
        return image
    scheme = image.partition(":")[0].lower()
    if scheme == "file":
        return Path(unquote(urlsplit(image).path))
    return Sent("url", image) if scheme in ("data", "http", "https") else image


def content_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """For templates: their places alone, not the images."""
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]


def as_text(content: Any) -> Any:
    """A content for templates as one string, in which PLACE stands for an image."""
    if not isinstance(content, list):
        return content
    return "\n".join(PLACE if part["type"] == "image" else part["text"] for part in content)


def without_marks(value: Any, marks: Sequence[str]) -> Any:
    """JSON values in which no text spells a token of images: a SEAM is in its middle."""
    match value:
        case str():
            for mark in marks:
                value = value.replace(mark, f"{mark[:1]}{SEAM}{mark[1:]}")
                if any(value.endswith(mark[:count]) for count in range(1, len(mark))):
                    value += SEAM  # the next part may begin with the rest
            return value
        case Mapping():
            return {without_marks(name, marks): without_marks(one, marks) for name, one in value.items()}
        case list() | tuple():
            return [without_marks(one, marks) for one in value]
    return value
