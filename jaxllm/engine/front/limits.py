"""What an engine could not honour is refused here, against what it settled on at its start."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.front.budget_checks import check_thinking
from jaxllm.engine.messages import EngineInfo
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.compiled_grammars import compile_grammar
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.prompt_scores import MAX_ENTRIES
from jaxllm.requests.sampling import MAX_LOGPROBS, SamplingParams
from jaxllm.text.bad_words import check_bad_words
from jaxllm.text.tokenizer import Tokenizer

MAX_ALL_LOGITS = 4096
"""The largest vocabulary, or number of classes, whose logits may be asked for without naming them."""


def check_request(
    info: EngineInfo, tokenizer: Tokenizer | None, ids: Sequence[int], params: SamplingParams, *, pools: bool = False
) -> None:
    """Refuse what the engine could not honour.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if info.tasks.labels and not pools:
        classes = ", ".join(info.tasks.labels[:5]) + (", …" if len(info.tasks.labels) > 5 else "")
        raise InvalidRequestError(f"this model generates no text, it classifies (as {classes}); use /classify")
    if not ids:
        raise InvalidRequestError("prompt is empty; it must have at least one token", param="prompt")
    bad = next((i for i in ids if not 0 <= i < info.vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(f"prompt has token id {bad}; ids go from 0 to {info.vocab_size - 1}", param="prompt")
    if len(ids) > info.max_model_len - (not pools):
        room = "it must fit" if pools else "with at least one to generate it must be shorter than"
        raise InvalidRequestError(
            f"prompt has {len(ids)} tokens; {room} the context of {info.max_model_len} tokens", param="prompt"
        )
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "shown_special_token_ids", "logprob_token_ids"):
        tokens = getattr(params, name) or ()
        bad = next((i for i in tokens if not 0 <= i < info.vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(f"{name} has token id {bad}; ids go from 0 to {info.vocab_size - 1}", param=name)
    for name in ("stop", "bad_words", "structured_outputs"):
        if getattr(params, name) and tokenizer is None:
            raise InvalidRequestError(f"{name} needs a tokenizer, but skip_tokenizer_init is on", param=name)
    _check_logprobs(info.max_logprobs, params)
    _check_vocabularies(info, len(ids), params)
    if params.structured_outputs is not None:
        compile_grammar(params.structured_outputs)
    check_thinking(params, tokenizer, ids)
    if params.bad_words and tokenizer is not None:
        check_bad_words(tokenizer.backend, params.bad_words)


def _check_logprobs(most: int, params: SamplingParams) -> None:
    if params.wants_vocabulary and most >= 0:
        problem = f" asks for the whole vocabulary; this engine gives at most {most} (max_logprobs)"
        raise InvalidRequestError([Field("logprobs"), problem])
    most = MAX_LOGPROBS if most < 0 else most
    counts = {
        "logprobs": params.logprobs or 0,
        "prompt_logprobs": params.prompt_logprobs or 0,
        "logprob_token_ids": len(params.logprob_token_ids),
    }
    for name, count in counts.items():
        if count > most or (count < 0 and most < MAX_LOGPROBS):
            asked = "the whole vocabulary" if count < 0 else count
            problem = f" asks for {asked}; this engine gives at most {most} (max_logprobs)"
            raise InvalidRequestError([Field(name), problem])


def _check_vocabularies(info: EngineInfo, num_prompt: int, params: SamplingParams) -> None:
    """Refuse more log-probabilities of whole vocabularies than a response may hold."""
    longest = MAX_ENTRIES // info.vocab_size
    if params.prompt_logprobs == -1 and num_prompt > longest:
        raise InvalidRequestError(
            f"prompt_logprobs is -1, the whole vocabulary of {info.vocab_size}, and prompt has {num_prompt} tokens; "
            f"accepted are prompts of up to {longest} tokens, or from 0 to {MAX_LOGPROBS}",
            param="prompt_logprobs",
        )
    room = info.max_model_len - num_prompt
    generated = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.wants_vocabulary and generated * params.n > longest:
        number = f"up to {generated} tokens" + (f" {params.n} times" if params.n > 1 else "")
        problem = (
            f" asks for the whole vocabulary of {info.vocab_size}, and {number} may be generated; accepted is a "
            f"max_tokens of up to {longest // params.n}, or from 0 to {MAX_LOGPROBS}"
        )
        raise InvalidRequestError([Field("logprobs"), problem])


def check_pooling(info: EngineInfo, prompts: Sequence[Sequence[int]], pooling: PoolingParams) -> None:
    """Refuse what the engine could not honour.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    params = SamplingParams(max_tokens=1, allowed_token_ids=pooling.token_ids or None)
    for ids in prompts:
        check_request(info, None, ids, params, pools=True)
    outputs = len(info.tasks.labels) or info.vocab_size
    if pooling.kind == "logits" and not pooling.token_ids and outputs > MAX_ALL_LOGITS:
        raise InvalidRequestError(
            f"token_ids is empty, which asks for all {outputs} logits; at most {MAX_ALL_LOGITS} are given",
            param="token_ids",
        )
