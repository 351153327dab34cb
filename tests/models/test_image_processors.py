"""Images and prompts as each family prepares them, against transformers' own processors (Pillow's, without torch)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from jaxllm.errors import InvalidRequestError
from jaxllm.models.vision.families import vision_family
from jaxllm.models.vision.processor import Grid, Processor, resized, rope_places, visible_until
from tests.models.vision_harness import stated
from tests.reference.tiny import tiny_config
from tests.reference.vision import PREPARATIONS, rows_first

SHAPES = [(40, 56), (75, 130), (130, 75), (61, 61), (301, 47), (9, 9), (200, 333)]
SEPARATE = ("smolvlm", "idefics3")  # whose processors take images by prompt

WORDS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    """A tokenizer with a token for each special token, each letter, and each number of ends of lines up to four."""
    ids, rest = [], text
    while rest:
        end = rest.find(">") + 1 if rest.startswith("<") else rest.find("]") + 1 if rest.startswith("[") else 1
        if rest.startswith("\n"):
            end = min(len(rest) - len(rest.lstrip("\n")), 4)
        ids.append(WORDS.setdefault(rest[:end], 1000 + len(WORDS)))
        rest = rest[end:]
    return ids


def words(ids: list[int]) -> str:
    names = {number: word for word, number in WORDS.items()}
    return "".join(names.get(token, f"({token})") for token in ids)


def processor(name: str, **options: Any) -> Processor:
    config, (kind, settings) = tiny_config(name), PREPARATIONS[name]
    family = vision_family(config)
    assert family is not None
    return family.processor(config, stated(getattr(transformers, kind)(**settings)) | options, encode)


def picture(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * width)
    small = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    noise = rng.integers(0, 30, (height, width, 3), np.uint8)
    return Image.fromarray(np.asarray(Image.fromarray(small).resize((width, height))) // 2 + noise)


def as_patches(values: np.ndarray, size: int) -> np.ndarray:
    """`[3, H, W]` as patches, channels first."""
    _, height, width = values.shape
    cut = values.reshape(3, height // size, size, width // size, size)
    return cut.transpose(1, 3, 0, 2, 4).reshape(-1, 3 * size * size)


@pytest.mark.parametrize("name", PREPARATIONS)
def test_pixels_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, (kind, settings) = processor(name), PREPARATIONS[name]
    theirs = getattr(transformers, kind)(**settings)
    for shape in SHAPES:
        image = picture(*shape)
        with monkeypatch.context() as patched:
            patched.setattr(Image.Image, "resize", rows_first(Image.Image.resize))
            given: Any = [[image]] if name in SEPARATE else [image]
            found = theirs(images=given, return_tensors="np")
        values, grid = np.asarray(found["pixel_values"]), ours.grid(*shape)
        if "image_grid_thw" in found:  # patches of a row lie next to each other there
            [(_, height, width)] = found["image_grid_thw"]
            values = values.reshape(height // 2, width // 2, 2, 2, -1).swapaxes(1, 2).reshape(height * width, -1)
            assert grid.tiles == ((height, width),)
        elif "image_position_ids" in found:
            values = 2 * (values[0, : grid.patches] - np.float32(0.5))
            assert grid.patches == 9 * found["num_soft_tokens_per_image"][0]
        else:
            tiles = values[0] if name in SEPARATE else values
            assert len(tiles) == len(grid.tiles)
            values = np.concatenate([as_patches(tile, ours.patch) for tile in tiles])
        patches = ours.patches(image)
        assert patches.dtype == np.float32 and patches.shape == values.shape
        assert np.abs(patches - values).max() < 1e-6


def test_resizing_does_not_depend_on_the_release_of_pillow() -> None:
    """Pillow 13 begins with the columns where that is cheaper, which gives other numbers."""
    image = picture(488, 640)
    expected = image.resize((644, 488), 3).resize((644, 476), 3)
    assert np.array_equal(resized(image, (476, 644), 3), expected)


def test_m_rope_places_are_those_of_transformers() -> None:
    """Two words, an image of 4 × 6 patches, a word, one of 2 × 2, two words: Qwen2.5-VL's and Qwen3-VL's, as run."""
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0], bool)
    places, delta = rope_places(mask, [(2, 8), (9, 10)], [Grid(((4, 6),)), Grid(((2, 2),))], 2)
    assert places.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert delta == -3


def test_tokens_of_images_side_by_side_see_each_other() -> None:
    assert visible_until(np.array([0, 1, 1, 1, 0, 0, 1], bool)).tolist() == [0, 3, 3, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("qwen2_vl", (40, 56), "ab(120)(120)cd"),
        ("gemma4_e", (48, 48), "ab(122)" + "(120)" * 64 + "(123)cd"),
        ("gemma3", (10, 20), "ab\n\n(122)(127)(127)(127)(127)(123)\n\ncd"),
        ("mistral3_vision", (50, 84), "ab(10)(10)(10)[IMG_BREAK](10)(10)(10)[IMG_END]cd"),
        ("lighton_ocr", (50, 84), "ab" + "(120)" * 6 + "cd"),
        ("llava", (50, 84), "ab" + "(120)" * 16 + "cd"),
        ("internvl", (56, 112), "ab<img>" + "(120)" * 4 * 3 + "</img>cd"),
        (
            "smolvlm", (64, 128),
            "ab<fake_token_around_image><row_1_col_1>(120)(120)(120)(120)<fake_token_around_image><row_1_col_2>(120)"
            "(120)(120)(120)\n\n<fake_token_around_image><global-img>(120)(120)(120)(120)<fake_token_around_image>cd",
        ),
    ],
)  # fmt: skip
def test_an_image_in_a_prompt(name: str, shape: tuple[int, int], text: str) -> None:
    ours = processor(name)
    grid = ours.grid(*shape)
    found = ours.expand([*encode("ab"), ours.placeholder, *encode("cd")], [grid])
    assert words(found.ids) == text
    assert found.spans == [(2, len(found.ids) - 2)]
    assert found.rows.max() + 1 == ours.rows(grid) == found.ids.count(ours.image)
    assert [found.ids[at] for at in np.flatnonzero(found.rows >= 0)] == [ours.image] * ours.rows(grid)


def test_smolvlm_without_tiles_has_one_for_all() -> None:
    ours = processor("smolvlm", do_image_splitting=False)
    found = ours.expand([ours.placeholder], [ours.grid(64, 128)])
    assert words(found.ids).startswith("<fake_token_around_image><global-img>(120)") and ours.rows(ours.grid(9, 9)) == 4


def test_ends_of_lines_around_an_image_of_gemma_3_become_one_token() -> None:
    """As its tokenizer makes of the text that transformers writes."""
    ours = processor("gemma3")
    found = ours.expand([*encode("a\n"), ours.placeholder, *encode("\nb")], [ours.grid(9, 9)])
    assert found.ids == [*encode("a\n\n\n"), 122, *[127] * 4, 123, *encode("\n\n\nb")]
    assert found.spans == [(1, 9)] and found.rows.tolist() == [-1, -1, -1, 0, 1, 2, 3, -1, -1, -1]
    assert found.visible_until.tolist() == [0, 1, 2, 6, 6, 6, 6, 7, 8, 9]


def test_as_many_places_as_images() -> None:
    ours = processor("llava")
    with pytest.raises(InvalidRequestError, match="the prompt has 2 places for images, and the request 1 images"):
        ours.expand([ours.placeholder, 5, ours.placeholder], [ours.grid(9, 9)])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "gemma4_e", "mistral3_vision", "internvl", "smolvlm"])
def test_rows_are_limited_on_request(name: str) -> None:
    ours = processor(name, max_soft_tokens=280) if name == "gemma4_e" else processor(name)
    for most in (6, 10, 40):
        limited = ours.limited(max_rows=most)
        counts = [limited.rows(limited.grid(*shape)) for shape in ((300, 300), (200, 333))]
        assert max(counts) <= max(most, 2 * 4)


def test_pixels_are_limited_by_options() -> None:
    ours = processor("qwen3_vl", max_pixels=32 * 32 * 5, min_pixels=1)
    assert ours.rows(ours.grid(400, 400)) <= 5


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma4_e"])
def test_a_shape_that_no_tower_takes_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"an image has|images may have"):
        processor(name).limited(max_rows=0 if name == "gemma4_e" else None).grid(1, 4000)


def test_importing_it_imports_no_jax() -> None:
    code = "import jaxllm.models.vision.processor, jaxllm.models.vision.decode, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
