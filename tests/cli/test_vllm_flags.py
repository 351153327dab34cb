"""Command lines of vLLM's server: honoured, said to change nothing, or refused with the reason."""

from __future__ import annotations

import logging

import pytest

from jaxllm.config import ServeConfig
from jaxllm.config.sources import ALWAYS_SO, REFUSED, RENAMED
from tests.cli.test_errors import check

OURS = {f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields}


def test_short_and_other_names(cli, served) -> None:
    assert cli("serve", "m", "-tp", "2", "-q=awq", "--enable-log-requests", "--max_model_len", "64").code == 0
    assert served == [
        ServeConfig(
            model="m", tensor_parallel_size=2, quantization="awq", enable_request_logging=True, max_model_len=64
        )
    ]


ADAPTERS = {"sql": "/adapters/sql", "poems": "org/poems"}
OBJECT = '{"name": "poems", "path": "org/poems", "base_model_name": "m"}'


@pytest.mark.parametrize(
    "given",
    [
        ["--lora-modules", "sql=/adapters/sql", "poems=org/poems"],
        ["--lora_modules", "sql=/adapters/sql, poems=org/poems"],
        ["--lora-modules", "sql=/adapters/sql", OBJECT],
        ["--lora-modules", '[{"name": "sql", "path": "/adapters/sql"}, "poems=org/poems"]'],
    ],
)
def test_adapters_are_given_as_vllm_takes_them(cli, served, given: list[str]) -> None:
    assert cli("serve", "m", "--enable-lora", *given, "--max-loras", "2").code == 0
    [config] = served
    assert {module.name: module.path for module in config.lora_modules} == ADAPTERS
    assert (config.enable_lora, config.max_loras) == (True, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sql", "it must be NAME=PATH, several separated by commas"),
        ("sql=", "it must be NAME=PATH, several separated by commas"),
        ("a=x,a=y", "'a' is there twice; each needs a name of its own"),
        ("[1", "it must be NAME=PATH, or JSON such as"),
        ('{"name": "a"}', "0.path: it must be given"),
        ('{"name": "a", "path": "x", "rank": 3}', "0.rank: there is no such key"),
        ('{"name": "a,b", "path": "x"}', "0.name: it must be printable characters"),
    ],
)
def test_adapters_have_names_and_paths(cli, served, given: str, said: str) -> None:
    check(cli("serve", "m", "--lora-modules", given), f"--lora-modules is {given!r}: {said}")
    assert not served


def test_adapters_are_not_served_by_a_server_without(cli, served) -> None:
    check(
        cli("serve", "m", "--lora-modules", "a=x", "--no-enable-lora"),
        "lora_modules is set, and enable_lora is false: adapters need it",
    )


@pytest.mark.parametrize("flag", ALWAYS_SO)
def test_what_is_always_so_is_accepted_with_one_line(cli, served, caplog, flag: str) -> None:
    with caplog.at_level(logging.WARNING):
        assert cli("serve", flag, "m").code == 0
    assert served == [ServeConfig(model="m")]
    assert [record.getMessage() for record in caplog.records] == [f"{flag} has no effect: {ALWAYS_SO[flag]}"]


@pytest.mark.parametrize("flag", REFUSED)
@pytest.mark.parametrize("value", ["", "=1"])
def test_what_cannot_be_honoured_is_refused_with_the_reason(cli, served, flag: str, value: str) -> None:
    check(cli("serve", "m", flag + value), f"{flag} is not available: {REFUSED[flag]}")
    assert not served


def test_a_switch_takes_no_value(cli, served) -> None:
    check(cli("serve", "--enable-chunked-prefill=false"), "--enable-chunked-prefill is 'false'; it takes no value")


def test_no_setting_is_hidden_and_every_hint_is_a_flag() -> None:
    assert not OURS & {*RENAMED, *ALWAYS_SO, *REFUSED}
    assert set(RENAMED.values()) <= OURS
    words = " ".join([*ALWAYS_SO.values(), *REFUSED.values()]).replace(",", " ").replace(";", " ").split()
    hints = {word.replace("--no-", "--") for word in words if word.startswith("--")}
    assert hints <= OURS, hints - OURS
