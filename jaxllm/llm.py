"""The notebook's front door: the same engine, driven without HTTP and without an event loop."""

from __future__ import annotations

import itertools
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig, make_config
from jaxllm.engine.doors import sequences
from jaxllm.engine.doors.async_llm import AsyncLLM, open_streams
from jaxllm.engine.doors.beams import BeamSearchParams, BeamStream
from jaxllm.engine.doors.controls import Controls
from jaxllm.engine.doors.eyes import Eyes
from jaxllm.engine.doors.sequences import Collector, Prompt, Prompts
from jaxllm.engine.doors.streams import Stream
from jaxllm.engine.messages import EngineInfo, EngineRequest, EngineStats, PlacedImages, TokenDelta
from jaxllm.errors import InvalidRequestError
from jaxllm.folders import in_home
from jaxllm.requests import outputs, steering
from jaxllm.requests.captures import CaptureParams, CaptureRequest, read_capture
from jaxllm.requests.logits_processors import read_processors
from jaxllm.requests.outputs import EmbeddingOutput, EmbeddingRequestOutput, PooledOutput, PoolingParams, RequestOutput
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.shown import TableList
from jaxllm.requests.steering import AdapterUse, LoRA, LoRARequest, Patch, Patches, Patching, Steer, Steers
from jaxllm.research.inside import Inside
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.chat.decisions import Decision, Question

Item = tuple[str | None, list[int], SamplingParams]
"""A request: its text where it has one, its token ids, its parameters."""
LoRAs = LoRARequest | Sequence[LoRA | None] | None
"""One adapter for all prompts, or for each prompt one, several or none."""

_adapter_ids = itertools.count(-1, -1)
"""Below those that callers choose."""

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(Inside, Controls):
    """A model ready to generate. Names and meanings are vLLM's; keyword arguments are the fields of EngineConfig.

    The engine runs in a thread of its own, so this works in scripts and in notebooks whose event loop is running. If it
    dies, all methods that need it raise EngineDeadError, which says why, until `restart`.

    Raises ConfigError, ModelNotFoundError or CheckpointError: one line that says what is wrong.
    """

    def __init__(
        self, model: str = "smollm2-135m", *, logits_processors: Sequence[Callable[..., Any]] = (), **fields: Any
    ):
        """`logits_processors` are functions of `(logits, state)` that requests may use: see docs/research.md."""
        self.config: EngineConfig = make_config(EngineConfig, model=str(model), **fields)
        self._streams = open_streams(self.config, processors=read_processors(logits_processors))
        self.tokenizer: Tokenizer | None = self._streams.tokenizer
        self._adapter_folders: list[tempfile.TemporaryDirectory[str]] = []
        """Of adapters that were given as arrays; they are removed with this object."""
        weakref.finalize(self, self._streams.shutdown).atexit = False  # its threads see to a program's end

    @property
    def info(self) -> EngineInfo:
        return self._streams.client.info

    @property
    def eyes(self) -> Eyes:
        """What prepares images for its model. Raises InvalidRequestError: it sees none."""
        return self._streams.eyes

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: LoRAs = None,
        *,
        capture: CaptureRequest | None = None,
        positions: str | Sequence[int] = "all",
        steer: Steers = None,
        patch: Patches = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched; the outputs are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, `{"prompt_token_ids": [...]}`, `{"prompt_embeds": [T, E]}`, which are
                vectors as the model's table of embeddings gives them, scaled, or a list of those.
            sampling_params: one for all, or one a prompt; by default the model's own.
            use_tqdm: show a progress bar with tokens a second.
            lora_request: the adapter of all prompts, or for each prompt one, a list of several, or None.
            capture: activations to give with each completion, in its `captures`: `{"residual": [3, 12]}`; see
                `capture`.
            positions: of which tokens, prompt and completion counted together: "all", "prompt", "generated", "last" (of
                the prompt), or numbers. Tokens from the first of them on are not taken from the prefix cache.
            steer: what is added to the residual stream of all prompts, or for each prompt one Steer, several, or None.
            patch: what takes the place of it, `{(layer, position): vector}`, for all prompts, or for each one or None.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be honoured; nothing is run then.
            EngineDeadError: the engine has died, or runs in the process that this one was forked from.
        """
        self._streams.check_process()
        items = sequences.prompt_list(prompts)
        params = self._params(sampling_params, len(items))
        adapters = _adapters(lora_request, len(items))
        embeds = [sequences.prompt_vectors(item, self.info) for item in items]
        texts = [
            (None, [0] * own.end) if own else sequences.prompt_ids(item, self.tokenizer)
            for item, own in zip(items, embeds, strict=True)
        ]
        images = [sequences.prompt_images(item, self) for item in items]
        placed = [
            self.eyes.place(ids, own) if own else (ids, None) for (_, ids), own in zip(texts, images, strict=True)
        ]
        requests = [(text, ids, p) for (text, _), (ids, _), p in zip(texts, placed, params, strict=True)]
        wanted = None if capture is None else read_capture(capture, positions, self.info.layer_shapes)
        steers, patches = steering.steers_of(steer, len(items)), steering.patches_of(patch, len(items))
        return self._run(
            requests, use_tqdm, adapters=adapters, capture=wanted, steers=steers, patches=patches, embeds=embeds,
            images=[seen for _, seen in placed],
        )  # fmt: skip

    def chat(
        self,
        messages: Iterable[dict] | Iterable[Iterable[dict]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: LoRAs = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        separate_reasoning: bool = False,
        steer: Steers = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered through the model's chat template.

        Where that shows how the model marks its reasoning, a constraint on the answer begins after the reasoning, and
        without max_thinking_tokens half of max_tokens is left for it.

        Args:
            tools: functions that the model may call, as chat completions take them. The calls are the outputs'
                `tool_calls`, and a text holds none.
            tool_choice: "auto", "required", "none", or `{"type": "function", "function": {"name": …}}`.
            parallel_tool_calls: an answer may make several calls.
            separate_reasoning: the outputs' `reasoning` is told apart from their text. It always is with `tools`.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        from jaxllm.chat.answer import read_output  # these load jinja2, which prompts do without
        from jaxllm.chat.conversation import Conversation, Rendering, given_messages, given_tools
        from jaxllm.chat.prompt import ChatModel, prepare_params

        self._streams.check_process()
        sequences.refuse_text(self.info.tasks)
        self.get_tokenizer()
        listed: list[Any] = list(messages)
        one = not listed or isinstance(listed[0], Mapping)
        conversations: list[list[dict]] = [listed] if one else [list(conversation) for conversation in listed]
        params = self._params(sampling_params, len(conversations))
        model = ChatModel(self)
        offered, choice = given_tools(tools or (), tool_choice)
        variables = dict(chat_template_kwargs or {})
        rendering = Rendering(
            chat_template=chat_template,
            documents=variables.pop("documents", None),
            variables=variables,
            opens_answer=add_generation_prompt and not continue_final_message,
            continues_last=continue_final_message,
        )
        reads = bool(tools) or separate_reasoning
        ready = []
        for conversation, asked in zip(conversations, params, strict=True):
            given = Conversation(
                messages=given_messages(conversation),
                tools=offered,
                tool_choice=choice,
                parallel_tool_calls=parallel_tool_calls,
                rendering=rendering,
                structured_outputs=asked.structured_outputs,
                separate_reasoning=reads,
            )
            ready.append(prepare_params(model, given, asked))
        count = len(ready)
        adapters, steers = _adapters(lora_request, count), steering.steers_of(steer, count)
        requests: list[Item] = [(one.prompt.text, one.prompt.token_ids, one.prompt.params) for one in ready]
        images = [one.prompt.images for one in ready]
        answers = self._run(requests, use_tqdm, adapters=adapters, steers=steers, images=images)
        if reads:
            for prompt, output in zip(ready, answers, strict=True):
                read_output(prompt, output)
        return answers

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[RequestOutput]:
        """The beam_width most likely completions of each prompt, best first.

        A search also ends where the context is full. Raises InvalidRequestError: a prompt cannot be honoured; then
        nothing is run.
        """
        self._streams.check_process()
        pairs = [sequences.prompt_ids(item, self.tokenizer) for item in sequences.prompt_list(prompts)]
        # of each token all the candidates of its step are shown, as far as may be
        most = self.info.max_logprobs
        count = 2 * params.beam_width if most < 0 else min(2 * params.beam_width, most)
        shown = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens, logprobs=count)
        return self._run([(text, ids, shown) for text, ids in pairs], False, params)

    def embed(
        self, prompts: Prompts, use_tqdm: bool = True, *, prompt_name: str | None = None
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, pooled and scaled as the checkpoint asks; else the last token's, of unit length.

        `prompt_name` is what sentence-transformers' files call the words that the model wants before each text, such as
        "query"; without it those that the files make the default.

        Raises InvalidRequestError: a prompt cannot be honoured, or has no text and a `prompt_name`.
        """
        tasks = self.info.tasks
        items = [_preceded(item, tasks.prompt(prompt_name), prompt_name) for item in sequences.prompt_list(prompts)]
        requests = self._pooling_requests(items, PoolingParams(kind=tasks.pooling))
        return [
            EmbeddingRequestOutput(
                request.request_id,
                EmbeddingOutput(outputs.shape_vector(output.values, None, tasks.normalize).tolist()),
                request.prompt_token_ids,
                output.num_cached_tokens,
            )
            for request, output in zip(requests, self._pool(requests, use_tqdm), strict=True)
        ]

    def pool(
        self,
        prompts: Prompts,
        pooling: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        second_texts: Sequence[int] = (),
    ) -> list[PooledOutput]:
        """Values read off the hidden states of one prompt or many, as they are; in the order of the prompts.

        Where prompts are pairs of texts, `second_texts` says of each at which token the second begins, for encoders
        that tell them apart: `llm.get_tokenizer().encode_pair(query, document)` gives both.

        Raises InvalidRequestError: a prompt or `pooling` cannot be honoured; nothing is run then.
        """
        return self._pool(self._pooling_requests(prompts, pooling or PoolingParams(), second_texts), use_tqdm)

    def decide(
        self, about: str | Iterable[dict[str, Any]], questions: Iterable[Question], use_tqdm: bool = True
    ) -> list[Decision]:
        """Answer questions about a text, or a conversation, by the probabilities of the answers that they may have.

        The same question about the same text has the same probabilities, whatever else runs: see docs/embeddings.md.

        Raises:
            InvalidRequestError: the model writes no text or has no chat template, or a question cannot be asked.
        """
        from jaxllm.chat.conversation import Message, given_messages  # these load jinja2, which prompts do without
        from jaxllm.chat.decisions import prepare
        from jaxllm.chat.prompt import ChatModel

        self._streams.check_process()
        self.get_tokenizer()
        questions = list(questions)
        if not questions:
            return []
        messages = [Message("user", about)] if isinstance(about, str) else given_messages(list(about))
        asked = prepare(ChatModel(self), messages, questions)
        return asked.decisions(self._pool(self._pooling_requests(asked.prompts, asked.pooling), use_tqdm))

    def add_lora(
        self,
        name: str,
        source: str | PathLike[str] | Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        *,
        scale: float = 1.0,
    ) -> LoRARequest:
        """An adapter that is read and checked now, to be given to `generate` and `chat` as their `lora_request`.

        Args:
            source: a folder that PEFT saved, a GGUF adapter, or arrays by the names that PEFT gives them.
            config: of arrays, what PEFT's adapter_config.json would say, such as {"r": 8, "lora_alpha": 16}.
            scale: how much of it is added.

        Raises:
            InvalidRequestError: it cannot be read, or not be used with this model.
        """
        if isinstance(source, Mapping):
            from jaxllm.weights.adapters import save_adapter  # imports JAX, which takes half a second

            folder = tempfile.TemporaryDirectory(prefix="jaxllm-adapter-")
            self._adapter_folders.append(folder)
            save_adapter(Path(folder.name), source, config or {})
            source = folder.name
        request = LoRARequest(name, next(_adapter_ids), in_home(source).absolute(), scale)
        self._run([(None, [0], SamplingParams(max_tokens=1))], False, adapters=[steering.adapter_uses(request)])
        return request

    def get_tokenizer(self) -> Tokenizer:
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
        return self._streams.client.stats()

    def shutdown(self) -> None:
        """Stop the engine and free the device."""
        self._streams.shutdown()

    def restart(self) -> None:
        """Stop the engine, if it runs, and start it again with the same sizes, as after a step that failed.

        Raises ConfigError, ModelNotFoundError or CheckpointError: it could not start.
        """
        self._streams.restart()
        self._open = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        default = self.get_default_sampling_params()
        return [asked or default for asked in _of_each("sampling_params", given, SamplingParams, count)]

    def _run(
        self,
        items: list[Item],
        use_tqdm: bool,
        search: BeamSearchParams | None = None,
        adapters: Sequence[tuple[AdapterUse, ...]] = (),
        capture: CaptureParams | None = None,
        steers: Sequence[Sequence[Steer]] = (),
        patches: Sequence[Patch] = (),
        embeds: Sequence[Patching | None] = (),
        images: Sequence[PlacedImages | None] = (),
    ) -> list[RequestOutput]:
        requests: list[EngineRequest] = []
        collectors: list[Collector] = []
        for at, (text, ids, params) in enumerate(items):
            sequences.check_request(self.info, self.tokenizer, ids, params)
            if capture is not None:
                sequences.check_capture(self.info, ids, capture)
            request = EngineRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=ids,
                sampling_params=params,
                adapters=adapters[at] if adapters else (),
                capture=capture,
                steering=self._steering(steers[at] if steers else (), len(ids)),
                patching=self._patching(patches[at] if patches else {}, len(ids), embeds[at] if embeds else None),
                images=images[at] if images else None,
            )
            requests.append(request)
            widest = self.info.layer_shapes.widest
            collectors.append(Collector(request.request_id, text, ids, params, self.tokenizer, capture, widest))
        places = [(collector, choice) for collector in collectors for choice in range(len(collector.output.outputs))]

        def take(sequence: int, delta: TokenDelta) -> bool:
            collector, choice = places[sequence]
            collector.add(choice, delta)
            return collector.output.finished

        if search is None:
            stream = Stream(self._streams, requests)
        else:
            rooms = (self.info.max_model_len - len(request.prompt_token_ids) for request in requests)
            searches = [replace(search, max_tokens=min(search.max_tokens, room)) for room in rooms]
            stream = BeamStream(self._streams, requests, searches, self.info.eos_token_ids)
        stream.drive(take, len(items), use_tqdm)
        return TableList(collector.output for collector in collectors)

    def _pooling_requests(
        self, prompts: Prompts, pooling: PoolingParams, second_texts: Sequence[int] = ()
    ) -> list[EngineRequest]:
        self._streams.check_process()
        all_ids = [sequences.prompt_ids(item, self.tokenizer)[1] for item in sequences.prompt_list(prompts)]
        second_texts = list(second_texts)
        sequences.check_pooling(self.info, all_ids, pooling, second_texts)
        return [
            EngineRequest(request_id=uuid.uuid4().hex, prompt_token_ids=ids, pooling=pooling, second_text=second)
            for ids, second in zip(all_ids, second_texts or [0] * len(all_ids), strict=True)
        ]

    def _pool(self, requests: list[EngineRequest], use_tqdm: bool) -> list[PooledOutput]:
        found: dict[int, PooledOutput] = {}

        def take(sequence: int, delta: TokenDelta) -> bool:
            found[sequence] = sequences.pooled_output(delta)
            return True

        Stream(self._streams, requests).drive(take, len(requests), use_tqdm)
        return [found[at] for at in range(len(requests))]


def _adapters(given: LoRAs, count: int) -> list[tuple[AdapterUse, ...]]:
    return [steering.adapter_uses(entry) for entry in _of_each("lora_request", given, LoRARequest, count)]


def _of_each(name: str, given: Any, kind: type, count: int) -> list[Any]:
    if given is None or isinstance(given, kind):
        return [given] * count
    given = list(given)
    if len(given) != count:
        raise InvalidRequestError(
            f"{name} has {len(given)} entries for {count} prompts; give one, or one a prompt", param=name
        )
    return given


def _preceded(prompt: Prompt, before: str, name: str | None) -> Prompt:
    if isinstance(prompt, str):
        return before + prompt
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str) and "prompt_token_ids" not in prompt:
        return before + prompt["prompt"]
    if name is not None:
        raise InvalidRequestError("prompt_name goes with texts, not with token ids", param="prompt_name")
    return prompt


_engines: dict[tuple, LLM] = {}


def generate(
    prompts: Prompts, model: str = "smollm2-135m", *, engine: dict[str, Any] | None = None, **sampling: Any
) -> str | list[str]:
    """The completion of a prompt, or of each prompt of a list, as text, by an engine that is kept for further calls.

    `engine` holds EngineConfig fields; all else are fields of SamplingParams.
    """
    key = (model, tuple(sorted((engine or {}).items())))
    if key not in _engines:
        _engines[key] = LLM(model, **(engine or {}))
    llm = _engines[key]
    params = SamplingParams(**(llm.info.default_sampling.fields() | {"max_tokens": 128} | sampling))
    asked, is_one = sequences.one_or_many(prompts)
    texts = [output.outputs[0].text for output in llm.generate(asked, params, use_tqdm=False)]
    return texts[0] if is_one else texts
