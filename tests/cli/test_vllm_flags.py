"""Command lines of vLLM's server: honoured, said to change nothing, or refused with the reason."""

from __future__ import annotations

import logging

import pytest

from jaxllm.cli.vllm_flags import ALWAYS_SO, REFUSED, RENAMED
from jaxllm.config import ServeConfig
from tests.cli.test_errors import check

OURS = {f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields}


def test_short_and_other_names(cli, served) -> None:
    assert cli("serve", "m", "-tp", "2", "-q=awq", "--enable-log-requests", "--max_model_len", "64").code == 0
    assert served == [
        ServeConfig(
            model="m", tensor_parallel_size=2, quantization="awq", enable_request_logging=True, max_model_len=64
        )
    ]


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
