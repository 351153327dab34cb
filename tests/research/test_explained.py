"""What a step ran is told as it was: its executables, its padding, and the bytes that it had to read."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, ConfigError, InvalidRequestError, SamplingParams
from jaxllm.engine.core.handle import RanSequence
from jaxllm.models.caches import Paged
from jaxllm.research.explained import StepExplanation, StepPart, _seen
from tests.reference.tiny import tiny_config, tiny_prompt
from tests.support.sizes import FIELDS
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module")
def name() -> str:
    return "llama_gqa"


def generate(llm: LLM, lengths: list[int], tokens: int, name: str = "llama_gqa", **params: object) -> None:
    prompts = [tiny_prompt(name)[start : start + length] for start, length in enumerate(lengths)]
    llm.reset_prefix_cache()
    sampled = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    llm.generate(prompts, sampled, use_tqdm=False)


def bytes_of(llm: LLM, *, layers: bool, head: bool, rows: int) -> int:
    """Of the arrays that `params` gives; a table that only the first layer reads counts `rows` of its rows."""
    total = 0
    for path, array in llm.params.items():
        if path == "embed.weight":
            total += array.nbytes // array.shape[0] * rows if layers else 0
        elif path in ("head.weight", "norm.weight"):
            total += array.nbytes if head else 0
        else:
            total += array.nbytes if layers else 0
    return total


def test_a_decode_is_told_with_its_padding_bytes_and_floor(llm: LLM) -> None:
    generate(llm, [9, 12, 7], 4)
    step = llm.explain_step("decode", bandwidth=1e9)
    (part,) = [part for part in step.parts if part.name.startswith("decode")]
    assert (part.name, part.real, part.padded, part.runs) == ("decode-8", 3, 8, 1)
    assert sorted(step.sequences) == [RanSequence(1, 10), RanSequence(1, 12), RanSequence(1, 15)]
    assert not tiny_config("llama_gqa").get("tie_word_embeddings")
    assert part.weight_bytes == bytes_of(llm, layers=True, head=True, rows=3)
    config = tiny_config("llama_gqa")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    a_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
    assert part.cache_bytes == step.cache_bytes == a_token * (10 + 12 + 15)
    assert step.floor_seconds == pytest.approx((part.weight_bytes + part.cache_bytes) / 1e9)
    assert step.seconds is not None and 0 < step.seconds < 60


def test_a_prefill_is_told_executable_by_executable(llm: LLM) -> None:
    generate(llm, [9, 20], 1)
    step = llm.explain_step(bandwidth=1e9)
    assert step.kind == "prefill" and sorted(step.sequences) == [RanSequence(9, 9), RanSequence(20, 20)]
    parts = {part.name: part for part in step.parts}
    assert list(parts) == ["put-admit", "backbone-32", "head-8"]
    assert parts["put-admit"].runs == 2 and parts["put-admit"].padded is None and parts["put-admit"].weight_bytes == 0
    assert (parts["backbone-32"].real, parts["head-8"].real) == (29, 2)
    assert parts["backbone-32"].weight_bytes == bytes_of(llm, layers=True, head=False, rows=29)
    assert parts["head-8"].weight_bytes == bytes_of(llm, layers=False, head=True, rows=0)


def test_scores_of_a_prompt_are_among_what_ran(llm: LLM) -> None:
    generate(llm, [9], 1, prompt_logprobs=0)
    assert [part.name for part in llm.explain_step().parts][:3] == ["put-admit", "backbone-32", "read-8-score_given"]


def test_the_last_step_of_each_kind_is_kept(llm: LLM) -> None:
    generate(llm, [9], 3)
    assert llm.explain_step().kind == "decode"
    assert llm.explain_step("prefill").sequences == [RanSequence(9, 9)]
    with pytest.raises(InvalidRequestError, match=r"^kind is 'both'; it must be 'decode', 'prefill' or None"):
        llm.explain_step("both")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"^bandwidth is -1; it must be bytes a second, 'measure', or None"):
        llm.explain_step(bandwidth=-1)


def test_without_a_bandwidth_there_is_no_floor(llm: LLM) -> None:
    generate(llm, [9], 3)
    step = llm.explain_step()
    assert step.floor_seconds is None
    assert 'The floor is not known: give the bandwidth of cpu in bytes a second, or bandwidth="measure"' in str(step)
    measured = llm.explain_step(bandwidth="measure")
    assert measured.bandwidth is not None and 1e8 < measured.bandwidth < 1e13
    assert "(measured)" in str(measured)


def test_a_step_takes_no_longer_than_the_call(llm: LLM) -> None:
    generate(llm, [9], 3)
    began = time.perf_counter()
    generate(llm, [9], 3)
    seconds = llm.explain_step("decode").seconds
    assert seconds is not None and 0 < seconds < time.perf_counter() - began


def test_before_any_step_there_is_nothing_to_explain(checkpoint: Path) -> None:
    with LLM(checkpoint, **FIELDS) as llm, pytest.raises(InvalidRequestError, match="no step has run since"):
        llm.explain_step()


def test_states_are_read_once_a_sequence(tmp_path: Path) -> None:
    with tiny_engine("lfm2", tmp_path) as llm:
        generate(llm, [9, 12], 3, "lfm2")
        step = llm.explain_step("decode")
    config = tiny_config("lfm2")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    keys = len(config["full_attn_idxs"]) * 2 * config["num_key_value_heads"] * head_dim * 4 * (11 + 14)
    states = (
        (config["num_hidden_layers"] - len(config["full_attn_idxs"]))
        * (config["conv_L_cache"] - 1)
        * config["hidden_size"]
        * 4
        * 2
    )
    assert step.cache_bytes == keys + states


def test_of_experts_those_of_one_token_are_read(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    with tiny_engine("mixtral", tmp_path) as llm:
        generate(llm, [9], 3, "mixtral")
        step = llm.explain_step("decode")
        experts = sum(array.nbytes for path, array in llm.params.items() if ".experts." in path)
        whole = bytes_of(llm, layers=True, head=True, rows=1)
    share = config["num_experts_per_tok"] / config["num_local_experts"]
    assert 0 < share < 1 and experts > 0
    assert step.weight_bytes == whole - round(experts * (1 - share))
    assert str(step).endswith("Not counted: experts beyond those of one token")


@pytest.mark.parametrize("part", [Paged(1, (8,)), Paged(1, (8,), 5), Paged(1, (8,), 6, True)], ids=str)
def test_tokens_that_windows_see(part: Paged) -> None:
    """Against each query's own window."""
    for context in range(1, 30):
        for length in range(1, context + 1):
            seen: set[int] = set()
            for query in range(context - length, context):
                window = part.window or context
                first = query // window * window if part.chunked else query - window + 1
                seen |= set(range(max(first, 0), query + 1))
            assert _seen(part, RanSequence(length, context)) == len(seen)


@pytest.fixture
def explanation() -> StepExplanation:
    part = StepPart("decode-4", 1, 3, 4, 2**20, 2**10)
    return StepExplanation("decode", [part], [RanSequence(1, 7), RanSequence(1, 12)], 1e9, "stated", 0.002)


def test_it_is_told_in_a_table(explanation: StepExplanation) -> None:
    assert str(explanation).splitlines() == [
        "The last decode: 2 tokens of 2 sequences, contexts of 7 to 12 tokens",
        "executable  runs  real  padded to  weights read  caches read",
        "decode-4    1     3     4          1 MiB         1 KiB",
        "1 MiB of weights and 1 KiB of caches are read",
        "At 1.0 GB/s (stated) that takes 1.05 ms: no step is faster",
        "It took 2 ms, 1.9 times the floor",
    ]


def test_a_step_that_ended_before_the_host_looked_took_at_most_that_long(explanation: StepExplanation) -> None:
    late = replace(explanation, seconds=27.5, waited=False)
    assert late.summary[-1] == (
        "It took at most 27.5 s, 26,200.5 times the floor; the host looked at it some time after it had ended"
    )


def test_it_is_shown_in_a_picture(explanation: StepExplanation) -> None:
    shown = explanation._repr_html_()
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", shown)]
    floor = 100 * explanation.floor_seconds / 0.002  # type: ignore[operator]
    np.testing.assert_allclose(widths, [75, 25, 100 * 1024 / 1025, 100 / 1025, floor, 100 - floor], atol=0.01)
    assert "<script" not in shown and shown.count("<div") == shown.count("</div>")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[LLM]:
    with tiny_engine("llama_gqa", tmp_path, engine_process=True) as llm:
        yield llm


def test_an_engine_in_another_process_is_neither_explained_nor_traced(elsewhere: LLM) -> None:
    for ask in (elsewhere.explain_step, elsewhere.trace):
        with pytest.raises(ConfigError, match="engine_process is True"):
            ask()


def test_a_trace_is_where_it_says(llm: LLM, tmp_path: Path) -> None:
    with llm.trace(tmp_path / "traces") as trace:
        assert repr(trace).endswith("not written yet)")
        with pytest.raises(InvalidRequestError, match="the trace is written when its with block has ended"):
            _ = trace.path
        with pytest.raises(InvalidRequestError, match="no trace can be begun"), llm.trace(tmp_path):
            pass
        generate(llm, [9], 3)
    events = json.loads(gzip.decompress(trace.path.read_bytes()))["traceEvents"]
    assert len(events) > 10 and trace.path.is_relative_to(tmp_path / "traces")
    assert trace.path.name in trace._repr_html_() and repr(str(trace.path)) in repr(trace)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it must be a folder"), llm.trace(tmp_path / "file"):
        pass
