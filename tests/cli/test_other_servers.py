"""The command lines and variables of other servers, and the table of what becomes of each flag."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from jaxllm.cli.main import app
from jaxllm.config import EngineConfig, ServeConfig, translation
from jaxllm.config.others import READERS, SERVERS, by_name, read_table, rows
from jaxllm.config.sources import read_settings
from jaxllm.config.translation import REFINED, SETTINGS, flag, other_variables, translated
from jaxllm.errors import ConfigError
from tests.cli.others import flags, lines, settled

OF_EVERY_COMMAND = {"-h", "--help", "--version", "--config"}
TOLD = re.compile(r"(--?[\w.-]+)( is not available: | is '1'?: |:? .*accepted (is|are) )")


def fate(name: str, values: list[str]) -> str:
    """What is wrong with how a flag is read; nothing where it is ours, translated, or refused with a reason."""
    try:
        found = translated(["m", name, *values])
    except ConfigError as error:
        return "" if TOLD.match(str(error)) and str(error).startswith(name) else str(error)
    rest = found.arguments[1:]
    if name in SETTINGS:
        return ""
    left = name in rest or (bool(rest) and not rest[0].startswith("--")) or rest.count("1") > 1
    alone = any(len(row.meaning) > 1 or row.ours[:1] == "@" for row in by_name().get(name, ()))
    empty = not (rest or found.said or found.variables or alone)
    return str(rest) if left or empty else ""


@pytest.mark.parametrize(("server", "number"), [("vllm", 320), ("llama_server", 257)])
def test_every_flag_of_a_server_is_honoured_or_told(server: str, number: int) -> None:
    theirs = flags(server)
    assert len(theirs) == number
    told = {name: fate(name, flag.values) for flag in theirs for name in flag.names if name not in OF_EVERY_COMMAND}
    assert {name: wrong for name, wrong in told.items() if wrong} == {}


def test_every_variable_of_llama_server_is_honoured_or_told() -> None:
    names = [flag.variable for flag in flags("llama_server") if flag.variable.startswith("LLAMA_ARG_")]
    assert len(names) > 100
    told = {name: str(next(other_variables({name: "1"}))) for name in names}
    assert not [line for line in told.values() if "nothing here corresponds to it" in line]


COMMANDS = [one.default_command for one in app.subapps if one.default_command is not None]


def test_flags_of_ours_are_read_without_the_table_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not say how another server's values of them are read."""
    names = {flag(name) for one in COMMANDS for name in inspect.signature(one).parameters}
    own = SETTINGS | names | {"--temp"}
    assert {name for name in own if any(translation._refines(row, name) for row in by_name().get(name, ()))} == REFINED

    def read() -> None:
        raise AssertionError("the table is read")

    monkeypatch.setattr(translation, "by_name", read)
    given = ["m", "--port", "80", "--max-num-seqs=3", "--temp", "0"]
    assert translated(given, own).arguments == ["m", "--port=80", "--max-num-seqs=3", "--temp", "0"]


LACKING = re.compile(r": method: it must be|is not available: |kv_connector|--kv-cache-dtype is")
"""What a recipe of vLLM's may be refused for: a feature that is not here, by its name."""


def test_recipes_of_vllm_start_or_name_what_is_not_here() -> None:
    started, refused = set(), {}
    for words in lines("vllm_recipes"):
        try:
            started.add(settled(words).model)
        except ConfigError as error:
            refused[words[0]] = str(error)
    assert (len(started) + len(refused), len(started) > 170) == (188, True)
    assert not {model: line for model, line in refused.items() if not LACKING.search(line)}


@pytest.mark.parametrize(("name", "number"), [("llama_server", 42), ("candle_vllm", 14), ("rust_de_llama", 3)])
def test_documented_command_lines_start(name: str, number: int) -> None:
    assert len([settled(words) for words in lines(f"{name}_lines")]) == number


DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 512}


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("-m a.gguf -c 4096 -np 2 -ub 512 -b 2048 -t 8 -ngl 99 -fa on --jinja",
         {"model": "a.gguf", "max_model_len": 4096, "max_num_seqs": 2, "max_num_batched_tokens": 512, "threads": 8}),
        ("-m a.gguf --threads -1 -tb 4", {"model": "a.gguf"}),
        ("-m a.gguf -c 0 -np -1", {"model": "a.gguf"}),
        ("-hf org/a:Q8_0 -a x,y", {"model": "org/a:Q8_0", "served_model_name": "x,y"}),
        ("-hf org/a -hff a-Q8_0.gguf", {"model": "org/a:a-Q8_0.gguf"}),
        ("-m a.gguf --temp 0.6 --top-k 20.0 -n 512", {"model": "a.gguf", "override_generation_config": DEFAULTS}),
        ("-m a.gguf -n -1 --seed -1 --reasoning-budget -1", {"model": "a.gguf"}),
        ("-m a.gguf -ctk q8_0 -ctv q8_0 --no-webui", {"model": "a.gguf", "kv_cache_dtype": "int8", "web": False}),
        ("-m a.gguf -fa -m-t 1".replace(" -m-t 1", " -t 1"), {"model": "a.gguf", "threads": 1}),
        ("-m a.gguf --host /tmp/a.sock", {"model": "a.gguf", "uds": "/tmp/a.sock"}),
        ("-m a.gguf -md b.gguf --draft-max 4",
         {"model": "a.gguf", "speculative_config": {"model": "b.gguf", "num_speculative_tokens": 4}}),
        ("-m a.gguf --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768", {"model": "a.gguf", "hf_overrides": {
            "rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}}),
        ("-m a.gguf --reasoning off", {"model": "a.gguf", "default_chat_template_kwargs": {"enable_thinking": False}}),
        ("--m org/a --f a.gguf --p 2000 --mem 64 --fp8-kvcache",
         {"model": "org/a:a.gguf", "port": 2000, "kv_cache_memory": "64MiB", "kv_cache_dtype": "fp8"}),
        ("--w /a --f b.gguf", {"model": "/a/b.gguf"}),
        ("--address [::1]:80 --n-threads 2 --n-parallel 4 --n-ctx 2048 --preload-model a.gguf",
         {"host": "::1", "port": 80, "threads": 2, "max_num_seqs": 4, "max_model_len": 2048, "preload_model": "a.gguf",
          "model_directory": "models"}),
        ("--preload-model=a.gguf", {"preload_model": "a.gguf", "model_directory": "models"}),
    ],
)  # fmt: skip
def test_flags_become_settings(cli, served, line: str, settings: dict[str, Any]) -> None:
    assert cli("serve", *line.split()).code == 0
    assert served == [ServeConfig(**settings)]


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("m -n 2 -r 1 --master-addr a", {"num_processes": 2, "process_id": 1, "coordinator_address": "a:29501"}),
        ("-m m -n 2 -c 8", {"override_generation_config": {"max_new_tokens": 2}, "max_model_len": 8}),
    ],
)
def test_a_name_of_several_servers_is_read_as_that_of_the_other_flags(
    cli, served, line: str, settings: dict[str, Any]
) -> None:
    assert cli("serve", *line.split()).code == 0
    assert served == [ServeConfig(model="m", **settings)]


def test_devices_and_tokens_go_into_the_environment() -> None:
    words = ["--d", "2,3", "--w", "/a", "--hf-token", "t"]
    assert translated(words).variables == {"CUDA_VISIBLE_DEVICES": "2,3", "HF_TOKEN": "t"}
    assert translated(["-m", "a", "-ngl", "0"]).variables == {"JAX_PLATFORMS": "cpu"}


def test_what_has_no_effect_is_said_in_one_line() -> None:
    said = translated(["m", "--no-mmap", "-tb", "4"]).said
    assert [line.partition(" has no effect: ")[0] for line in said] == ["--no-mmap", "-tb"]


OTHERS = {
    "OLLAMA_HOST": "0.0.0.0", "OLLAMA_CONTEXT_LENGTH": "4096", "OLLAMA_KEEP_ALIVE": "5m", "OLLAMA_FLASH_ATTENTION": "1",
    "LLAMA_ARG_TEMPERATURE": "0.5", "LLAMA_ARG_TOP_K": "3", "LLAMA_ARG_UI": "off", "LLAMA_ARG_RPC": "a:1",
    "VLLM_ATTENTION_BACKEND": "X", "VLLM_LOGGING_LEVEL": "DEBUG",
}  # fmt: skip


def test_variables_of_other_servers_are_settings() -> None:
    config = read_settings(ServeConfig, {}, environ=OTHERS)
    assert (config.host, config.port, config.max_model_len, config.web) == ("0.0.0.0", 11434, 4096, False)
    assert config.override_generation_config == {"temperature": 0.5, "top_k": 3}
    assert (config.log_level, config.model_ttl) == ("debug", None)
    several = read_settings(ServeConfig, {"model_directory": "/m"}, environ=OTHERS)
    assert several.model_ttl == 300
    ours = read_settings(ServeConfig, {"port": 1}, environ=OTHERS | {"JAXLLM_HOST": "::1"})
    assert (ours.host, ours.port) == ("::1", 1)
    assert read_settings(ServeConfig, {"uds": "/a.sock"}, environ=OTHERS).uds is not None
    assert read_settings(EngineConfig, {}, environ=OTHERS) == EngineConfig()


def test_a_variable_that_is_honoured_is_named_in_errors() -> None:
    with pytest.raises(ConfigError, match=r"^OLLAMA_MAX_QUEUE is 'many': it must be an integer"):
        read_settings(ServeConfig, {}, environ={"OLLAMA_MAX_QUEUE": "many"})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LLAMA_ARG_CHAT_TEMPLATE_KWARGS", "[1]", "is '[1]': it must be a JSON object"),
        ("OLLAMA_NUM_PARALLEL", "--port", "is '--port': it must be an integer"),
        ("LLAMA_ARG_SSL_KEY_FILE", "", "is '': it must be a path"),
    ],
)
def test_a_variable_may_have_any_value(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{variable} {said}")):
        read_settings(ServeConfig, {}, environ={variable: value})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LLAMA_ARG_UI", "maybe", "accepted are 1, true, on, enabled, 0, false, off, disabled"),
        ("LLAMA_ARG_TOP_K", "inf", "--top-k is 'inf': accepted is a number"),
        ("LLAMA_ARG_N_GPU_LAYERS", "0", "see JAX_PLATFORMS"),
        ("LLAMA_ARG_API_KEY", "secret", "it stands for --api-key where that is not given"),
    ],
)
def test_a_variable_without_effect_says_why_and_no_secret(variable: str, value: str, said: str) -> None:
    assert str(next(other_variables({variable: value}))) == f"{variable} is set: {said}"


def test_no_setting_is_hidden_and_every_hint_is_a_flag() -> None:
    hidden = {name for row in rows() for name in row.names if name in SETTINGS and row.ours != name and not row.only}
    assert not hidden
    ours = {row.ours.partition(".")[0] for row in rows() if row.ours[:2] == "--"} | {
        ours if isinstance(ours, str) else ours["is"] for ours in read_table()["renamed"]["variables"].values()
    }
    hints = {word for row in rows() for word in re.findall(r"--[a-z-]+", row.why)} | ours
    named = {hint.replace("--no-", "--") for hint in hints}
    assert not named - SETTINGS - {"--help"}


def test_a_meaning_says_nothing_that_is_not_read() -> None:
    read = {"is", "value", "unit", "unless", "words", "others", "read"}
    assert not {(row.server, row.names) for row in rows() if row.meaning.keys() - read}
    assert {row.meaning["read"] for row in rows() if "read" in row.meaning} <= READERS.keys()


def test_a_server_has_a_name_once() -> None:
    for server in SERVERS:
        names = [name for row in rows() if row.server == server for name in row.names]
        assert not {name for name in names if names.count(name) > 1}
