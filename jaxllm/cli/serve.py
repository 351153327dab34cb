"""`jaxllm serve`: the OpenAI-compatible server."""

from __future__ import annotations

from jaxllm.cli.settings import takes_settings
from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError, one_line


@takes_settings(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is a flag, a JAXLLM_… variable (JAXLLM_MAX_MODEL_LEN) and a YAML key (max_model_len); a flag wins over
    a variable, a variable over the file.
    """
    if config.ray:
        try:
            from jaxllm.ray_replicas import run_on_ray as run_server
        except ImportError as error:
            raise ConfigError(
                f"ray is true, and Ray Serve cannot be imported ({one_line(error)}): pip install 'jaxllm[ray]'"
            ) from None
    else:
        from jaxllm.serving.server import serve as run_server
    run_server(config)
