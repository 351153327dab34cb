"""A model of lm-evaluation-harness that is an engine in the same process: no server, no texts over HTTP.

python -m jaxllm.integrations.lm_eval run --model jaxllm --model_args model=smollm2-135m --tasks …
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models import utils
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.requests.sampling import SamplingParams

logger = logging.getLogger(__name__)

ScoredPair = tuple[tuple[str, str] | None, list[int], list[int]]
"""A context and a continuation: their texts, by which a cache knows them, and their tokens."""


@register_model("jaxllm")
class JaxLM(TemplateLM):
    """`--model jaxllm`: the engine batches the requests, and computes shared contexts once.

    Args:
        model: as `LLM` takes it; `pretrained` is another name for it.
        max_gen_toks: tokens to generate if a task does not say.
        prefix_token_id: the token before a text without a context; by default the tokenizer's beginning of a sequence,
            or its end if it has none.
        think_end_token: text up to its last occurrence is no part of an answer.
        fields: those of EngineConfig, such as dtype, max_model_len, tensor_parallel_size.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **fields: Any,
    ):
        super().__init__()
        if (model is None) == (pretrained is None):
            raise ConfigError("--model_args must have one of model and pretrained: model=smollm2-135m")
        if device is not None:
            logger.warning("device is %r, which jaxllm does not read: JAX_PLATFORMS chooses the platform", device)
        del batch_size, max_batch_size  # the engine batches what it is given, up to max_num_seqs
        self.llm = LLM(model or pretrained or "", **fields)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_gen_toks = max_gen_toks
        self._think_end_token = think_end_token
        self._prefix_token_id = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        found = self.tokenizer.bos_token_id if self._prefix_token_id is None else self._prefix_token_id
        return self.eot_token_id if found is None else found

    @property
    def max_length(self) -> int:
        return self.llm.info.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """The chat template's name for caches of requests."""
        return self.llm.info.model_name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A rendered chat; the last message is continued if no generation prompt is added."""
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; a text that begins with the beginning of a sequence, as rendered chats do, gets no second one."""
        begins = self.tokenizer.special_tokens.get("bos_token")
        if add_special_tokens is None:
            add_special_tokens = not (begins and string.startswith(begins))
        return self.tokenizer.encode(string, add_special_tokens)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts; long ones in windows that fit the context, each token once."""
        windows: list[ScoredPair] = []
        counts = []
        for (text,) in [request.args for request in requests]:
            found = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length - 2, context_len=1
            )
            pairs = [make_disjoint_window(window) for window in found]
            windows += [(None, context, continuation) for context, continuation in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoredPair], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        contexts = [self._shortened(context, continuation) for _, context, continuation in requests]
        continuations = [continuation for _, _, continuation in requests]
        found = self.llm.score(contexts, continuations, use_tqdm=not disable_tqdm) if requests else []
        answers = [(score.total, score.is_greedy) for score in found]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _shortened(self, context: list[int], continuation: list[int]) -> list[int]:
        room = self.max_length - 1 - len(continuation)
        if len(context) <= room:
            return context
        logger.warning("a context of %d tokens is shortened to its last %d", len(context), max(room, 1))
        return context[-max(room, 1) :]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts: list[list[int]] = []
        params, stops = [], []
        for text, asked in [request.args for request in requests]:
            settings: dict[str, Any] = dict(utils.normalize_gen_kwargs(asked, default_max_gen_toks=self.max_gen_toks))
            if not settings.pop("do_sample"):
                settings["temperature"] = 0.0
            stop = utils.handle_stop_sequences(settings.pop("until", None), eos=None)
            most = settings.pop("max_gen_toks")
            ids, most = utils.maybe_truncate(self.tok_encode(text), most, self.max_length, shrink_gen_toks=False)
            prompts.append(ids)
            stops.append(stop)
            ends = () if self._think_end_token else tuple(stop)  # thoughts may hold what ends an answer
            params.append(_sampling(settings, max_tokens=most, stop=ends))
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm) if requests else []
        answers = [
            utils.postprocess_generated_text(output.outputs[0].text, stop, self._think_end_token)
            for output, stop in zip(outputs, stops, strict=True)
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers


def _sampling(settings: dict[str, Any], **own: Any) -> SamplingParams:
    known = {field.name for field in fields(SamplingParams)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidRequestError(
            f"generation_kwargs has {', '.join(unknown)}; accepted are until, do_sample, max_gen_toks and the fields "
            f"of SamplingParams: {', '.join(sorted(known))}"
        )
    return SamplingParams(**settings | own)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
