"""Talk to a running server through the Responses API.

jaxllm serve                              # in another terminal
pip install openai
python examples/responses.py [http://127.0.0.1:8000]
"""

import sys
import time
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")  # the key matters only if the server was started with --api-key
model = client.models.list().data[0].id

# The server keeps what was said: the second request sends only what is new.
first = client.responses.create(model=model, input="What is the capital of Japan?", max_output_tokens=32)
print(first.output_text)
second = client.responses.create(
    model=model, input="And of Italy?", previous_response_id=first.id, max_output_tokens=32
)
print(second.output_text)

# A stream of events.
with client.responses.stream(model=model, input="Count to five.", max_output_tokens=32) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
print()


# An answer that is a pydantic object.
class City(BaseModel):
    name: Literal["Berlin", "Paris", "Rome"]
    country: Literal["France", "Germany", "Italy"]


parsed = client.responses.parse(
    model=model, input="Which city is the Eiffel Tower in?", text_format=City, max_output_tokens=64
)
print(parsed.output_parsed)


# A function: the model asks for a call, we make it, the model goes on.
def population(city: str) -> int:
    return {"Paris": 2_100_000}.get(city, 0)


tool = {
    "type": "function",
    "name": "population",
    "description": "How many people live in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
asked = client.responses.parse(
    model=model, input="How many people live in Paris?", tools=[tool], tool_choice="required", max_output_tokens=64
)
outputs = [
    {"type": "function_call_output", "call_id": call.call_id, "output": str(population(**call.parsed_arguments))}
    for call in asked.output
    if call.type == "function_call"
]
told = client.responses.create(model=model, input=outputs, previous_response_id=asked.id, max_output_tokens=48)
print(told.output_text)

# In the background: nobody waits, and the response is fetched when it is ready.
running = client.responses.create(model=model, input="Tell me a story.", max_output_tokens=64, background=True)
while running.status in ("queued", "in_progress"):
    time.sleep(0.2)
    running = client.responses.retrieve(running.id)
print(running.status, running.output_text)
