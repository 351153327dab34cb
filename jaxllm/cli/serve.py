"""Commands about servers: `jaxllm serve`, those that run, and the keys that they ask for."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

from cyclopts import App, Parameter

from jaxllm.cli.settings import documented, takes_settings
from jaxllm.cli.terminal import print_table
from jaxllm.config import ServeConfig
from jaxllm.config.values import format_bytes
from jaxllm.errors import ConfigError, one_line


@takes_settings(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is a flag, a JAXLLM_… variable (JAXLLM_MAX_MODEL_LEN) and a YAML key (max_model_len); a flag wins over
    a variable, a variable over the file.
    """
    if config.ray:
        try:
            from jaxllm.ray import run_on_ray as run_server
        except ImportError as error:
            raise ConfigError(
                f"ray is true, and Ray Serve cannot be imported ({one_line(error)}): pip install 'jaxllm[ray]'"
            ) from None
    else:
        from jaxllm.serving.server import serve as run_server
    run_server(config)


@documented
def ps(*, json_output: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """List the jaxllm servers that you run on this machine: process, models, address, memory.

    Args:
        json_output: Print a JSON array instead of a table.
    """
    from jaxllm.serving.running import running_servers

    servers = running_servers()
    if json_output:
        print(json.dumps([server._asdict() for server in servers]))
        return
    if not servers:
        print("no server runs")
        return
    rows = [
        (str(server.pid), ", ".join(server.models), server.address, format_bytes(server.nbytes)) for server in servers
    ]
    print_table(("pid", "models", "address", "memory"), rows)


keys = App(name="keys", help="Make API keys for `jaxllm serve --api-key-file`.")


@keys.command
@documented
def new(name: str, *, json_output: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """Make a key and print it, this once, and the line that goes into the file of keys, which holds only its hash.

    The line is on standard output and the key on standard error: `jaxllm keys new alice >> keys.yaml` adds the one and
    shows the other.

    Args:
        name: What metrics, logs and the owners of stored objects call the key.
        json_output: Print name, key and hash as one JSON object on standard output instead.
    """
    from jaxllm.serving.access.keys import NAME, hash_of, new_key

    if not re.fullmatch(NAME, name):
        raise ConfigError(f"NAME is {name!r}: it must have 1 to 64 letters, digits, '.', '_' and '-'")
    key = new_key()
    if json_output:
        print(json.dumps({"name": name, "key": key, "hash": hash_of(key)}))
        return
    print(f'"{name}": {{hash: "{hash_of(key)}"}}')
    print(f"The key of {name}, which is shown this once: {key}", file=sys.stderr)
