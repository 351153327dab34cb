"""Complete several prompts in one batch: `python examples/offline.py`."""

from jaxllm import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    prompts = ["The capital of France is", "The chemical symbol of gold is", "Once upon a time"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    # One SamplingParams a prompt, and several completions of one prompt, in the same batch.
    greedy = SamplingParams(temperature=0, max_tokens=8)
    varied = SamplingParams(temperature=0.8, top_p=0.95, n=3, seed=1, max_tokens=8, stop="\n")
    for output in llm.generate(["2 + 2 =", "My favourite colour is"], [greedy, varied]):
        for completion in output.outputs:
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
