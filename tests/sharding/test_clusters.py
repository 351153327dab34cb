"""A process finds out which one of a group it is, or says in one line what it lacks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.sharding.clusters import settled, split_address

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "node[003-004,7],x",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}  # fmt: skip
OMPI_4 = OMPI | {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
LWS = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
STATED: dict[str, Any] = {"num_processes": 2, "process_id": 1, "coordinator_address": "10.0.0.1:8476"}


def place(variables: dict[str, str], looks: bool = True, **fields: Any) -> tuple[int | None, int | None, str | None]:
    config = EngineConfig(**({"tensor_parallel_size": 2} | fields))
    found = settled(config, looks=looks, variables=variables)
    assert settled(found, looks=looks, variables=variables) == found
    return found.num_processes, found.process_id, found.coordinator_address


@pytest.mark.parametrize(
    ("variables", "host"),
    [(SLURM, "node003"), (OMPI, "127.0.0.1"), (OMPI_4, "10.96.0.1"), (LWS, "llm-0.llm.default")],
)
def test_what_started_the_processes_says_which_this_is(variables: dict[str, str], host: str) -> None:
    count, number, address = place(variables)
    assert (count, number) == (2, 1) and address is not None and split_address(address)[0] == host


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,x2", "n1"), ("gpu-[07-09]", "gpu-07"), ("gpu-[2,4-5],x", "gpu-2")],
)
def test_slurm_s_first_node_is_found(nodes: str, first: str) -> None:
    _, _, address = place(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert address is not None and address.startswith(f"{first}:")


def test_jobs_on_one_machine_take_ports_of_their_own() -> None:
    ports = {place(OMPI | {"PMIX_NAMESPACE": f"job-{number}"})[2] for number in range(8)}
    assert len(ports) == 8


def test_settings_win_over_what_is_found() -> None:
    assert place(OMPI, coordinator_address="10.0.0.9:1234") == (2, 1, "10.0.0.9:1234")
    assert place(SLURM, **STATED) == (2, 1, "10.0.0.1:8476")


def test_a_python_program_is_alone_unless_it_says_otherwise() -> None:
    """Each of several programs may well be meant to have an engine of its own."""
    assert place(OMPI, looks=False) == (None, None, None)
    assert place(OMPI, looks=False, cluster="ompi")[:2] == (2, 1)
    assert place(OMPI, cluster="off") == (None, None, None)
    assert place({}, looks=False, **STATED) == (2, 1, "10.0.0.1:8476")


@pytest.mark.parametrize(
    "variables", [{}, OMPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {"SLURM_JOB_ID": "1"}]
)
def test_one_process_is_no_group(variables: dict[str, str]) -> None:
    assert place(variables) == (None, None, None)


def test_an_engine_that_starts_the_others_has_a_process_of_its_own() -> None:
    config = EngineConfig(tensor_parallel_size=2, multi_process=True)
    for variables, looks in (({}, True), (OMPI, False)):
        found = settled(config, looks=looks, variables=variables)
        assert found.engine_process and found.multi_process and not found.in_group


@pytest.mark.parametrize(
    "fields",
    [
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 4},
        {"tensor_parallel_size": 3, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 1},
    ],
    ids=str,
)
def test_processes_have_whole_stages_or_parts_of_one(fields: dict[str, int]) -> None:
    assert place(OMPI, **fields) == place(OMPI)


@pytest.mark.parametrize(
    ("variables", "fields", "said"),
    [
        ({}, {"cluster": "slurm"}, "cluster is 'slurm', but SLURM_STEP_NUM_TASKS and SLURM_PROCID are not set"),
        ({}, {"num_processes": 2}, "num_processes is 2, but coordinator_address is missing: set it"),
        ({}, {"process_id": 1}, "process_id is 1, but num_processes is missing"),
        ({}, {"process_id": 1, "num_processes": 1}, "process_id is 1, but num_processes is 1: accepted is 0"),
        ({}, STATED | {"process_id": 2}, "process_id is 2, but num_processes is 2: accepted is 0 to 1"),
        ({}, STATED | {"coordinator_address": "a"}, "coordinator_address is 'a': accepted is a host and a port"),
        (
            OMPI,
            {"tensor_parallel_size": 3},
            "tensor_parallel_size is 3, and 2 processes share the model: accepted are ",
        ),
        (
            OMPI,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            "pipeline_parallel_size is 3 and tensor_parallel_size is 2, and 2 processes share the model: each is to "
            "have whole stages, or an equal part of one; accepted are 3 or 6 processes",
        ),
        (OMPI, {"data_parallel_size": 2}, "data_parallel_size is 2, but num_processes is 2"),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {}, "num_processes is 2, but coordinator_address is missing"),
        (OMPI, {"multi_process": True}, "multi_process is true, but this is process 1 of 2 that were started together"),
        ({}, {"cluster": "mpi4py"}, "cluster is 'mpi4py', which needs the package mpi4py"),
    ],
)
def test_what_is_missing_is_said_in_a_line(variables: dict[str, str], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        place(variables, **fields)
