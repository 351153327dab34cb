"""`jaxllm serve --ray` where Ray is missing, and settings of it without it."""

from __future__ import annotations

import sys

import pytest


def test_without_ray_one_line_says_what_to_install(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "jaxllm.ray", raising=False)
    result = cli("serve", "smollm2-135m", "--ray")
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("jaxllm: error: ray is true, and Ray Serve cannot be imported (import of ray halted")
    assert result.err.endswith("): pip install 'jaxllm[ray]'\n")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--num-replicas=2", "num_replicas is 2"), ("--prefix-affinity", "prefix_affinity is True"),
        ('--replica-options={"max_ongoing_requests": 9}', "replica_options is {'max_ongoing_requests': 9}"),
    ],
)  # fmt: skip
def test_what_only_ray_takes_is_refused_without_it(cli, served, flag: str, said: str) -> None:
    result = cli("serve", flag)
    assert (result.code, result.err) == (2, f"jaxllm: error: {said}, which changes nothing without ray\n")
    assert not served
