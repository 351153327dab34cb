"""The notebook's front door: the same engine, driven without HTTP and without an event loop."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.config import EngineConfig, make_config
from jaxllm.engine.front.async_llm import AsyncLLM, open_streams
from jaxllm.engine.front.beams import BeamSearchParams, BeamStream
from jaxllm.engine.front.limits import check_pooling, check_request
from jaxllm.engine.front.sequences import Collector, Prompt, failure, pooled_output, prompt_ids
from jaxllm.engine.front.streams import Stream
from jaxllm.engine.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import EmbeddingOutput, EmbeddingRequestOutput, PooledOutput, RequestOutput, shape_vector
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.reasoned_answers import constrained_answer, told_to_think
from jaxllm.text.reasoning import template_reasoning
from jaxllm.text.tokenizer import Tokenizer

Item = tuple[str | None, list[int], SamplingParams]
"""A request: its text where it has one, its token ids, its parameters."""

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate. Names and meanings are vLLM's; keyword arguments are the fields of EngineConfig.

    The engine runs in a thread of its own, so this works in scripts and in notebooks whose event loop is running. If it
    dies, all methods that need it raise EngineDeadError, which says why, until `restart`.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: one line that says what is wrong.
    """

    def __init__(self, model: str = "smollm2-135m", **fields: Any):
        self.config: EngineConfig = make_config(EngineConfig, model=str(model), **fields)
        self._streams = open_streams(self.config)
        self.tokenizer: Tokenizer | None = self._streams.tokenizer
        weakref.finalize(self, self._streams.shutdown).atexit = False  # its threads see to a program's end

    @property
    def info(self) -> EngineInfo:
        """What the engine settled on at its start, the last one."""
        return self._streams.client.info

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
            EngineDeadError: the engine has died, or runs in the process that this one was forked from.
        """
        self._streams.check_process()
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

        Where that shows how the model marks its reasoning, a constraint on the answer begins behind the reasoning, and
        without max_thinking_tokens half of max_tokens is left for it.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        self._streams.check_process()
        tokenizer = self.get_tokenizer()
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        params = self._params(sampling_params, len(conversations))
        requests: list[Item] = []
        reasoning = template_reasoning(chat_template or tokenizer.chat_template)
        thinks = told_to_think(chat_template_kwargs or {})
        for conversation, p in zip(conversations, params, strict=True):
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            continued = conversation[-1].get("content") if continue_final_message else ""
            continued = continued if isinstance(continued, str) else ""
            asked = constrained_answer(p, reasoning, text, continued=continued, thinks=thinks)
            requests.append((text, tokenizer.encode_chat(text), asked))
        return self._run(requests, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The beam_width most likely completions of each prompt, best first.

        Raises:
            InvalidRequestError: a prompt cannot be honoured, or leaves no room for max_tokens; nothing is run then.
        """
        self._streams.check_process()
        pairs = [prompt_ids(item, self.tokenizer) for item in _as_list(prompts)]
        for _, ids in pairs:
            if len(ids) + params.max_tokens > self.info.max_model_len:
                raise InvalidRequestError(
                    f"max_tokens is {params.max_tokens} and the prompt has {len(ids)} tokens; the context holds "
                    f"{self.info.max_model_len}",
                    param="max_tokens",
                )
        # of each token all the candidates of its step are shown, as far as may be
        most = self.info.max_logprobs
        count = 2 * params.beam_width if most < 0 else min(2 * params.beam_width, most)
        shown = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens, logprobs=count)
        return self._run([(text, ids, shown) for text, ids in pairs], False, params)

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

    def asynchronous(self) -> AsyncLLM:
        """The same engine for asyncio programs, until it is shut down here."""
        return AsyncLLM.sharing(self.config, self._streams)

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._streams.client.stats()

    def shutdown(self) -> None:
        """Stop the engine and free the device."""
        self._streams.shutdown()

    def restart(self) -> None:
        """Stop the engine, if it runs, and start it again with the same sizes, as after a step that failed.

        Raises:
            ConfigError, ModelNotFoundError, CheckpointError: it could not start.
        """
        self._streams.restart()

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

    def _run(self, items: list[Item], use_tqdm: bool, search: BeamSearchParams | None = None) -> list[RequestOutput]:
        for _, ids, params in items:
            check_request(self.info, self.tokenizer, ids, params)
        requests = [
            EngineRequest(request_id=uuid.uuid4().hex, prompt_token_ids=ids, sampling_params=params)
            for _, ids, params in items
        ]
        collectors = [
            Collector(request.request_id, text, ids, params, self.tokenizer)
            for request, (text, ids, params) in zip(requests, items, strict=True)
        ]
        places = [(collector, choice) for collector in collectors for choice in range(len(collector.output.outputs))]

        def take(sequence: int, delta: TokenDelta) -> bool:
            collector, choice = places[sequence]
            collector.add(choice, delta)
            return collector.output.finished

        if search is None:
            stream = Stream(self._streams, requests)
        else:
            stream = BeamStream(self._streams, requests, [search] * len(requests), self.info.eos_token_ids)
        _drive(stream, take, len(items), use_tqdm)
        return [collector.output for collector in collectors]

    def _pooling_requests(self, prompts: Prompt | Sequence[Prompt], pooling: PoolingParams) -> list[EngineRequest]:
        self._streams.check_process()
        all_ids = [prompt_ids(item, self.tokenizer)[1] for item in _as_list(prompts)]
        check_pooling(self.info, all_ids, pooling)
        return [EngineRequest(request_id=uuid.uuid4().hex, prompt_token_ids=ids, pooling=pooling) for ids in all_ids]

    def _pool(self, requests: list[EngineRequest], use_tqdm: bool) -> list[PooledOutput]:
        found: dict[int, PooledOutput] = {}

        def take(sequence: int, delta: TokenDelta) -> bool:
            found[sequence] = pooled_output(delta)
            return True

        _drive(Stream(self._streams, requests), take, len(requests), use_tqdm)
        return [found[at] for at in range(len(requests))]


def _drive(stream: Stream, take: Callable[[int, TokenDelta], bool], total: int, use_tqdm: bool) -> None:
    """Hand a stream's deltas to `take`, which says whether one completes its request, under a progress bar."""
    from tqdm.auto import tqdm

    generated = 0
    with stream, tqdm(total=total, desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for events in stream:
            for sequence, delta in events:
                if delta.error is not None:
                    raise failure(delta)
                generated += len(delta.token_ids)
                if take(sequence, delta):
                    if generated:
                        bar.set_postfix_str(
                            f"{generated / max(bar.format_dict['elapsed'], 1e-9):,.0f} tok/s", refresh=False
                        )
                    bar.update()


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
