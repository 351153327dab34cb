"""/v1/chat/completions: the request, the response and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from jaxllm.chat.conversation import MAX_TOOLS, Conversation, Tool, renaming
from jaxllm.errors import Field as Place
from jaxllm.requests.sampling import MAX_LOGPROBS
from jaxllm.serving.generation import GenerationSettings
from jaxllm.serving.http.request_model import CacheFields, RequestModel, Rule, check_equal, check_rules, refuse
from jaxllm.serving.openai.answers import ChatLogprobs, PromptLogprobs, Timings, WeightSpan
from jaxllm.serving.openai.kv_transfer import KVTransferAnswer
from jaxllm.serving.openai.messages import FIELD_NAMES, Messages, TemplateFields, TextPart, ToolFields, Verbosity
from jaxllm.serving.openai.sampling import UNSUPPORTED_SAMPLING, CompletionUsage, GenerationRequest, TokenLimit

MAX_METADATA = 16
"""OpenAI's limit."""

_RULES = (
    Rule(
        lambda body: not body.logprobs,
        {"top_logprobs": (0,), "logprob_token_ids": ([],)},
        "needs logprobs to be true",
    ),
    Rule(
        lambda body: body.executes,  # one completion of several answers
        {
            "n": (1,), "best_of": (1,), "use_beam_search": (False,), "logprobs": (False,), "prompt_logprobs": (),
            "return_token_ids": (False,), "return_weight_versions": (False,), "echo": (False,),
            "continue_final_message": (False,), "add_generation_prompt": (True,), "truncate_prompt_tokens": (),
            "timings_per_token": (False,), "separate_reasoning": (True,), "stream_reasoning": (True,),
            "kv_transfer_params": (),
        },
        "is not available with mcp.execute",
    ),
)  # fmt: skip


class MCPOptions(RequestModel):
    """The MCP servers' tools are offered to the model, whatever else the request asks for."""

    execute: bool = False
    """The server runs the tools that the model calls, and lets it go on until it calls none; else the client does."""
    allowed_tools: list[str] | None = Field(default=None, min_length=1, max_length=MAX_TOOLS)
    """Only these, by the names that /v1/mcp/tools lists."""
    max_turns: int | None = Field(default=None, ge=1)
    """With execute: most answers of the model, the last of which may call none; the server has a limit of its own."""
    max_calls: int | None = Field(default=None, ge=1)
    """With execute: most tools that are run; the server has a limit of its own."""

    @model_validator(mode="after")
    def _only_executed(self) -> MCPOptions:
        for name in ("max_turns", "max_calls"):
            if getattr(self, name) is not None and not self.execute:
                raise refuse(f"mcp.{name} needs mcp.execute to be true", name)
        return self


class Prediction(RequestModel):
    """What the answer may well be, or have in it: a text that is to be edited, say."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]
    """The text, whole or in parts."""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, TemplateFields, ToolFields, CacheFields):
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_SAMPLING | {
        "audio", "functions", "moderation", "suffix", "web_search_options",
    }  # fmt: skip
    path: ClassVar[str] = "/v1/chat/completions"
    called_here: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "max_completion_tokens", "input": "messages", "prompt": "messages",
        "stop_sequences": "stop", "reasoning": "reasoning_effort", "text": "response_format",
    }  # fmt: skip

    messages: Messages
    """The conversation so far."""
    logprobs: bool = False
    """Return log-probabilities of the generated tokens."""
    top_logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS)
    """Log-probabilities of this many likeliest tokens at each position; needs logprobs."""
    max_tokens: TokenLimit = None
    """The older name of max_completion_tokens."""
    max_completion_tokens: TokenLimit = None
    """Upper bound on generated tokens; by default, and with -1, what is left of the context."""
    add_special_tokens: bool = False
    """Add the tokenizer's own special tokens to the rendered prompt, whose template usually has them already."""
    echo: bool = False
    """Begin each answer with the text of the last message, if that has the role of the answer."""
    include_reasoning: bool = True
    """Return the model's reasoning; false leaves it out of the answer."""
    separate_reasoning: bool = True
    """False leaves the reasoning in the content, with its marks, as SGLang does."""
    stream_reasoning: bool = True
    """False sends the reasoning of a stream in one chunk, once it has ended, as SGLang does."""
    function_call: Literal["none"] | None = None
    """Only none: tools and tool_choice are the newer names of functions and function_call."""
    verbosity: Verbosity | None = None
    """Given to templates that know a verbosity; others have no such setting."""
    modalities: list[Literal["text"]] | None = None
    """Only text."""
    reasoning_control: bool = False
    """Let POST /chat/completions/control end the reasoning; without effect where the model marks none."""
    prediction: Prediction | None = None
    """What the answer may well be: tokens are tried ahead from it where the server drafts from texts
    (speculative_config, ngram or suffix). It changes how fast the answer comes, not the answer."""
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    """Accepted, without effect: nothing is stored."""
    store: bool | None = None
    """Accepted, without effect: nothing is stored."""
    mcp: MCPOptions | None = None
    """Use the tools of this server's MCP servers; without it only `mcp_inject` of the server offers them."""
    service_tier: str | None = None
    """Accepted, without effect, as OpenAI documents it for a single tier."""
    safety_identifier: str | None = None
    """Accepted, without effect: it names a user to OpenAI's abuse detection."""

    @model_validator(mode="after")
    def _chat_fields(self) -> ChatRequest:
        if self.mcp is not None and self.tools is not None:
            raise refuse("mcp and tools are given; a request's tools are its own, or the MCP servers'", "mcp")
        check_rules(self, _RULES)
        budget = super().thinking_budget
        check_equal("max_thinking_tokens", self.max_thinking_tokens, "thinking.budget_tokens", budget)
        check_equal("max_tokens", self.max_tokens, "max_completion_tokens", self.max_completion_tokens)
        return self

    @property
    def executes(self) -> bool:
        return self.mcp is not None and self.mcp.execute

    @property
    def takes_tools(self) -> bool:
        """True where the servers' tools may be offered unasked: not where a certain form of answer is expected."""
        said = self.tools is not None or self.tool_choice == "none"
        formed = self.constraint_field is not None or self.use_beam_search
        return not (said or formed or self.continue_final_message or self.add_generation_prompt is False)

    @property
    def thinking_budget(self) -> int | None:
        return super().thinking_budget if self.max_thinking_tokens is None else self.max_thinking_tokens

    @property
    def custom_names(self) -> set[str]:
        """Of custom tools."""
        return {tool.name for tool in self.tools or () if tool.type == "custom"}

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self, injected: Sequence[Tool] = ()) -> Conversation:
        """`injected` are tools for a request that brings none. Raises InvalidRequestError: see `own_names`."""
        return Conversation(
            messages=[message.message() for message in self.messages],
            tools=self.callable_tools(injected),
            tool_choice=self.choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            rendering=self.rendering(special_tokens=self.add_special_tokens, verbosity=self.verbosity),
            structured_outputs=self.constraint(),
            separate_reasoning=self.separate_reasoning,
            reasoning_control=self.reasoning_control,
            image_sizes=self.mm_processor_kwargs or {},
        )

    def generation_settings(self) -> GenerationSettings:
        return self.settings(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=self.logprobs_count,
            prompt_logprobs=self.prompt_logprobs,
            prediction="" if self.prediction is None else self.prediction.text,
        )

    def own_names(self) -> Callable[[Place], Place]:
        """The names that the fields of its Conversation and GenerationSettings have here."""
        names = {"structured_outputs": self.constraint_field or "structured_outputs", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return renaming(FIELD_NAMES | names)

    @property
    def echoed(self) -> str:
        """The text that each answer begins with."""
        last, rendering = self.messages[-1], self.rendering()
        if not self.echo or (last.role != "assistant" and rendering.opens_answer):
            return ""
        return last.message().text


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class CalledCustom(msgspec.Struct):
    name: str
    input: str


class MadeToolCall(msgspec.Struct, kw_only=True):
    """A call of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class MCPCall(msgspec.Struct, kw_only=True):
    """A tool that the server ran; of what a failed one says to the model, `error` has OpenAI's form."""

    id: str
    name: str
    server_label: str
    arguments: str
    status: Literal["in_progress", "completed", "failed"]
    output: str | None
    error: dict[str, Any] | None


class MCPCallDelta(MCPCall, kw_only=True):
    """The whole call: once as it begins, without output, and once as it has ended."""

    index: int


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning` and `reasoning_content` are one thing under vLLM's two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeToolCall] | UnsetType = UNSET
    mcp_calls: list[MCPCall] | UnsetType = UNSET
    """With mcp.execute: what the server ran before this was said, or while."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    timings: Timings | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
    conversation_id: str | UnsetType = UNSET
    resource_id: str | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A call's first delta has id, type and name, the others a fragment of the arguments, or of the input, only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    """null where a call opens, as at OpenAI's."""
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    mcp_calls: list[MCPCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions/render: the prompt as text and as token ids."""

    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int
