"""What an engine could not honour, refused before it costs anything."""

from __future__ import annotations

import msgspec
import pytest

from jaxllm.engine.doors.sequences import check_request
from jaxllm.engine.messages import EngineInfo
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import MAX_ENTRIES
from jaxllm.requests.sampling import SamplingParams

VOCAB = 50_000
INFO = EngineInfo(
    model_name="m", vocab_size=VOCAB, max_model_len=4096, eos_token_ids=[0], num_pages=9, page_size=16, max_num_seqs=4,
    max_num_batched_tokens=64,
)  # fmt: skip


@pytest.mark.parametrize("count", [None, 0, 20])
def test_log_probabilities_of_long_prompts(count):
    check_request(INFO, None, [1] * 4000, SamplingParams(prompt_logprobs=count))


def test_whole_vocabularies_are_for_short_prompts():
    longest = MAX_ENTRIES // VOCAB
    check_request(INFO, None, [1] * longest, SamplingParams(prompt_logprobs=-1))
    with pytest.raises(InvalidRequestError, match=rf"up to {longest} tokens, or from 0 to 20") as error:
        check_request(INFO, None, [1] * (longest + 1), SamplingParams(prompt_logprobs=-1))
    assert error.value.param == "prompt_logprobs"


def test_whole_vocabularies_are_for_short_answers():
    info, longest = msgspec.structs.replace(INFO, max_logprobs=-1), MAX_ENTRIES // VOCAB
    check_request(info, None, [1], SamplingParams(logprobs=-1, max_tokens=longest))
    check_request(info, None, [1] * (4096 - longest), SamplingParams(logprobs=-1, max_tokens=None))
    check_request(info, None, [1], SamplingParams(logprobs=20, max_tokens=None))
    for params in (
        SamplingParams(logprobs=-1, max_tokens=longest + 1),
        SamplingParams(logprobs=-1, max_tokens=None),
        SamplingParams(logprobs=-1, max_tokens=longest, n=2),
    ):
        with pytest.raises(
            InvalidRequestError, match=rf"max_tokens of up to {longest // params.n}, or from 0"
        ) as error:
            check_request(info, None, [1], params)
        assert error.value.param == "logprobs"
