"""The model's replies within one response, each to a context that has grown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxllm.chat.conversation import naming
from jaxllm.chat.prompt import sampling_params
from jaxllm.errors import ContextLengthError
from jaxllm.serving.call import ClientCall
from jaxllm.serving.generation import GenerationSettings, Reply, begin_reply
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.messages import turns
from jaxllm.serving.responses.offers import Offer
from jaxllm.serving.responses.request import ResponseRequest
from jaxllm.serving.responses.translate import Translation, generation_settings


class Replies:
    """Begins replies to what a request brings, the end of its `context` being its `own`.

    Raises InvalidRequestError for settings that are out of range.
    """

    def __init__(
        self,
        call: ClientCall,
        body: ResponseRequest,
        context: Sequence[Item],
        own: Sequence[Item],
    ):
        self._call = call
        self._body = body
        self._context = context
        self._own = own
        self.model_name, self.model = call.name, call.model
        translation = self._translation(context, Offer([], "auto"))
        with naming(translation.name):
            self.params = sampling_params(self.model, generation_settings(body))

    async def begin(self, offer: Offer, output: Sequence[Item], num_generated: int) -> Reply:
        """The reply to the request and to what the response has put out since, generating `num_generated` tokens.

        The request has been accepted before this: a server that is stopping still answers.

        With truncation auto, to as many of the latest turns as fit.
        Raises InvalidRequestError naming the field; ContextLengthError where the prompt does not fit.
        """
        context = [*self._context, *output]
        settings = generation_settings(self._body)
        if output:
            settings = _what_is_left(settings, num_generated)
        try:
            return await self._reply(context, offer, settings)
        except ContextLengthError as error:
            if self._body.truncation == "disabled":
                raise
            too_long = error
        fitting: Reply | None = None
        cuts = [cut for cut in turns(context) if cut > 0]
        low, high = 0, len(cuts)
        while low < high:
            middle = (low + high) // 2
            kept = [*_leading_instructions(context[: cuts[middle]]), *context[cuts[middle] :]]
            try:
                fitting = await self._reply(kept, offer, settings)
                high = middle
            except ContextLengthError as error:
                too_long = error
                low = middle + 1
        if fitting is None:
            raise too_long
        return fitting

    async def _reply(self, context: Sequence[Item], offer: Offer, settings: GenerationSettings) -> Reply:
        translation = self._translation(context, offer)
        with naming(translation.name):
            return await begin_reply(self._call, translation.conversation(), settings, prefix="resp-", goes_on=True)

    def _translation(self, context: Sequence[Item], offer: Offer) -> Translation:
        return Translation(self._body, context, self._own, offer, list(self.model.special_tokens))


def _what_is_left(settings: GenerationSettings, num_generated: int) -> GenerationSettings:
    """Of the bounds on tokens, once a response has generated some."""
    most = None if settings.max_tokens is None else settings.max_tokens - num_generated
    sampling = {name: value for name, value in settings.sampling.items() if name != "min_tokens"}
    return replace(settings, sampling=sampling, max_tokens=most, cut_to_context=True)


def _leading_instructions(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item["type"] == "message" and item["role"] in ("system", "developer")]
