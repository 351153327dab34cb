"""What a caller may ask of the sampler, validated when it is built."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, get_args

from jaxllm.config.values import LogprobsMode
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.logits_processors import Chosen, read_chosen
from jaxllm.requests.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_REGEXES = 4
MAX_BAD_WORDS = 64
MAX_BREAKERS = 64
MAX_PATTERN_SIZE = 4096
MAX_N = 128
_SHOWN_LENGTH = 100
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)

INT32_MAX = 2**31 - 1
"""What an integer that reaches the device may be."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_INTEGERS: dict[str, tuple[int, int, str]] = {
    "n": (1, MAX_N, f"an integer from 1 to {MAX_N}"),
    "top_k": (-1, INT32_MAX, f"-1 or 0 (all tokens), or a positive integer up to {INT32_MAX}"),
    "repeat_last_n": (-1, INT32_MAX, f"-1 (all tokens), or an integer from 0 to {INT32_MAX}"),
    "dry_penalty_last_n": (-1, INT32_MAX, f"-1 (all tokens), or an integer from 0 to {INT32_MAX}"),
    "dry_allowed_length": (0, INT32_MAX, f"an integer from 0 to {INT32_MAX}"),
    "seed": (INT64_MIN, 2**64 - 1, "a 64-bit integer"),
    "max_tokens": (1, INT32_MAX, f"an integer from 1 to {INT32_MAX}"),
    "min_tokens": (0, INT32_MAX, f"an integer from 0 to {INT32_MAX}"),
    "max_thinking_tokens": (0, INT32_MAX, f"an integer from 0 to {INT32_MAX}"),
    "thinking_token_budget": (-1, INT32_MAX, f"an integer from -1 to {INT32_MAX}"),
    "logprobs": (-1, MAX_LOGPROBS, f"-1 (whole vocabulary) or an integer from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (-1, MAX_LOGPROBS, f"-1 (whole vocabulary) or an integer from 0 to {MAX_LOGPROBS}"),
}
_MAY_BE_NONE = frozenset({
    "repeat_last_n", "dry_penalty_last_n", "seed", "max_tokens", "max_thinking_tokens", "thinking_token_budget",
    "logprobs", "prompt_logprobs",
})  # fmt: skip
_REALS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "0 or more"),
    "top_p": (0, 1, "from 0 to 1"),
    "min_p": (0, 1, "from 0 to 1"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
    "repetition_penalty": (math.ulp(0.0), math.inf, "above 0"),
    "dry_multiplier": (0, 100, "from 0 to 100"),
    "dry_base": (1, 100, "from 1 to 100"),
    "top_n_sigma": (-1, 1000, "0 or -1 (off), or a number up to 1000"),
    "typical_p": (0, 1, "from 0 to 1"),
    "xtc_probability": (0, 1, "from 0 to 1"),
    "xtc_threshold": (0, 1, "from 0 to 1"),
}
_MOST = {
    "bad_words": (MAX_BAD_WORDS, "words"),
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_regex": (MAX_STOP_REGEXES, "expressions"),
    "dry_sequence_breakers": (MAX_BREAKERS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logprob_token_ids": (MAX_LOGPROBS, "ids"),
    "prompt_logprob_token_ids": (MAX_LOGPROBS, "ids"),
}
_IDS_BESIDE = {"logprobs": "logprob_token_ids", "prompt_logprobs": "prompt_logprob_token_ids"}
_FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "skip_reading_prefix_cache",
)  # fmt: skip
_TOKEN_IDS = (
    "allowed_token_ids", "stop_token_ids", "shown_special_token_ids", "logprob_token_ids", "prompt_logprob_token_ids",
    "predicted_token_ids",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ThinkingMarkers:
    """The texts around a reasoning block.

    Attributes:
        open: what begins it: an answer that does not begin with this text has none.
        close: what ends it.
        behind: what the model writes right after `close`, such as the lines that set the answer apart.
        opened: the prompt ends inside the block, so the answer begins there.
    """

    open: str
    close: str
    behind: str = ""
    opened: bool = False


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """When an answer that goes round in circles is ended; names and meanings are vLLM's.

    Attributes:
        max_pattern_size: the most tokens that are looked for again and again; 0 looks for none.
        min_pattern_size: the fewest; 0 is as 1.
        min_count: how often they must stand at the end of the answer, one after another.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        set_field, most = object.__setattr__, MAX_PATTERN_SIZE
        bounds = {"max_pattern_size": (0, most), "min_pattern_size": (0, most), "min_count": (0, INT32_MAX)}
        for name, (low, high) in bounds.items():
            set_field(self, name, _integer(name, getattr(self, name), low, high, f"an integer from {low} to {high}"))
        fits = self.min_pattern_size <= self.max_pattern_size
        _check(fits, "min_pattern_size", self.min_pattern_size, f"at most max_pattern_size ({self.max_pattern_size})")
        counts = self.min_count >= 2 or not self.max_pattern_size
        _check(counts, "min_count", self.min_count, "2 or more where max_pattern_size is set")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; names and meanings are vLLM's.

    Attributes:
        n: how many completions of the same prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens (ties with the k-th are kept); 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens with at least this fraction of the most likely token's probability; 0 keeps all.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens; each in [-2, 2].
        repetition_penalty: over prompt and generated tokens; > 0, 1 is off (Keskar et al. 2019, arXiv:1909.05858).
        repeat_last_n: how many of the last tokens the three penalties look at; None or -1 looks at all, 0 at none.
        dry_multiplier: above 0 takes dry_multiplier * dry_base ** (n - dry_allowed_length) off the logit of a token
            that would make a repeat of n tokens longer. n is counted up to 128.
        dry_base: how much dearer each further token of a repeat is, at least 1.
        dry_allowed_length: the least n for which anything is taken off.
        dry_penalty_last_n: how many of the last tokens DRY looks at; None or -1 looks at all, 0 at none.
        dry_sequence_breakers: texts that end a repeat: the tokens that one stands in, or the last that spells it.
        top_n_sigma: keep tokens within this many standard deviations of the greatest logit; 0 or -1 keeps all.
        typical_p: keep the tokens whose information is nearest to the expected, with this probability; 1 keeps all.
        xtc_probability: how often the likeliest tokens are excluded; the seed says which tokens that befalls.
        xtc_threshold: from which probability on they are, but for the least likely of them.
        logit_bias: token id -> value added to its logit, each value in [-100, 100].
        allowed_token_ids: only these may be generated; None allows all.
        bad_words: texts that may not be generated: the token that would complete one is never chosen.
        logits_processors: which of the engine's own logits processors change this request's logits: their names, or
            names and arguments, as {"scale": {"factor": 2.0}}. They see raw logits, before all else here.
        structured_outputs: what the generated text must match.
        seed: makes the request's own random stream reproducible; None takes one from the engine's seed.
        max_tokens: upper bound on generated tokens; None runs to the context's end.
        max_thinking_tokens: after this many tokens of reasoning, markers not counted, its closing marker is forced;
            None sets no bound. A forced token's log-probability is the model's own.
        thinking_token_budget: vLLM's name of max_thinking_tokens; -1 sets no bound.
        thinking_markers: how the answer marks its reasoning; None takes it from the chat template and the prompt.
        min_tokens: no end-of-sequence and no stop token before this many tokens.
        stop: text that ends generation, one string or a list; left out unless include_stop_str_in_output.
        stop_regex: regular expressions that end generation as `stop` does, one or a list: at the first character with
            which one has matched, of at most 256 characters. The syntax is that of a structured output's `regex`.
        repetition_detection: ends an answer that repeats itself, with finish_reason "repetition".
        stop_token_ids: token ids that end generation; kept in token_ids, left out of the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: return the log-probabilities of this many most likely tokens, besides the chosen one's; -1 returns the
            whole vocabulary, where the engine's max_logprobs is -1.
        logprob_token_ids: return those of these tokens as well; together with logprobs at most 20.
        logprobs_mode: what is returned as log-probabilities of generated tokens: those of the model's raw distribution
            ("raw_logprobs"), those of the one that is sampled from ("processed_logprobs"), after all that changes or
            cuts off logits, or the logits of either ("raw_logits", "processed_logits"). None is the engine's setting.
        prompt_logprobs: the same for each prompt token; -1 returns the whole vocabulary.
        prompt_logprob_token_ids: return those of these tokens as well, at each prompt token.
        skip_reading_prefix_cache: compute the whole prompt, also what the prefix cache has of it.
        predicted_token_ids: what the answer may well be, or have in it: an engine that tries tokens of texts ahead
            looks there too. It changes how fast the answer comes, not the answer.
        detokenize: False returns token ids only.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_token_ids: special tokens that stay in the text although skip_special_tokens leaves them out.
        include_stop_str_in_output: keep the stop string that ended generation in the text.

    A request with dry_multiplier, top_n_sigma, typical_p or xtc_probability is sampled in llama.cpp's order: penalties
    and masks, DRY, top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature. Of others logits are divided by the
    temperature first, then come min_p, top_k and top_p. At temperature 0 all of these but DRY and penalties do nothing.

    Log-probabilities of a prompt are always those of the raw distribution: before logits processors, temperature,
    penalties and truncation.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repeat_last_n: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Mapping[str, Mapping[str, Any]] | Sequence[str] = ()
    structured_outputs: StructuredOutputs | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    max_thinking_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_markers: ThinkingMarkers | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_regex: str | Sequence[str] = ()
    repetition_detection: RepetitionDetectionParams | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[int] = ()
    skip_reading_prefix_cache: bool = False
    predicted_token_ids: Sequence[int] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; normalising happens once, here
        for name, (low, high, accepted) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                set_field(self, name, _integer(name, value, low, high, accepted))
        for name in _REALS:
            _check(_finite(getattr(self, name)), name, getattr(self, name), "a finite number")
        for name in _FLAGS:
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in ("stop", "stop_regex", "bad_words", "dry_sequence_breakers"):
            value = getattr(self, name)
            alone = isinstance(value, str) and name.startswith("stop")
            set_field(self, name, (value,) if alone else _tuple(name, value, "a list of strings") or ())
        set_field(self, "repetition_detection", _detection(self.repetition_detection))
        for name in _TOKEN_IDS:
            ids = _tuple(name, getattr(self, name), "a list of token ids")
            if ids is not None:
                ids = tuple(_integer(name, token, 0, INT32_MAX, f"token ids from 0 to {INT32_MAX}") for token in ids)
            set_field(self, name, ids if name == "allowed_token_ids" else ids or ())
        processors = self.logits_processors
        set_field(self, "logits_processors", read_chosen(processors) if processors not in ((), {}) else {})
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            if getattr(self, name) == -1:
                set_field(self, name, None)
        _check(isinstance(self.logit_bias or {}, dict), "logit_bias", self.logit_bias, "token ids with their values")
        set_field(self, "top_k", max(self.top_k, 0))
        self._check_values()
        if self.top_p == 0:  # the likeliest token alone
            set_field(self, "top_p", 1.0)
            set_field(self, "temperature", 0.0)
        set_field(self, "logit_bias", _biases(self.logit_bias or {}))
        for name, beside in _IDS_BESIDE.items():
            if getattr(self, beside):
                set_field(self, name, getattr(self, name) or 0)
        if (budget := self.thinking_token_budget) is not None:
            most = self.max_thinking_tokens
            _check(most in (None, budget), "max_thinking_tokens", most, f"thinking_token_budget ({budget}), or None")
            set_field(self, "max_thinking_tokens", None if budget < 0 else budget)
            set_field(self, "thinking_token_budget", None)

    def _check_values(self) -> None:
        for name, (low, high, accepted) in _REALS.items():
            value = getattr(self, name)
            _check(low <= value <= high, name, value, accepted)
        for name, (most, kind) in _MOST.items():
            count = len(getattr(self, name))
            _check(count <= most, name, f"{count} {kind}", f"at most {most}")
        _check(self.allowed_token_ids != (), "allowed_token_ids", [], "at least one token id")
        words = list(self.bad_words)
        are_words = all(isinstance(word, str) and word.strip() for word in words)
        _check(are_words, "bad_words", words, "strings that are not blank")
        for name in ("stop", "stop_regex", "dry_sequence_breakers"):
            texts = list(getattr(self, name))
            _check(all(isinstance(text, str) and text for text in texts), name, texts, "non-empty strings")
            _check(not texts or self.detokenize or name[:4] != "stop", name, texts, "left out with detokenize=False")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _check(fits, "min_tokens", self.min_tokens, "at most ", Field("max_tokens"), f" ({self.max_tokens})")
        for name, ids in _IDS_BESIDE.items():
            if asked := len(getattr(self, ids)):
                count, most = getattr(self, name) or 0, MAX_LOGPROBS - asked
                _check(count <= most, name, count, f"at most {most} with {asked} ids in {ids}")
        modes = ", ".join(LOGPROBS_MODES)
        _check(self.logprobs_mode in (None, *LOGPROBS_MODES), "logprobs_mode", self.logprobs_mode, f"one of {modes}")

    @property
    def wants_vocabulary(self) -> bool:
        return self.logprobs == -1

    @property
    def greedy(self) -> bool:
        """True when sampling is argmax of the raw logits: nothing but the forward pass is needed."""
        changes = self.adjusts_logits or self.processes_logits or self.chains_samplers
        return self.temperature == 0 and not (changes or self.logprobs is not None)

    @property
    def chains_samplers(self) -> bool:
        """True when it is sampled in llama.cpp's order, by DRY, top-n-sigma, typical sampling or XTC."""
        cuts = self.top_n_sigma > 0 or self.typical_p < 1 or self.xtc_probability > 0
        return self.dry_multiplier > 0 or (cuts and self.temperature > 0)

    @property
    def chosen_processors(self) -> Chosen:
        assert isinstance(self.logits_processors, Mapping), "they are read when this is built"
        return self.logits_processors

    @property
    def processes_logits(self) -> bool:
        return bool(self.logits_processors)

    @property
    def adjusts_logits(self) -> bool:
        """True when logits change before the choice, so that even argmax needs the request's history."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a checkpoint recommends to sample with; names are SamplingParams', None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_tokens: int | None = None

    def fields(self) -> dict[str, Any]:
        """The stated ones, as keyword arguments of SamplingParams."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _biases(given: dict[Any, Any]) -> dict[int, float]:
    entries = f"{len(given)} entries"
    _check(len(given) <= MAX_LOGIT_BIAS, "logit_bias", entries, f"at most {MAX_LOGIT_BIAS} entries")
    accepted = "token ids from 0 with values from -100 to 100"
    for token, value in given.items():
        _check(_finite(value) and -100 <= value <= 100, "logit_bias", {token: value}, accepted)
    keys = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in given]  # as JSON has them
    tokens = [_integer("logit_bias", key, 0, INT32_MAX, accepted) for key in keys]
    return dict(zip(tokens, map(float, given.values()), strict=True))


def _detection(given: Any) -> RepetitionDetectionParams | None:
    if given is None or isinstance(given, RepetitionDetectionParams):
        return given
    known = isinstance(given, Mapping) and given.keys() <= RepetitionDetectionParams.__dataclass_fields__.keys()
    _check(known, "repetition_detection", given, "max_pattern_size, min_pattern_size and min_count")
    return RepetitionDetectionParams(**given)


def _integer(name: str, value: Any, low: int, high: int, accepted: str) -> int:
    known = hasattr(value, "__index__") and not isinstance(value, bool)
    _check(known and low <= value <= high, name, value, accepted)
    return operator.index(value)


def _finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _tuple(name: str, values: Any, accepted: str) -> tuple[Any, ...] | None:
    if values is None:
        return None
    _check(isinstance(values, Iterable) and not isinstance(values, str | bytes), name, values, accepted)
    return tuple(values)


def _check(condition: bool, name: str, value: object, *accepted: str | Field) -> None:
    if not condition:
        raise InvalidRequestError([Field(name), f" is {_shown(value)}; it must be ", *accepted])


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a very large {type(value).__name__}"
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"
