"""`jaxllm`: the command line. Each command is a file of this package; nothing here imports jax."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import UnusedCliTokensError

from jaxllm import logs
from jaxllm.cli.bench import bench
from jaxllm.cli.chat import chat
from jaxllm.cli.common_help import HELP_ALL, CommonFirst, has_rare, takes_help_all
from jaxllm.cli.compile import compile
from jaxllm.cli.completion import completion_of
from jaxllm.cli.convert import convert
from jaxllm.cli.generate import generate
from jaxllm.cli.keys import keys
from jaxllm.cli.list import list_models
from jaxllm.cli.models import models
from jaxllm.cli.plan import plan
from jaxllm.cli.profile import profile
from jaxllm.cli.ps import ps
from jaxllm.cli.pull import pull
from jaxllm.cli.rm import rm
from jaxllm.cli.serve import serve
from jaxllm.cli.show import show
from jaxllm.cli.store import store
from jaxllm.cli.streams import OUTPUT, prepare_streams
from jaxllm.cli.vllm_flags import translated
from jaxllm.cli.wrong_values import in_words
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError
from jaxllm.threads import note_exit_status

logger = logging.getLogger(__name__)

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def version() -> str:
    """The installed version, as in `jaxllm --version`."""
    from importlib.metadata import version as installed

    return f"jaxllm {installed('jaxllm')}"


app = App(
    name="jaxllm",
    help="LLM inference compiled by JAX/XLA. Try `jaxllm chat`, `jaxllm serve`, or COMMAND --help; COMMAND --help-all "
    "shows rarer settings too.",
    version=version,
)
for command in (
    serve, generate, chat, pull, show, rm, ps, convert, compile, models, keys, plan, bench, profile, store,
):  # fmt: skip
    app.command(command)
app.command(completion_of(app))
app.command(list_models, name="list")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 with one line on stderr when the user's input did not."""
    asked, everything = takes_help_all(sys.argv[1:] if arguments is None else arguments)
    app.help_formatter = help_page = CommonFirst(everything or not has_rare(app, asked))
    try:
        try:
            app(translated(asked), exit_on_error=False, print_error=False)
        finally:
            if help_page.num_left_out:
                print(f"{help_page.num_left_out} more settings are shown by {HELP_ALL}.")
            sys.stdout.flush()
    except UnusedCliTokensError as error:
        _refuse(ConfigError(f"unexpected argument {(error.unused_tokens or ['?'])[0]!r}; see --help"))
    except CycloptsError as error:
        _refuse(ConfigError(in_words(error)))
    except EngineDeadError as error:
        _refuse(error, FAILED)
    except JaxLLMError as error:
        _refuse(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `jaxllm generate … | head -1`: the reader has had enough
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        if error.filename != OUTPUT:
            raise
        _refuse(ConfigError(f"{OUTPUT} cannot be written: {(error.strerror or str(error)).lower()}"), FAILED)


def run() -> None:
    """`main` as a whole process, which then ends at once, whatever is still being compiled for nobody."""
    prepare_streams()
    try:
        main()
        note_exit_status(0)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            note_exit_status(error.code or 0)
        raise


def _refuse(error: Exception, status: int = USAGE_ERROR) -> None:
    line = " ".join(str(error).split())
    if logs.settings().format == "json":
        logger.critical(line)
    else:
        print(f"jaxllm: error: {line}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    run()
