"""What an engine could not honour is refused here, against what it settled on at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from jaxllm.engine.features.grammar.thinking_budget import closing_tokens
from jaxllm.engine.messages import EngineInfo, EngineRequest
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.captures import CaptureParams
from jaxllm.requests.logits_processors import check_chosen
from jaxllm.requests.outputs import MAX_ENTRIES, ModelTasks, PoolingParams
from jaxllm.requests.sampling import MAX_LOGPROBS, SamplingParams, ThinkingMarkers
from jaxllm.requests.structured_outputs import compile_grammar
from jaxllm.text.reasoning import prompt_markers, template_reasoning
from jaxllm.text.spellings import check_bad_words
from jaxllm.text.tokenizer import Tokenizer

MAX_ALL_LOGITS = 4096
"""The largest vocabulary, or number of classes, whose logits may be asked for without naming them."""


def refuse_text(tasks: ModelTasks) -> None:
    """Raises InvalidRequestError where the model cannot be asked to write."""
    if tasks.why_no_text is not None:
        raise InvalidRequestError(tasks.why_no_text)


def check_request(
    info: EngineInfo, tokenizer: Tokenizer | None, ids: Sequence[int], params: SamplingParams, *, pools: bool = False
) -> None:
    """Refuse what the engine could not honour.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if not pools:
        refuse_text(info.tasks)
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
    if params.processes_logits:
        check_chosen(info.logits_processors, params.chosen_processors)
    _check_logprobs(info.max_logprobs, params)
    _check_vocabularies(info, len(ids), params)
    if params.structured_outputs is not None:
        compile_grammar(params.structured_outputs)
    check_thinking(params, tokenizer, ids)
    if params.bad_words and tokenizer is not None:
        check_bad_words(tokenizer.backend, params.bad_words)


def refuse_in_stages(info: EngineInfo, name: str) -> None:
    """Raises InvalidRequestError where layers are on devices of their own, which only pass tokens on."""
    if info.num_stages > 1:
        raise InvalidRequestError(
            f"{name} is set, and this engine's pipeline_parallel_size is {info.num_stages}; it must be 1 for that", name
        )


MOST_CAPTURED_BYTES = 2**30
"""What a step may give of activations, as float32."""


def check_capture(info: EngineInfo, ids: Sequence[int], capture: CaptureParams) -> None:
    """Refuse more activations than there is room for, and positions that a prompt and its completion cannot have.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if info.tasks.encodes:
        raise InvalidRequestError("this model is an encoder; activations are given of decoders only", "capture")
    refuse_in_stages(info, "capture")
    most = max(1, MOST_CAPTURED_BYTES // (4 * info.max_num_batched_tokens * info.layer_shapes.widest))
    if len(capture.taps) > most:
        raise InvalidRequestError(
            f"capture asks for {len(capture.taps)} activations; accepted are up to {most} at a time, for steps of "
            f"{info.max_num_batched_tokens} tokens (max_num_batched_tokens)",
            "capture",
        )
    positions = capture.positions if isinstance(capture.positions, tuple) else ()
    bad = next((i for i in positions if not -len(ids) <= i < info.max_model_len), None)
    if bad is not None:
        raise InvalidRequestError(
            f"positions has {bad}; of a prompt of {len(ids)} tokens, in a context of {info.max_model_len}, they go "
            f"from {-len(ids)} to {info.max_model_len - 1}",
            "positions",
        )


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


def check_pooling(
    info: EngineInfo, prompts: Sequence[Sequence[int]], pooling: PoolingParams, second_texts: Sequence[int] = ()
) -> None:
    """Refuse what the engine could not honour. `second_texts` are where each prompt's second text begins; 0: nowhere.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if second_texts and len(second_texts) != len(prompts):
        raise InvalidRequestError(
            f"second_texts has {len(second_texts)} entries for {len(prompts)} prompts; give one a prompt",
            param="second_texts",
        )
    for ids, second in zip(prompts, second_texts, strict=False):
        if not 0 <= second < max(len(ids), 1):
            raise InvalidRequestError(
                f"second_texts has {second} for a prompt of {len(ids)} tokens; it must be one of them", "second_texts"
            )
    if info.tasks.encodes:
        _check_encoder(info.tasks, pooling)
    params = SamplingParams(max_tokens=1, allowed_token_ids=pooling.token_ids or None)
    for ids in prompts:
        check_request(info, None, ids, params, pools=True)
    outputs = len(info.tasks.labels) or info.vocab_size
    if pooling.kind == "logits" and not pooling.token_ids and outputs > MAX_ALL_LOGITS:
        raise InvalidRequestError(
            f"token_ids is empty, which asks for all {outputs} logits; at most {MAX_ALL_LOGITS} are given",
            param="token_ids",
        )


def _check_encoder(tasks: ModelTasks, pooling: PoolingParams) -> None:
    kind = pooling.kind
    if tasks.labels and kind != "logits":
        raise InvalidRequestError(f"this model gives classes ({', '.join(tasks.labels[:5])}) and no vectors")
    if not tasks.labels and kind == "logits":
        raise InvalidRequestError(
            "kind is 'logits'; this model is an encoder, which scores no tokens: it must be last, cls or mean",
            param="kind",
        )
    if tasks.labels and pooling.token_ids:
        raise InvalidRequestError("token_ids is set, but this model scores classes, all of which it gives", "token_ids")
    if tasks.projects and kind != tasks.pooling:
        raise InvalidRequestError(
            f"kind is {kind!r}; it must be {tasks.pooling!r}, which this model's Dense modules are made for",
            param="kind",
        )


FIELD = "max_thinking_tokens"


def with_markers(request: EngineRequest, tokenizer: Tokenizer | None) -> EngineRequest:
    """The same request; its budget, if it has one, knows which markers it is about. Raises as `check_thinking` does."""
    params = request.sampling_params
    if params.max_thinking_tokens is None or params.thinking_markers is not None:
        return request
    markers = _markers(tokenizer, request.prompt_token_ids)
    return msgspec.structs.replace(request, sampling_params=replace(params, thinking_markers=markers))


def check_thinking(params: SamplingParams, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
    """Refuse a budget that could not be enforced.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if params.max_thinking_tokens is None:
        return
    if tokenizer is None:
        raise InvalidRequestError(f"{FIELD} needs a tokenizer, but skip_tokenizer_init is on", param=FIELD)
    markers = params.thinking_markers or _markers(tokenizer, prompt)
    needed = closing_tokens(markers, tokenizer.backend)
    allowed = params.allowed_token_ids
    missing = [] if allowed is None else [token for token in needed if token not in allowed]
    if missing:
        raise InvalidRequestError(
            f"allowed_token_ids leaves out {missing}; with {FIELD} it must have the tokens {needed}, which end the "
            "reasoning",
            param="allowed_token_ids",
        )


def _markers(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> ThinkingMarkers:
    reasoning = template_reasoning(tokenizer.chat_template if tokenizer is not None else None)
    if tokenizer is None or reasoning is None:
        raise InvalidRequestError(
            f"{FIELD} needs to know how the model marks its reasoning, and its chat template shows no markers; "
            "thinking_markers may say",
            param=FIELD,
        )
    return prompt_markers(reasoning, tokenizer, prompt)
