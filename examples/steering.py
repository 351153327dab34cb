"""Completions that are steered by the difference of two texts, and by none: `python examples/steering.py`."""

from jaxllm import LLM, SamplingParams, Steer

LAYER = 15
with LLM("smollm2-135m") as llm:
    # The residual stream at the last token of each text; what differs between them is a direction.
    texts = ["I love this. It is wonderful, beautiful and great!", "I hate this. It is awful, ugly and terrible!"]
    good, bad = (c["residual"][LAYER][0] for c in llm.capture(texts, {"residual": LAYER}, "last", use_tqdm=False))
    direction = good - bad

    # One batch: the same prompt steered one way, the other way, and not at all.
    prompt = "I think that the food here is"
    steers = [Steer(LAYER, direction, 1.5), None, Steer(LAYER, direction, -1.5)]
    params = SamplingParams(temperature=0, max_tokens=16)
    outputs = llm.generate([prompt] * 3, params, use_tqdm=False, steer=steers)
    for name, output in zip(("towards", "plain", "away"), outputs, strict=True):
        print(f"{name:>8}: {prompt}{output.outputs[0].text!r}")
