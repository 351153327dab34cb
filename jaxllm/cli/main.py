"""`jaxllm`: the command line. Its commands are functions of this package; nothing here imports jax."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import App, CycloptsError
from cyclopts.exceptions import UnusedCliTokensError
from cyclopts.help import DefaultFormatter

from jaxllm import logs
from jaxllm.cli.bench import bench, profile
from jaxllm.cli.chat import chat
from jaxllm.cli.generate import generate
from jaxllm.cli.launch import launch
from jaxllm.cli.models import compile, convert, list_models, models, plan, pull, rm, show
from jaxllm.cli.serve import keys, ps, serve, stop, store
from jaxllm.cli.settings import documented, in_words
from jaxllm.cli.terminal import OUTPUT, prepare_streams
from jaxllm.config import ServeConfig
from jaxllm.config.translation import SETTINGS, flag, translated
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.requests.sampling import SamplingParams
from jaxllm.threads import FAILED, INTERRUPTED, note_exit_status

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

logger = logging.getLogger(__name__)

USAGE_ERROR = 2
PIPE_CLOSED = 141
HELP_ALL = "--help-all"

COMMON = frozenset({
    "model", "revision", "dtype", "max_model_len", "isq", "max_num_seqs", "gpu_memory_utilization", "kv_cache_memory",
    "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "speculative_config",
    "seed", "host", "port", "api_key", "api_key_file", "served_model_name", "chat_template", "tool_call_parser",
    "reasoning_parser", "models", "model_directory", "max_loaded_models", "model_memory", "mcp_config", "data_dir",
    "log_level", "log_format", "temperature", "top_k", "top_p", "max_tokens", "stop",
})  # fmt: skip
"""Settings and sampling parameters that --help shows."""
RARE = frozenset({*ServeConfig.model_fields, *(field.name for field in dataclasses.fields(SamplingParams))} - COMMON)


def version() -> str:
    from importlib.metadata import version as installed

    return f"jaxllm {installed('jaxllm')}"


app = App(
    name="jaxllm",
    help="LLM inference compiled by JAX/XLA. Try `jaxllm chat`, `jaxllm serve`, or COMMAND --help; COMMAND --help-all "
    "shows rarer settings too.",
    version=version,
)
for command in (
    serve, generate, chat, launch, pull, show, rm, ps, stop, convert, compile, models, keys, plan, bench, profile,
    store,
):  # fmt: skip
    app.command(command)
app.command(list_models, name="list")
app.command(chat, name="run")  # as ollama calls it


@app.command
@documented
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that makes a shell complete commands, flags and their choices.

    bash and zsh: put `eval "$(jaxllm completion bash)"` into ~/.bashrc, or the same with zsh into ~/.zshrc.
    fish: `jaxllm completion fish > ~/.config/fish/completions/jaxllm.fish`.

    Args:
        shell: Which shell it is for.
    """
    print(app.generate_completion(shell=shell))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 with one line on stderr when the user's input did not."""
    asked, everything = takes_help_all(sys.argv[1:] if arguments is None else arguments)
    words, meant, _ = app.parse_commands(asked)  # --help is one of them
    has_rare = any(getattr(one.default_command, "takes_all_settings", False) for one in meant)
    app.help_formatter = help_page = CommonFirst(everything or not has_rare)
    try:
        try:
            app([*words, *in_our_words(asked[len(words) :], meant)], exit_on_error=False, print_error=False)
        finally:
            if help_page.num_left_out:
                print(f"{help_page.num_left_out} more settings are shown by {HELP_ALL}.")
            sys.stdout.flush()
    except UnusedCliTokensError as error:
        _refuse(f"unexpected argument {(error.unused_tokens or ['?'])[0]!r}; see --help")
    except CycloptsError as error:
        _refuse(in_words(error))
    except JaxLLMError as error:
        _refuse(error, FAILED if isinstance(error, EngineDeadError) else USAGE_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `jaxllm generate … | head -1`: the reader has had enough
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        if error.filename != OUTPUT:
            raise
        _refuse(f"{OUTPUT} cannot be written: {(error.strerror or str(error)).lower()}", FAILED)


def in_our_words(arguments: Sequence[str], commands: Sequence[App]) -> list[str]:
    """What follows a command, with the flags of other servers translated, and said of each that changes nothing."""
    command = commands[-1].default_command if commands else None
    names = inspect.signature(command).parameters if command is not None else ()
    own = {*map(flag, names), *(["--temp"] if "temperature" in names else [])}
    found = translated(arguments, SETTINGS | own)
    os.environ.update(found.variables)
    for line in found.said:
        logger.warning("%s", line)
    return found.arguments


def run() -> None:
    """`main` as a whole process, which then ends at once, whatever is still being compiled."""
    prepare_streams()
    try:
        main()
        note_exit_status(0)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            note_exit_status(error.code or 0)
        raise


def _refuse(error: object, status: int = USAGE_ERROR) -> None:
    line = " ".join(str(error).split())
    if logs.settings().format == "json":
        logger.critical(line)
    else:
        print(f"jaxllm: error: {line}", file=sys.stderr)
    sys.exit(status)


def takes_help_all(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with --help in the place of --help-all, and whether that was there; after -- it is a text."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = ["--help" if argument == HELP_ALL else argument for argument in arguments[:end]]
    return [*flags, *arguments[end:]], HELP_ALL in arguments[:end]


class CommonFirst(DefaultFormatter):
    """Leaves rare flags out, unless `everything` is to be shown."""

    def __init__(self, everything: bool):
        super().__init__()
        self._everything = everything
        self.num_left_out = 0

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        if not self._everything and panel.format == "parameter":
            shown = [entry for entry in panel.entries if not _fields(entry.names) & RARE]
            self.num_left_out += len(panel.entries) - len(shown)
            panel = panel.copy(entries=shown)
        if panel.entries:
            super().__call__(console, options, panel)


def _fields(flags: Sequence[str]) -> set[str]:
    return {flag.removeprefix("--").partition(".")[0].replace("-", "_") for flag in flags}


if __name__ == "__main__":
    run()
