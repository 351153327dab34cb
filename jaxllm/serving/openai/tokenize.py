"""/tokenize and /detokenize: vLLM's fields, and llama.cpp's `content`; its /apply-template and /props."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import model_validator

from jaxllm.chat.conversation import naming, renaming
from jaxllm.chat.prompt import render
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.request_model import ModelFields, refuse
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.messages import FIELD_NAMES, Messages, TemplateFields, ToolFields
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState
from jaxllm.text.tokenizer import Tokenizer


class TokenizeRequest(ModelFields, TemplateFields, ToolFields):
    prompt: str | None = None
    """Text; special tokens are added unless add_special_tokens is false."""
    content: str | None = None
    """Text; llama.cpp's name, where special tokens are added only if add_special is true."""
    messages: Messages | None = None
    """A chat, rendered as /v1/chat/completions does."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens; true for prompt, false otherwise."""
    add_special: bool | None = None
    """llama.cpp's name of add_special_tokens."""
    return_token_strs: bool = False
    """Also return each token's text."""
    parse_special: Literal[True] = True
    """Only true: special tokens in a text are taken for what they are, as by llama.cpp's default."""
    with_pieces: bool = False
    """Return each token as {"id", "piece"}, where a part of a character is a list of bytes; as llama.cpp."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        given = [name for name in ("prompt", "messages", "content") if getattr(self, name) is not None]
        if len(given) != 1:
            raise refuse(f"give one of prompt, messages and content, not {' and '.join(given) or 'none'}", "prompt")
        if self.add_special is not None and self.content is None:
            raise refuse("add_special goes with content; use add_special_tokens", "add_special")
        return self

    @property
    def special_tokens(self) -> bool:
        for asked in (self.add_special_tokens, self.add_special):
            if asked is not None:
                return asked
        return self.prompt is not None


class TokenPiece(msgspec.Struct):
    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: Sequence[int | TokenPiece]
    token_strs: list[str] | None


class DetokenizeRequest(ModelFields):
    tokens: list[int]
    """Token ids."""


class DetokenizeResponse(msgspec.Struct):
    """The text, under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The facts with which a client renders and counts as this server does."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None


router = APIRouter(route_class=JSONRoute, tags=["tokenizer"])
template_router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])


@router.post("/tokenize", responses=returns(TokenizeResponse))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or a chat."""
    call = await open_call(request, body.model)
    state, model, special = call.state, call.model, body.special_tokens
    if body.messages is not None:
        with naming(renaming(FIELD_NAMES)):
            chat = body.chat(body.messages, body.callable_tools(), special_tokens=special)
            tokens = (await call.prepare(render, chat, may_be_cut=True)).token_ids
    else:
        name, text = ("content", body.content) if body.prompt is None else ("prompt", body.prompt)
        tokens = await state.offload(model.encode, text or "", Field(name), add_special_tokens=special, may_be_cut=True)
    texts = None
    if body.return_token_strs:
        texts = await state.offload(lambda: list(map(model.token_text, tokens)))
    longest = model.engine.info.max_model_len
    shown: Sequence[int | TokenPiece] = tokens
    if body.with_pieces:
        shown = await state.offload(lambda: [_piece(model, token) for token in tokens])
    return json_response(TokenizeResponse(count=len(tokens), max_model_len=longest, tokens=shown, token_strs=texts))


def _piece(model: ServedModel, token: int) -> TokenPiece:
    raw = model.token_bytes(token)
    try:
        return TokenPiece(token, raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(token, list(raw))


@router.post("/detokenize", responses=returns(DetokenizeResponse))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    call = await open_call(request, body.model)
    text = await call.state.offload(_text, call.model.tokenizer, body.tokens)
    return json_response(DetokenizeResponse(text, text))


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    for position, token in enumerate(tokens):
        if not 0 <= token < tokenizer.vocab_size:
            message = f"tokens[{position}] is {token}; token ids of this model are from 0 to {tokenizer.vocab_size - 1}"
            raise InvalidRequestError(message, f"tokens[{position}]")
    return tokenizer.decode(tokens, skip_special_tokens=False)


@router.get("/tokenizer_info", responses=returns(TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's special tokens and chat template, and the formats that answers are parsed for."""
    state: ServerState = request.app.state.server
    model = state.registry.find_loaded(None, tenant_of(request))
    tokenizer = model.tokenizer
    template = model.chat_template or tokenizer.chat_template
    formats = model.formats(template or "")
    info = TokenizerInfo(
        tokenizer_class=type(tokenizer.backend.model).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=model.engine.info.max_model_len,
        bos_token=tokenizer.special_tokens.get("bos_token"),
        eos_token=tokenizer.special_tokens.get("eos_token"),
        eos_token_ids=tokenizer.eos_token_ids,
        special_tokens=tokenizer.special_tokens,
        chat_template=template,
        tool_call_parser=formats.tools.name if formats.tools else None,
        reasoning_parser=formats.reasoning.name if formats.reasoning else None,
    )
    return json_response(info)


class ApplyTemplateRequest(ModelFields, TemplateFields, ToolFields):
    messages: Messages
    """A chat, rendered as /v1/chat/completions does."""


class AppliedTemplate(msgspec.Struct):
    prompt: str


class SamplingDefaultsShown(msgspec.Struct, kw_only=True):
    """The checkpoint's recommendations; null where it has none."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None


class GenerationSettingsShown(msgspec.Struct, kw_only=True):
    n_ctx: int
    params: SamplingDefaultsShown


class Modalities(msgspec.Struct):
    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, kw_only=True):
    default_generation_settings: GenerationSettingsShown
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    build_info: str


@template_router.post("/apply-template", responses=returns(AppliedTemplate))
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Response:
    """The text of the prompt that /v1/chat/completions would give the model."""
    call = await open_call(request, body.model)
    with naming(renaming(FIELD_NAMES)):
        chat = body.chat(body.messages, body.callable_tools())
        rendered = await call.prepare(render, chat, may_be_cut=True)
    return json_response(AppliedTemplate(rendered.text))


@template_router.get("/props", responses=returns(Props))
async def props(
    request: Request,
    model: Annotated[str | None, Query(description="A name that /v1/models lists; by default the first.")] = None,
) -> Response:
    """A model that is loaded, its context and its chat template, in llama.cpp's words."""
    state: ServerState = request.app.state.server
    found = state.registry.find_loaded(model, tenant_of(request))
    info, tokenizer = found.engine.info, found.engine.tokenizer
    special = {} if tokenizer is None else tokenizer.special_tokens
    template = found.chat_template or (None if tokenizer is None else tokenizer.chat_template)
    defaults = msgspec.convert(info.default_sampling, SamplingDefaultsShown, from_attributes=True)
    shown = Props(
        default_generation_settings=GenerationSettingsShown(n_ctx=info.max_model_len, params=defaults),
        total_slots=info.max_num_seqs,
        model_alias=found.names[0],
        model_path=found.config.model,
        modalities=Modalities(vision=info.most_image_rows > 0),
        chat_template=template,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        build_info=f"jaxllm {version('jaxllm')}",
    )
    return json_response(shown)
