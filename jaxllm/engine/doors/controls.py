"""The methods of `LLM` and `AsyncLLM` that pause an engine and exchange its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jaxllm.engine.doors.streams import Streams
from jaxllm.engine.doors.thread_client import ThreadClient, exchange_weights
from jaxllm.engine.messages import NameWeights, Pause, ResetPrefixCache, Resume, UpdateWeights, WeightSource
from jaxllm.errors import ConfigError, InvalidRequestError

LONGEST_VERSION = 256


class Controls:
    """The methods that trainers need of an engine. An engine that starts again is not paused, and has the model's own
    weights.
    """

    _streams: Streams
    _waits_while_paused = False
    """Requests that come while running ones are kept are taken and wait, in place of being refused."""

    @property
    def is_paused(self) -> bool:
        """It was told to pause, and not to resume yet."""
        return self._streams.paused is not None

    @property
    def weight_version(self) -> str:
        """The name of the weights: "initial", or as the last `update_weights` said."""
        return self._streams.weight_version

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Run no steps until `resume`; returns when none runs any more.

        Args:
            mode: what becomes of running requests. "keep" lets them stop where they are, "wait" lets them run to their
                ends first, and "abort" ends them now, with finish_reason "abort".

        Raises:
            InvalidRequestError: `mode` is none of these.
            EngineDeadError: the engine has died.
        """
        self._streams.check_process()
        if mode not in ("keep", "wait", "abort"):
            raise InvalidRequestError(f"mode is {mode!r}; it must be 'keep', 'wait' or 'abort'", "mode")
        self._streams.paused = mode
        self._streams.refuses = not (mode == "keep" and self._waits_while_paused)
        try:
            if mode == "abort":
                self._streams.abort_all()
            self._streams.client.order(Pause("wait" if mode == "wait" else "keep"))
        except BaseException:
            self._streams.paused, self._streams.refuses = None, False
            raise

    def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            EngineDeadError: the engine has died.
        """
        self._streams.check_process()
        self._streams.client.order(Resume())
        self._streams.paused, self._streams.refuses = None, False

    def reset_prefix_cache(self) -> None:
        """Requests that come from now on find nothing in the prefix cache that earlier ones have computed."""
        self._streams.check_process()
        self._streams.client.order(ResetPrefixCache())

    def update_weights(self, source: WeightSource, *, version: str | None = None) -> str:
        """Exchange the weights between two steps; returns what they are called, which every output says of its tokens.

        They are read, and quantized as the engine's are, while it goes on. Requests that run then continue with the
        new weights after the tokens that they have: pause first, with "wait" or "abort", if they should not. Later
        requests share no prefix with earlier ones. If something is wrong with them, the engine keeps those it has.

        Args:
            source: a model's name, folder or file, which must be the same model with other weights; or arrays, all or
                some of them, by the names in the checkpoint that the engine was started from, or by those of `params`.
                They are copied.
            version: by default the number of the exchange: "1", "2", and so on.

        Raises:
            CheckpointError, ModelNotFoundError: `source` is not there, or is of another model.
            ConfigError: the engine has adapters, or several processes, or arrays are given and it has its own process.
            EngineDeadError: the engine has died.
        """
        self._streams.check_process()
        name = self._check_version(version) if version is not None else str(self._streams.num_updates + 1)
        client = self._streams.client
        if isinstance(client, ThreadClient):
            exchange_weights(source, name, client.ask)
        elif isinstance(source, Mapping):
            raise ConfigError(
                "engine_process is True: arrays reach only an engine in the same process; save them as safetensors in "
                "a copy of the model's folder, and give that"
            )
        else:
            client.order(UpdateWeights(str(source), name))
        self._streams.num_updates += 1
        self._streams.weight_version = name
        return name

    def name_weights(self, version: str) -> None:
        """Call the weights that are there `version`.

        Raises:
            InvalidRequestError: it is empty, or longer than 256 characters.
        """
        self._streams.check_process()
        self._streams.client.order(NameWeights(self._check_version(version)))
        self._streams.weight_version = version

    @staticmethod
    def _check_version(version: str) -> str:
        if not isinstance(version, str) or not 0 < len(version) <= LONGEST_VERSION:
            raise InvalidRequestError(
                f"version is {str(version)[:40]!r}; it must be a text of 1 to {LONGEST_VERSION} characters", "version"
            )
        return version
