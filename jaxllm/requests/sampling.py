"""What a caller may ask of the sampler, validated when it is built."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 64
MAX_N = 128


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
        logit_bias: token id -> value added to its logit, each value in [-100, 100].
        allowed_token_ids: only these may be generated; None allows all.
        bad_words: texts that may not be generated: the token that would complete one is never chosen.
        structured_outputs: what the generated text must match.
        seed: makes the request's own random stream reproducible; None takes one from the engine's seed.
        max_tokens: upper bound on generated tokens; None runs to the context's end.
        min_tokens: no end-of-sequence and no stop token before this many tokens.
        stop: text that ends generation, one string or a list; left out unless include_stop_str_in_output.
        stop_token_ids: token ids that end generation; kept in token_ids, left out of the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: return the log-probabilities of this many most likely tokens, besides the chosen one's.
        prompt_logprobs: the same for each prompt token; -1 returns the whole vocabulary.
        detokenize: False returns token ids only.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_token_ids: special tokens that stay in the text although skip_special_tokens leaves them out.
        include_stop_str_in_output: keep the stop string that ended generation in the text.

    Log-probabilities are those of the model's raw distribution, before temperature, penalties and truncation.

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
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputs | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; normalising happens once, here
        for name in _INTEGERS:
            set_field(self, name, _integer(name, getattr(self, name)))
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        for name in ("stop_token_ids", "bad_words", "shown_special_token_ids"):
            set_field(self, name, tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            set_field(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.repeat_last_n == -1:
            set_field(self, "repeat_last_n", None)
        set_field(self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()})
        set_field(self, "top_k", max(self.top_k, 0) if self.top_k >= -1 else self.top_k)

        _check(1 <= self.n <= MAX_N, "n", self.n, f"an integer from 1 to {MAX_N}")
        _check(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _check(self.top_k >= 0, "top_k", self.top_k, "-1 or 0 (all tokens), or a positive integer")
        _check(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_finite(value) and -2 <= value <= 2, name, value, "from -2 to 2")
        _check(
            _finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0",
        )
        _check(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"{len(self.logit_bias)} entries",
            f"at most {MAX_LOGIT_BIAS} entries",
        )
        for token, value in self.logit_bias.items():
            _check(
                token >= 0 and _finite(value) and -100 <= value <= 100,
                "logit_bias",
                {token: value},
                "token ids from 0 with values from -100 to 100",
            )
        _check(
            self.repeat_last_n is None or self.repeat_last_n >= 0,
            "repeat_last_n",
            self.repeat_last_n,
            "-1 (all tokens), or 0 or more",
        )
        _check(self.allowed_token_ids != (), "allowed_token_ids", [], "at least one token id")
        _check(
            len(self.bad_words) <= MAX_BAD_WORDS,
            "bad_words",
            f"{len(self.bad_words)} words",
            f"at most {MAX_BAD_WORDS}",
        )
        _check(
            all(isinstance(w, str) and w.strip() for w in self.bad_words),
            "bad_words",
            list(self.bad_words),
            "strings that are not blank",
        )
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            "at most ",
            Field("max_tokens"),
            f" ({self.max_tokens})",
        )
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", list(self.stop), "non-empty strings")
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"{len(self.stop_token_ids)} ids",
            f"at most {MAX_STOP_TOKEN_IDS}",
        )
        _check(not self.stop or self.detokenize, "stop", list(self.stop), "stop strings need detokenize=True")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"from 0 to {MAX_LOGPROBS}",
        )
        _check(
            self.prompt_logprobs is None or -1 <= self.prompt_logprobs <= MAX_LOGPROBS,
            "prompt_logprobs",
            self.prompt_logprobs,
            f"-1 (whole vocabulary) or from 0 to {MAX_LOGPROBS}",
        )
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")

    @property
    def greedy(self) -> bool:
        """True when sampling is argmax of the raw logits: nothing but the forward pass is needed."""
        return self.temperature == 0 and not self.adjusts_logits and self.logprobs is None

    @property
    def adjusts_logits(self) -> bool:
        """True when logits change before the choice, so that even argmax needs the request's history."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a checkpoint recommends to sample with; names are SamplingParams', None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def fields(self) -> dict[str, Any]:
        """Those that say something, as keyword arguments of SamplingParams."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_INTEGERS = ("n", "top_k", "repeat_last_n", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


def _integer(name: str, value: Any) -> int | None:
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer", param=name) from None


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _check(condition: bool, name: str, value: object, *accepted: str | Field) -> None:
    if not condition:
        raise InvalidRequestError([Field(name), f" is {value!r}; it must be ", *accepted])
