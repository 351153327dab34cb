"""The settings of tokens that a step tries ahead."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxllm.setting_values import SettingsGroup

MTP_NAMES = ("qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp")
"""What vLLM also calls the method of the models whose modules are supported."""
_OF_TEXTS: tuple[str, ...] = ("prompt_lookup_min", "prompt_lookup_max", "remembered_tokens")
"""Settings of methods that look for drafts in texts."""


class SpeculativeConfig(SettingsGroup):
    """How tokens are drafted that a step tries ahead, in vLLM's words."""

    method: Literal["ngram", "suffix", "draft_model", "mtp", "eagle3"] | None = None
    """ngram: what followed in the request's own text the last time that it said what it has just said. suffix: in the
    answers of earlier requests as well. draft_model: what a smaller model says next. mtp: what the module says that the
    model's own checkpoint has for predicting further tokens. eagle3: what an EAGLE-3 head says that was trained for the
    model. By default draft_model where there is a model, ngram elsewhere."""
    model: str | None = None
    """The draft model or the head, named as `model` of the engine is; it must have the same vocabulary."""
    revision: str | None = None
    """Branch, tag or commit of the draft model's hub repository."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=15)]
    """How many tokens are tried ahead."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] | None = None
    """The shortest match that is good enough, in tokens; by default prompt_lookup_max."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=16)] | None = None
    """The longest match that is looked for, in tokens; by default prompt_lookup_min, and 5 without either."""
    remembered_tokens: Annotated[int, Field(ge=0, le=2**20)] | None = None
    """How many tokens of other texts are looked through: of those that requests predict (by default 4,096), and with
    suffix of the answers of earlier requests as well (32,768)."""

    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    """Other depths where many requests run, as [[1, 8, 4], [9, 32, 2], [33, 4096, 0]]: first, last, tokens."""

    @field_validator("method", mode="before")
    @classmethod
    def _of_vllm(cls, method: object) -> object:
        return "mtp" if isinstance(method, str) and method in MTP_NAMES else method

    @property
    def source(self) -> Literal["ngram", "suffix", "draft_model", "mtp", "eagle3"]:
        """Where drafts come from."""
        return self.method or ("ngram" if self.model is None else "draft_model")

    @property
    def shortest(self) -> int:
        """The shortest match, in tokens."""
        return self.prompt_lookup_min or self.longest

    @property
    def longest(self) -> int:
        """The longest match, in tokens."""
        return self.prompt_lookup_max or self.prompt_lookup_min or 5

    @property
    def remembered(self) -> int:
        """How many tokens of other texts are looked through."""
        default = 32_768 if self.source == "suffix" else 4_096
        return default if self.remembered_tokens is None else self.remembered_tokens

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.source in ("draft_model", "eagle3"):
            if self.model is None:
                raise ValueError(f'model is missing: method "{self.source}" takes the name of a model or a folder')
            meaningless = _OF_TEXTS
        else:
            meaningless = ("model", "revision", *(_OF_TEXTS if self.source == "mtp" else ()))
        for name in meaningless:
            if getattr(self, name) is not None:
                raise ValueError(f'{name} means nothing with method "{self.source}": leave it out')
        if self.shortest > self.longest:
            raise ValueError(
                f"prompt_lookup_min is {self.shortest}: at most prompt_lookup_max, which is {self.longest}"
            )
        before = 0
        for first, last, most in self.num_speculative_tokens_per_batch_size or ():
            if not before < first <= last or not 0 <= most <= self.num_speculative_tokens:
                raise ValueError(
                    f"num_speculative_tokens_per_batch_size holds {[first, last, most]}: accepted are [first, last, "
                    f"tokens] in ascending order, with 0 to num_speculative_tokens tokens"
                )
            before = last
        return self
