"""Models that see, in a whole engine, against transformers' greedy tokens and against themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM, InvalidRequestError, SamplingParams
from jaxllm.engine.doors.streams import Stream
from jaxllm.engine.messages import EngineRequest, PlacedImages, SeenImage
from jaxllm.engine.start import tower
from jaxllm.requests.outputs import RequestOutput
from tests.models.test_vision import Model, expanded
from tests.reference.vision import images

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4, "block_size": 8,
    "max_num_batched_tokens": 32, "enforce_eager": True,
}  # fmt: skip
BACKENDS = {"smolvlm": "reference", "qwen3_vl": "auto", "qwen2_5_vl": "reference", "gemma3": "auto"}


class Seeing:
    """A model that sees, in an engine, and the golden prompt about two images."""

    def __init__(self, name: str, folder: Path, **settings: Any):
        self.model = Model(name, folder)
        golden = self.model.golden
        self.ids, self.greedy = golden["token_ids"].tolist(), golden["greedy"].tolist()
        self.expanded = expanded(self.model, self.ids, int(golden["image"]))
        self.llm = LLM(str(self.model.path), **{**SETTINGS, "attention_backend": BACKENDS[name], **settings})

    def placed(self, pictures: Sequence[Image.Image] | None = None) -> PlacedImages:
        seen, processor = [], self.model.processor
        for image in pictures or images():
            pixels, grid = processor.pixels(image).tobytes(), processor.grid(image.height, image.width)
            digest = hashlib.sha256(pixels).digest()
            seen.append(SeenImage(digest, pixels, grid.tiles, grid.cut, processor.rows(grid)))
        found = self.expanded
        until, places = found.visible_until, found.places
        return PlacedImages(
            tuple(seen),
            found.rows.astype(np.int32).tobytes(),
            None if until is None else until.tobytes(),
            None if places is None else places.tobytes(),
            found.delta,
        )

    def asked(self, *asked: PlacedImages | list[int], **params: Any) -> list[RequestOutput]:
        """Answers to the golden prompt about other images, or to tokens."""
        params = {"max_tokens": len(self.greedy)} | params
        greedy = SamplingParams(temperature=0, ignore_eos=True, **params)
        items = [(None, one if isinstance(one, list) else self.ids, greedy) for one in asked]
        return self.llm._run(items, False, images=[None if isinstance(one, list) else one for one in asked])


def said(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=BACKENDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    found = Seeing(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.llm.shutdown()


def others() -> list[Image.Image]:
    """Images of the same sizes, whose placeholders are equal."""
    return [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images()]


def test_answers_are_those_of_transformers_and_images_are_encoded_once(seeing: Seeing) -> None:
    (first,) = seeing.asked(seeing.placed())
    assert said([first]) == [seeing.greedy] and first.num_cached_tokens == 0
    encoded = seeing.llm.stats().num_images_encoded
    assert encoded == len(images())
    again = seeing.asked(*[seeing.placed()] * 3)
    assert said(again) == [seeing.greedy] * 3
    assert [one.num_cached_tokens for one in again] == [(len(seeing.ids) - 1) // 8 * 8] * 3
    assert seeing.llm.stats().num_images_encoded == encoded


def test_images_of_one_size_are_not_taken_for_each_other(seeing: Seeing) -> None:
    first_row = int(np.flatnonzero(seeing.expanded.rows >= 0)[0])
    seeing.asked(seeing.placed())
    (other,) = seeing.asked(seeing.placed(others()))
    assert other.num_cached_tokens <= first_row
    seeing.llm.reset_prefix_cache()
    assert said(seeing.asked(seeing.placed(others()))) == said([other])


def test_texts_beside_images_say_what_they_say_alone(seeing: Seeing) -> None:
    texts = [[int(token) for token in np.random.default_rng(seed).integers(3, 90, 21 + seed)] for seed in range(3)]
    alone = [said(seeing.asked(text))[0] for text in texts]
    seeing.llm.reset_prefix_cache()
    together = seeing.asked(texts[0], seeing.placed(), texts[1], seeing.placed(others()), texts[2], seeing.placed())
    expected = said(seeing.asked(seeing.placed(others())))[0]
    assert said(together) == [alone[0], seeing.greedy, alone[1], expected, alone[2], seeing.greedy]


def test_choices_share_their_images(seeing: Seeing) -> None:
    before = seeing.llm.stats().num_images_encoded
    (found,) = seeing.asked(seeing.placed([image.rotate(180) for image in images()]), n=3)
    assert len({tuple(choice.token_ids) for choice in found.outputs}) == 1
    assert seeing.llm.stats().num_images_encoded == before + len(images())


def test_requests_may_be_ended_at_any_time(seeing: Seeing) -> None:
    """While their images are encoded, and later; who waits for the same images has them encoded then."""
    seeing.llm.reset_prefix_cache()
    placed = seeing.placed([image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) for image in images()])
    greedy = SamplingParams(temperature=0, max_tokens=len(seeing.greedy), ignore_eos=True)
    requests = [
        EngineRequest(request_id=f"{number}", prompt_token_ids=seeing.ids, sampling_params=greedy, images=placed)
        for number in range(12)
    ]
    with Stream(seeing.llm._streams, requests[:11]) as stream:
        stream.abort()
    assert said(seeing.asked(seeing.placed())) == [seeing.greedy]
    expected = said(seeing.asked(placed))
    seeing.llm.reset_prefix_cache()
    assert said(seeing.asked(placed)) == expected


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_small_steps_few_pages_and_drafts_change_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and a tower in pieces, requests that are preempted, tokens that are tried ahead."""
    monkeypatch.setattr(tower, "PART_OPERATIONS", 1)
    tokens = 16 if name == "qwen3_vl" else 24
    ngrams = {"method": "ngram", "num_speculative_tokens": 2}
    seeing = Seeing(
        name, tmp_path, max_num_batched_tokens=tokens, kv_cache_memory=60_000, max_model_len=64,
        speculative_config=ngrams,
    )  # fmt: skip
    with seeing.llm:
        found = said(seeing.asked(*[seeing.placed(), seeing.placed(others())] * 3, max_tokens=24))[::2]
        assert [tokens[: len(seeing.greedy)] for tokens in found] == [seeing.greedy] * 3
        assert found == [found[0]] * 3 == said(seeing.asked(seeing.placed(), max_tokens=24)) * 3
        assert seeing.llm.stats().num_preemptions > 0 and seeing.llm.stats().num_draft_tokens > 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    seeing = Seeing("smolvlm", tmp_path, media_cache_memory="64KiB")
    with seeing.llm:
        wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
        pixels = seeing.model.processor.pixels(wide).tobytes()
        many = SeenImage(b"x" * 32, pixels, ((8, 8),), (1, 1), seeing.llm.info.most_image_rows * 1000)
        placed = seeing.placed()
        with pytest.raises(InvalidRequestError, match="there is room for"):
            seeing.asked(PlacedImages((many,), placed.rows))
        assert said(seeing.asked(placed)) == [seeing.greedy]


def test_a_model_that_is_to_see_nothing_has_no_tower(tmp_path: Path) -> None:
    with Seeing("smolvlm", tmp_path, limit_mm_per_prompt='{"image": 0}').llm as llm:
        assert llm.info.most_image_rows == 0
        with pytest.raises(InvalidRequestError, match="sees no images"):
            llm.generate({"prompt_token_ids": [5], "multi_modal_data": {"image": images()[0]}})
