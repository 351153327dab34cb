"""/tokenize and /detokenize"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jaxllm.chat.conversation import naming, renaming
from jaxllm.chat.prompt import render
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.messages import FIELD_NAMES
from jaxllm.serving.openai.tokenize_types import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from jaxllm.serving.state import ServerState
from jaxllm.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute, tags=["tokenizer"])


@router.post("/tokenize", responses=returns(TokenizeResponse))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or a chat."""
    state: ServerState = request.app.state.server
    model = (await open_call(request, body.model)).model
    if body.messages is not None:
        with naming(renaming(FIELD_NAMES)):
            tokens = (await state.prepare(render, model, body.conversation(), may_be_cut=True)).token_ids
    else:
        name, text = ("content", body.content) if body.prompt is None else ("prompt", body.prompt)
        tokens = await state.offload(
            model.encode, text or "", Field(name), add_special_tokens=body.special_tokens, may_be_cut=True
        )
    texts = None
    if body.return_token_strs:
        texts = await state.offload(lambda: list(map(model.token_text, tokens)))
    return json_response(
        TokenizeResponse(
            count=len(tokens), max_model_len=model.engine.info.max_model_len, tokens=tokens, token_strs=texts
        )
    )


@router.post("/detokenize", responses=returns(DetokenizeResponse))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state: ServerState = request.app.state.server
    model = (await open_call(request, body.model)).model
    return json_response(DetokenizeResponse(await state.offload(_text, model.tokenizer, body.tokens)))


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Raises InvalidRequestError naming the first id that the tokenizer does not know."""
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
