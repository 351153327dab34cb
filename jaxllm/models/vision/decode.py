"""From the bytes of a picture that a stranger sent to an RGB image, or to one line that says what is wrong with it.

The format and the size are read of the header before anything is decoded, since a file of a few kilobytes may hold
hundreds of megapixels. Pillow's own words are never passed on: they may hold addresses of this process's memory.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from jaxllm.errors import InvalidRequestError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MOST_BYTES = 32 * 2**20
MOST_PIXELS = 80_000_000  # below the number from which Pillow warns on its own
DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")  # grey of more than 8 bits


def decode_image(data: bytes, *, most_bytes: int = MOST_BYTES, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The picture, or the first frame of an animation, upright and on white.

    Raises InvalidRequestError: it is none of `FORMATS`, too large, or damaged.
    """
    if len(data) > most_bytes:
        raise InvalidRequestError(f"an image has {len(data):,} bytes; accepted are {most_bytes:,}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > most_pixels:
            raise InvalidRequestError(
                f"an image has {width:,} × {height:,} pixels; accepted are {most_pixels:,} in all"
            )
        image.load()
        return rgb(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError:  # Pillow's own limit
        raise InvalidRequestError(f"an image has too many pixels; accepted are {most_pixels:,} in all") from None
    except UnidentifiedImageError:
        named = ", ".join(FORMATS)
        raise InvalidRequestError(f"an image is not readable; accepted are files of the formats {named}") from None
    except InvalidRequestError:
        raise
    except MemoryError:
        raise InvalidRequestError("an image needs more memory than there is to decode it") from None
    except Exception:  # damaged files make Pillow raise errors of many types
        raise InvalidRequestError("an image is damaged or cut off, so that it cannot be decoded") from None


def rgb(image: Image.Image) -> Image.Image:
    if image.mode in DEEP:
        values: np.ndarray = np.asarray(image, np.float64)
        most = 65_535 if image.mode.startswith("I;") else float(values.max())
        values = values * (1 / 257 if most > 255 else 255 if image.mode == "F" and most <= 1 else 1)
        image = Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.new("RGBA", over.size, (255, 255, 255, 255))
        image.alpha_composite(over)
    return image if image.mode == "RGB" else image.convert("RGB")
