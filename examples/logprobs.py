"""What the model thought of its own words, and of a prompt: `python examples/logprobs.py`."""

import math

from jaxllm import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    # logprobs=3: the chosen token and the three most likely at each step.
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    completion = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
    for step in completion.logprobs:
        print("  ".join(f"{entry.decoded_token!r} {math.exp(entry.logprob):.1%}" for entry in step.values()))
    print(f"log-probability of {completion.text!r}: {completion.cumulative_logprob:.2f}")

    # prompt_logprobs=0: of each prompt token only its own; the first has none, since nothing comes before it.
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    sentences = ["The cat sat on the mat.", "The mat cat on sat the."]
    for output in llm.generate(sentences, score, use_tqdm=False):
        entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        total = sum(entry[token].logprob for token, entry in entries)
        print(f"{output.prompt!r}: perplexity {math.exp(-total / (len(output.prompt_token_ids) - 1)):.0f}")
