"""Every route and every field has its test, and docs/api.md says which; nothing is refused or ignored in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from tests.serving.api_coverage import Claim, claims
from tests.serving.api_surface import BODIES, INERT, Section, models, routes, sections
from tests.serving.fake_engine import FakeEngine

REFUSED = [(model, name) for model in models() for name in sorted(model.unsupported)]
INERT_FIELDS = [
    (section, name)
    for section in sections()
    for name, schema in section.fields.items()
    if section.of_body and schema["description"].startswith(INERT)
]
SAMPLES = {
    "Metadata": {"user_id": "u"}, "CacheControl": {"type": "ephemeral"}, "CacheOptions": {"mode": "implicit"},
    "BackgroundOptions": {"completion_window": "2h"}, "ImageOptions": {"context_compression": "auto"},
    "BillingPolicy": {"type": "billing_policy"},
}  # fmt: skip
"""Values of the objects among them."""
KNOWN = {str(route): set[str]() for route in routes()} | {section.title: set(section.fields) for section in sections()}
"""What a claim may be about."""


def test_every_route_has_its_test() -> None:
    assert not {str(route) for route in routes()} - {claim.subject for claim in claims() if not claim.fields}


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.title)
def test_every_field_has_its_test(section: Section) -> None:
    tested = {field for claim in claims() if claim.subject == section.title for field in claim.fields}
    inert = {name for owner, name in INERT_FIELDS if owner is section}
    assert tested | inert == set(section.fields) and not tested & inert


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: f"{claim.test}-{claim.subject}")
def test_what_a_test_covers_exists_and_is_spoken_of(claim: Claim) -> None:
    assert set(claim.fields) <= KNOWN[claim.subject]
    words = set(re.findall(r"\w+", claim.text))
    assert not [field for field in claim.fields if not set(re.findall(r"\w+", field)) <= words]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.title)
def test_every_field_says_what_it_does(section: Section) -> None:
    assert not [name for name, schema in section.fields.items() if not schema["description"]]


@pytest.mark.parametrize(("model", "name"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_fields_of_other_servers_are_refused_by_name(model: type[BaseModel], name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} is not supported by this server"):
        model.model_validate({name: 1})


@pytest.mark.parametrize(
    ("section", "name"), INERT_FIELDS, ids=[f"{section.title}.{name}" for section, name in INERT_FIELDS]
)
def test_inert_fields_change_nothing(client: TestClient, engine: FakeEngine, section: Section, name: str) -> None:
    path = section.routes[0].path
    for fields in ({}, {name: sample(section.fields[name])}):
        response = client.post(path, json=BODIES[path] | fields)
        assert response.status_code == 200, response.text
    without, with_it = engine.seen or engine.pooled
    assert without == with_it


def sample(schema: dict[str, Any]) -> Any:
    """Some value that fits."""
    if "anyOf" in schema:
        return sample(schema["anyOf"][0])
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    values = {"string": "x", "boolean": True, "integer": 1, "object": {"a": "b"}, "array": []}
    return values[schema["type"]] if "type" in schema else SAMPLES[schema["$ref"]]
