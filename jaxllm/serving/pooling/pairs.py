"""How alike or how relevant two texts are: judged with yes or no, by a classification head, or by cosine."""

from __future__ import annotations

from typing import Literal

import numpy as np
from fastapi import Request

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, Field, InvalidRequestError
from jaxllm.requests.tasks import Activation, ModelTasks, PoolingParams
from jaxllm.serving.pooling.prompts import check_length, kept_tokens, pooling_kind, text_prompt
from jaxllm.serving.pooling.run import PoolingRun
from jaxllm.serving.pooling.scoring_types import ComparisonFields
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

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


def score_method(config: ModelConfig, tasks: ModelTasks) -> Method:
    """The server's setting, or what suits the model: its head's classes, the prompt it was trained with, or cosine.

    Raises:
        ConfigError: the setting does not suit the model, or that of pooling does not.
    """
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


async def score_pairs(
    state: ServerState, model: ServedModel, request: Request, pairs: list[Pair], body: ComparisonFields, run: PoolingRun
) -> list[float]:
    """A score for each pair: a probability, or with cosine a number from -1 to 1.

    Raises:
        InvalidRequestError: a field does not suit how this model compares; APIError: a text is too long.
    """
    method = score_method(model.config, model.engine.info.tasks)
    _check_fields(model, body, method)
    names = body.named_texts()
    short = await state.offload(_shorten_pairs, model, pairs, body, names)
    names = {
        cut: names[text] for pair, cuts in zip(pairs, short, strict=True) for text, cut in zip(pair, cuts, strict=True)
    }
    pairs = short
    if method == "cosine":
        return await _cosines(state, model, request, pairs, body, run, names)
    params = PoolingParams(kind="logits", token_ids=_answers(model) if method == "yes_no" else ())
    found = await state.offload(lambda: [_pair_prompt(model, pair, body, names) for pair in pairs])
    prompts, second_texts = zip(*found, strict=True)
    logits = np.stack(await run.run(request, prompts, params, second_texts)).astype(np.float64)
    return _relevance(logits, model.engine.info.tasks, raw=not body.use_activation).tolist()


def activate(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    if activation == "identity":
        return x
    if activation == "sigmoid":
        return np.exp(-np.logaddexp(0, -x))
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _relevance(logits: np.ndarray, tasks: ModelTasks, *, raw: bool) -> np.ndarray:
    """`[N, 2]` of yes and no, or `[N, 1]`, to one number each."""
    if logits.shape[1] == 1:
        return logits[:, 0] if raw else activate(logits, tasks.activation)[:, 0]
    yes = tasks.labels.index("yes") if tasks.labels else 0
    odds = logits[:, yes] - logits[:, 1 - yes]
    return odds if raw else activate(odds, "sigmoid")


async def _cosines(
    state: ServerState,
    model: ServedModel,
    request: Request,
    pairs: list[Pair],
    body: ComparisonFields,
    run: PoolingRun,
    names: dict[str, str],
) -> list[float]:
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    keep = kept_tokens(model, body)
    before = model.engine.info.tasks.prompt(None)
    prompts = await state.offload(lambda: [text_prompt(model, before + text, keep, names[text]) for text in texts])
    vectors = np.stack(await run.run(request, prompts, PoolingParams(kind=pooling_kind(model)))).astype(np.float64)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    unit = dict(zip(texts, units, strict=True))
    return [float(unit[first] @ unit[second]) for first, second in pairs]


def _check_fields(model: ServedModel, body: ComparisonFields, method: Method) -> None:
    tasks = model.engine.info.tasks
    if method == "classifier" and len(tasks.labels) != 1 and set(tasks.labels) != {"yes", "no"}:
        raise InvalidRequestError(
            f"this model tells {len(tasks.labels)} classes apart; a score needs one, or yes and no; use /classify",
        )
    if body.instruction is not None and not _judges(model):
        raise InvalidRequestError("instruction has no place in how this model compares texts", "instruction")
    if method == "cosine" and not body.use_activation:
        raise InvalidRequestError("use_activation is false, but a cosine has no activation", "use_activation")


def _judges(model: ServedModel) -> bool:
    """Whether pairs are put to the model in JUDGE_PROMPT."""
    tasks = model.engine.info.tasks
    method = score_method(model.config, tasks)
    return method == "yes_no" or (method == "classifier" and tasks.judges_pairs)


def _answers(model: ServedModel) -> tuple[int, int]:
    """The tokens "yes" and "no"."""
    ids = [model.tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in ids):
        raise InvalidRequestError("score_method is 'yes_no', but this tokenizer has no single token for 'yes' and 'no'")
    return ids[0][0], ids[1][0]


def _pair_prompt(
    model: ServedModel, pair: Pair, body: ComparisonFields, names: dict[str, str]
) -> tuple[list[int], int]:
    """Token ids of one pair, its document cut where the whole is longer than truncate_prompt_tokens.

    Also where the second text begins, as `Tokenizer.encode_pair` says.
    """
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
