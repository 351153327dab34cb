"""`jaxllm serve`: the OpenAI-compatible server."""

from __future__ import annotations

from jaxllm.cli.settings import takes_settings
from jaxllm.config import ServeConfig


@takes_settings(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is a flag, a JAXLLM_… variable (JAXLLM_MAX_MODEL_LEN) and a YAML key (max_model_len); a flag wins over
    a variable, a variable over the file.
    """
    from jaxllm.serving.server import serve as run_server

    run_server(config)
