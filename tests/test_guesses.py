"""Tokens tried ahead under a grammar: the answers are those without, and what the text says again takes fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.chat.constraint import tool_constraint
from jaxllm.chat.conversation import Tool
from jaxllm.chat.events import OutputFormats
from jaxllm.chat.formats import TOOL_FORMATS
from jaxllm.engine.features.drafts.ngrams import Guesses, ngram_drafts
from jaxllm.engine.features.drafts.rules import NgramDrafts
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.serving.mixed_requests import write_model
from tests.support.sizes import FIELDS as SIZES
from tests.support.sizes import few_pages
from tests.test_drafts import NGRAMS, assert_equal, told

FIELDS = SIZES | {"skip_tokenizer_init": False}
MODELS = ("llama_gqa", "lfm2")
"""Pages alone, and states beside them."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "size", "colours"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA)
REGEX = StructuredOutputs(regex=r"(ab|cd){2,6} [0-9]{4}-[01][0-9]( the end)?")
REASONED = replace(JSON, after="@")
"""One token of the vocabulary ends the reasoning, which a bias brings about."""
PROMPTS = [
    "Say it: ababab 2031-11 the end. Once more: ",
    '{"name":"abc","size":12,"colours":["red","red"]}\n{"name":"',
    "pages of the engine " * 4,
]


def called() -> StructuredOutputs:
    """What an answer must match that calls a tool, as `tool_choice: required` has it."""
    tools = [Tool(name="look_up", parameters=SCHEMA, strict=True)]
    formats = OutputFormats(next(known for known in TOOL_FORMATS if known.name == "hermes"), None)
    constraint = tool_constraint(formats, tools, "required", parallel=False, after=None, special_tokens={})
    assert constraint is not None
    return constraint


def params(llm: LLM, outputs: StructuredOutputs | None, seed: int, **more: Any) -> SamplingParams:
    """Of seed 0 greedy ones, of others at temperature 1."""
    bias = {llm.tokenizer.encode("@", False)[0]: 6.0} if outputs is REASONED else {}
    fields: dict[str, Any] = {"temperature": min(seed, 1), "seed": seed, "max_tokens": 60, "logit_bias": bias}
    return SamplingParams(**fields | more, structured_outputs=outputs)


def requests(llm: LLM) -> tuple[list[str], list[SamplingParams]]:
    """Grammars of each kind, greedy and at temperature 1, among requests without any."""
    every = (JSON, REGEX, called(), REASONED, None)
    asked = [params(llm, outputs, seed) for outputs in every for seed in range(2)]
    further = {"logprobs": 2, "repetition_penalty": 1.2, "top_k": 20}
    asked += [replace(asked[1], **further), replace(asked[3], min_tokens=9, presence_penalty=0.4)]
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(asked))], asked


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def plain(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(directory) -> Iterator[LLM]:
    with LLM(directory, **FIELDS, speculative_config=NGRAMS) as llm:
        yield llm


def test_answers_are_those_without_drafts(plain, drafting):
    prompts, asked = requests(plain)
    expected = told(plain.generate(prompts, asked, use_tqdm=False))
    before = drafting.stats()
    for _ in range(2):  # the second time many a prompt's pages are cached
        assert_equal(told(drafting.generate(prompts, asked, use_tqdm=False)), expected)
    alone = [told(drafting.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts[::3], asked[::3], strict=True)]
    assert_equal(alone, expected[::3])
    stats = drafting.stats()
    taken = sum(stats.accepted_by_position) - sum(before.accepted_by_position)
    assert 0 < taken < stats.num_draft_tokens - before.num_draft_tokens, "some are taken, and some refused"
    assert stats.num_free_pages == stats.num_pages


def answer(llm: LLM, prompt: str, asked: SamplingParams) -> tuple[list[int], str, int]:
    """Tokens, text, and in how many steps they came."""
    before = llm.stats().num_steps
    (choice,) = llm.generate([prompt], asked, use_tqdm=False)[0].outputs
    return choice.token_ids, choice.text, llm.stats().num_steps - before


@pytest.mark.parametrize("outputs", [JSON, REGEX], ids=["json", "regex"])
def test_an_answer_that_is_known_takes_fewer_steps(plain, drafting, outputs):
    asked = params(plain, outputs, 3)
    tokens, _, first = answer(plain, PROMPTS[0], asked)
    again, _, second = answer(drafting, PROMPTS[0], replace(asked, predicted_token_ids=tokens))
    assert again == tokens and len(tokens) > 10
    assert second < 0.7 * first


def test_drafts_go_from_the_reasoning_into_the_schema(plain, drafting, monkeypatch):
    """The answer is predicted, so that drafts begin before the mark which ends the reasoning, and end after it."""
    crossed = []
    tried = Guesses._try

    def noted(self: Guesses, request: Any, constraint: Any, most: int) -> Any:
        drafts, places = tried(self, request, constraint, most)
        crossed.append([place.active for place in places])
        return drafts, places

    monkeypatch.setattr(Guesses, "_try", noted)
    for seed in range(1, 6):
        asked = params(plain, REASONED, seed)
        tokens, _, _ = answer(plain, PROMPTS[2], asked)
        assert answer(drafting, PROMPTS[2], replace(asked, predicted_token_ids=tokens))[0] == tokens
        mark = tokens.index(plain.tokenizer.encode("@", False)[0])
        wrong = [*tokens[: mark + 1], *plain.tokenizer.encode("no JSON", False)]
        assert answer(drafting, PROMPTS[2], replace(asked, predicted_token_ids=wrong))[0] == tokens
    assert sum(False in active and sum(active) > 1 for active in crossed) > 1


def test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts(directory, plain):
    prompts = [f"{i}. {PROMPTS[i % 2]}" for i in range(12)]
    asked = [params(plain, JSON, seed) for seed in range(12)]
    expected = told(plain.generate(prompts, asked, use_tqdm=False))
    with few_pages(24), LLM(directory, **FIELDS, speculative_config=NGRAMS) as llm:
        assert_equal(told(llm.generate(prompts, asked, use_tqdm=False)), expected)
        stats = llm.stats()
    assert stats.num_preemptions > 0 < sum(stats.accepted_by_position)


def test_a_model_drafts_for_some_and_the_text_for_those_with_a_grammar(tmp_path):
    directory = str(write_model(tmp_path))
    with LLM(directory, **FIELDS, enable_prefix_caching=False) as plain:
        prompts, asked = requests(plain)
        prompts, asked = prompts[1::3], asked[1::3]
        expected = told(plain.generate(prompts, asked, use_tqdm=False))
    with LLM(directory, **FIELDS, speculative_config={"model": directory, "num_speculative_tokens": 3}) as llm:
        assert_equal(told(llm.generate(prompts, asked, use_tqdm=False)), expected)
        assert sum(llm.stats().accepted_by_position) > 0


def test_a_schema_is_followed_whatever_the_draft(drafting):
    """The draft is of another schema, whose tokens the grammar refuses one after another."""
    other = drafting.tokenizer.encode('{"name":7,"size":"x","colours":"red"}', False)
    asked = params(drafting, JSON, 5, max_tokens=90, predicted_token_ids=other)
    _, text, _ = answer(drafting, PROMPTS[1], asked)
    found = json.loads(text)
    assert set(found) == set(SCHEMA["properties"]) and isinstance(found["size"], int)


def test_the_host_finds_what_the_device_would():
    """One function, over NumPy's arrays and over the device's."""
    dice, rule = np.random.default_rng(3), NgramDrafts(4, 1, 3, remembered=64)
    history, position = dice.integers(1, 4, (50, 40)), dice.integers(0, 40, 50)
    remembered = dice.integers(0, 5, 64)
    on_device = ngram_drafts(*map(jnp.asarray, (history, position, remembered)), rule)
    on_host = ngram_drafts(history, position, remembered, rule, np)
    np.testing.assert_array_equal(on_device[0], on_host[0])
    np.testing.assert_array_equal(on_device[1], on_host[1])
