"""Two requests streamed at the same time from one engine: `python examples/async_streaming.py`."""

import asyncio

from jaxllm import AsyncLLM, SamplingParams


async def stream(engine: AsyncLLM, prompt: str) -> None:
    shown = 0
    # The same RequestOutput comes again and again as it grows. Leaving the loop early would abort the request.
    async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=12)):
        text = output.outputs[0].text
        if len(text) > shown:
            print(f"{prompt} … {text[shown:]!r}", flush=True)
            shown = len(text)
    print(f"{prompt}{text}")


async def main() -> None:
    engine = AsyncLLM(model="smollm2-135m")
    try:
        await asyncio.gather(stream(engine, "The capital of France is"), stream(engine, "Water boils at"))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
