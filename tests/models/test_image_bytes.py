"""Bytes of pictures, whole and damaged."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxllm.errors import InvalidRequestError
from jaxllm.models.vision.decode import FORMATS, decode_image


def picture(height: int = 9, width: int = 14) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_read(kind):
    decoded = decode_image(encoded(picture(), kind))
    assert decoded.mode == "RGB" and decoded.size == (14, 9)
    if kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(decoded, picture())


@pytest.mark.parametrize("kind", ["ICO", "PPM", "TGA", "SGI", "JPEG2000"])
def test_other_formats_are_refused_in_our_own_words(kind):
    with pytest.raises(InvalidRequestError, match=r"^an image is not readable; accepted are files of the formats JPEG"):
        decode_image(encoded(picture(16, 16), kind))


def test_what_is_turned_comes_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right
    decoded = decode_image(encoded(picture(), exif=exif))
    assert np.array_equal(decoded, np.rot90(np.asarray(picture()), -1))


def test_transparency_lies_on_white():
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0], pixels[1, 1] = (10, 20, 30, 255), (200, 0, 0, 128)
    decoded = np.asarray(decode_image(encoded(Image.fromarray(pixels))))
    assert decoded[0, 0].tolist() == [10, 20, 30] and decoded[0, 1].tolist() == [255] * 3
    assert np.abs(decoded[1, 1].astype(int) - [227, 127, 127]).max() <= 1
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 9, 9])
    assert decode_image(encoded(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_keep_their_shades():
    shades = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    decoded = np.asarray(decode_image(encoded(Image.fromarray(shades))))
    dark = np.asarray(decode_image(encoded(Image.fromarray(shades // 512))))
    assert dark.max() == 0
    assert np.abs(decoded[..., 0] - shades / 257.0).max() <= 0.51 and (decoded == decoded[..., :1]).all()


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        more = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **more)
        assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


def test_cmyk_and_grey_become_rgb():
    for mode in ("CMYK", "L", "1"):
        assert decode_image(encoded(picture().convert(mode), "TIFF")).mode == "RGB"


def huge_png(side: int) -> bytes:
    """A valid header and nothing that could be decoded in little memory."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(2**16))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", data) + part(b"IEND", b"")


def test_sizes_are_read_before_anything_is_decoded():
    with pytest.raises(InvalidRequestError, match="an image has 12,000 × 12,000 pixels; accepted are 80,000,000 in"):
        decode_image(huge_png(12_000))
    with pytest.raises(InvalidRequestError, match="too many pixels; accepted are 80,000,000 in all"):
        decode_image(huge_png(60_000))
    with pytest.raises(InvalidRequestError, match="an image has 20 bytes; accepted are 10"):
        decode_image(bytes(20), most_bytes=10)
    with pytest.raises(InvalidRequestError, match="14 × 9 pixels; accepted are 100 in all"):
        decode_image(encoded(picture()), most_pixels=100)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut off, with bytes changed, left out or doubled."""
    array = np.frombuffer(data, np.uint8).copy()
    kind, at = rng.integers(4), int(rng.integers(len(array)))
    if kind == 0:
        return array[:at].tobytes()
    if kind == 1:
        where = rng.integers(len(array), size=int(rng.integers(1, 9)))
        array[where] = rng.integers(0, 256, len(where))
        return array.tobytes()
    length = int(rng.integers(1, 40))
    if kind == 2:
        return np.delete(array, np.s_[at : at + length]).tobytes()
    return np.insert(array, at, array[at : at + length]).tobytes()


def fuzz(count: int) -> None:
    rng = np.random.default_rng(1)
    whole = [encoded(picture(30, 40), kind) for kind in FORMATS]
    whole += [encoded(picture().convert(mode), "PNG") for mode in ("RGBA", "P", "L", "1", "I;16")]
    for number in range(count):
        data = damaged(whole[number % len(whole)], rng)
        try:
            image = decode_image(data, most_pixels=10**6)
        except InvalidRequestError as error:
            assert str(error).startswith("an image ") and "0x" not in str(error) and "\n" not in str(error)
        else:
            assert image.mode == "RGB" and image.width * image.height <= 10**6


def test_damaged_files_are_refused_or_read():
    fuzz(600)


@pytest.mark.thorough
def test_many_damaged_files():
    fuzz(10_000)
