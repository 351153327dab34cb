"""/apply-template and /props, which llama.cpp's clients ask for."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from jaxllm.chat.conversation import Conversation, naming, renaming
from jaxllm.chat.prompt import render
from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.request_model import ModelFields
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.messages import FIELD_NAMES, Messages, TemplateFields, ToolFields
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])


class ApplyTemplateRequest(ModelFields, TemplateFields, ToolFields):
    messages: Messages
    """A chat, rendered as /v1/chat/completions does."""

    def conversation(self) -> Conversation:
        """The chat that is to be rendered. Raises InvalidRequestError: see FIELD_NAMES."""
        return Conversation(
            messages=[message.message() for message in self.messages],
            tools=self.callable_tools(),
            rendering=self.rendering(),
        )


class AppliedTemplate(msgspec.Struct):
    prompt: str


class SamplingDefaultsShown(msgspec.Struct, kw_only=True):
    """What the checkpoint recommends to sample with; null where it says nothing."""

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


@router.post("/apply-template", responses=returns(AppliedTemplate))
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Response:
    """The text of the prompt that /v1/chat/completions would give the model."""
    state: ServerState = request.app.state.server
    model = (await open_call(request, body.model)).model
    with naming(renaming(FIELD_NAMES)):
        rendered = await state.prepare(render, model, body.conversation(), may_be_cut=True)
    return json_response(AppliedTemplate(rendered.text))


@router.get("/props", responses=returns(Props))
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
    defaults = SamplingDefaultsShown(**asdict(info.default_sampling))
    shown = Props(
        default_generation_settings=GenerationSettingsShown(n_ctx=info.max_model_len, params=defaults),
        total_slots=info.max_num_seqs,
        model_alias=found.names[0],
        model_path=found.config.model,
        modalities=Modalities(),
        chat_template=template,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        build_info=f"jaxllm {version('jaxllm')}",
    )
    return json_response(shown)
