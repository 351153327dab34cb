"""What a format of answers is, and what other servers call the formats that we read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxllm.chat.calls import CallScan
from jaxllm.chat.events import long_id
from jaxllm.text.reasoning import CHANNELS, ReasoningFormat


@dataclass(frozen=True)
class CallSyntax:
    """One way in which a format's calls begin.

    Attributes:
        scan: reads what follows `marker`.
        marker: text that begins calls anywhere; "" for calls that begin a line without one.
        first: without a marker, the characters that a call begins with; "" stands for the tools' names.
        ends_reasoning: a call of it inside open reasoning ends that; its marker is a token that models do not quote.
    """

    scan: CallScan
    marker: str = ""
    first: str = ""
    ends_reasoning: bool = False


@dataclass(frozen=True)
class Tags:
    """How raw arguments are written, each between tags of its own.

    Attributes:
        open: the opening tag, or its parts, between which a newline may come; with {key} in it, and {string} where it
            says whether the value is text ("true") or JSON ("false"), or {type} where it says which type it has.
        close: the closing tag, which may have {key} in it.
        also_ends: a regular expression of other text that ends a value, so that none can have it.
        exact: newlines are where `open` and `close` have them, and `between` is behind each argument; else they may
            come.
        literal: what stands around a text that holds one of the characters in `markup`.
    """

    open: tuple[str, ...]
    close: str
    also_ends: str = ""
    exact: bool = False
    between: str = "\n"
    literal: tuple[str, str] | None = None
    markup: str = ""


@dataclass(frozen=True)
class Layout:
    """How the model writes calls, for grammars: start call end [between call end]… stop.

    Attributes:
        call: what comes before the arguments, with {name} in it, {index} where calls are numbered, and {id} where the
            model names them itself.
        arguments: the notation of the arguments.
        marked: the beginning of start + call that only calls have; "" if text may look alike.
        thought: what opens and closes reasoning that may come before all this, where no text of its own sets it apart.
    """

    call: str
    end: str = ""
    start: str = ""
    between: str = ""
    stop: str = ""
    marked: str = ""
    arguments: Literal["json", "gemma", "pythonic"] | Tags = "json"
    quote: str = ""
    thought: tuple[str, str] | None = None

    def head(self, name: str, index: int = 0) -> str:
        """What comes before the arguments of a call."""
        written = self.call.replace("{index}", str(index)).replace("{id}", f"call{index:06}")
        return written.replace("{name}", name)


@dataclass(frozen=True)
class ToolFormat:
    """One format of tool calls.

    Attributes:
        detect: it is the format of a template that contains all strings of one of these groups.
        markers: strings that may be special tokens and that the parser must see.
        variant_of: who asks for the format of that name gets this one where the template speaks it.
    """

    name: str
    syntaxes: tuple[CallSyntax, ...]
    layout: Layout
    detect: tuple[tuple[str, ...], ...]
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = long_id
    variant_of: str = ""


@dataclass(frozen=True)
class OutputFormats:
    """What an answer is parsed for; None parses nothing."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that the parser must see in the text, although they may be special tokens."""
        known = self.reasoning
        reasoning = (known.open, known.close, *known.special) if known else ()
        return (*reasoning, *(self.tools.markers if self.tools else ()))

    @property
    def channels(self) -> str:
        """The name of the format whose answers are messages; "" where they are one text."""
        names = {known.name for known in (self.tools, self.reasoning) if known is not None}
        return next((name for name in CHANNELS if name in names), "")


def _by_alias(**names: str) -> dict[str, str]:
    return {alias: name for name, aliases in names.items() for alias in aliases.split()}


TOOL_ALIASES = _by_alias(
    cohere_command="cohere_command3 cohere_command4",
    glm45="glm47 ling3 poolside_v1",
    harmony="openai",
    hermes="ernie45 granite4 qwen3_json",
    jamba="hunyuan_a13b",
    json="xlam",
    llama3_json="llama4_json",
    llama4_pythonic="pythonic",
    muse="muse_glimmer musespark1x",
    qwen3_coder="qwen3_xml step3p5",
)
"""vLLM's names of formats of calls, by ours."""
REASONING_ALIASES = _by_alias(
    cohere="cohere_command3 cohere_command4",
    deepseek_r1="minimax_m2 step3 step5",
    harmony="openai_gptoss",
    muse="muse_glimmer musespark1x",
    think="deepseek_v3 deepseek_v4 deepseek_v41 glm45 glm47 granite_thinking_parser holo2 hy_v3 kimi_k2 ling3 "
    "mimo minicpmv nemotron_v3 olmo3 poolside_v1 qwen3 step3p5",
)
"""vLLM's names of formats of reasoning, by ours."""
UNREAD = {"beam": "", "hf": "auto", "hy_v4": "", "inkling": "", "k2_horizon": "", "step5": ""}
"""Formats of vLLM's that we do not read, and the nearest that we do; "" where none is near."""
