"""The marks of reasoning in the answers of model families, and the marks that a chat template uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxllm.requests.sampling import ThinkingMarkers

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

PROMPT_TAIL = 16  # tokens at a prompt's end in which an opening marker is looked for


CITATION_END = "</co:"
"""The beginning of the closing tag of Cohere's citations, `<co>Paris</co: 0:[1]>`; the source follows."""
HARMONY = "harmony"  # gpt-oss's messages on channels, which have a parser of their own
HARMONY_TOKENS = (
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
MUSE = "muse"  # Muse's messages to itself, the user and tools, which have a parser of their own too
MUSE_TOKENS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
FUNCTIONARY = "functionary_v32"  # v3.2's messages, which have a parser of their own, and no reasoning
CHANNELS = (HARMONY, MUSE, FUNCTIONARY)  # formats whose answers are messages, calls among them


@dataclass(frozen=True)
class ReasoningFormat:
    """One way of marking reasoning.

    Attributes:
        detect: it is the format of a template that contains one of these; of a group within them, all.
        behind: what the family writes right after `close`.
        answer: what begins the answer's text after that, where it is marked.
        around: marks in and around the answer's text, which are no part of it.
        wrapper: tags that may stand around all of the answer's text, and that may be text elsewhere.
        variants: other opening and closing marks that models of the family write.
        special: further special tokens that the answer's parser must see.
        always_open: the answer begins inside the reasoning even if neither template nor model opens it.
        in_content: the reasoning, with its marks, is the beginning of the content.
        variant_of: who asks for the format of that name gets this one where the template speaks it.
    """

    name: str
    open: str
    close: str
    detect: tuple[str | tuple[str, ...], ...]
    behind: str = ""
    always_open: bool = False
    answer: str = ""
    around: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    wrapper: tuple[str, str] | None = None
    variants: tuple[tuple[str, str], ...] = ()
    in_content: bool = False
    variant_of: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open, *(open for open, _ in self.variants))

    @property
    def closes(self) -> tuple[str, ...]:
        return (self.close, *(close for _, close in self.variants))

    @property
    def openings(self) -> tuple[str, ...]:
        """The first marks of an answer that has reasoning, or whose text is marked."""
        return tuple(filter(None, (*self.opens, self.answer)))

    def as_content(self, *, opened: bool) -> ReasoningFormat:
        """The same, as text that is content with all its marks; the prompt has `opened` the block, or has not."""
        return replace(self, open="" if opened else self.open, around=(), wrapper=None, in_content=True)

    def markers(self, *, opened: bool, text_follows: bool = False) -> ThinkingMarkers:
        """For a request whose prompt has `opened` the block, or has not; with `text_follows` nothing else can."""
        behind = self.behind + (self.answer if text_follows else "")
        return ThinkingMarkers(open=self.open, close=self.close, behind=behind, opened=opened)


# Of each: name, the mark that opens, the one that closes, `detect`. The first whose strings a template has is its own.
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        HARMONY, "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>analysis",),
        behind="<|start|>assistant", answer="<|channel|>final<|message|>", special=HARMONY_TOKENS,
    ),
    ReasoningFormat(
        MUSE, " to=self<|message|>", "<|eom|>", ("<atem:function_calls>",),
        behind="<|start|>assistant", answer=" to=user<|message|>", special=MUSE_TOKENS,
    ),
    ReasoningFormat(
        "solar_open", "<|think|>", "<|end|>", (("<|think|>", "<|begin|>"),),
        behind="<|begin|>assistant", answer="<|content|>", special=("<|begin|>", "<|content|>"),
        around=("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>", "<|calls|>"),
    ),
    ReasoningFormat("solar_open2", "<|think:start|>", "<|think:end|>", ("<|think:start|>",)),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", ("<|channel>",)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", ("<seed:think>",)),
    ReasoningFormat(
        "cohere", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>",),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<co>", CITATION_END),
    ),
    ReasoningFormat(
        "kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>",
        (("'<|open|>'", "'think'"), "<|open|>think<|sep|>"),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        special=("<|open|>", "<|close|>", "<|sep|>"), variants=(("<|open|>think<|sep|>", "<|open|>response<|sep|>"),),
    ),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", ("<mm:think>",)),
    ReasoningFormat("longcat", "<longcat_think>", "</longcat_think>", ("<longcat_think>",)),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>",)),
    ReasoningFormat(
        "plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", ("<|plamo:begin_think:plamo|>",)
    ),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷", ("◁think▷",)),
    ReasoningFormat("exaone", "<thought>", "</thought>", ("<thought>",), behind="\n\n"),
    ReasoningFormat(
        "granite", "Here is my thought process:", "Here is my response:", ("Here is my thought process",),
        behind="\n\n", variants=(("Here's my thought process:", "Here's my response:"),),
    ),
    ReasoningFormat(
        "hunyuan_a13b", "<think>", "</think>", (("<think>", "<answer>"), ("<think>", "<|extra_0|>")),
        behind="\n<answer>\n", wrapper=("<answer>", "</answer>"),
    ),
    ReasoningFormat(
        "ernie45", "<think>", "</think>", (("<think>", "<response>"),),
        behind="\n\n", wrapper=("<response>", "</response>"),
    ),
    ReasoningFormat(
        "hy_v3_opensource", "<think:opensource>", "</think:opensource>", (("<think", ":opensource"),),
        variant_of="think",
    ),
    ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>"), behind="\n\n"),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", (), behind="\n\n", always_open=True),
    ReasoningFormat(
        "minimax_m2_append_think", "<think>", "</think>", (), behind="\n\n", always_open=True, in_content=True
    ),
)  # fmt: skip


def template_reasoning(chat_template: str | None) -> ReasoningFormat | None:
    """The format that answers to prompts of this template have; None where it shows none."""
    template = chat_template or ""
    return next((known for known in REASONING_FORMATS if _speaks(template, known)), None)


def _speaks(template: str, known: ReasoningFormat) -> bool:
    groups = ((group,) if isinstance(group, str) else group for group in known.detect)
    return any(all(text in template for text in group) for group in groups)


def opens_reasoning(reasoning: ReasoningFormat | None, prompt_text: str, continued: str = "") -> bool:
    """True where an answer to the rendered prompt begins inside a reasoning block.

    It does where the prompt ends with the opening marker, and where `continued`, the text of an assistant's message
    that the model goes on with, opens a block without closing it. Markers elsewhere in the prompt, such as in a user's
    question about them, count for nothing.
    """
    if reasoning is None:
        return False
    if prompt_text.rstrip().endswith(reasoning.open):
        return True
    if reasoning.open in continued or reasoning.close in continued:
        return continued.rfind(reasoning.open) > continued.rfind(reasoning.close)
    return reasoning.always_open and not prompt_text.rstrip().endswith(reasoning.close)


def prompt_markers(reasoning: ReasoningFormat, tokenizer: Tokenizer, prompt: Sequence[int]) -> ThinkingMarkers:
    """The markers of an answer to a prompt rendered elsewhere, which has opened the block if it ends with the mark."""
    tail = tokenizer.decode(prompt[-PROMPT_TAIL:], skip_special_tokens=False)
    return reasoning.markers(opened=opens_reasoning(reasoning, tail))
