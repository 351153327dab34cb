"""What a front door makes of images: pixels for the model's tower, and their places in a prompt."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.messages import EngineInfo, PlacedImages, SeenImage
from jaxllm.errors import InvalidRequestError
from jaxllm.folders import in_home
from jaxllm.recent import Recent

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxllm.models.vision.processor import Processor
    from jaxllm.text.tokenizer import Tokenizer

KEPT_BYTES = 2**28
"""Bytes of prepared images that are remembered: who asks again about an image need not have it decoded again."""


GivenImage = Any
"""The bytes or the path of a file, `[H, W, 3]` of uint8, or an image of Pillow."""


class RowLimits(NamedTuple):
    """The least and the most rows that an image is to have; None: as the model's processor has it."""

    least: int | None = None
    most: int | None = None


NO_LIMITS = RowLimits()


class Eyes:
    """Prepares images for one model. Any thread may use it."""

    def __init__(
        self,
        processor: Processor,
        tokenizer: Tokenizer,
        info: EngineInfo,
        limits: RowLimits = NO_LIMITS,
        most_images: int | None = None,
    ):
        self._processor = processor.limited(*limits)
        self._limits = limits
        self._info = info
        self._most_images = most_images
        self._kept: Recent[SeenImage] = Recent(KEPT_BYTES, lambda image: len(image.pixels))
        self.placeholder = tokenizer.backend.id_to_token(processor.placeholder)
        """The text that stands for an image in a prompt."""
        tokens = {processor.placeholder, processor.image}
        self.marks: list[str] = sorted(filter(None, map(tokenizer.backend.id_to_token, tokens)))
        """The texts that no caller's text may spell as tokens."""
        fixed = processor.limited(1, 1) is processor
        self.row_pixels = None if fixed else processor.unit**2
        """The pixels of a row; None where the sizes of images cannot be chosen."""

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None, info: EngineInfo) -> Eyes:
        """Those of an engine's model. Raises InvalidRequestError: it does not see, or runs without a tokenizer."""
        if not info.most_image_rows:
            raise InvalidRequestError(f"the model {info.model_name} sees no images; only text is served")
        if tokenizer is None:
            raise InvalidRequestError("images need a tokenizer, and the engine runs without one (skip_tokenizer_init)")
        from jaxllm.engine.start.tokenizer import open_model  # these load JAX, which servers of text do without
        from jaxllm.models.vision.spec import vision_spec
        from jaxllm.weights import source

        path = source.resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
        checkpoint = open_model(config, path)
        try:
            spec = vision_spec(checkpoint)
        finally:
            checkpoint.close()
        assert spec is not None, "an engine that has rows for images has a tower"
        limits = RowLimits(config.image_min_tokens, config.image_max_tokens)
        processor = spec.processor(lambda text: tokenizer.encode(text, False))
        return cls(processor, tokenizer, info, limits, (config.limit_mm_per_prompt or {}).get("image"))

    def look(self, image: GivenImage, limits: RowLimits = NO_LIMITS) -> SeenImage:
        """An image ready for the model.

        Raises InvalidRequestError: it is none of these, damaged, too large, or of a shape that the model does not take.
        """
        from PIL import Image as pillow

        from jaxllm.models.vision.decode import decode_image, rgb

        if isinstance(image, str | os.PathLike):
            try:
                image = in_home(image).read_bytes()
            except OSError as error:
                raise InvalidRequestError(f"the image {str(image)!r} cannot be read: {error.strerror}") from None
        bounds = limits.most, self._limits.most, any(limits) and self._info.most_image_rows
        most = min(filter(None, bounds), default=None)  # a request may ask for less than the settings allow
        least = limits.least or self._limits.least
        limits = RowLimits(least and min(least, most or least), most)
        if isinstance(image, bytes):
            key = hashlib.sha256(image).digest() + repr(limits).encode()
            found = self._kept.get(key)
            if found is None:
                found = self._seen(decode_image(image), limits)
                self._kept.put(key, found)
            return found
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
                raise InvalidRequestError(f"an image is {image.dtype} {list(image.shape)}; it must be uint8 [H, W, 3]")
            image = pillow.fromarray(image)
        if not isinstance(image, pillow.Image):
            raise InvalidRequestError(
                f"an image is {type(image).__name__}; it must be a path, bytes, a NumPy array or an image of Pillow"
            )
        return self._seen(rgb(image), limits)

    def place(self, ids: Sequence[int], images: Sequence[SeenImage]) -> tuple[list[int], PlacedImages]:
        """The tokens of a prompt with those of each image in the place of its placeholder.

        Raises InvalidRequestError: there are more or fewer placeholders than images, or more rows than the engine has.
        """
        from jaxllm.models.vision.processor import Grid

        if self._most_images is not None and len(images) > self._most_images:
            raise InvalidRequestError(
                f"the request has {len(images)} images; accepted are {self._most_images} (limit_mm_per_prompt)"
            )
        rows, most = sum(image.num_rows for image in images), self._info.most_image_rows
        if rows > most:
            raise InvalidRequestError(
                f"the request's images take {rows} tokens; accepted are {most} (media_cache_memory)"
            )
        found = self._processor.expand(ids, [Grid(image.tiles, image.cut) for image in images])
        arrays: dict[str, Any] = {"visible_until": found.visible_until, "places": found.places}
        data = {name: None if array is None else array.tobytes() for name, array in arrays.items()}
        return found.ids, PlacedImages(tuple(images), found.rows.tobytes(), **data, delta=found.delta)

    def _seen(self, image: Image, limits: RowLimits) -> SeenImage:
        processor = self._processor.limited(*limits)
        grid, pixels = processor.grid(image.height, image.width), processor.pixels(image).tobytes()
        digest = hashlib.sha256(pixels)
        digest.update(repr(grid).encode())
        return SeenImage(digest.digest(), pixels, grid.tiles, grid.cut, processor.rows(grid))
