"""The application of Ray's own commands; `jaxllm serve --ray` starts the same.

    serve run jaxllm.ray:app model=smollm2-135m num_replicas=2

See docs/scale.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from jaxllm.cli.settings import read_settings
from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.ray_replicas import application
from jaxllm.wording import did_you_mean


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, for `serve run` and for the files of `serve deploy`.

    Args:
        arguments: the fields of ServeConfig, over JAXLLM_… variables, over the YAML file that `config` names.

    Raises:
        ConfigError: a setting that does not exist, or a value that it does not take.
    """
    given = {"ray": True, **arguments}
    path = given.pop("config", None)
    for name in given:
        if name not in ServeConfig.model_fields:
            raise ConfigError(f"unknown argument {name!r}{did_you_mean(name, ServeConfig.model_fields)}")
    config = read_settings(ServeConfig, given, None if path is None else Path(path), as_flag=lambda name: name)
    if not config.ray:
        raise ConfigError("ray is False, and this is the application that runs on Ray: leave it out")
    return application(config)
