"""The dashboard and the alerts ask for metrics and labels that a server has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.config import ServeConfig
from tests.serving.fake_engine import FakeEngine, app_of

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/jaxllm.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PROMETHEUS_OWN = {"up": {"job", "instance"}}
"""What Prometheus makes of a scrape itself."""
ADDED = {"job", "instance"}
"""Labels that Prometheus gives to what it scrapes."""
QUERIES = {
    **{f"{panel['title']} {t['refId']}": t["expr"] for panel in PANELS for t in panel["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each series that a server shows once it has had a request, by name."""
    config = ServeConfig(model="fake", data_dir=tmp_path_factory.mktemp("data"))
    with TestClient(app_of(config, FakeEngine(), None), base_url="http://localhost") as client:
        client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3}).raise_for_status()
        text = client.get("/metrics").text
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found | PROMETHEUS_OWN


def parts(expression: Any) -> Iterator[Any]:
    """An expression of PromQL and all that it is made of."""
    yield expression
    inner = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    for part in [*inner, *getattr(expression, "args", [])]:
        if part is not None:
            yield from parts(part)


def parsed(query: str) -> Any:
    return promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$model", ".*"))


def selectors(query: str) -> list[Any]:
    return [part for part in parts(parsed(query)) if isinstance(part, promql_parser.VectorSelector)]


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_what_a_server_has(scraped: dict[str, set[str]], name: str) -> None:
    asked = selectors(QUERIES[name])
    assert asked
    for selector in asked:
        assert selector.name in scraped, f"no metric is called {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= scraped[selector.name] | ADDED, f"{selector.name} has {scraped[selector.name]}"
    known = set.union(*(scraped[selector.name] for selector in asked)) | ADDED
    for part in parts(parsed(QUERIES[name])):
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            assert set(part.modifier.labels) <= known


def test_the_check_finds_what_is_not_there(scraped: dict[str, set[str]]) -> None:
    [nowhere, somewhere] = selectors('rate(jaxllm:nothing_total[5m]) / jaxllm:kv_pages{colour="red"}')
    assert nowhere.name not in scraped and somewhere.name in scraped
    assert {matcher.name for matcher in somewhere.matchers.matchers} - scraped[somewhere.name] == {"colour"}


def test_the_models_are_listed_by_a_metric_that_is_there(scraped: dict[str, set[str]]) -> None:
    [variable] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "model"]
    metric, label = variable["query"]["query"].removeprefix("label_values(").removesuffix(")").split(", ")
    assert label in scraped[metric]


def test_every_legend_names_a_label_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            query = parsed(target["expr"])
            kept = {
                label
                for part in parts(query)
                if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None
                for label in part.modifier.labels
            }
            named = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            assert named <= kept, panel["title"]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
