"""A request at the front door: checked against what its engine can do, and taken apart into sequences."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxllm.engine.doors.eyes import Eyes
from jaxllm.engine.features.grammar.thinking_budget import closing_tokens
from jaxllm.engine.messages import EngineInfo, EngineRequest, SeenImage, TokenDelta
from jaxllm.errors import Field, InvalidRequestError, JaxLLMError
from jaxllm.requests.captures import CaptureParams, CapturesInProgress
from jaxllm.requests.logits_processors import check_chosen
from jaxllm.requests.outputs import (
    MAX_ENTRIES,
    CompletionOutput,
    ModelTasks,
    PooledOutput,
    PoolingParams,
    RankedLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    extend_versions,
    of_vocabulary,
)
from jaxllm.requests.sampling import LOGPROBS_MODES, MAX_LOGPROBS, SamplingParams, ThinkingMarkers
from jaxllm.requests.steering import Patching, read_embeds
from jaxllm.requests.structured_outputs import compile_grammar
from jaxllm.text.detokenizer import regex_matcher
from jaxllm.text.reasoning import prompt_markers, template_reasoning
from jaxllm.text.spellings import check_bad_words
from jaxllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | dict
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`.
`"multi_modal_data": {"image": …}` beside these has an image, or a list of them, for the placeholders in the prompt."""
Prompts = Prompt | Iterable[Prompt]
"""One prompt, or several."""
_BYTES = (bytes, bytearray, memoryview)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """The prompt's text, where it has one, and its token ids.

    Raises:
        InvalidRequestError: a text without a tokenizer, or none of the accepted shapes.
    """
    if isinstance(prompt, dict):
        inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if inner is None:
            raise InvalidRequestError(
                f"prompt has the keys {sorted(prompt)}; it must have 'prompt' or 'prompt_token_ids'", param="prompt"
            )
        prompt = inner
    if isinstance(prompt, _BYTES):
        raise InvalidRequestError(f"prompt is {type(prompt).__name__}; it must be text: decode it", param="prompt")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("prompt is text, but skip_tokenizer_init is on; give token ids", param="prompt")
        return prompt, tokenizer.encode(prompt)
    _check_iterable(prompt)
    ids = list(prompt)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidRequestError("prompt must be text or a list of integer token ids", param="prompt")
    return None, ids


class Sees(Protocol):
    """An engine that images can be shown to."""

    @property
    def eyes(self) -> Eyes: ...


def prompt_images(prompt: Prompt, engine: Sees) -> list[SeenImage]:
    """The images of a prompt's `multi_modal_data`. Raises InvalidRequestError: it has anything else, or one is bad."""
    media = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
    if not media:
        return []
    if not isinstance(media, Mapping) or set(media) != {"image"}:
        raise InvalidRequestError([Field("multi_modal_data"), " has other keys; accepted is 'image'"])
    given = media["image"]
    return [engine.eyes.look(image) for image in (given if isinstance(given, list | tuple) else [given])]


def prompt_list(prompts: Prompts) -> list[Any]:
    """One prompt or many -> many."""
    return one_or_many(prompts)[0]


def one_or_many(prompts: Prompts) -> tuple[list[Any], bool]:
    """One prompt or many -> many, and whether it was one; a list of integers is one prompt.

    Raises InvalidRequestError for what is neither.
    """
    if isinstance(prompts, (str, dict, *_BYTES)):
        return [prompts], True
    _check_iterable(prompts)
    listed = list(prompts)  # an iterator can be looked at only once
    if listed and all(isinstance(item, int) for item in listed):
        return [listed], True
    return listed, False


def _check_iterable(given: object) -> None:
    if not isinstance(given, Iterable):
        raise InvalidRequestError(f"prompt is {given!r}; it must be text, or a list of integer token ids", "prompt")


def split_request(request: EngineRequest) -> list[EngineRequest]:
    """One request for each of its choices; their prompts share pages, their seeds differ."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    seeds = [None if params.seed is None else params.seed + choice for choice in range(params.n)]
    return [msgspec.structs.replace(request, sampling_params=replace(params, n=1, seed=seed)) for seed in seeds]


def failure(delta: TokenDelta) -> JaxLLMError:
    """The error to raise for a delta that ends its request before it is complete."""
    kind = InvalidRequestError if delta.invalid else JaxLLMError
    return kind(f"request {delta.request_id} failed: {delta.error or delta.finish_reason}")


def pooled_output(delta: TokenDelta) -> PooledOutput:
    """The result that the one delta of a request with pooling carries. Raises JaxLLMError when it failed."""
    if delta.pooled is None:
        raise failure(delta)
    return PooledOutput(np.frombuffer(delta.pooled, "<f4").astype(np.float32), delta.num_cached_tokens)


def rank_vocabulary(delta: TokenDelta) -> None:
    """Make a delta's log-probabilities of those of the whole vocabulary, where it brings these."""
    if delta.vocabulary is not None:
        rows = np.frombuffer(delta.vocabulary, "<f4").reshape(len(delta.token_ids), -1)
        delta.logprobs = [of_vocabulary(token, row) for token, row in zip(delta.token_ids, rows, strict=True)]
        delta.vocabulary = None


def name_tokens(delta: TokenDelta, tokenizer: Tokenizer) -> None:
    """Give the log-probabilities of a delta their tokens' texts and bytes."""
    if delta.logprobs is not None:
        delta.logprobs = [_named(entries, tokenizer) for entries in delta.logprobs]


def _named(entries: RankedLogprobs, tokenizer: Tokenizer) -> RankedLogprobs:
    named = []
    for token, logprob in entries:
        raw = tokenizer.token_bytes(token)
        named.append((token, logprob._replace(decoded_token=raw.decode(errors="replace"), token_bytes=raw)))
    return named


class Collector:
    """Gathers the deltas of one caller's request into a RequestOutput."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None = None,
        capture: CaptureParams | None = None,
        width: int = 0,
    ):
        """`tokenizer` names the tokens of the prompt's log-probabilities; `capture` are of up to `width`."""
        wants = params.logprobs is not None
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=ids,
            outputs=[
                CompletionOutput(index=i, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None)
                for i in range(params.n)
            ],
            metrics=RequestMetrics(arrival_time=time.time()),
        )
        self._open = params.n
        self._captures = [CapturesInProgress(capture, width) for _ in range(params.n)] if capture else []
        self._tokenizer = tokenizer

    def add(self, choice: int, delta: TokenDelta) -> None:
        """Append a delta of one choice."""
        output, metrics = self.output.outputs[choice], self.output.metrics
        assert metrics is not None
        if delta.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = time.time()
            metrics.first_scheduled_time = delta.first_scheduled_time
            self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [self._dict(step) for step in delta.prompt_logprobs.steps()]
        for rows in delta.captured:
            self._captures[choice].add(rows.positions, rows.values)
        output.token_ids += delta.token_ids
        output.text += delta.text
        if delta.token_ids and delta.weight_version:  # beams have none
            extend_versions(output.weight_versions, delta.weight_version, len(delta.token_ids))
        if output.logprobs is not None and delta.logprobs is not None:
            entries: list[TokenLogprobs] = [dict(e) for e in delta.logprobs]
            output.logprobs += entries
            chosen = zip(delta.token_ids, entries, strict=True)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(e[t].logprob for t, e in chosen)
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            if self._captures:
                output.captures = self._captures[choice].finish()
            self._open -= 1
            if self._open == 0:
                self.output.finished = True
                metrics.finished_time = time.time()

    def _dict(self, step: RankedLogprobs | None) -> TokenLogprobs | None:
        if step is None:
            return None
        return dict(step if self._tokenizer is None else _named(step, self._tokenizer))


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
    named = (
        "logit_bias", "stop_token_ids", "allowed_token_ids", "shown_special_token_ids", "logprob_token_ids",
        "prompt_logprob_token_ids",
    )  # fmt: skip
    for name, tokens in (("prompt", ids), *((name, getattr(params, name) or ()) for name in named)):
        bad = next((i for i in tokens if not 0 <= i < info.vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(f"{name} has token id {bad}; ids go from 0 to {info.vocab_size - 1}", param=name)
    if len(ids) > info.max_model_len - (not pools):
        room = "it must fit" if pools else "with at least one to generate it must be shorter than"
        raise InvalidRequestError(
            f"prompt has {len(ids)} tokens; {room} the context of {info.max_model_len} tokens", param="prompt"
        )
    for name in ("stop", "stop_regex", "bad_words", "structured_outputs", "dry_sequence_breakers"):
        unused = name == "dry_sequence_breakers" and not params.dry_multiplier
        if getattr(params, name) and tokenizer is None and not unused:
            raise InvalidRequestError(f"{name} needs a tokenizer, but skip_tokenizer_init is on", param=name)
    if params.processes_logits:
        check_chosen(info.logits_processors, params.chosen_processors)
    _check_logprobs(info, params)
    _check_vocabularies(info, len(ids), params)
    if params.structured_outputs is not None:
        compile_grammar(params.structured_outputs)
    check_thinking(params, tokenizer, ids)
    for expression in params.stop_regex:
        regex_matcher(expression)
    if params.bad_words and tokenizer is not None:
        check_bad_words(tokenizer.backend, params.bad_words)


def refuse_in_stages(info: EngineInfo, name: str) -> None:
    """Raises InvalidRequestError where layers are on devices of their own, which only pass tokens on."""
    if info.num_stages > 1:
        raise InvalidRequestError(
            f"{name} is set, and this engine's pipeline_parallel_size is {info.num_stages}; it must be 1 for that", name
        )


def prompt_vectors(prompt: Prompt, info: EngineInfo) -> Patching | None:
    """The vectors of a prompt `{"prompt_embeds": [T, E]}`; None for any other.

    Raises:
        InvalidRequestError: they are none, or the model takes none; `param` is prompt_embeds.
    """
    if not isinstance(prompt, dict) or "prompt_embeds" not in prompt:
        return None
    if not info.takes_vectors:
        raise InvalidRequestError(
            "prompt_embeds is set; this model needs to know its tokens by their ids", "prompt_embeds"
        )
    refuse_in_stages(info, "prompt_embeds")
    return read_embeds(prompt["prompt_embeds"], width=info.hidden_size, longest=info.max_model_len)


MOST_CAPTURED_BYTES = 2**30
"""Bytes of activations that a step may give, as float32."""


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


def _check_logprobs(info: EngineInfo, params: SamplingParams) -> None:
    most, mode = info.max_logprobs, params.logprobs_mode or info.logprobs_mode
    if params.wants_vocabulary and mode != LOGPROBS_MODES[0]:
        problem = f" is {mode!r}; it must be {LOGPROBS_MODES[0]!r} with a whole vocabulary (logprobs: -1)"
        raise InvalidRequestError([Field("logprobs_mode"), problem])
    if params.wants_vocabulary and most >= 0:
        problem = f" asks for the whole vocabulary; this engine gives at most {most} (max_logprobs)"
        raise InvalidRequestError([Field("logprobs"), problem])
    most = MAX_LOGPROBS if most < 0 else most
    counts = {
        "logprobs": params.logprobs or 0,
        "prompt_logprobs": params.prompt_logprobs or 0,
        "logprob_token_ids": len(params.logprob_token_ids),
        "prompt_logprob_token_ids": len(params.prompt_logprob_token_ids),
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
    if pooling.of_tokens and not pooling.token_ids and outputs > MAX_ALL_LOGITS:
        raise InvalidRequestError(
            f"token_ids is empty, which asks for all {outputs} {pooling.kind}; at most {MAX_ALL_LOGITS} are given",
            param="token_ids",
        )


def _check_encoder(tasks: ModelTasks, pooling: PoolingParams) -> None:
    kind = pooling.kind
    if tasks.labels and kind != "logits":
        raise InvalidRequestError(f"this model gives classes ({', '.join(tasks.labels[:5])}) and no vectors")
    if not tasks.labels and pooling.of_tokens:
        raise InvalidRequestError(
            f"kind is {kind!r}; this model is an encoder, which scores no tokens: it must be last, cls or mean",
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


def settled(request: EngineRequest, info: EngineInfo, tokenizer: Tokenizer | None) -> EngineRequest:
    """The same request; its budget, if it has one, knows which markers it is about, and its log-probabilities what they
    are. Raises as `check_thinking` does.
    """
    params = request.sampling_params
    if params.logprobs is not None and params.logprobs_mode is None:
        params = replace(params, logprobs_mode=info.logprobs_mode)
        request = msgspec.structs.replace(request, sampling_params=params)
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
