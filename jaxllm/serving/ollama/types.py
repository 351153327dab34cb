"""Ollama's API: requests, and the messages and options that they send."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxllm.chat.conversation import (
    MAX_PIECES,
    MAX_TOOLS,
    Call,
    Conversation,
    Message,
    Rendering,
    renaming,
    thinking_variables,
)
from jaxllm.chat.pictures import Part, Picture, Sent
from jaxllm.errors import Field as Place
from jaxllm.requests.sampling import INT32_MAX, MAX_LOGPROBS
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.generation import GenerationSettings
from jaxllm.serving.http.request_model import RequestModel, check_equal, refuse, seconds
from jaxllm.serving.openai.messages import ToolFields
from jaxllm.serving.openai.sampling import CommonSampling
from jaxllm.serving.pooling.types import MAX_INPUTS, EmbeddingRequest
from jaxllm.wording import shown

INERT = frozenset({
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch",
    "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap",
})  # fmt: skip
"""Options without effect: the server's settings say how a model is loaded and how long its context is."""
OFF: Mapping[str, Any] = {"mirostat": 0, "penalize_newline": True, "tfs_z": 1, "vocab_only": False}
"""Options that are not here -> the value that asks for nothing, and is accepted."""

OPTION_OF = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Options that SamplingParams has by other names; the other ones are called the same."""
_OPTIONS = {name: f"options.{OPTION_OF.get(name, name)}" for name in [*CommonSampling.model_fields, *OPTION_OF]}
FIELD_NAMES = renaming(
    _OPTIONS
    | {
        "call_id": "tool_call_id",
        "structured_outputs": "format",
        "chat_template": "template",
        "logprobs": "top_logprobs",
    }
)
"""The names that the fields of a Conversation and its GenerationSettings have here."""

_NUMBER = re.compile(r"-?[0-9]{1,9}")
_GO_TEMPLATE = re.compile(r"\{\{-?\s*(\.[A-Z]|if |range |\$)")


def _seconds(value: Any) -> Any:
    """As `seconds`; "-1" and "300" are numbers too, as in the variable OLLAMA_KEEP_ALIVE."""
    return seconds(int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value)


class Options(CommonSampling):
    """How tokens are chosen, and until when. Options about loading, such as num_ctx and num_gpu, change nothing."""

    num_predict: int | None = Field(default=None, ge=-2, le=INT32_MAX)
    """Upper bound on generated tokens; by default, and with 0, -1 and -2, what is left of the context."""
    repeat_penalty: float | None = None
    """As repetition_penalty in a chat."""

    @model_validator(mode="before")
    @classmethod
    def _of_ollama_alone(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in OFF.keys() & data.keys():
            if data[name] not in (None, OFF[name]):
                raise refuse(f"{name} is {shown(data[name])}; it must be {shown(OFF[name])}: it is not available", name)
        return {name: value for name, value in data.items() if name not in INERT | OFF.keys()}


class OllamaFields(RequestModel):
    """The model, how long it stays, and how it samples."""

    model: str = Field(min_length=1)
    """A name that /api/tags lists, with :latest or without."""
    options: Options | None = None
    """Sampling; what ollama sets for loading is accepted and changes nothing."""
    keep_alive: Annotated[float | None, BeforeValidator(_seconds, json_schema_input_type=float | str | None)] = None
    """How long the model stays loaded after this request, as "10m", or seconds; 0: not at all, -1: for good. A model
    that the server never unloads, such as its only one, stays in any case."""


class AnswerFields(OllamaFields):
    """How an answer is made and sent."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"shift", "truncate"})
    called_here: ClassVar[Mapping[str, str]] = _OPTIONS | {"response_format": "format"}

    stream: bool = True
    """Send the answer in lines of JSON while it is generated."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """json for any JSON object, or a JSON schema that the answer must match."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """Whether to think, or how hard; by default the chat template's own default."""
    logprobs: bool = False
    """Return log-probabilities of the generated tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of this many likeliest tokens at each position; needs logprobs."""

    @model_validator(mode="after")
    def _both_of_logprobs(self) -> AnswerFields:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @property
    def says_nothing(self) -> bool:
        """It only loads the model, or unloads it."""
        return not any(getattr(self, name, None) for name in ("messages", "prompt", "suffix"))

    def constraint(self) -> StructuredOutputs | None:
        if self.format in (None, ""):
            return None
        any_object = self.format == "json"
        return StructuredOutputs(json_object=True) if any_object else StructuredOutputs(json=json.dumps(self.format))

    def rendering(self, **more: Any) -> Rendering:
        thinks, effort = (self.think, None) if isinstance(self.think, bool | None) else (None, self.think)
        return Rendering(variables=thinking_variables(thinks, effort), **more)

    def settings(self) -> GenerationSettings:
        options = self.options or Options()
        penalty = {} if options.repeat_penalty is None else {"repetition_penalty": options.repeat_penalty}
        return GenerationSettings(
            sampling=options.sampling() | penalty,
            max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


_Images = Annotated[list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=MAX_PIECES)]


def _with_images(images: Sequence[str] | None, text: str, *place: str | int) -> list[Part]:
    pictures = (Picture(Sent(one), place=Place(*place, "images", n)) for n, one in enumerate(images or ()))
    return [*pictures, text]


class OllamaFunctionCall(RequestModel):
    name: str
    """Of the function."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """The arguments that it was called with."""
    index: int | None = None
    """Accepted, without effect: calls are in their order."""


class OllamaToolCall(RequestModel):
    """A call that the assistant made earlier."""

    function: OllamaFunctionCall
    """The function that was called."""
    id: str | None = None
    """The name that a tool's message has for it."""
    type: Literal["function"] | None = None
    """Only function."""


class OllamaMessage(RequestModel):
    role: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """system, user, assistant, tool, or another that the template names. A last one of the assistant is continued."""
    content: str = ""
    """The words."""
    thinking: str | None = None
    """The assistant's earlier reasoning, given to templates that show it."""
    tool_calls: list[OllamaToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    """Calls that the assistant made; each must be answered by a message of role tool."""
    tool_name: str | None = None
    """Of a tool's message: the function that gave it."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers; by default the first of its function that waits for one."""
    images: _Images = None
    """Images in base64, which the model sees before the content."""

    @model_validator(mode="after")
    def _fields_of_role(self) -> OllamaMessage:
        for role, others in (("assistant", ("thinking", "tool_calls")), ("tool", ("tool_name", "tool_call_id"))):
            for name in others:
                if getattr(self, name) and self.role != role:
                    raise refuse(f"{name} belongs to messages of role {role!r}, not {self.role!r}", name)
        return self


def _messages(sent: Sequence[OllamaMessage]) -> list[Message]:
    """Calls get ids where they have none: nine letters and digits, as Mistral's templates insist on."""
    found: list[Message] = []
    waiting: dict[str, str] = {}
    for at, said in enumerate(sent):
        made = enumerate(said.tool_calls or ())
        calls = [Call(call.id or f"c{at:04}{n:04}", call.function.name, call.function.arguments) for n, call in made]
        answered = None
        if said.role == "tool":
            fitting = (call_id for call_id, name in waiting.items() if said.tool_name in (None, name))
            answered = said.tool_call_id or next(fitting, said.tool_name or "")
            waiting.pop(answered, None)
        waiting |= {call.id: call.name for call in calls}
        fields: dict[str, Any] = {"reasoning": said.thinking or None, "call_id": answered, "name": said.tool_name}
        parts = _with_images(said.images, said.content, "messages", at)
        found.append(Message.of(said.role, parts, calls=calls, **fields))
    return found


class OllamaChatRequest(AnswerFields, ToolFields):
    messages: list[OllamaMessage] | None = Field(default=None, max_length=MAX_PIECES)
    """The conversation so far; without any the model is loaded, and with a keep_alive of 0 unloaded."""

    def conversation(self) -> Conversation:
        """Raises InvalidRequestError: see FIELD_NAMES."""
        messages = _messages(self.messages or ())
        continues = messages[-1].role == "assistant" and not messages[-1].calls
        return Conversation(
            messages=messages,
            tools=self.callable_tools(),
            tool_choice=self.choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            rendering=self.rendering(opens_answer=not continues, continues_last=continues),
            structured_outputs=self.constraint(),
        )


class GenerateRequest(AnswerFields):
    unsupported: ClassVar[frozenset[str]] = frozenset({"height", "shift", "steps", "truncate", "width"})

    prompt: str = ""
    """A user's message, or with raw a text to continue; without one the model is loaded, or unloaded."""
    system: str | None = None
    """A system message before the prompt."""
    template: str | None = None
    """A Jinja template instead of the model's; ollama's own are in Go's notation, and are refused."""
    context: list[int] | None = None
    """The context of an earlier answer, which this one goes on from."""
    raw: bool = False
    """Continue the prompt as text, without the chat template; so it is where the model has none."""
    suffix: str | None = None
    """The text after the answer, for models that fill in the middle."""
    images: _Images = None
    """Images in base64, which the model sees before the prompt."""

    @model_validator(mode="after")
    def _raw_alone(self) -> GenerateRequest:
        alone = "raw" if self.raw else "suffix" if self.suffix else None
        for name in ("system", "template", "context", "images", *(("suffix",) if self.raw else ())):
            if alone and getattr(self, name):
                raise refuse(f"{name} is not available with {alone}", name)
        if self.images and self.context:
            raise refuse("images is not available with context; send the messages to /api/chat", "images")
        if self.template and _GO_TEMPLATE.search(self.template):
            raise refuse("template is in Go's notation; here it must be a Jinja template", "template")
        return self

    def conversation(self) -> Conversation:
        said = [Message("system", self.system)] if self.system else []
        return Conversation(
            messages=[*said, Message.of("user", _with_images(self.images, self.prompt))],
            rendering=self.rendering(chat_template=self.template or None),
            structured_outputs=self.constraint(),
        )


class OllamaEmbedRequest(OllamaFields):
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] = ""
    """A text, or a list of texts; without any the model is loaded."""
    truncate: bool = True
    """Cut longer texts to the context; false refuses them."""
    dimensions: int | None = Field(default=None, ge=1)
    """Keep this many leading channels, for models that were trained for it (Matryoshka)."""

    def as_embeddings(self) -> EmbeddingRequest:
        cut = -1 if self.truncate else None
        return EmbeddingRequest(
            input=self.input, truncate_prompt_tokens=cut, dimensions=self.dimensions, normalize=True
        )


class OllamaEmbeddingsRequest(OllamaFields):
    prompt: str = ""
    """The text; without one the model is loaded."""

    def as_embeddings(self) -> EmbeddingRequest:
        return _OfPrompt(input=self.prompt, truncate_prompt_tokens=-1, normalize=False)


class _OfPrompt(EmbeddingRequest):
    called: ClassVar = {"input": "prompt"}


class NamedModel(RequestModel):
    """A model by its name."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"options", "password", "system", "template", "username"})

    model: str | None = None
    """A name that /api/tags lists, with :latest or without."""
    name: str | None = None
    """The older name of model."""
    verbose: Literal[False] = False
    """Only false: vocabularies are not shown."""

    @model_validator(mode="after")
    def _one_name(self) -> NamedModel:
        check_equal("model", self.model, "name", self.name)
        if not self.named:
            raise refuse("model is required", "model")
        return self

    @property
    def named(self) -> str:
        return self.model or self.name or ""


class PullRequest(NamedModel):
    stream: bool = True
    """Send lines of JSON that say how far it is."""
    insecure: Literal[False] = False
    """Only false: models come over TLS."""
