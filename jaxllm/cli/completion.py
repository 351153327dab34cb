"""`jaxllm completion`: what makes a shell complete commands and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cyclopts import App


def completion_of(app: App) -> Callable[..., None]:
    """The command that prints the scripts for `app`."""

    def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
        print(app.generate_completion(shell=shell))

    completion.__doc__ = HELP
    return completion


HELP = """Print a script that makes a shell complete commands, flags and their choices.

bash and zsh: put `eval "$(jaxllm completion bash)"` into ~/.bashrc, or the same with zsh into ~/.zshrc.
fish: `jaxllm completion fish > ~/.config/fish/completions/jaxllm.fish`.

Args:
    shell: Which shell it is for.
"""
