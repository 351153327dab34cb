"""What a request looks like to its caller, and what else a model can be asked for. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.captures import Captures
from jaxllm.requests.shown import MOST_TOKENS, frame, panel, shortened, shown_tokens, text_block, tinted, token_rows

if TYPE_CHECKING:
    import pandas


class Logprob(NamedTuple):
    """One token's log-probability (natural log), its 1-based rank in the vocabulary, its text and its bytes.

    The text of a token that is a part of a character is U+FFFD; the bytes of tokens join to the text's UTF-8.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


RankedLogprobs = list[tuple[int, Logprob]]
"""The candidates at one position by token id: the token itself first, then the most likely ones, best first."""

TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob: the chosen token first, then the most likely ones, best first."""


class WeightVersionSpan(NamedTuple):
    """Tokens `[start, end)` of a completion were made by weights of this version; see `LLM.update_weights`."""

    version: str
    start: int
    end: int


@dataclass
class ParsedCall:
    """A call of a function that an answer makes."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; what there is of it where the answer broke off or was malformed inside. A custom tool's
    is its input, a text."""


@dataclass(repr=False)
class CompletionOutput:
    """One completion of a prompt.

    `finish_reason` is None while running, then "stop" (end-of-sequence, stop string or stop token), "length",
    "repetition" or "abort"; `stop_reason` is the stop string, regular expression or stop token id that ended it,
    "repetition_detected" for a repetition, None for end-of-sequence. `captures` are
    activations of the prompt's and its tokens, where they were asked for; the last token is not run, and has none.
    `weight_versions` say which weights made which tokens: one span, unless they were exchanged meanwhile.
    Of a chat with tools, or whose reasoning is told apart, `text` is the content alone, `reasoning` and `tool_calls`
    are the rest of the answer, and the `finish_reason` of one that calls is "tool_calls".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    captures: Captures | None = None
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    reasoning: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each token and each alternative that `logprobs` has, and whether it was chosen.

        Raises ConfigError: pandas is not installed.
        """
        return frame(token_rows(self.token_ids, self.logprobs))

    def __repr__(self) -> str:
        return f"CompletionOutput({shortened(self.text)}, {self._summary()})"

    def _summary(self) -> str:
        said = [f"{len(self.token_ids):,} tokens", self.finish_reason or "running"]
        if self.cumulative_logprob is not None:
            said.append(f"log-probability {self.cumulative_logprob:.2f}")
        if len(self.weight_versions) > 1:
            said.append("weights " + ", ".join(span.version for span in self.weight_versions))
        return ", ".join(said)

    def _text_html(self) -> str:
        if self.logprobs is None:
            return escape(self.text) if self.text or not self.token_ids else escape(str(self.token_ids[:MOST_TOKENS]))
        return _tokens_html(self.token_ids, self.logprobs)

    def _repr_html_(self) -> str:
        return panel([text_block(self._text_html())], self._summary())


def _tokens_html(
    token_ids: list[int], steps: list[TokenLogprobs] | list[TokenLogprobs | None], whole: str | None = None
) -> str:
    left = len(token_ids) - MOST_TOKENS
    shown = tinted(shown_tokens(token_ids[:MOST_TOKENS], steps[:MOST_TOKENS], whole))
    return shown + (f" … and {left:,} more tokens" if left > 0 else "")


def extend_versions(spans: list[WeightVersionSpan], version: str, count: int) -> None:
    end = spans[-1].end if spans else 0
    start = spans.pop().start if spans and spans[-1].version == version else end
    spans.append(WeightVersionSpan(version, start, end + count))


class PooledOutput(NamedTuple):
    """What a pooling request gives: float32, [hidden size] or one value for each of its token ids."""

    values: np.ndarray
    num_cached_tokens: int


def shape_vector(vector: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The leading `dimensions` channels (Kusupati et al. 2022, arXiv:2205.13147), of unit length if asked; float32."""
    exact = vector[:dimensions].astype(np.float64)
    length = np.linalg.norm(exact) if normalize else 0.0
    return (exact / length if length > 0 else exact).astype(np.float32)


@dataclass(repr=False)
class EmbeddingOutput:
    """The vector of one text."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={len(self.embedding)})"


@dataclass
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class RequestMetrics:
    """Times of one request in seconds since the epoch; None where it has not got there yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(repr=False)
class RequestOutput:
    """A request's state as its caller sees it; `prompt_logprobs` has one entry a prompt token, None for the first.

    `num_cached_tokens` counts the prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    def to_pandas(self, *, prompt: bool = False) -> pandas.DataFrame:
        """The tables of its completions, or of the `prompt`. Raises ConfigError: pandas is not installed."""
        if prompt:
            return frame(token_rows(self.prompt_token_ids, self.prompt_logprobs))
        rows = (token_rows(output.token_ids, output.logprobs, completion=output.index) for output in self.outputs)
        return frame(chain.from_iterable(rows))

    def __repr__(self) -> str:
        asked = f"{len(self.prompt_token_ids):,} tokens" if self.prompt is None else shortened(self.prompt)
        return f"RequestOutput({asked} -> {', '.join(map(repr, self.outputs))})"

    def _prompt_html(self) -> str:
        if self.prompt_logprobs is not None:
            return _tokens_html(self.prompt_token_ids, self.prompt_logprobs, self.prompt)
        if self.prompt is not None:
            return escape(self.prompt)
        return escape(f"⟨{len(self.prompt_token_ids):,} tokens⟩ ")

    def _repr_html_(self) -> str:
        prompt = text_block(self._prompt_html(), faint=True)
        texts = [prompt + text_block(output._text_html()) for output in self.outputs[:1]]
        texts += [text_block("… ", faint=True) + text_block(output._text_html()) for output in self.outputs[1:]]
        notes = "; ".join(output._summary() for output in self.outputs)
        is_tinted = any(steps is not None for steps in (self.prompt_logprobs, *(o.logprobs for o in self.outputs)))
        tint = " · the stronger the tint, the less likely the token; hover for others" if is_tinted else ""
        return panel(texts, f"{len(self.prompt_token_ids):,} tokens of prompt → {notes}{tint}")


MAX_ENTRIES = 2**20
"""Tokens of a prompt times the vocabulary, where the whole of it is asked for: 4 MB of numbers, 100 MB of JSON."""


class PromptScores(msgspec.Struct):
    """Row i is of the prompt's token i + 1: the first has none, as nothing predicts it.

    Attributes:
        tokens: `[n]` int32, the prompt's tokens from the second on.
        ids: `[n, 1 + k]` int32, each token and the k most likely or asked for; empty for the whole vocabulary.
        ranks: `[n, 1 + k]` int32, likewise, from 1; 0 of those asked for.
        logprobs: `[n, 1 + k]` float32, or `[n, V]` by token id.
    """

    tokens: bytes
    ids: bytes
    ranks: bytes
    logprobs: bytes

    @classmethod
    def empty(cls, tokens: list[int], width: int, *, whole: bool) -> ScoresInProgress:
        """Arrays to fill, of `width` `1 + k`, or with `whole` the vocabulary."""
        rows = len(tokens) - 1
        ids = np.zeros((rows, 0 if whole else width), np.int32)
        return ScoresInProgress(np.asarray(tokens[1:], np.int32), ids, ids.copy(), np.zeros((rows, width), np.float32))

    def __len__(self) -> int:
        return len(self.tokens) // 4 + 1

    def steps(self) -> Iterator[RankedLogprobs | None]:
        """Position by position, made when it is asked for; None for the first."""
        tokens = np.frombuffer(self.tokens, np.int32)
        yield None
        if len(tokens) == 0:
            return
        logprobs = np.frombuffer(self.logprobs, np.float32).reshape(len(tokens), -1)
        if not self.ids:
            for token, row in zip(tokens.tolist(), logprobs, strict=True):
                yield of_vocabulary(token, row)
            return
        ids = np.frombuffer(self.ids, np.int32).reshape(logprobs.shape)
        ranks = np.frombuffer(self.ranks, np.int32).reshape(logprobs.shape)
        for entries in map(zip, ids.tolist(), logprobs.tolist(), ranks.tolist()):
            found: dict[int, Logprob] = {}
            for i, value, rank in entries:  # each once; a small vocabulary has fewer candidates than were asked for
                if not found or value > -np.inf:
                    found.setdefault(i, Logprob(value, rank or None))
            yield list(found.items())


class ScoresInProgress(NamedTuple):
    tokens: np.ndarray
    ids: np.ndarray
    ranks: np.ndarray
    logprobs: np.ndarray

    def finish(self) -> PromptScores:
        return PromptScores(*(array.tobytes() for array in self))


def of_vocabulary(token: int, row: np.ndarray) -> RankedLogprobs:
    """`token`, then all others, most likely first, of `[V]` log-probabilities by token id."""
    order = np.argsort(-row, kind="stable")
    ranked = [(i, Logprob(v, at)) for at, (i, v) in enumerate(zip(order.tolist(), row[order].tolist(), strict=True), 1)]
    itself = int(np.flatnonzero(order == token)[0])
    return [ranked[itself], *ranked[:itself], *ranked[itself + 1 :]]


Pooling = Literal["last", "mean", "cls"]
Activation = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, kw_only=True)
class ModelTasks:
    """How to embed, classify and compare with one model.

    Attributes:
        pooling: which hidden states stand for a text: the last token's, the mean of all, or the first token's.
        normalize: whether its embeddings are of unit length unless asked otherwise.
        labels: names of the classes whose scores the output head gives; empty where it gives the vocabulary's, so that
            the model generates text.
        activation: what turns those scores into probabilities.
        judges_pairs: it was trained to judge a query and a document in the prompt of Qwen3-Reranker.
        encodes: it is an encoder, which generates nothing, whatever its head gives.
        projects: products follow pooling, so that no other pooling makes its vectors.
        longest_text: tokens of the longest text that it is to be given, where its files say so.
        prompts: what may be put before a text, by name.
        default_prompt: what is put before a text where no name is asked for.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    judges_pairs: bool = False
    encodes: bool = False
    projects: bool = False
    longest_text: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    def prompt(self, name: str | None) -> str:
        """What is put before a text: the default, or what has this name. Raises InvalidRequestError: none has it."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none, for this model has no prompts"
            raise InvalidRequestError(f"prompt_name is {name[:60]!r}; accepted are {known}", param="prompt_name")
        return self.prompts[name]

    @property
    def why_no_text(self) -> str | None:
        """Why the model cannot be asked to write, and what it can be asked for; None where it writes."""
        if self.labels:
            classes = ", ".join(self.labels[:5]) + (", …" if len(self.labels) > 5 else "")
            use = "/classify, /score and /rerank" if len(self.labels) == 1 else "/classify"
            kind = "is an encoder, which generates no text;" if self.encodes else "generates no text,"
            return f"this model {kind} it classifies (as {classes}); use {use}"
        if self.encodes:
            return "this model is an encoder, which generates no text; use /v1/embeddings, /score and /rerank"
        return None


MAX_TOKEN_IDS = 512


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What is read off the hidden states of one prompt; nothing is generated.

    Attributes:
        kind: "last" and "cls" are the last and the first token's hidden state after the final norm, "mean" the mean of
            all of them, each float32 and not normalised; "logits" the last token's logits of `token_ids`, "logprobs"
            the natural logarithms of their probabilities as the next token.
        token_ids: whose; only with kind "logits" or "logprobs", where an empty tuple means all of them.

    Raises InvalidRequestError: `token_ids` does not go with `kind`; `param` names the field.
    """

    kind: Literal["last", "cls", "mean", "logits", "logprobs"] = "last"
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if self.kind not in ("last", "cls", "mean", "logits", "logprobs"):
            accepted = "it must be last, cls, mean, logits or logprobs"
            raise InvalidRequestError(f"kind is {self.kind!r}; {accepted}", param="kind")
        if self.token_ids and not self.of_tokens:
            raise InvalidRequestError(f"token_ids needs kind 'logits' or 'logprobs', not {self.kind!r}", "token_ids")
        if len(self.token_ids) > MAX_TOKEN_IDS:
            problem = f"token_ids has {len(self.token_ids)} ids; it may have {MAX_TOKEN_IDS}"
            raise InvalidRequestError(problem, param="token_ids")

    @property
    def of_tokens(self) -> bool:
        """It asks for values of tokens, not for a hidden state."""
        return self.kind in ("logits", "logprobs")
