"""/tokenize and /detokenize"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jaxllm.errors import InvalidRequestError
from jaxllm.serving.openapi import returns
from jaxllm.serving.prompts import tokenize_chat
from jaxllm.serving.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from jaxllm.serving.responses import json_response
from jaxllm.serving.route import JSONRoute
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["tokenizer"])


@router.post("/tokenize", responses=returns(TokenizeResponse))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or a chat."""
    state: ServerState = request.app.state.server
    state.resolve_model(body.model)
    return json_response(await state.offload(_tokenize, state, body))


@router.post("/detokenize", responses=returns(DetokenizeResponse))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state: ServerState = request.app.state.server
    state.resolve_model(body.model)
    vocab_size = state.tokenizer.vocab_size
    for position, token in enumerate(body.tokens):
        if not 0 <= token < vocab_size:
            message = f"tokens[{position}] is {token}; token ids of this model are from 0 to {vocab_size - 1}"
            raise InvalidRequestError(message, f"tokens[{position}]")
    text = await state.offload(state.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))


def _tokenize(state: ServerState, body: TokenizeRequest) -> TokenizeResponse:
    if body.messages is not None:
        tokens = tokenize_chat(state, body.messages, body, body.special_tokens)
    else:
        tokens = state.tokenizer.encode(body.prompt or body.content or "", body.special_tokens)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=state.engine.info.max_model_len,
        tokens=tokens,
        token_strs=[state.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
    )
