"""The metrics of several servers in one text: nothing lost, each sample under its server's name."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from jaxllm.serving.metrics import merged

TEXT = """\
# HELP jaxllm:steps_total Steps run.
# TYPE jaxllm:steps_total counter
jaxllm:steps_total{model_name="tiny"} %d.0
# HELP jaxllm:iteration_tokens_total Tokens that one step ran.
# TYPE jaxllm:iteration_tokens_total histogram
jaxllm:iteration_tokens_total_bucket{le="1.0",model_name="tiny"} 1.0
jaxllm:iteration_tokens_total_bucket{le="+Inf",model_name="tiny"} 3.0
jaxllm:iteration_tokens_total_count{model_name="tiny"} 3.0
jaxllm:iteration_tokens_total_sum{model_name="tiny"} 9.0
"""


def test_each_sample_has_its_server() -> None:
    text = merged({"a": TEXT % 5, "b": TEXT % 7}).decode()
    assert (
        text.count("# TYPE jaxllm:steps_total counter")
        == text.count("# TYPE jaxllm:iteration_tokens_total histogram")
        == 1
    )
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    steps = {sample.labels["replica"]: sample.value for sample in families["jaxllm:steps"]}
    assert steps == {"a": 5.0, "b": 7.0}
    assert len(families["jaxllm:iteration_tokens_total"]) == 2 * 4
    assert {sample.labels["model_name"] for samples in families.values() for sample in samples} == {"tiny"}
