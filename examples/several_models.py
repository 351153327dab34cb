"""Two models of one server, each loaded by the first request for it: `python examples/several_models.py [URL]`.

It talks to `jaxllm serve --models examples/several_models.yaml`.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20)  # it comes again while the other model is busy


def show() -> None:
    print("  ".join(f"{model.id}: {model.status['value']}" for model in client.models.list()))


show()
for name in ("small", "gemma3"):
    answer = client.completions.create(
        model=name,
        prompt="The capital of France is",
        max_tokens=5,
        temperature=0,
        extra_body={"keep_alive": "10m"},  # it is unloaded after ten minutes without a request
    )
    print(f"{name} says {answer.choices[0].text!r}")
    show()
