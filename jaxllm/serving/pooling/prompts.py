"""Inputs as token ids, cut to fit."""

from __future__ import annotations

from jaxllm.chat.conversation import naming, renaming
from jaxllm.chat.prompt import render
from jaxllm.errors import ContextLengthError, Field, InvalidRequestError
from jaxllm.requests.tasks import Pooling
from jaxllm.serving.openai.messages import FIELD_NAMES
from jaxllm.serving.pooling.embedding_types import InputFields, PoolingFields
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState


def pooling_kind(model: ServedModel) -> Pooling:
    """The server's setting, or what the checkpoint asks for."""
    setting = model.config.pooling
    return model.engine.info.tasks.pooling if setting == "auto" else setting


async def input_prompts(state: ServerState, model: ServedModel, body: InputFields) -> list[list[int]]:
    """Tokenize, cut and check every input of a request. Raises InvalidRequestError naming the entry."""
    if body.messages is None:
        return await state.offload(_input_prompts, model, body)
    with naming(renaming(FIELD_NAMES)):
        may_be_cut = body.truncate_prompt_tokens is not None
        rendered = await state.prepare(render, model, body.conversation(), may_be_cut=may_be_cut)
    return [check_length(model, cut(rendered.token_ids, kept_tokens(model, body), body.truncation_side), "messages")]


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
    """How many tokens truncate_prompt_tokens leaves; more than any text has where it is not set."""
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
