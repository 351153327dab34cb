"""`jaxllm keys`: API keys for the file that `jaxllm serve --api-key-file` reads."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

from cyclopts import App, Parameter

from jaxllm.cli.documentation import documented
from jaxllm.errors import ConfigError

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
    from jaxllm.serving.access.api_key import NAME, hash_of, new_key

    if not re.fullmatch(NAME, name):
        raise ConfigError(f"NAME is {name!r}: it must have 1 to 64 letters, digits, '.', '_' and '-'")
    key = new_key()
    if json_output:
        print(json.dumps({"name": name, "key": key, "hash": hash_of(key)}))
        return
    print(f'"{name}": {{hash: "{hash_of(key)}"}}')
    print(f"The key of {name}, which is shown this once: {key}", file=sys.stderr)
