"""What an API key has used, by day and model, and what its limits leave: `python examples/usage.py [URL] [KEY]`.

It talks to `jaxllm serve --api-key-file keys.yaml`; docs/keys.md shows how keys are made.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = OpenAI(base_url=f"{url}/v1", api_key=key)

model = client.models.list().data[0].id  # of those that the key may use
answer = client.completions.with_raw_response.create(model=model, prompt="The capital of France is", max_tokens=8)
print(answer.parse().choices[0].text)
for name, value in answer.headers.items():
    if name.startswith("x-ratelimit-"):
        print(f"{name}: {value}")

for day in client.get("/usage", cast_to=object)["data"]:
    read, cached, written = day["input_tokens"], day["input_cached_tokens"], day["output_tokens"]
    print(f"{day['date']} {day['model']}: {day['num_model_requests']} requests,", end=" ")
    print(f"{read} tokens read, {cached} of them from the cache, and {written} written")
