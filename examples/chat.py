"""A conversation of two turns: `python examples/chat.py`."""

from jaxllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=48)
messages = [{"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}]

with LLM("smollm2-135m") as llm:
    for question in ["What is the capital of Japan?", "And what is the capital of Italy?"]:
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, params, use_tqdm=False)[0]
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        # The second turn finds the first one's KV pages in the prefix cache.
        print(f"> {question}\n{answer}")
        print(f"  ({len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} from the cache)")
