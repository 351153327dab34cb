"""--help shows what most people set; --help-all shows every flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts import App
from cyclopts.help import DefaultFormatter

from jaxllm.config import ServeConfig
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

HELP_ALL = "--help-all"

COMMON = frozenset({
    "model", "revision", "dtype", "max_model_len", "isq", "max_num_seqs", "gpu_memory_utilization", "kv_cache_memory",
    "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "speculative_config",
    "seed",
    "host", "port", "api_key", "api_key_file", "served_model_name", "chat_template", "tool_call_parser",
    "reasoning_parser",
    "models", "model_directory", "max_loaded_models", "model_memory", "mcp_config", "data_dir", "log_level",
    "log_format",
    "temperature", "top_k", "top_p", "max_tokens", "stop",
})  # fmt: skip
"""Settings and sampling parameters that --help shows."""
RARE = frozenset({*ServeConfig.model_fields, *(field.name for field in dataclasses.fields(SamplingParams))} - COMMON)


def takes_help_all(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with --help in the place of --help-all, and whether that was there; behind -- it is a text."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = HELP_ALL in arguments[:end]
    flags = ["--help" if argument == HELP_ALL else argument for argument in arguments[:end]]
    return [*flags, *arguments[end:]], found


def has_rare(app: App, arguments: Sequence[str]) -> bool:
    """Whether the command that is meant takes all settings: of a few, those are what it is about."""
    _, named, _ = app.parse_commands(arguments)  # --help is one of them
    return any(getattr(one.default_command, "takes_all_settings", False) for one in named)


class CommonFirst(DefaultFormatter):
    """Leaves rare flags out, unless `everything` is to be shown."""

    def __init__(self, everything: bool):
        super().__init__()
        self._everything = everything
        self.num_left_out = 0

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        if not self._everything and panel.format == "parameter":
            shown = [entry for entry in panel.entries if not _is_rare(entry.names)]
            self.num_left_out += len(panel.entries) - len(shown)
            panel = panel.copy(entries=shown)
        if panel.entries:
            super().__call__(console, options, panel)


def _is_rare(names: Sequence[str]) -> bool:
    """Worked example: --stop-token-ids.0 and --no-skip-special-tokens belong to rare fields."""
    fields = {name.removeprefix("--").partition(".")[0].replace("-", "_") for name in names}
    return bool(fields & RARE)
