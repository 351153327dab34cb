"""The methods of `LLM` that look inside its engine."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from jaxllm.engine.doors.sequences import (
    Prompt,
    Prompts,
    check_capture,
    check_request,
    failure,
    prompt_ids,
    prompt_list,
    refuse_in_stages,
)
from jaxllm.engine.doors.streams import Stream, Streams
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxllm.folders import in_home
from jaxllm.requests.captures import FINAL, CaptureRequest, Captures, CapturesInProgress, read_capture
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.shown import OutputList, TableList
from jaxllm.requests.steering import Patch, Patches, Patching, Steer, Steering, patches_of, read_patch, read_steering
from jaxllm.research.scores import LogitRows, ScoredCompletion, pairs, scored

if TYPE_CHECKING:
    import jax

    from jaxllm.engine.core.handle import StepKind
    from jaxllm.engine.doors.thread_client import ThreadClient
    from jaxllm.engine.scale.data_parallel import Core
    from jaxllm.models.decoder import Decoder
    from jaxllm.models.registry import LiveModel
    from jaxllm.research.explained import ProfilerTrace, StepExplanation
    from jaxllm.research.model import LayerAttention, OpenModel, Watched


T = TypeVar("T")


class Inside:
    """The methods of `LLM` that look inside its engine."""

    _streams: Streams
    _open: OpenModel | None = None
    _watched: Watched | None = None

    @property
    def module(self) -> Decoder:
        """The Flax NNX module with the engine's weights; its collectives run inside `jax.shard_map`, as in `model_fn`.

        Raises ConfigError if the engine runs in a process of its own.
        """
        return self._model.module(self.params)

    @property
    def params(self) -> dict[str, jax.Array]:
        """The weights as arrays, by their paths in `module`, such as "layers.0.mlp.down.weight".

        They are the engine's own arrays, which must not be donated; quantized or tiled ones are expanded at each
        access.
        """
        return self._model.params(self._ask(lambda core: _live(core).arrays()))

    def model_fn(self, params: Mapping[str, jax.Array], tokens: Any, embeddings: Any = None) -> jax.Array:
        """The logits after each token: a pure function, for `jax.grad` and `jax.jit`.

        It is the decoder that the engine runs, in plain XLA. With tensor parallelism no request should run meanwhile.

        Args:
            params: as `params` gives them; also of another type, or changed.
            tokens: integers `[T]`, or `[B, T]` for several sequences; tokens see those before them in their own.
            embeddings: replace the tokens' rows of the embedding table, `[T, E]` or `[B, T, E]`: soft prompts, or a
                variable to differentiate by.

        Returns:
            float32 `[T, V]` or `[B, T, V]`.

        Raises:
            InvalidRequestError: `tokens`, `embeddings` or `params` are of another shape.
        """
        import jax.numpy as jnp

        rows = None if embeddings is None else jnp.asarray(embeddings)
        return self._model.logits(params, jnp.asarray(tokens), rows)

    def attention(self, prompt: Prompt, layers: int | Sequence[int] | bool = True) -> dict[int, LayerAttention]:
        """Attention over a text of up to 512 tokens: weights, queries, keys and values, by layer.

        It is computed anew in plain XLA, in memory that grows with the square of the text's length, and compiled for
        each length. With tensor parallelism no request should run meanwhile.

        Args:
            layers: one, several, which may count back from the last with -1, or True for all that have attention.

        Raises:
            InvalidRequestError: the prompt is too long, a layer is not there or has no attention, or the model attends
                to latents.
        """
        import jax.numpy as jnp

        from jaxllm.research.model import Watched

        info, tokenizer = self._streams.client.info, self._streams.tokenizer
        model, ids = self._model, prompt_ids(prompt, tokenizer)[1]
        check_request(info, tokenizer, ids, SamplingParams(max_tokens=1))
        if self._watched is None or self._watched.model is not model:
            self._watched = Watched(model)
        return self._watched.attention(self.params, jnp.array(ids, jnp.int32), layers)

    def score(self, prompts: Prompts, completions: Prompts, use_tqdm: bool = True) -> list[ScoredCompletion]:
        """How likely each completion is after its prompt, in their order; shared beginnings are computed once.

        Args:
            prompts: one for each completion, or one for all: texts, or token ids.
            completions: likewise. Text is tokenized together with its prompt, whose last token it may change.

        Raises:
            InvalidRequestError: a prompt or a completion is empty, or too long; nothing is run then.
            EngineDeadError: the engine has died.
        """
        self._streams.check_process()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        asked = pairs(prompts, completions, self._streams.tokenizer)
        for ids, _ in asked:
            check_request(self._streams.client.info, self._streams.tokenizer, ids, params)
        order = sorted(range(len(asked)), key=asked.__getitem__)  # those that begin alike one after the other
        requests = [
            EngineRequest(request_id=uuid.uuid4().hex, prompt_token_ids=ids, sampling_params=params, scores_from=count)
            for ids, count in map(asked.__getitem__, order)
        ]
        found: dict[int, ScoredCompletion] = {}

        def take(sequence: int, delta: TokenDelta) -> bool:
            _check_ended(delta)
            index = order[sequence]
            assert delta.prompt_logprobs is not None, "the first delta has the scores, and there is one"
            found[index] = scored(*asked[index], delta.prompt_logprobs, delta.num_cached_tokens)
            return True

        Stream(self._streams, requests).drive(take, len(requests), use_tqdm)
        return TableList(found[index] for index in range(len(asked)))

    def capture(
        self, prompts: Prompts, capture: CaptureRequest, positions: str | Sequence[int] = "prompt",
        use_tqdm: bool = True, *, patch: Patches = None,
    ) -> list[Captures]:  # fmt: skip
        """Activations of one prompt or many, in their order: `llm.capture(prompts, {"residual": [3, 12]})`.

        A captured sequence does not use the prefix cache from its first wanted token on; others in its batch do.

        Args:
            capture: names of `jaxllm.requests.captures.TAPPED` with a layer, a list of layers, or True for all; and
                `"final": True`. Or a list of TransformerLens's names, such as "blocks.12.hook_resid_post".
            positions: of which tokens: "prompt" (or "all"), "last", or numbers, which may count from the end.
            patch: values that replace the residual stream's, for all prompts, or for each prompt one or None.

        Raises:
            InvalidRequestError: a prompt, a name, a layer or a position is not there; nothing is run then.
            EngineDeadError: the engine has died.
        """
        self._streams.check_process()
        info, tokenizer = self._streams.client.info, self._streams.tokenizer
        wanted = read_capture(capture, positions, info.layer_shapes)
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        requests = []
        items = prompt_list(prompts)
        for prompt, own in zip(items, patches_of(patch, len(items)), strict=True):
            ids = prompt_ids(prompt, tokenizer)[1]
            check_request(info, tokenizer, ids, params)
            check_capture(info, ids, wanted)
            request = EngineRequest(
                request_id=uuid.uuid4().hex, prompt_token_ids=ids, sampling_params=params, capture=wanted,
                patching=self._patching(own, len(ids)),
            )  # fmt: skip
            requests.append(request)
        found = [CapturesInProgress(wanted, info.layer_shapes.widest) for _ in requests]

        def take(sequence: int, delta: TokenDelta) -> bool:
            _check_ended(delta)
            for rows in delta.captured:
                found[sequence].add(rows.positions, rows.values)
            return True

        Stream(self._streams, requests).drive(take, len(requests), use_tqdm)
        return OutputList(captures.finish() for captures in found)

    def logits(
        self, prompts: Prompts, positions: str | Sequence[int] = "prompt", use_tqdm: bool = True, *,
        patch: Patches = None,
    ) -> list[LogitRows]:  # fmt: skip
        """The logits over the vocabulary after each token of one prompt or many, of which none is kept.

        Args:
            patch: as `capture`.

        Returns:
            For each prompt a view like an array `[T, V]`, whose rows are computed at access.

        Raises:
            InvalidRequestError, EngineDeadError: as `capture`.
        """
        self._client()
        found = self.capture(prompts, {FINAL: True}, positions, use_tqdm, patch=patch)
        unembed = partial(self.unembed, norm=False)
        return [LogitRows(captures.final, unembed, self._streams.client.info.vocab_size) for captures in found]

    def unembed(self, activations: np.ndarray, *, norm: bool = True) -> np.ndarray:
        """The logits that the model's head gives of activations, `[..., E]` -> `[..., V]`, float32: a logit lens.

        Args:
            norm: whether they pass the model's last norm first, as the residual stream does; False for those after it.

        Raises:
            InvalidRequestError: the model is an encoder, or `activations` are not of its width.
        """
        info = self._streams.client.info
        if info.tasks.encodes:
            raise InvalidRequestError("this model is an encoder, which has no logits of tokens")
        states = np.asarray(activations)
        if states.ndim == 0 or states.shape[-1] != info.hidden_size:
            raise InvalidRequestError(
                f"activations has the shape {list(states.shape)}; the last axis must be {info.hidden_size}",
                "activations",
            )
        rows, parts = states.reshape(-1, info.hidden_size), []
        while len(rows):
            parts.append(self._ask(partial(_unembed, rows, not norm)))  # other requests have their turn in between
            rows = rows[len(parts[-1]) :]
        found = np.concatenate(parts) if parts else np.zeros((0, info.vocab_size), np.float32)
        return found.reshape(*states.shape[:-1], found.shape[1])

    def explain_step(
        self, kind: StepKind | None = None, bandwidth: float | Literal["measure"] | None = None
    ) -> StepExplanation:
        """The executables of the last step with their padding, the bytes that they read, their floor, and the time.

        Args:
            kind: "decode" for the last one that gave each of its requests tokens, "prefill" for the last that computed
                a prompt; by default the last of both.
            bandwidth: bytes a second that a device reads of its memory, or "measure", which reads half a GiB several
                times; by default NVIDIA's figure for the GPU, if `jaxllm plan --gpu` knows it.

        Raises:
            InvalidRequestError: no such step has run yet.
        """
        from jaxllm.research.explained import explain

        steps, sizes, parts = self._ask(lambda core: (dict(core.last_steps), core.sizes, _live(core).parts))
        return explain(steps, sizes, parts, kind, bandwidth)

    def trace(self, folder: str | PathLike[str] = "jaxllm-traces") -> ProfilerTrace:
        """Trace the devices and the host in a `with` block: `with llm.trace() as trace: llm.generate(…)`.

        Afterwards `trace.path` is a file for https://ui.perfetto.dev, and a notebook shows a link to it.

        Args:
            folder: made if it is not there; each trace is in a folder of its own in it. XProf opens it too.

        Raises:
            ConfigError: `folder` cannot be made.
            InvalidRequestError: another trace is being written.
        """
        from jaxllm.research.explained import ProfilerTrace

        self._client()
        return ProfilerTrace(folder)

    def control_vector(
        self, source: str | PathLike[str], scale: float = 1.0, layers: tuple[int, int] | None = None
    ) -> list[Steer]:
        """The vectors in a GGUF file of llama.cpp's or repeng's, to be given to `generate` and `chat` as `steer`.

        Args:
            scale: a factor on all of them, as llama.cpp's --control-vector-scaled.
            layers: the first and the last layer to take, as --control-vector-layer-range; by default all.

        Raises:
            CheckpointError: it is no file of control vectors, or has none for these layers.
        """
        path = in_home(source)
        found = _directions(path)
        first, last = layers or (0, max(found, default=0))
        steers = [Steer(layer, found[layer], scale) for layer in sorted(found) if first <= layer <= last]
        if not steers:
            raise CheckpointError(f"{path}: has no vector for the layers {first} to {last}")
        return steers

    def _steering(self, steers: Sequence[Steer], num_prompt: int) -> Steering | None:
        return read_steering(steers, num_prompt, **self._sizes("steer", bool(steers)))

    def _patching(self, patch: Patch, num_prompt: int, embeds: Patching | None = None) -> Patching | None:
        if patch and embeds is not None:
            raise InvalidRequestError("patch is set for a prompt of vectors (prompt_embeds); give one of them", "patch")
        return embeds or read_patch(patch, num_prompt, **self._sizes("patch", bool(patch)))

    def _sizes(self, name: str, is_set: bool) -> dict[str, int]:
        """The sizes that a `name` must fit. Raises InvalidRequestError if it is set and the model has no use for it."""
        info = self._streams.client.info
        if is_set and info.tasks.encodes:
            raise InvalidRequestError(f"this model is an encoder; only decoders are {name}ed", name)
        if is_set:
            refuse_in_stages(info, name)
        return {"num_layers": info.num_layers, "width": info.hidden_size, "longest": info.max_model_len}

    @property
    def _model(self) -> OpenModel:
        if self._open is None:
            from jaxllm.research.model import OpenModel

            parts = self._ask(lambda core: _live(core).parts)
            if parts.mesh.is_multi_process:
                raise ConfigError(
                    "num_processes is more than 1: each process has a part of the model; it must be 1 to look inside it"
                )
            self._open = OpenModel(parts)
        return self._open

    def _ask(self, ask: Callable[[Core], T]) -> T:
        return self._client().ask(ask)

    def _client(self) -> ThreadClient:
        from jaxllm.engine.doors.thread_client import ThreadClient

        self._streams.check_process()
        client = self._streams.client
        if not isinstance(client, ThreadClient):
            raise ConfigError(
                "engine_process is True: the model is in another process; it must be False to look inside it"
            )
        return client


def _check_ended(delta: TokenDelta) -> None:
    if delta.finish_reason == "abort":
        raise failure(delta)


def _unembed(states: np.ndarray, normed: bool, core: Core) -> np.ndarray:
    from jaxllm.engine.features.readout import ScoresFeature

    scores = core.features["scores"]
    assert isinstance(scores, ScoresFeature)
    return scores.unembed(states, normed)


def _live(core: Core) -> LiveModel:
    if core.model is None:
        raise ConfigError("pipeline_parallel_size is more than 1: it must be 1 to look at the model as a whole")
    return core.model


def _directions(path: Path) -> dict[int, np.ndarray]:
    """The vectors of a file: `direction.N` is added as layer N ends."""
    from jaxllm.weights.gguf_file import GGUFCheckpoint

    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; accepted is a GGUF file of control vectors")
    file = GGUFCheckpoint(path)
    try:
        kind = file.config.get("general.architecture")
        if kind != "controlvector":
            raise CheckpointError(f"{path}: its general.architecture is {kind!r}; it must be 'controlvector'")
        found = {}
        for name in file.tensors:
            matched = re.fullmatch(r"direction\.(\d+)", name)
            if matched is None:
                raise CheckpointError(f"{path}: tensor {name!r}; a file of control vectors has direction.N alone")
            found[int(matched[1])] = np.array(file.read(name).expand(), np.float32).reshape(-1)
        return found
    finally:
        file.close()
