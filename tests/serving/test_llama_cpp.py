"""Completions and infilling in llama.cpp's own form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.dialects.llama_cpp_requests import NEUTRAL, WITHOUT_EFFECT
from tests.serving.fake_engine import BOS, CACHED, CONTEXT, REPLY, FakeEngine
from tests.serving.openai.test_infill import QWEN, knowing
from tests.serving.real_server import served
from tests.support.covers import covers

FIELDS = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
    "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
    "timings",
}  # fmt: skip


def post(client: TestClient, path: str = "/completion", **fields: Any) -> Any:
    response = client.post(path, json={"prompt": "Hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, param: str, path: str = "/completion", **fields: Any) -> str:
    response = client.post(path, json={"prompt": "Hi"} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    return error["message"]


def events(client: TestClient, **fields: Any) -> list[Any]:
    response = client.post("/completion", json={"prompt": "Hi", "stream": True} | fields)
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert not response.text.endswith("[DONE]\n\n")
    return [json.loads(item) for item in data]


@covers("POST /completion")
@covers("NativeFields", "return_tokens")
def test_a_whole_answer(client: TestClient) -> None:
    body = post(client)
    assert set(body) == FIELDS
    assert (body["content"], body["tokens"], body["stop"], body["stop_type"]) == (REPLY, [], True, "eos")
    assert (body["tokens_evaluated"], body["tokens_predicted"], body["tokens_cached"]) == (3, len(REPLY), CACHED)
    assert (body["prompt"], body["model"], body["index"], body["truncated"]) == ("<s>Hi", "fake", 0, False)
    assert body["timings"]["prompt_n"] == 3 - CACHED and body["timings"]["predicted_n"] == len(REPLY)
    assert body["generation_settings"]["temperature"] == 0.5 and body["generation_settings"]["n_ctx"] == CONTEXT
    assert post(client, return_tokens=True)["tokens"] == list(REPLY.encode())


@covers("NativeFields", "n_predict", "stream")
def test_a_stream_has_the_text_in_pieces_and_ends_with_all_the_rest(client: TestClient, engine: FakeEngine) -> None:
    *pieces, last = events(client, n_predict=6, timings_per_token=True)
    assert "".join(piece["content"] for piece in pieces) == REPLY[:6]
    assert [piece["tokens"] for piece in pieces] == [[byte] for byte in REPLY[:6].encode()]
    assert all(piece["stop"] is False and "timings" in piece for piece in pieces)
    assert set(last) == FIELDS and (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")
    assert last["tokens_predicted"] == 6 and "timings" not in events(client)[0]
    engine.fail_after = 2
    assert "caught fire" in events(client)[-1]["error"]["message"]


@covers("NativeFields", "n_predict")
def test_the_bound_on_tokens_by_all_its_names(client: TestClient, engine: FakeEngine) -> None:
    for fields, most in (({}, CONTEXT - 3), ({"n_predict": -1}, CONTEXT - 3), ({"n_predict": 10**6}, CONTEXT - 3),
                         ({"n_predict": 4, "max_tokens": 9}, 4), ({"max_completion_tokens": 5}, 5)):  # fmt: skip
        post(client, **fields)
        assert engine.seen[-1][1].max_tokens == most
    assert post(client, n_predict=0)["content"] == ""
    assert "n_predict is -2" in refused(client, "n_predict", n_predict=-2)


@covers("NativeCompletionRequest", "prompt")
@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("Hi", [[BOS, 72, 105]]),
        ([72, 105], [[72, 105]]),
        (["H", 105, "!"], [[BOS, 72, 105, 33]]),
        ([7, "H"], [[7, 72]]),
        (["H", "i"], [[BOS, 72], [BOS, 105]]),
        ([[1, "H"], [2, 3], "i", {"prompt_string": "!"}], [[1, 72], [2, 3], [BOS, 105], [BOS, 33]]),
        ({"prompt_string": "H", "multimodal_data": []}, [[BOS, 72]]),
    ],
)
def test_prompts_of_every_shape(
    client: TestClient, engine: FakeEngine, prompt: Any, token_ids: list[list[int]]
) -> None:
    body = post(client, prompt=prompt)
    assert [ids for ids, _, _ in engine.seen] == token_ids
    assert [one["index"] for one in (body if isinstance(body, list) else [body])] == [*range(len(token_ids))]


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], [True]], {"prompt_string": "a", "multimodal_data": ["x"]}, {"text": "a"}, [["a"] * 1025], 5],
)
def test_prompts_that_are_none(client: TestClient, prompt: Any) -> None:
    refused(client, "prompt", prompt=prompt)


@covers("NativeFields", "n_cmpl")
def test_several_answers_are_a_list(client: TestClient, engine: FakeEngine) -> None:
    engine.replies = ["one", "two"]
    assert [one["content"] for one in post(client, n_cmpl=2)] == ["one", "two"]
    assert [one["content"] for one in post(client, n=2, prompt=["a", "b"])] == ["one", "two"] * 2
    assert client.post("/completion", json={"prompt": "a", "n": 0}).json()["error"]["param"] == "n_cmpl"


@covers("NativeFields", "n_probs")
def test_probabilities(client: TestClient) -> None:
    body = post(client, n_probs=2, n_predict=1)
    [found] = body["completion_probabilities"]
    assert (found["id"], found["token"], found["bytes"], found["logprob"]) == (84, "T", [84], -1.0)
    assert [(one["token"], one["logprob"]) for one in found["top_logprobs"]] == [("A", -0.5), ("T", -1.0)]
    first, *_ = events(client, logprobs=1)
    assert [one["token"] for one in first["completion_probabilities"][0]["top_logprobs"]] == ["A"]
    assert "completion_probabilities" not in post(client)


@covers("NativeFields", "repeat_penalty", "samplers", "lora")
def test_sampling_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    def sampled(**fields: Any) -> Any:
        post(client, **fields)
        return engine.seen[-1][1]

    params = sampled(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=["x"], ignore_eos=True)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 5, 0.9, 0.1)
    assert (params.seed, params.stop, params.ignore_eos) == (3, ("x",), True)
    params = sampled(repeat_penalty=1.2)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.2, 64)
    assert sampled(repeat_penalty=1.2, repeat_last_n=9).repeat_last_n == 9
    params = sampled(samplers=["top_k", "infill"], top_k=5, top_p=0.9, min_p=0.1, temperature=0.7)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 5, 1.0, 0.0)
    further = {"dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9, "top_n_sigma": 2.0}
    params = sampled(samplers=["dry", "typical_p"], dry_sequence_breakers=["x"], **further)
    assert (params.dry_multiplier, params.dry_sequence_breakers, params.typical_p) == (0.8, ("x",), 0.9)
    assert (params.xtc_probability, params.top_n_sigma) == (0.0, 0.0)
    assert sampled(**further).xtc_probability == 0.5
    assert "samplers has 'tfs_z'" in refused(client, "samplers", samplers=["tfs_z"])
    refused(client, "repeat_penalty", repeat_penalty=1.2, repetition_penalty=1.3)
    assert refused(client, "lora[0].id", lora=[{"id": 7, "scale": 1.0}])


def test_what_asks_for_nothing_is_taken_and_samplers_that_are_not_here_are_refused(
    make_client: Any, client: TestClient, engine: FakeEngine
) -> None:
    post(client)
    post(client, **{name: values[0] for name, values in NEUTRAL.items()}, **dict.fromkeys(WITHOUT_EFFECT, 1))
    assert engine.seen[0][:2] == engine.seen[1][:2]
    assert "mirostat is 2; this server has only 0" in refused(client, "mirostat", mirostat=2)
    assert "return_progress" in refused(client, "return_progress", return_progress=True)
    assert "unknown field 'cache_promt'" in refused(client, "cache_promt", cache_promt=True)
    lenient = make_client(FakeEngine(), unknown_fields="warn")
    [warning] = post(lenient, mirostat=2, dynatemp_range=0)["warnings"]
    assert "mirostat" in warning and warning.endswith("ignored")
    assert post(lenient, mirostat=2, response_fields=[""]) == {"warnings": [warning]}
    first, *others = events(lenient, mirostat=2)
    assert first["warnings"] == [warning] and not any("warnings" in event for event in others)


@covers("NativeFields", "logit_bias")
def test_biases_in_all_forms(client: TestClient, engine: FakeEngine) -> None:
    for given, found in (
        ([[72, 1.5], ["ab", -2], [7, False]], {72: 1.5, 97: -2.0, 98: -2.0, 7: -100.0}),
        ({"72": 1.5, "ab": False, "7": 500}, {72: 1.5, 97: -100.0, 98: -100.0, 7: 100.0}),
    ):
        post(client, logit_bias=given)
        assert engine.seen[-1][1].logit_bias == found
    for wrong in ([[72]], [[72, True]], [[None, 1]]):
        assert "logit_bias has" in refused(client, "logit_bias", logit_bias=wrong)


def test_constraints(client: TestClient, engine: FakeEngine) -> None:
    post(client, grammar='root ::= "a" | "b"')
    assert engine.seen[-1][1].structured_outputs.grammar == 'root ::= "a" | "b"'
    post(client, json_schema={}, grammar="")
    assert json.loads(engine.seen[-1][1].structured_outputs.json) == {"type": "object"}
    refused(client, "grammar", grammar="root ::= (")


@covers("NativeFields", "cache_prompt")
def test_a_prompt_can_be_computed_anew(client: TestClient, engine: FakeEngine) -> None:
    for cache_prompt in (True, False):
        post(client, cache_prompt=cache_prompt)
        assert engine.seen[-1][1].skip_reading_prefix_cache is not cache_prompt


def test_why_it_ended(client: TestClient) -> None:
    found = post(client, stop=["France"])
    assert (found["stop_type"], found["stopping_word"]) == ("word", "France")
    assert found["content"] == "The capital of "


@covers("NativeFields", "n_indent")
def test_an_answer_ends_before_a_line_that_is_indented_too_little(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "if a:\n    b()\n\t  c()\n  d()\n    e()"
    found = post(client, n_indent=3)
    assert (found["content"], found["stop_type"]) == ("if a:\n    b()\n\t  c()\n  ", "limit")
    assert found["has_new_line"] and post(client)["content"] == engine.reply
    assert "".join(event["content"] for event in events(client, n_indent=3)) == found["content"]
    assert not engine.active


@covers("NativeFields", "t_max_predict_ms")
def test_an_answer_ends_with_the_line_in_which_its_time_is_over(client: TestClient, engine: FakeEngine) -> None:
    engine.reply, engine.delay = "a\nb\nc\n" * 20, 0.02
    found = post(client, t_max_predict_ms=30)
    assert found["stop_type"] == "limit" and found["content"].endswith("\n") and len(found["content"]) < 30


@covers("NativeFields", "response_fields")
def test_only_some_fields(client: TestClient) -> None:
    asked = ["content", "generation_settings/n_predict", "timings/prompt_n", "nothing"]
    found = {"content": REPLY, "n_predict": -1, "prompt_n": 0}
    assert post(client, response_fields=asked) == found
    assert post(client, response_fields=[""]) == {}
    assert events(client, response_fields=asked)[-1] == found | {"content": ""}


@covers("NativeFields", "model")
def test_completions_without_v1_take_either_form(client: TestClient, engine: FakeEngine) -> None:
    assert post(client, "/completions", n_predict=3)["content"] == REPLY[:3]
    assert post(client, "/completions", cache_prompt=True)["content"] == REPLY
    assert post(client, "/completions", max_tokens=3)["choices"][0]["text"] == REPLY[:3]
    assert client.post("/v1/completions", json={"prompt": "Hi", "n_predict": 3}).status_code == 400
    assert client.post("/completion", json={"prompt": "Hi", "model": "other"}).status_code == 404
    assert client.post("/completions", json={"prompt": [], "n_predict": 3}).json()["error"]["param"] == "prompt"


@covers("POST /infill")
@covers("InfillRequest", "input_prefix", "input_suffix", "input_extra", "prompt")
@covers("ExtraFile", "text", "filename", "time")
def test_infill(make_client: Any, client: TestClient) -> None:
    engine = knowing(*QWEN, "<|file_sep|>")
    infilling = make_client(engine)
    body = {
        "input_prefix": "a\n", "prompt": "b", "input_suffix": "c", "n_predict": 4,
        "input_extra": [{"text": "1", "filename": "x.py", "time": [1, 2]}],
    }  # fmt: skip
    found = post(infilling, "/infill", **body)
    assert found["content"] == REPLY[:4]
    prompt = "<s><|file_sep|>x.py\n1<|file_sep|>file\n<|fim_prefix|>a\nb<|fim_suffix|>c<|fim_middle|>"
    assert found["prompt"] == prompt
    assert engine.seen[-1][1].stop_token_ids == (engine.tokenizer.backend.token_to_id("<|file_sep|>"),)
    long = [{"text": letter * 100} for letter in "123"]
    assert post(infilling, "/infill", **body | {"input_extra": long})["prompt"].count("tmp") == 2
    assert "no tokens for filling in the middle" in refused(client, "input_suffix", "/infill", **body)
    assert "input_prefix is required" in refused(client, "input_prefix", "/infill", input_suffix="a")


VIM = {
    "id_slot": 0, "input_prefix": "a\n", "input_suffix": "\nb", "input_extra": [], "prompt": "", "n_predict": 128,
    "stop": [], "n_indent": 0, "top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "tokens_cached", "truncated"],
}  # fmt: skip
"""What llama.vim sends."""


def test_what_editors_send_is_answered(make_client: Any) -> None:
    client = make_client(knowing(*QWEN))
    found = post(client, "/infill", **VIM)
    assert found["content"] == REPLY and {"prompt_n", "prompt_ms", "tokens_cached", "truncated"} < set(found)
    warm = VIM | {"n_predict": 0, "samplers": [], "temperature": 0.0, "t_max_prompt_ms": 1, "response_fields": [""]}
    assert post(client, "/infill", **warm) == {}


@pytest.mark.programs
def test_a_real_model_says_the_same_in_both_forms(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0}
    with (
        served("smollm2-135m", data_dir=str(tmp_path / "data")) as url,
        httpx.Client(base_url=url, timeout=300) as http,
    ):

        def answer(path: str, **fields: Any) -> Any:
            return http.post(path, json=ask | fields).raise_for_status().json()

        ours = answer("/v1/completions", max_tokens=12, logprobs=2, return_token_ids=True)["choices"][0]
        theirs = answer("/completion", n_predict=12, n_probs=2, return_tokens=True)
        assert (theirs["content"], theirs["tokens"]) == (ours["text"], ours["token_ids"])
        found = [[one["logprob"] for one in step["top_logprobs"]] for step in theirs["completion_probabilities"]]
        listed = [sorted(top.values(), reverse=True)[:2] for top in ours["logprobs"]["top_logprobs"]]
        assert np.allclose(found, listed, atol=1e-4)
        assert theirs["prompt"] == ask["prompt"] and theirs["tokens_evaluated"] == len(ours["prompt_token_ids"])
        streamed = http.post("/completion", json=ask | {"n_predict": 12, "stream": True}).text.split("\n\n")[:-1]
        *pieces, last = [json.loads(event.removeprefix("data: ")) for event in streamed]
        assert "".join(piece["content"] for piece in pieces) == ours["text"] and last["stop_type"] == "limit"
        assert answer("/completion", n_predict=9, grammar='root ::= " Par" [a-z]{2}')["content"] == " Paris"
        assert answer("/completion", n_predict=9, logit_bias=[[" Paris", False]])["content"] != ours["text"]
        assert not any(slot["is_processing"] for slot in http.get("/slots").json())
