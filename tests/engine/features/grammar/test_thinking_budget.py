"""Thinking budgets: the closing marker comes exactly when the budget is spent, and nobody else notices."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.engine.core.sampler import allow_only
from jaxllm.engine.doors.beams import BeamSearchParams
from jaxllm.engine.doors.streams import Stream
from jaxllm.engine.features.grammar.thinking_budget import Thinking
from jaxllm.engine.messages import EndThinking, EngineRequest
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import INT32_MAX, ThinkingMarkers
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.text.reasoning import REASONING_FORMATS
from tests.engine.real_vocabulary import llm_with_real_vocabulary

PROMPTS = [f"{i}. Think about {what}:" for i, what in enumerate(("Bob", "a wolf", "Ada Lovelace", "the sea"))]
OPENED = ThinkingMarkers(open="<think>", close="</think>", behind="\n\n", opened=True)
SPECIAL = ThinkingMarkers(open="<|im_start|>", close="<|im_end|>", opened=True)
"""Markers that are one token each."""


WAYS = {
    "one step": {"decode_steps": 1},
    "four steps a dispatch": {"decode_steps": 4},
    "drafts": {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


@pytest.fixture(scope="module", params=list(WAYS))
def llm(request, tmp_path_factory):
    """<think> is several tokens of it."""
    way = WAYS[request.param]
    with llm_with_real_vocabulary(tmp_path_factory.mktemp("llama"), eos_token_id=0, **way) as llm:
        yield llm


def params(**more) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0, "ignore_eos": True} | more)


def run(llm, prompt, asked):
    return llm.generate(prompt, asked, use_tqdm=False)[0].outputs[0]


def closing(llm, markers=OPENED) -> list[int]:
    return llm.tokenizer.encode(markers.close + markers.behind, add_special_tokens=False)


@pytest.mark.parametrize("markers", [OPENED, SPECIAL], ids=["several tokens", "one token"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_marker_comes_when_the_budget_is_spent(llm, markers, temperature):
    """Before it the tokens are an unbudgeted run's; behind it, those of a run whose prompt has all of that."""
    budgets = [0, 1, 2, 7, 30]
    free = run(llm, PROMPTS[0], params(temperature=temperature, seed=3))
    forced = closing(llm, markers)
    asked = [
        params(temperature=temperature, seed=3, max_thinking_tokens=budget, thinking_markers=markers)
        for budget in budgets
    ]
    bounded = [output.outputs[0] for output in llm.generate([PROMPTS[0]] * len(asked), asked, use_tqdm=False)]
    ends = [budget + len(forced) for budget in budgets]
    for budget, end, found in zip(budgets, ends, bounded, strict=True):
        assert found.token_ids[:budget] == free.token_ids[:budget]
        assert found.token_ids[budget:end] == forced
        assert len(found.token_ids) == 40 and found.finish_reason == "length"
    prompt = llm.tokenizer.encode(PROMPTS[0])
    before = [{"prompt_token_ids": prompt + found.token_ids[:end]} for end, found in zip(ends, bounded, strict=True)]
    rest = [params(temperature=temperature, seed=3, max_tokens=40 - end) for end in ends]
    behind = [output.outputs[0] for output in llm.generate(before, rest, use_tqdm=False)]
    assert [found.token_ids[end:] for end, found in zip(ends, bounded, strict=True)] == [o.token_ids for o in behind]


def test_batch_mates_stay_what_they_are_and_a_recompute_keeps_its_place(llm):
    asked = [
        params(max_tokens=90, max_thinking_tokens=20, thinking_markers=OPENED),
        params(max_tokens=90, temperature=1.0, seed=5, n=4, max_thinking_tokens=33, thinking_markers=SPECIAL),
        params(max_tokens=60, temperature=1.0, seed=7, logprobs=2, repetition_penalty=1.1),
        params(max_tokens=60),
    ]
    alone = [llm.generate(p, a, use_tqdm=False)[0] for p, a in zip(PROMPTS, asked, strict=True)]
    before = llm.stats().num_preemptions
    together = llm.generate(PROMPTS, asked, use_tqdm=False)
    assert llm.stats().num_preemptions > before
    found = [[[c.token_ids for c in output.outputs] for output in outputs] for outputs in (alone, together)]
    assert found[0] == found[1]
    assert all(c.token_ids[33] == closing(llm, SPECIAL)[0] for c in together[1].outputs)
    assert len({tuple(c.token_ids[:33]) for c in together[1].outputs}) == 4
    assert llm.stats().num_free_pages == llm.stats().num_pages


def test_a_forced_tokens_log_probability_is_the_models_own(llm):
    asked = params(max_thinking_tokens=5, thinking_markers=OPENED, logprobs=2, temperature=0.7, seed=1)
    bounded = run(llm, PROMPTS[1], asked)
    forced = closing(llm)
    ids = llm.tokenizer.encode(PROMPTS[1]) + bounded.token_ids
    scored = llm.generate({"prompt_token_ids": ids}, params(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    own = scored.prompt_logprobs[-len(bounded.token_ids) :]
    assert bounded.token_ids[5 : 5 + len(forced)] == forced
    for token, said, model in zip(bounded.token_ids, bounded.logprobs, own, strict=True):
        assert math.isclose(said[token].logprob, model[token].logprob, abs_tol=1e-3)
    assert min(bounded.logprobs[5 + i][t].logprob for i, t in enumerate(forced)) < -3, "it was not the model's choice"


def test_penalties_and_biases_go_with_it(llm):
    forced = closing(llm)
    asked = params(
        max_thinking_tokens=6, thinking_markers=OPENED, repetition_penalty=1.3, min_tokens=30,
        logit_bias=dict.fromkeys(forced, -100.0),
    )  # fmt: skip
    assert run(llm, PROMPTS[0], asked).token_ids[6 : 6 + len(forced)] == forced


def test_what_cannot_be_forced_fails_alone(llm):
    asked = params(max_thinking_tokens=6, thinking_markers=OPENED, bad_words=["</think>"])
    with pytest.raises(InvalidRequestError, match="which ends the reasoning, could not be forced"):
        run(llm, PROMPTS[0], asked)
    asked = params(max_thinking_tokens=6, thinking_markers=OPENED, allowed_token_ids=[5, 6, 7])
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids leaves out \["):
        run(llm, PROMPTS[0], asked)
    assert len(run(llm, PROMPTS[0], params()).token_ids) == 40


class TestModelsOwnMarkers:
    """A bias makes the random model write the markers; it has one token for each."""

    def test_an_earlier_end_is_the_end(self, llm):
        """Closed at once by the model: nothing is forced."""
        end = closing(llm, SPECIAL)[0]
        bias = {end: 100.0}
        own = run(llm, PROMPTS[0], params(logit_bias=bias, frequency_penalty=2, max_tokens=90))
        asked = params(
            logit_bias=bias, frequency_penalty=2, max_tokens=90, max_thinking_tokens=8, thinking_markers=SPECIAL
        )
        assert own.token_ids[0] == end
        assert run(llm, PROMPTS[0], asked).token_ids == own.token_ids

    def test_an_answer_without_reasoning_is_left_alone(self, llm):
        free = run(llm, PROMPTS[2], params())
        markers = ThinkingMarkers(open="<|im_start|>", close="<|im_end|>")
        for budget in (0, 3):
            asked = params(max_thinking_tokens=budget, thinking_markers=markers)
            assert run(llm, PROMPTS[2], asked).token_ids == free.token_ids

    @pytest.mark.parametrize("budget", [0, 1, 4])
    def test_the_budget_begins_behind_the_opening(self, llm, budget):
        start, end = llm.tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False)
        bias = {"logit_bias": {start: 50.0}, "presence_penalty": 2, "frequency_penalty": 2}
        free = run(llm, PROMPTS[0], params(**bias))
        assert free.token_ids[0] == start
        markers = ThinkingMarkers(open="<|im_start|>", close="<|im_end|>")
        bounded = run(llm, PROMPTS[0], params(**bias, max_thinking_tokens=budget, thinking_markers=markers))
        assert bounded.token_ids[: 1 + budget] == free.token_ids[: 1 + budget]
        assert bounded.token_ids[1 + budget] == end

    def test_a_marker_that_has_begun_is_finished(self, llm):
        """The budget ends inside the closing marker, three tokens, of which the model has written one."""
        first, *rest = llm.tokenizer.encode("</think>", add_special_tokens=False)
        markers = ThinkingMarkers(open="<think>", close="</think>", opened=True)
        asked = params(max_thinking_tokens=3, thinking_markers=markers, logit_bias={first: 100.0})
        tokens = run(llm, PROMPTS[0], asked).token_ids
        assert tokens[: 3 + len(rest)] == [first, first, first, *rest]


def test_a_grammar_begins_behind_the_forced_marker(llm):
    """What the family writes behind its marker is left to the grammar."""
    outputs = StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                                      "additionalProperties": False}, after="</think>")  # fmt: skip
    asked = params(max_tokens=90, max_thinking_tokens=9, thinking_markers=OPENED, structured_outputs=outputs)
    answer = run(llm, PROMPTS[0], asked)
    thought, _, text = answer.text.partition("</think>")
    assert json.loads(text)["a"] in (1, 2) and answer.finish_reason == "stop"
    assert thought == llm.tokenizer.decode(run(llm, PROMPTS[0], params()).token_ids[:9])


def test_a_grammar_that_covers_the_reasoning(llm):
    """What it forces inside the block counts: tokens put in at once would go past the budget."""
    inside = " one two three four five six seven eight nine ten"
    rules = f'start: "{inside}" thought "yes"\nthought: /[^<]*/ "</think>"\n'
    markers = ThinkingMarkers(open="<think>", close="</think>", opened=True)
    count = len(llm.tokenizer.encode(inside)) + 4
    asked = params(
        max_thinking_tokens=count, thinking_markers=markers, structured_outputs=StructuredOutputs(grammar=rules)
    )
    answer = run(llm, PROMPTS[0], asked)
    end = count + len(closing(llm, markers))
    assert answer.token_ids[count:end] == closing(llm, markers)
    assert answer.text.startswith(inside) and answer.text.endswith("</think>yes")


def test_stop_strings_see_the_marker(llm):
    asked = params(max_thinking_tokens=4, thinking_markers=OPENED, stop="</think>", include_stop_str_in_output=True)
    answer = run(llm, PROMPTS[0], asked)
    assert answer.text.endswith("</think>") and answer.stop_reason == "</think>"


def test_cached_prefixes_change_nothing(llm):
    prompt = "one two three four five six seven eight nine ten " * 4
    asked = params(max_thinking_tokens=6, thinking_markers=OPENED)
    first, second = (llm.generate(prompt, asked, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_markers_must_be_known(llm):
    """The template of this model marks no reasoning."""
    with pytest.raises(InvalidRequestError, match="shows no markers"):
        run(llm, PROMPTS[0], params(max_thinking_tokens=6))
    llm.tokenizer.chat_template, kept = "{{ '<think>' }}{{ '</think>' }}", llm.tokenizer.chat_template
    try:
        tokens = run(llm, PROMPTS[0] + "<think>\n", params(max_thinking_tokens=6)).token_ids
    finally:
        llm.tokenizer.chat_template = kept
    forced = closing(llm)
    assert tokens[6 : 6 + len(forced)] == forced


def test_an_unbudgeted_step_is_the_same_executable_as_before(llm):
    """With budgets far away requests decode as others do: their steps are not split, and nothing is masked."""
    counts = llm.stats().scheduled_tokens
    asked = params(max_thinking_tokens=100, thinking_markers=OPENED)
    run(llm, PROMPTS[3], asked)
    now = llm.stats().scheduled_tokens
    heads = sum(now[name] - counts.get(name, 0) for name in now if name.startswith("head"))
    assert heads == 1, "only the prompt's last chunk is not a decode"


def test_reasoning_ends_when_its_caller_says_so(llm):
    """After the tokens that were under way then, which are those of an unbudgeted run."""
    most, prompt = 90, llm.tokenizer.encode(PROMPTS[1])
    free, forced = run(llm, PROMPTS[1], params(max_tokens=most)).token_ids, closing(llm)
    asked = params(max_tokens=most, max_thinking_tokens=INT32_MAX, thinking_markers=OPENED)
    found: list[int] = []
    request = EngineRequest(request_id="x", prompt_token_ids=prompt, sampling_params=asked)
    with Stream(llm._streams, [request]) as stream:
        for gains in stream:
            if not found:
                llm._streams.client.order(EndThinking([*stream.names, "unknown"]))
            found += [token for _, delta in gains for token in delta.token_ids]
    at = next(start for start in range(most) if found[start : start + len(forced)] == forced)
    assert found[:at] == free[:at] and len(found) == most


def test_beams_have_no_budget():
    assert "max_thinking_tokens" not in BeamSearchParams.__dataclass_fields__


@pytest.mark.parametrize("known", REASONING_FORMATS, ids=lambda known: known.name)
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_markers_of_every_family(llm, known, opened, budget):
    """A model that writes the opening and goes on thinking; the tokenizer has several tokens for each marker."""
    tokenizer = llm.tokenizer
    thinking = Thinking(budget, known.markers(opened=opened), tokenizer.backend)
    for token in [] if opened else tokenizer.encode(known.open, add_special_tokens=False):
        assert thinking.forced is None
        thinking.accept(token)
    for token in tokenizer.encode(" so it goes on and on and on", add_special_tokens=False)[:budget]:
        assert thinking.forced is None and not thinking.over
        thinking.accept(token)
    written = []
    while not thinking.over:
        assert thinking.forced is not None and thinking.left == 0
        written.append(thinking.forced)
        thinking.accept(thinking.forced)
    assert tokenizer.decode(written, skip_special_tokens=False) == known.close + known.behind


@pytest.mark.parametrize("known", REASONING_FORMATS, ids=lambda known: known.name)
def test_any_other_beginning_has_no_budget(llm, known):
    for text in ("Paris.", known.open[:3] + "x", " " * 40, known.close):
        thinking = Thinking(0, known.markers(opened=False), llm.tokenizer.backend)
        for token in llm.tokenizer.encode(text + " and so on and so on and so on and so on and so on and so on"):
            assert thinking.forced is None
            if not thinking.over:
                thinking.accept(token)
        assert thinking.over


def test_only_one_token_is_allowed():
    row = np.full(4, -1, np.int32)
    allow_only(row, 63)
    assert np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [63]
