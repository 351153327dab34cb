"""The notebook's front door: the same engine, driven without HTTP and without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jaxllm.config import EngineConfig, make_config
from jaxllm.engine.front.beam_search import BeamSearch, BeamSearchParams, best_first, completion, step_params
from jaxllm.engine.front.frontend import (
    Collector,
    Prompt,
    check_pooling,
    check_request,
    name_tokens,
    pooling_request,
    prompt_ids,
    split_request,
)
from jaxllm.engine.front.messages import EngineInfo, EngineRequest, EngineStats
from jaxllm.engine.start.launch import start_engine
from jaxllm.errors import InvalidRequestError, JaxLLMError
from jaxllm.requests.outputs import EmbeddingOutput, EmbeddingRequestOutput, PooledOutput, RequestOutput, shape_vector
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.tokenizer import Tokenizer

Item = tuple[str | None, list[int], SamplingParams]
"""A request: its text where it has one, its token ids, its parameters."""

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate. Names and meanings are vLLM's; keyword arguments are the fields of EngineConfig.

    The engine runs in a thread of its own, so this works in scripts and in notebooks whose event loop is running.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: one line that says what is wrong.
    """

    def __init__(self, model: str = "smollm2-135m", **fields: Any):
        self.config: EngineConfig = make_config(EngineConfig, model=str(model), **fields)
        self._client, self.tokenizer = start_engine(self.config)
        self.info: EngineInfo = self._client.info
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched; the outputs are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, `{"prompt_token_ids": [...]}`, or a list of those.
            sampling_params: one for all, or one a prompt; by default the model's own.
            use_tqdm: show a progress bar with tokens a second.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be honoured; nothing is run then.
        """
        items = _as_list(prompts)
        params = self._params(sampling_params, len(items))
        pairs = [prompt_ids(item, self.tokenizer) for item in items]
        return self._run([(text, ids, p) for (text, ids), p in zip(pairs, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered through the model's chat template.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        tokenizer = self.get_tokenizer()
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        params = self._params(sampling_params, len(conversations))
        requests: list[Item] = []
        for conversation, p in zip(conversations, params, strict=True):
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            requests.append((text, tokenizer.encode_chat(text), p))
        return self._run(requests, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The beam_width most likely completions of each prompt, best first.

        Raises:
            InvalidRequestError: a prompt cannot be honoured, or leaves no room for max_tokens; nothing is run then.
        """
        pairs = [prompt_ids(item, self.tokenizer) for item in _as_list(prompts)]
        for _, ids in pairs:
            if len(ids) + params.max_tokens > self.info.max_model_len:
                raise InvalidRequestError(
                    f"max_tokens is {params.max_tokens} and the prompt has {len(ids)} tokens; the context holds "
                    f"{self.info.max_model_len}",
                    param="max_tokens",
                )
        searches = [BeamSearch(params, len(ids), self.info.eos_token_ids) for _, ids in pairs]
        step = step_params(params, SamplingParams(), first=False)
        while running := [(ids, search) for (_, ids), search in zip(pairs, searches, strict=True) if not search.done]:
            items: list[Item] = [
                (None, [*ids, *beam.token_ids], step) for ids, search in running for beam in search.open
            ]
            outputs = iter(self._run(items, use_tqdm=False))
            for _, search in running:
                found = [next(outputs).outputs[0].logprobs or [{}] for _ in search.open]
                search.advance([best_first(candidates[0]) for candidates in found])
        return [
            RequestOutput(
                request_id=f"beam-search-{at}",
                prompt=text,
                prompt_token_ids=ids,
                outputs=[
                    completion(self.tokenizer, ids, index, beam)
                    for index, beam in enumerate(search.best(params.beam_width))
                ],
                finished=True,
            )
            for at, ((text, ids), search) in enumerate(zip(pairs, searches, strict=True))
        ]

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, pooled and scaled as the checkpoint asks; else the last token's, of unit length.

        Raises:
            InvalidRequestError: a prompt cannot be honoured; nothing is run then.
        """
        tasks = self.info.tasks
        requests = self._pooling_requests(prompts, PoolingParams(kind=tasks.pooling))
        return [
            EmbeddingRequestOutput(
                request.request_id,
                EmbeddingOutput(shape_vector(output.values, None, tasks.normalize).tolist()),
                request.prompt_token_ids,
                output.num_cached_tokens,
            )
            for request, output in zip(requests, self._pool(requests, use_tqdm), strict=True)
        ]

    def pool(
        self, prompts: Prompt | Sequence[Prompt], pooling: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[PooledOutput]:
        """Values read off the hidden states of one prompt or many, as they are; in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or `pooling` cannot be honoured; nothing is run then.
        """
        return self._pool(self._pooling_requests(prompts, pooling or PoolingParams()), use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequestError("there is no tokenizer: skip_tokenizer_init is on")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate() uses where it is given none: the checkpoint's own defaults."""
        return SamplingParams(**self.info.default_sampling.fields())

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._client.stats()

    def shutdown(self) -> None:
        """Stop the engine and free the device."""
        self._client.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise InvalidRequestError(
                f"sampling_params has {len(params)} entries for {count} prompts; give one, or one a prompt",
                param="sampling_params",
            )
        return list(params)

    def _run(self, items: list[Item], use_tqdm: bool) -> list[RequestOutput]:
        for _, ids, params in items:
            check_request(self.info, self.tokenizer, ids, params)
        with self._busy:
            collectors: list[Collector] = []
            where: dict[str, tuple[Collector, int]] = {}
            requests: list[EngineRequest] = []
            for text, ids, params in items:
                children = split_request(ids, params)
                collector = Collector(children[0].request_id.removesuffix("-0"), text, ids, params)
                collectors.append(collector)
                where |= {child.request_id: (collector, choice) for choice, child in enumerate(children)}
                requests += children
            self._drive(requests, where, len(items), use_tqdm)
        return [collector.output for collector in collectors]

    def _pooling_requests(self, prompts: Prompt | Sequence[Prompt], pooling: PoolingParams) -> list[EngineRequest]:
        requests = [pooling_request(prompt_ids(item, self.tokenizer)[1], pooling) for item in _as_list(prompts)]
        for request in requests:
            check_pooling(self.info, request.prompt_token_ids, pooling)
        return requests

    def _pool(self, requests: list[EngineRequest], use_tqdm: bool) -> list[PooledOutput]:
        from tqdm.auto import tqdm

        waiting = {request.request_id for request in requests}
        found: dict[str, PooledOutput] = {}
        with self._busy, tqdm(total=len(requests), unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            try:
                for request in requests:
                    self._client.add(request)
                while waiting:
                    for delta in self._client.outputs(timeout=1.0):
                        if delta.request_id not in waiting:
                            continue  # left over from a call that was interrupted
                        if delta.pooled is None:
                            reason = delta.error or delta.finish_reason
                            raise JaxLLMError(f"request {delta.request_id} failed: {reason}")
                        found[delta.request_id] = PooledOutput.from_bytes(delta.pooled, delta.num_cached_tokens)
                        waiting.discard(delta.request_id)
                        bar.update()
            finally:
                if waiting:
                    self._client.abort(list(waiting))
        return [found[request.request_id] for request in requests]

    def _drive(
        self, requests: list[EngineRequest], where: dict[str, tuple[Collector, int]], count: int, use_tqdm: bool
    ) -> None:
        from tqdm.auto import tqdm

        generated = 0
        with tqdm(total=count, desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            try:
                for request in requests:
                    self._client.add(request)
                while where:
                    for delta in self._client.outputs(timeout=1.0):
                        entry = where.get(delta.request_id)
                        if entry is None:
                            continue  # left over from a call that was interrupted
                        if delta.error is not None:
                            raise JaxLLMError(f"request {delta.request_id} failed: {delta.error}")
                        collector, choice = entry
                        name_tokens(delta, self.tokenizer)
                        collector.add(choice, delta)
                        generated += len(delta.token_ids)
                        if delta.finish_reason is not None:
                            del where[delta.request_id]
                            elapsed = max(bar.format_dict["elapsed"], 1e-9)
                            bar.set_postfix_str(f"{generated / elapsed:,.0f} tok/s", refresh=False)
                            bar.update(collector.output.finished)
            finally:
                if where:
                    self._client.abort(list(where))


def _is_many(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts; a list of integers is one prompt."""
    return not isinstance(prompts, (str, dict)) and not (prompts and all(isinstance(i, int) for i in prompts))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or many -> many."""
    return list(prompts) if _is_many(prompts) else [prompts]


_engines: dict[tuple, LLM] = {}


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str = "smollm2-135m",
    *,
    engine: dict[str, Any] | None = None,
    **sampling: Any,
) -> str | list[str]:
    """The one-liner: the completion of a prompt, or of each prompt of a list, as text.

    The engine is started at the first call and kept; `engine` holds EngineConfig fields, everything else are fields of
    SamplingParams.
    """
    key = (model, tuple(sorted((engine or {}).items())))
    if key not in _engines:
        _engines[key] = LLM(model, **(engine or {}))
    llm = _engines[key]
    params = SamplingParams(**(llm.info.default_sampling.fields() | {"max_tokens": 128} | sampling))
    texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    return texts if _is_many(prompts) else texts[0]
