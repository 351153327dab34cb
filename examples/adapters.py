"""A LoRA adapter that a running server loads, beside its model: `python examples/adapters.py ADAPTER [URL]`.

ADAPTER is a folder that PEFT saved, or a GGUF adapter. It talks to `jaxllm serve smollm2-135m --enable-lora`.
"""

import sys

from openai import OpenAI

adapter = sys.argv[1]
url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id


def ask(name: str, **fields: object) -> str:
    answer = client.completions.create(
        model=name, prompt="The capital of France is", max_tokens=5, temperature=0, extra_body=fields
    )
    return answer.choices[0].text


client.post("/load_lora_adapter", body={"lora_name": "mine", "lora_path": adapter}, cast_to=str)
try:
    print("models:", ", ".join(one.id for one in client.models.list()))
    print(f"{model} says {ask(model)!r}")
    print(f"mine says {ask('mine')!r}")

    (number,) = (one["id"] for one in client.get("/lora-adapters", cast_to=object) if one["name"] == "mine")
    half = ask(model, lora=[{"id": number, "scale": 0.5}])
    print(f"{model} with half of mine says {half!r}")
finally:
    client.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)
print("models:", ", ".join(one.id for one in client.models.list()))
