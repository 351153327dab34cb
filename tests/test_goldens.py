"""The two real models at float32 say what transformers says, token for token."""

import pytest

from jaxllm import LLM, SamplingParams
from tests.reference import load_model_goldens
from tests.support.real_models import SHAPES

MODELS = ("smollm2-135m", "gemma3-270m")


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    with LLM(request.param, dtype="float32", **SHAPES) as llm:
        yield llm, list(load_model_goldens(request.param).values())


def test_greedy_tokens(model):
    llm, goldens = model
    params = [
        SamplingParams(temperature=0, max_tokens=len(g.greedy_token_ids), ignore_eos=True, detokenize=False)
        for g in goldens
    ]
    outputs = llm.generate([g.prompt_token_ids for g in goldens], params, use_tqdm=False)
    for golden, output in zip(goldens, outputs, strict=True):
        sure = golden.sure_greedy_token_ids  # up to where the reference's two best logits are too close to call
        assert output.outputs[0].token_ids[: len(sure)] == sure, golden.name


def test_prompt_logprobs(model):
    llm, goldens = model
    scored = [g for g in goldens if g.logprobs is not None]
    assert len(scored) >= 4
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    outputs = llm.generate([g.prompt_token_ids for g in scored], params, use_tqdm=False)
    for golden, output in zip(scored, outputs, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None and entries[0] is None
        tokens = golden.prompt_token_ids[1:]
        ours = [entry[token].logprob for entry, token in zip(entries[1:], tokens, strict=True)]
        assert ours == pytest.approx(golden.logprobs.tolist(), abs=1e-3), golden.name
        for position, entry in enumerate(entries[1:]):
            best = sorted(-lp.logprob for lp in entry.values())[:5]
            assert best == pytest.approx((-golden.top_logprobs[position]).tolist(), abs=1e-3), golden.name


def test_text_is_tokenized_as_the_reference_tokenizes_it(model):
    llm, goldens = model
    for golden in goldens:
        if golden.name != "chat":
            assert llm.get_tokenizer().encode(golden.prompt) == golden.prompt_token_ids, golden.name
