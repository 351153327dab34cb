"""`jaxllm completion`: what makes a shell complete commands and flags."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that makes a shell complete commands, flags and their choices.

    bash and zsh: put `eval "$(jaxllm completion bash)"` into ~/.bashrc, or the same with zsh into ~/.zshrc.
    fish: `jaxllm completion fish > ~/.config/fish/completions/jaxllm.fish`.

    Args:
        shell: Which shell it is for.
    """
    from jaxllm.cli.main import app

    print(app.generate_completion(shell=shell))
