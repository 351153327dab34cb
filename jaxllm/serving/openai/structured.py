"""The fields that constrain generated text, OpenAI's and vLLM's, as one StructuredOutputs."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxllm.chat.custom import TextInput
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.http.request_model import RequestModel, refuse, refusing

MAX_STRUCTURES = 128

Schema = dict[str, Any] | bool | str
"""A JSON schema, or its JSON text."""


class TextFormat(RequestModel):
    type: Literal["text"]


class GrammarDefinition(RequestModel):
    """A grammar of the texts that a custom tool takes."""

    syntax: Literal["lark", "regex"]
    """lark, in llguidance's dialect, or a regular expression, which matches the whole text."""
    definition: str = Field(min_length=1)
    """The grammar. The model is told of it, and held to it as to the schema of a strict function."""

    def text_input(self) -> TextInput:
        return TextInput(self.syntax, self.definition)


class JSONObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JSONObjectSchemaFormat(JSONObjectFormat):
    """Any JSON object, or one that matches a schema."""

    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """llama.cpp's place of the schema that the answer must match; by default any JSON object will do."""


class JSONSchema(RequestModel):
    name: str | None = None
    """Accepted, without effect: the model does not see it."""
    description: str | None = None
    """Accepted, without effect: the model does not see it."""
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """The schema that the answer must match; by default any JSON object will do."""
    strict: bool | None = None
    """Accepted, without effect: the answer matches the schema in any case."""


class JSONSchemaFormat(RequestModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JSONSchema | None = None
    """The schema, with its name."""
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """llama.cpp's place of the schema, instead of json_schema."""

    @model_validator(mode="after")
    def _one_schema(self) -> JSONSchemaFormat:
        if self.json_schema is None and self.schema_ is None:
            raise refuse("json_schema is required", "json_schema")
        if self.json_schema is not None and self.schema_ is not None:
            raise refuse("json_schema and schema are one setting, give one of them")
        return self

    @property
    def asked(self) -> dict[str, Any] | bool | None:
        return self.schema_ if self.json_schema is None else self.json_schema.schema_


class Structure(RequestModel):
    begin: str = Field(min_length=1)
    """Text before the JSON."""
    schema_: dict[str, Any] | bool = Field(alias="schema")
    """The schema that the JSON matches."""
    end: str
    """Text after the JSON."""


class StructuralTagFormat(RequestModel):
    """Free text in which each trigger begins one of the structures."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"format"})

    type: Literal["structural_tag"]
    structures: list[Structure] = Field(min_length=1, max_length=MAX_STRUCTURES)
    """The structures that may follow a trigger."""
    triggers: list[str] = Field(min_length=1, max_length=MAX_STRUCTURES)
    """Texts that begin a structure; each structure's begin starts with one."""


ResponseFormat = Annotated[
    TextFormat | JSONObjectSchemaFormat | JSONSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputsFields(RequestModel):
    """vLLM's constraints; exactly one is set."""

    unsupported: ClassVar[frozenset[str]] = frozenset({
        "disable_additional_properties", "disable_any_whitespace", "disable_fallback", "whitespace_pattern",
    })  # fmt: skip

    json_: Schema | None = Field(default=None, alias="json")
    """A JSON schema, or its JSON text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, in llguidance's Lark dialect or in GBNF."""
    structural_tag: str | dict[str, Any] | None = None
    """{"structures": […], "triggers": […]}, or its JSON text."""


class StructuredFields(RequestModel):
    """The request's fields that constrain the text; at most one of them may be set."""

    response_format: ResponseFormat | None = None
    """text, json_object, json_schema or structural_tag."""
    structured_outputs: StructuredOutputsFields | None = None
    """vLLM's constraints, of which one is set."""
    guided_json: Schema | None = None
    """vLLM's older name of structured_outputs.json."""
    guided_regex: str | None = None
    """vLLM's older name of structured_outputs.regex."""
    guided_choice: list[str] | None = None
    """vLLM's older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """vLLM's older name of structured_outputs.grammar."""
    grammar: str | None = None
    """llama.cpp's name of structured_outputs.grammar."""
    json_schema: Schema | None = None
    """llama.cpp's and SGLang's name of structured_outputs.json."""
    regex: str | None = None
    """SGLang's name of structured_outputs.regex."""

    @model_validator(mode="after")
    def _one_constraint(self) -> StructuredFields:
        given = self._constraint_fields()
        if len(given) > 1:
            raise refuse(f"{' and '.join(given)} are set; they are one setting, give one of them", given[1])
        with refusing(self.constraint_field):
            self.constraint()
        return self

    def constraint(self) -> StructuredOutputs | None:
        """The constraint on the text; None where anything may be generated."""
        name = self.constraint_field
        return None if name is None else StructuredOutputs(**_constraint(name, getattr(self, name)))

    @property
    def constraint_field(self) -> str | None:
        return next(iter(self._constraint_fields()), None)

    def _constraint_fields(self) -> list[str]:
        given = [name for name in StructuredFields.model_fields if getattr(self, name) is not None]
        return [name for name in given if not isinstance(getattr(self, name), TextFormat)]


def _constraint(name: str, value: Any) -> dict[str, Any]:
    match value:
        case JSONObjectSchemaFormat(schema_=schema) | JSONSchemaFormat(asked=schema):
            return {"json_object": True} if schema is None else {"json": _text(schema)}
        case StructuralTagFormat():
            tag = value.model_dump(by_alias=True, include={"structures", "triggers"})
            return {"structural_tag": _text(tag)}
        case StructuredOutputsFields():
            given = value.model_dump(by_alias=True, exclude_none=True)
            return {kind: _text(part) if kind in ("json", "structural_tag") else part for kind, part in given.items()}
        case _:
            kind = "json" if name == "json_schema" else name.removeprefix("guided_")
            return {kind: _text(value) if kind == "json" else value}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
