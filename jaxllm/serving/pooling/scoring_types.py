"""/score, /rerank (Jina's and Cohere's shapes) and /classify."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from jaxllm.serving.http.request_model import RequestModel, refuse
from jaxllm.serving.pooling.embedding_types import (
    MAX_INPUTS,
    UNSUPPORTED_POOLING,
    InputFields,
    PoolingFields,
    PoolingUsage,
)

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of /score: vLLM's first, and its others."""


class TextDocument(RequestModel):
    text: str
    """The document's text."""


Text = str | TextDocument


class ComparisonFields(PoolingFields):
    """How two texts are compared."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_POOLING | {
        "chat_template_kwargs", "max_chunks_per_doc", "rank_fields", "truncation_side",
    }  # fmt: skip

    instruction: str | None = Field(default=None, min_length=1)
    """What makes a document relevant, for rerankers that take instructions; by default that it answers a web search."""
    max_tokens_per_doc: int | None = Field(default=None, ge=0)
    """Cut documents to this many tokens; 0 leaves them whole."""
    max_tokens_per_query: int | None = Field(default=None, ge=0)
    """Cut queries to this many tokens; 0 leaves them whole."""
    use_activation: bool = True
    """False gives the raw score, before it is made a probability."""

    def named_texts(self) -> dict[str, str]:
        """Where each of the texts is in the request, such as documents[2]; of equal ones the first."""
        raise NotImplementedError


class ScoreRequest(ComparisonFields):
    text_1: Text | list[Text]
    """The query, or one query for each text in text_2."""
    text_2: Text | list[Text]
    """The texts to compare with it."""

    @model_validator(mode="before")
    @classmethod
    def _vllms_other_names(cls, data: Any) -> Any:
        """{"queries": …, "documents": …} -> {"text_1": …, "text_2": …}."""
        if not isinstance(data, dict):
            return data
        for first, second in SIDES[1:]:
            if first in data and second in data:
                others = {name: value for name, value in data.items() if name not in (first, second)}
                return others | {"text_1": data[first], "text_2": data[second]}
        return data

    @model_validator(mode="after")
    def _sides_match(self) -> ScoreRequest:
        first, second = len(_texts(self.text_1)), len(_texts(self.text_2))
        for name, count in (("text_1", first), ("text_2", second)):
            if not 1 <= count <= MAX_INPUTS:
                raise refuse(f"{name} has {count} entries; it must have from 1 to {MAX_INPUTS}", name)
        if first not in (1, second):
            raise refuse(
                f"text_1 has {first} entries and text_2 {second}; give one in text_1, or as many as in text_2", "text_1"
            )
        return self

    def named_texts(self) -> dict[str, str]:
        return _named("text_2", self.text_2) | _named("text_1", self.text_1)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = _texts(self.text_1), _texts(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class DocumentRerankRequest(ComparisonFields):
    query: str
    """What to look for."""
    documents: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    """Where to look: texts, or objects with a `text`."""
    top_n: int = Field(default=0, ge=0)
    """Return only this many of the best; 0 returns all."""
    return_documents: bool | None = None
    """Repeat each document's text in its result; true by default, but not at /v2/rerank."""

    @model_validator(mode="after")
    def _has_documents(self) -> DocumentRerankRequest:
        if self.documents is None and not self.names_texts:
            raise refuse("documents is required", "documents")
        return self

    def named_texts(self) -> dict[str, str]:
        return _named("texts" if self.names_texts else "documents", list(self.candidates)) | {self.query: "query"}

    @property
    def names_texts(self) -> bool:
        """Whether the documents come under TEI's name."""
        return False

    @property
    def candidates(self) -> list[str]:
        return _texts(self.documents or [])


class RerankRequest(DocumentRerankRequest):
    texts: list[str] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    """TEI's name of documents; the answer is then a list, as TEI's."""
    return_text: bool | None = None
    """With texts: repeat each text in its result."""
    raw_scores: bool | None = None
    """With texts: the raw scores, before they are made probabilities."""
    truncate: bool | None = None
    """With texts: cut those that are longer than the context; without it they are refused."""
    truncation_direction: Literal["Right", "right"] | None = None
    """With texts: only right, the end that truncate cuts off."""

    @model_validator(mode="after")
    def _of_one_api(self) -> RerankRequest:
        for name in ("documents", "top_n", "return_documents") if self.texts is not None else ():
            if name in self.model_fields_set:
                raise refuse(f"{name} does not go with texts, which is TEI's name of documents", name)
        for name in ("return_text", "raw_scores", "truncate", "truncation_direction") if self.texts is None else ():
            if getattr(self, name) is not None:
                raise refuse(f"{name} goes with texts, TEI's name of documents", name)
        for name, other in (("raw_scores", "use_activation"), ("truncate", "truncate_prompt_tokens")):
            if getattr(self, name) is not None and other in self.model_fields_set:
                raise refuse(f"{name} and {other} are one setting, give one of them", name)
        if self.raw_scores:
            self.use_activation = False
        if self.truncate:
            self.truncate_prompt_tokens = -1
        return self

    @property
    def names_texts(self) -> bool:
        return self.texts is not None

    @property
    def candidates(self) -> list[str]:
        return super().candidates if self.texts is None else self.texts


def _texts(value: Text | list[Text]) -> list[str]:
    items = value if isinstance(value, list) else [value]
    return [item.text if isinstance(item, TextDocument) else item for item in items]


def _named(field: str, value: Text | list[Text]) -> dict[str, str]:
    texts = _texts(value)
    if not isinstance(value, list):
        return {texts[0]: field}
    return {text: f"{field}[{index}]" for index, text in reversed(list(enumerate(texts)))}


class ClassifyRequest(InputFields):
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_POOLING

    use_activation: bool = True
    """False gives the raw scores instead of probabilities."""


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    text: str


class Rank(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class TextRank(msgspec.Struct, kw_only=True):
    """TEI's."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class APIVersion(msgspec.Struct):
    version: Literal["1", "2"]


class RankingMeta(msgspec.Struct):
    """Cohere's."""

    api_version: APIVersion


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[Rank]
    usage: PoolingUsage
    meta: RankingMeta


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
