"""Talk to a running server through the openai package.

jaxllm serve                              # in another terminal
pip install openai
python examples/openai_client.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")  # the key matters only if the server was started with --api-key
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the capital of Japan?"}]

answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
print(answer.choices[0].message.content)
print(f"({answer.usage.prompt_tokens} prompt tokens, {answer.usage.completion_tokens} generated)")

for chunk in client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# Fields that OpenAI does not have go into extra_body.
completion = client.completions.create(
    model=model, prompt="The capital of France is", max_tokens=8, temperature=0, extra_body={"min_tokens": 4}
)
print(repr(completion.choices[0].text))
