"""Requests without generation: their texts as token ids cut to fit, run side by side, and judged by pair or class."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from fastapi import Request, Response

from jaxllm.chat.conversation import naming, renaming
from jaxllm.chat.prompt import render
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ContextLengthError, Field, InvalidRequestError
from jaxllm.requests.outputs import Activation, ModelTasks, PooledOutput, Pooling, PoolingParams
from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.answers import json_response
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import until_disconnect
from jaxllm.serving.openai.messages import FIELD_NAMES
from jaxllm.serving.openai.sampling import PromptTokensDetails
from jaxllm.serving.pooling.types import ComparisonFields, InputFields, PoolingFields
from jaxllm.serving.request_metrics import Clock, ModelCall
from jaxllm.serving.served_model import ServedModel

Method = Literal["yes_no", "cosine", "classifier"]
Pair = tuple[str, str]
JUDGE_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Qwen3-Reranker's (arXiv:2506.05176); it answers with one token."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PoolingRun:
    """One request's prompts, for one `run`. Raises InvalidRequestError for a priority that its tenant may not have."""

    def __init__(self, request: Request, call: ClientCall, fields: PoolingFields, kind: str):
        self.id = f"{kind}-{fields.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.call = call
        self.model = call.model
        self.tasks = call.model.engine.info.tasks
        self.state = call.state
        self._request = request
        self._adapters = call.adapter_uses()
        self._fields = fields
        self._priority = call.tenant.priority(fields.priority)
        self._task: asyncio.Task[list[PooledOutput]] | None = None
        self._ended_by: APIError | None = None
        self._usage: ModelCall

    @property
    def pooling(self) -> Pooling:
        """The server's setting, or what the checkpoint asks for."""
        setting = self.model.config.pooling
        return self.tasks.pooling if setting == "auto" else setting

    async def run(
        self, prompts: Sequence[list[int]], params: PoolingParams, second_texts: Sequence[int] = ()
    ) -> list[np.ndarray]:
        """The values of every prompt, in order; see `outputs`."""
        return [output.values for output in await self.outputs(prompts, params, second_texts)]

    async def outputs(
        self, prompts: Sequence[list[int]], params: PoolingParams, second_texts: Sequence[int] = ()
    ) -> list[PooledOutput]:
        """What is found of every prompt, in order. `second_texts` are `AsyncLLM.pool`'s.

        Raises ClientDisconnected where the client went away first; APIError, the error that it was aborted with, or 429
        when the key has fewer tokens left than the prompts have; and the engine's own errors.
        """
        asked = self._usage = ModelCall(operation="embed", model=self.model.names[0], clock=Clock(time.time()))
        tokens = sum(map(len, prompts))
        async with self.call.asking(self, asked, tokens):
            asked.prompt_tokens = tokens
            try:
                outputs = await until_disconnect(self._request.receive, self._run(prompts, params, second_texts))
            except asyncio.CancelledError:
                if self._ended_by is not None:
                    raise self._ended_by from None
                raise
            asked.cached_tokens = sum(output.num_cached_tokens for output in outputs)
        return outputs

    def abort(self, error: APIError) -> None:
        self._ended_by = error
        if self._task is not None:
            self._task.cancel()

    def usage(self) -> PoolingUsage:
        tokens, cached = self._usage.prompt_tokens, PromptTokensDetails(self._usage.cached_tokens)
        return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=cached)

    def listed(self, kind: Callable[..., msgspec.Struct], data: Sequence[msgspec.Struct]) -> Response:
        """The answer of one entry a prompt, as one of types' lists."""
        answer = kind(id=self.id, created=self.created, model=self.call.name, data=data, usage=self.usage())
        return json_response(answer, request_id=self.id)

    async def _run(
        self, prompts: Sequence[list[int]], params: PoolingParams, second_texts: Sequence[int]
    ) -> list[PooledOutput]:
        tenant = self.call.tenant
        call = self.model.engine.pool(
            prompts,
            params,
            request_id=self.id,
            priority=self._priority,
            cache_salt=tenant.cache_salt(self._fields.cache_salt),
            group=tenant.group,
            adapters=self._adapters,
            second_texts=second_texts,
        )
        self._task = asyncio.create_task(call)
        return await self._task


async def input_prompts(run: PoolingRun, body: InputFields) -> list[list[int]]:
    """Tokenize, cut and check every input of a request. Raises InvalidRequestError naming the entry."""
    if body.messages is None:
        return await run.state.offload(_input_prompts, run.model, body)
    with naming(renaming(FIELD_NAMES)):
        may_be_cut = body.truncate_prompt_tokens is not None
        chat = body.chat(body.messages, special_tokens=bool(body.add_special_tokens))
        chat.refuse_images()
        rendered = await run.call.prepare(render, chat, may_be_cut=may_be_cut)
    kept = cut(rendered.token_ids, kept_tokens(run.model, body), body.truncation_side)
    return [check_length(run.model, kept, "messages")]


def text_prompt(model: ServedModel, text: str, keep: int, source: str, side: str = "right") -> list[int]:
    """Token ids of a text with its special tokens, which stay when it is cut to `keep` tokens."""
    ids = model.encode(text, Field(source), may_be_cut=keep <= model.engine.info.max_model_len)
    if len(ids) > keep:
        plain = model.tokenizer.encode(text, add_special_tokens=False)
        start = next(i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
        before, after = ids[:start], ids[start + len(plain) :]
        room = keep - len(before) - len(after)
        if room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep}; {len(before) + len(after)} special tokens leave no room for text",
                "truncate_prompt_tokens",
            )
        ids = before + cut(plain, room, side) + after
    return check_length(model, ids, source)


def kept_tokens(model: ServedModel, fields: PoolingFields) -> int:
    """The number of tokens that truncate_prompt_tokens leaves; more than any text has where it is not set."""
    longest = model.engine.info.max_model_len
    match fields.truncate_prompt_tokens:
        case None:
            return 2**63
        case -1:
            return longest
        case count:
            return min(count, longest)


def cut(ids: list[int], keep: int, side: str = "right") -> list[int]:
    """The first `keep` tokens, or with side "left" the last."""
    return ids if len(ids) <= keep else ids[:keep] if side == "right" else ids[-keep:]


def check_length(model: ServedModel, ids: list[int], source: str) -> list[int]:
    """`ids` again. Raises InvalidRequestError when there are none, or more than the context holds."""
    if not ids:
        raise InvalidRequestError(f"{source} is empty; it must have at least one token", source)
    longest = model.engine.info.max_model_len
    if len(ids) > longest:
        message = (
            f"{source} has {len(ids)} tokens; the context holds {longest}. truncate_prompt_tokens cuts what is longer"
        )
        raise ContextLengthError(message, source)
    return ids


def score_method(config: ModelConfig, tasks: ModelTasks) -> Method:
    """The server's setting, or what suits the model. Raises ConfigError where this, or pooling, does not suit it."""
    if tasks.projects and config.pooling not in ("auto", tasks.pooling):
        raise ConfigError(
            f"pooling is {config.pooling!r}, but this model's Dense modules are made for {tasks.pooling!r}; use auto"
        )
    if tasks.encodes and config.score_method == "yes_no":
        raise ConfigError("score_method is 'yes_no', but this model is an encoder, which scores no tokens; use auto")
    setting = config.score_method
    if setting == "auto":
        return "classifier" if tasks.labels else "yes_no" if tasks.judges_pairs else "cosine"
    if (setting == "classifier") != bool(tasks.labels) and setting != "cosine":
        head = "has a classification head" if tasks.labels else "has no classification head"
        raise ConfigError(f"score_method is {setting!r}, but the model {head}; use auto")
    return setting


async def score_pairs(run: PoolingRun, pairs: list[Pair], body: ComparisonFields) -> list[float]:
    """A probability for each pair, or with cosine a number from -1 to 1. Raises InvalidRequestError and APIError."""
    model, offload = run.model, run.state.offload
    method = score_method(model.config, run.tasks)
    _check_fields(model, body, method)
    names = body.named_texts()
    short = await offload(_shorten_pairs, model, pairs, body, names)
    names = {
        cut: names[text] for pair, cuts in zip(pairs, short, strict=True) for text, cut in zip(pair, cuts, strict=True)
    }
    if method == "cosine":
        return await _cosines(run, short, body, names)
    params = PoolingParams(kind="logits", token_ids=_answers(model) if method == "yes_no" else ())
    found = await offload(lambda: [_pair_prompt(model, pair, body, names) for pair in short])
    prompts, second_texts = zip(*found, strict=True)
    logits = np.stack(await run.run(prompts, params, second_texts)).astype(np.float64)
    return _relevance(logits, run.tasks, raw=not body.use_activation).tolist()


def activate(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    if activation == "identity":
        return x
    if activation == "sigmoid":
        return np.exp(-np.logaddexp(0, -x))
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


async def class_scores(run: PoolingRun, body: InputFields, *, raw: bool) -> list[np.ndarray]:
    """Each input's class probabilities, or `raw` scores. Raises InvalidRequestError without a classification head."""
    if not run.tasks.labels:
        name = run.call.name
        raise InvalidRequestError(f"model {name!r} has no classification head, so it cannot classify", "model")
    prompts = await input_prompts(run, body)
    logits = np.stack(await run.run(prompts, PoolingParams(kind="logits")))
    return list(activate(logits, "identity" if raw else run.tasks.activation))


def _input_prompts(model: ServedModel, body: InputFields) -> list[list[int]]:
    name = body.called.get("input", "input")
    several = len(body.inputs) > 1 or body.inputs[0] is not body.input
    return [
        _input_prompt(model, body, entry, f"{name}[{index}]" if several else name)
        for index, entry in enumerate(body.inputs)
    ]


def _input_prompt(model: ServedModel, body: InputFields, entry: str | list[int], source: str) -> list[int]:
    keep = kept_tokens(model, body)
    if isinstance(entry, str):
        entry = model.engine.info.tasks.prompt(body.prompt_name) + entry
        if body.add_special_tokens is not False:
            return text_prompt(model, entry, keep, source, body.truncation_side)
        may_be_cut = body.truncate_prompt_tokens is not None
        entry = model.encode(entry, Field(source), add_special_tokens=False, may_be_cut=may_be_cut)
    vocab_size = model.engine.info.vocab_size
    outside = next((token for token in entry if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(f"{source} has token id {outside}; ids go from 0 to {vocab_size - 1}", source)
    return check_length(model, cut(entry, keep, body.truncation_side), source)


def _relevance(logits: np.ndarray, tasks: ModelTasks, *, raw: bool) -> np.ndarray:
    """`[N, 2]` of yes and no, or `[N, 1]`, to one number each."""
    if logits.shape[1] == 1:
        return logits[:, 0] if raw else activate(logits, tasks.activation)[:, 0]
    yes = tasks.labels.index("yes") if tasks.labels else 0
    odds = logits[:, yes] - logits[:, 1 - yes]
    return odds if raw else activate(odds, "sigmoid")


async def _cosines(run: PoolingRun, pairs: list[Pair], body: ComparisonFields, names: dict[str, str]) -> list[float]:
    texts, model = list(dict.fromkeys(text for pair in pairs for text in pair)), run.model
    keep, before = kept_tokens(model, body), run.tasks.prompt(None)
    prompts = await run.state.offload(lambda: [text_prompt(model, before + text, keep, names[text]) for text in texts])
    vectors = np.stack(await run.run(prompts, PoolingParams(kind=run.pooling))).astype(np.float64)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    unit = dict(zip(texts, units, strict=True))
    return [float(np.clip(unit[first] @ unit[second], -1, 1)) for first, second in pairs]


def _check_fields(model: ServedModel, body: ComparisonFields, method: Method) -> None:
    tasks = model.engine.info.tasks
    if method == "classifier" and len(tasks.labels) != 1 and set(tasks.labels) != {"yes", "no"}:
        raise InvalidRequestError(
            f"this model tells {len(tasks.labels)} classes apart; a score needs one, or yes and no; use /classify"
        )
    if body.instruction is not None and not _judges(model):
        raise InvalidRequestError("instruction has no place in how this model compares texts", "instruction")
    if method == "cosine" and not body.use_activation:
        raise InvalidRequestError("use_activation is false, but a cosine has no activation", "use_activation")


def _judges(model: ServedModel) -> bool:
    """Say whether pairs are put to the model in JUDGE_PROMPT."""
    tasks = model.engine.info.tasks
    method = score_method(model.config, tasks)
    return method == "yes_no" or (method == "classifier" and tasks.judges_pairs)


def _answers(model: ServedModel) -> tuple[int, int]:
    ids = [model.tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in ids):
        raise InvalidRequestError("score_method is 'yes_no', but this tokenizer has no single token for 'yes' and 'no'")
    return ids[0][0], ids[1][0]


def _pair_prompt(
    model: ServedModel, pair: Pair, body: ComparisonFields, names: dict[str, str]
) -> tuple[list[int], int]:
    """Token ids of one pair, its document cut to fit, and where the second text begins, as `encode_pair` says."""
    query, document = pair
    keep = kept_tokens(model, body)
    for text in pair:
        model.check_length(text, Field(names[text]), may_be_cut=True)
    ids, second = _encode_pair(model, query, document, body)
    length = len(model.tokenizer.encode(document, add_special_tokens=False)) if len(ids) > keep else 0
    while len(ids) > keep:
        length -= len(ids) - keep
        if length < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {body.truncate_prompt_tokens}, which leaves no room for a document",
                "truncate_prompt_tokens",
            )
        ids, second = _encode_pair(model, query, _first_tokens(model, document, length), body)
    return check_length(model, ids, names[document]), second


def _encode_pair(model: ServedModel, query: str, document: str, body: ComparisonFields) -> tuple[list[int], int]:
    if not _judges(model):
        return model.tokenizer.encode_pair(query, document)
    text = JUDGE_PROMPT.format(instruction=body.instruction or INSTRUCTION, query=query, document=document)
    return model.tokenizer.encode(text, add_special_tokens=False), 0


def _shorten_pairs(model: ServedModel, pairs: list[Pair], body: ComparisonFields, names: dict[str, str]) -> list[Pair]:
    limits = body.max_tokens_per_query, body.max_tokens_per_doc
    if not any(limits):
        return pairs
    known: dict[tuple[str, int | None], str] = {}  # one query stands in many pairs

    def shorten(text: str, limit: int | None) -> str:
        if limit and (text, limit) not in known:
            model.check_length(text, Field(names[text]), may_be_cut=True)
            known[text, limit] = _first_tokens(model, text, limit)
        return known.get((text, limit), text)

    return [(shorten(query, limits[0]), shorten(document, limits[1])) for query, document in pairs]


def _first_tokens(model: ServedModel, text: str, count: int) -> str:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= count else model.tokenizer.decode(ids[:count], skip_special_tokens=False)
