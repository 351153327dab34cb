"""What SamplingParams accepts, and the one line it says otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

ACCEPTED: list[dict[str, Any]] = [
    {"n": 1}, {"n": 128}, {"temperature": 0}, {"temperature": 100.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**6},
    {"top_p": 1.0}, {"top_p": 1e-9}, {"top_p": 0.0},
    {"min_p": 0}, {"min_p": 1}, {"presence_penalty": -2}, {"frequency_penalty": 2},
    {"repetition_penalty": 1e-3}, {"logit_bias": {0: -100, 5: 100}}, {"logit_bias": None}, {"max_tokens": None},
    {"max_tokens": 1}, {"min_tokens": 16}, {"min_tokens": 99, "max_tokens": None}, {"stop": "x"}, {"stop": ["x"] * 64},
    {"stop": None}, {"stop_token_ids": None}, {"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))}, {"logprobs": 0},
    {"logprobs": 20}, {"prompt_logprobs": -1}, {"prompt_logprobs": 20}, {"seed": 2**64 - 1}, {"seed": -(2**63)},
    {"dry_multiplier": 0.8, "dry_base": 1, "dry_allowed_length": 0, "dry_penalty_last_n": -1},
    {"dry_sequence_breakers": []}, {"dry_sequence_breakers": ["\n"] * 64}, {"top_n_sigma": -1}, {"top_n_sigma": 2.5},
    {"typical_p": 0}, {"typical_p": 1}, {"xtc_probability": 1, "xtc_threshold": 0}, {"stop_regex": "a+"},
    {"stop_regex": ["a+"] * 4}, {"repetition_detection": None}, {"repetition_detection": {}},
    {"repetition_detection": {"max_pattern_size": 9, "min_count": 2}},
    {"logprob_token_ids": range(20)}, {"logprob_token_ids": [5], "logprobs": 0}, {"logprobs": -1},
]  # fmt: skip

REFUSED: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -2),
    ("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf),
    ("logit_bias", {-1: 0.0}), ("logit_bias", {1: 100.5}), ("logit_bias", {1: math.nan}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)), ("max_tokens", 0), ("min_tokens", -1),
    ("min_tokens", 17), ("stop", ""), ("stop", ["x"] * (MAX_STOP_STRINGS + 1)), ("stop", [3]),
    ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS + 1))), ("logprobs", -2), ("logprobs", 21),
    ("prompt_logprobs", -2), ("prompt_logprobs", 21), ("seed", 2**64), ("seed", -(2**63) - 1),
    ("top_k", 64.0), ("max_tokens", "5"), ("seed", 0.5), ("top_k", 2**31), ("max_tokens", 2**31),
    ("repeat_last_n", 2**31), ("repeat_last_n", -2), ("min_tokens", 10**30), ("max_tokens", True), ("n", None),
    ("temperature", 10**400), ("temperature", "hot"), ("top_p", None), ("min_p", True), ("ignore_eos", 1),
    ("allowed_token_ids", [10**30]), ("allowed_token_ids", 5), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("stop_token_ids", "12"), ("shown_special_token_ids", [2**31]), ("stop", 5), ("bad_words", "word"),
    ("dry_multiplier", -0.1), ("dry_multiplier", 101), ("dry_base", 0.9), ("dry_allowed_length", -1),
    ("dry_allowed_length", 1.5), ("dry_penalty_last_n", -2), ("dry_sequence_breakers", "\n"),
    ("dry_sequence_breakers", [""]), ("dry_sequence_breakers", ["a"] * 65), ("top_n_sigma", -2), ("top_n_sigma", 1e9),
    ("typical_p", 1.1), ("typical_p", None), ("xtc_probability", 1.5), ("xtc_threshold", -1), ("stop_regex", ""),
    ("stop_regex", ["a"] * 5), ("stop_regex", [1]), ("repetition_detection", 3), ("repetition_detection", {"size": 2}),
    ("logprob_token_ids", range(21)), ("logprob_token_ids", [-1]),
    ("logit_bias", {2**31: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: "a"}), ("logit_bias", [1]),
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepts(fields):
    SamplingParams(**fields)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda x: str(x)[:30])
def test_refuses_in_one_line_that_names_the_field(name, value):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert error.value.param == name
    assert message.startswith(f"{name} is ") and "it must be " in message
    assert "\n" not in message and len(message) < 200


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
def test_what_is_looked_for_in_the_text_needs_text(name):
    with pytest.raises(InvalidRequestError, match=rf"{name} is \['x'\]; it must be left out with detokenize=False"):
        SamplingParams(**{name: "x"}, detokenize=False)


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"max_pattern_size": 4097, "min_count": 2}, "max_pattern_size", "an integer from 0 to 4096"),
        (
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "min_pattern_size",
            "at most max_pattern_size",
        ),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count", "2 or more"),
    ],
)
def test_a_repetition_must_be_one(fields, name, said):
    with pytest.raises(InvalidRequestError, match=f"{name} is .*{said}") as error:
        SamplingParams(repetition_detection=fields)  # type: ignore[arg-type]
    assert error.value.param == name


def test_values_are_normalised_once():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias={"7": 1}, top_k=-1)  # type: ignore[dict-item]
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.top_k) == (("end",), (1, 2), {7: 1.0}, 0)


@pytest.mark.parametrize(
    ("fields", "greedy", "adjusts"),
    [
        ({"temperature": 0}, True, False),
        ({}, False, False),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, True, False),
        ({"temperature": 0, "logprobs": 0}, False, False),
        ({"temperature": 0, "prompt_logprobs": 3}, True, False),
        ({"temperature": 0, "min_tokens": 1}, False, True),
        ({"temperature": 0, "logit_bias": {1: 1}}, False, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, False, True),
        ({"temperature": 1, "presence_penalty": -0.1}, False, True),
        ({"temperature": 1, "frequency_penalty": 0.1}, False, True),
        ({"temperature": 0, "dry_multiplier": 0.8}, False, False),
        ({"temperature": 0, "top_n_sigma": 1, "typical_p": 0.5, "xtc_probability": 1}, True, False),
    ],
    ids=str,
)
def test_a_greedy_request_pays_for_nothing_else(fields, greedy, adjusts):
    params = SamplingParams(**fields)
    assert (params.greedy, params.adjusts_logits) == (greedy, adjusts)
