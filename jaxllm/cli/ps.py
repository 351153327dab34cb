"""`jaxllm ps`: the servers that run on this machine."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from jaxllm.cli.documentation import documented
from jaxllm.cli.table import print_table
from jaxllm.setting_values import format_bytes


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
