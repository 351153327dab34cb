"""Embeddings, scores, rankings and classes: requests and answers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
from pydantic import Field, field_validator, model_validator

from jaxllm.requests.sampling import INT32_MAX
from jaxllm.serving.http import request_model
from jaxllm.serving.http.request_model import ModelFields, RequestModel, Rule, ScheduledFields, are_integers, refuse
from jaxllm.serving.openai.messages import Messages, TemplateFields

MAX_INPUTS = 2048
"""Texts of one request, as at OpenAI."""

UNSUPPORTED_POOLING = frozenset({"chat_template_content_format", "media_io_kwargs", "padding"})
"""Fields of vLLM's server that this one refuses by name."""

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
DTYPES: Mapping[EmbedDtype, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


class PoolingFields(ModelFields, ScheduledFields):
    """Which model, how much of a text, and when."""

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    """Cut longer inputs to this many tokens; -1 cuts to the context. Without it they are refused."""
    request_id: str | None = request_model.Label
    """Becomes part of the response's id."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keep_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise refuse("truncate_prompt_tokens is 0; it must be -1, or 1 or more")
        return value


class InputFields(TemplateFields, PoolingFields):
    """The texts to look at: `input`, or a chat as `messages`."""

    called: ClassVar[Mapping[str, str]] = {}
    """The names of fields in errors where the request came in another API's words."""

    input: str | list[str] | list[int] | list[list[int]] | None = None
    """One text or one list of token ids, or a list of either."""
    messages: Messages | None = None
    """A chat, rendered through the template and taken as one text."""
    prompt_name: str | None = None
    """The prompt before each text, by its name in config_sentence_transformers.json; by default as that says."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as the one that ends a text; true for text, false for a chat."""
    add_generation_prompt: bool | None = False
    """End the chat with the start of an assistant turn."""
    truncation_side: Literal["left", "right"] = "right"
    """Which end truncate_prompt_tokens cuts off; special tokens stay."""

    @field_validator("input", mode="wrap")
    @classmethod
    def _one_kind(cls, value: Any, validate: Any) -> Any:
        """Lists of ids are checked here: they may be long, and pydantic would try every branch on every element."""
        if not isinstance(value, list):
            return validate(value)
        if not value:
            raise refuse("input is an empty list; it must have at least one entry")
        if are_integers(value) or all(
            isinstance(entry, str) or (isinstance(entry, list) and are_integers(entry)) for entry in value
        ):
            return value
        raise refuse("input must be a string, a list of strings, of token ids, or of lists of token ids")

    @model_validator(mode="after")
    def _one_source(self) -> InputFields:
        if (self.input is None) == (self.messages is None):
            problem = "neither is given" if self.input is None else "both are given"
            raise refuse(f"give input or messages; {problem}", "input")
        of_texts = bool(self.inputs) and all(isinstance(entry, str) for entry in self.inputs)
        if self.prompt_name is not None and not of_texts:
            raise refuse("prompt_name goes with texts, not with token ids or messages", "prompt_name")
        if len(self.inputs) > MAX_INPUTS:
            raise refuse(f"input has {len(self.inputs)} entries; at most {MAX_INPUTS}", "input")
        return self

    @property
    def inputs(self) -> list[str | list[int]]:
        """One entry a text; none where there are messages."""
        if self.input is None:
            return []
        if isinstance(self.input, str) or are_integers(self.input):
            return [self.input]  # type: ignore[list-item]
        return self.input  # type: ignore[return-value]


_ENCODING_RULES = (
    Rule(
        lambda body: body.encoding_format != "base64",
        {"embed_dtype": (), "endianness": ()},
        "needs encoding_format to be 'base64'",
    ),
)


class EncodingFields(RequestModel):
    """The form of vectors."""

    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of little-endian float32."""
    embed_dtype: EmbedDtype | None = None
    """With base64, the type of its numbers instead of float32."""
    endianness: Literal["native", "big", "little"] | None = None
    """With base64, the order of each number's bytes; little by default, and native is that of the server."""

    @model_validator(mode="after")
    def _bytes_only(self) -> EncodingFields:
        request_model.check_rules(self, _ENCODING_RULES)
        return self

    def encoded(self, vector: np.ndarray) -> list[float] | str:
        """A vector of float32 as asked for; values beyond a narrower type's range are its infinity or NaN."""
        if self.encoding_format == "float":
            return vector.tolist()
        with np.errstate(over="ignore"):
            values = vector.astype(DTYPES[self.embed_dtype or "float32"])
        order = {"native": "=", "big": ">"}.get(self.endianness or "little", "<")
        octets = values.view(f"u{values.itemsize}").astype(f"{order}u{values.itemsize}")
        return base64.b64encode(octets.tobytes()).decode()


class VectorFields(InputFields, EncodingFields):
    """Vectors of texts."""

    dimensions: int | None = Field(default=None, ge=1)
    """Keep this many leading channels, for models that were trained for it (Matryoshka)."""
    normalize: bool | None = None
    """Scale to unit length; by default as the model asks, which is nearly always true."""
    use_activation: bool | None = None
    """Another name of normalize; of classes: false gives the raw scores instead of probabilities."""

    @model_validator(mode="after")
    def _one_name(self) -> VectorFields:
        if self.normalize is not None and self.use_activation is not None:
            raise refuse("use_activation is another name of normalize; give one of them", "use_activation")
        return self


class EmbeddingRequest(VectorFields):
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_POOLING
    path: ClassVar[str] = "/v1/embeddings"
    called_here: ClassVar[Mapping[str, str]] = {
        "output_dimension": "dimensions", "texts": "input", "inputs": "input", "prompt": "input",
        "truncate": "truncate_prompt_tokens", "embedding_types": "encoding_format",
    }  # fmt: skip


class PoolingRequest(VectorFields):
    """What a model makes of each text, whichever kind of model it is."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_POOLING

    task: Literal["embed", "classify"] | None = None
    """A vector, or the probabilities of the classes; by default what the model is made for."""


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of /score: vLLM's first, and its others."""


class TextDocument(RequestModel):
    text: str
    """The document's text."""


Text = str | TextDocument


class ComparisonFields(PoolingFields):
    """The way in which two texts are compared."""

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
        """The place of each text in the request, such as documents[2]; of equal ones the first."""
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
    """The text to look for."""
    documents: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    """The texts to rank, or objects with a `text`."""
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
        """True where the documents come under TEI's name."""
        return False

    @property
    def candidates(self) -> list[str]:
        return _texts(self.documents or [])


_RERANK_RULES = (
    Rule(
        lambda body: body.texts is not None,
        {"documents": (), "top_n": (), "return_documents": ()},
        "does not go with texts, which is TEI's name of documents",
    ),
    Rule(
        lambda body: body.texts is None,
        {"return_text": (), "raw_scores": (), "truncate": (), "truncation_direction": ()},
        "goes with texts, TEI's name of documents",
    ),
)


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
        request_model.check_rules(self, _RERANK_RULES)
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
