"""An engine that says something fit to be shown, by what the person's last message asks for."""

from __future__ import annotations

import msgspec

from jaxllm.engine.messages import EngineRequest
from tests.serving.fake_engine import REPLY, FakeEngine, SaidToken

MARKDOWN = """## Merging intervals

Sort by the start, then extend the last interval or begin a new one. This takes $O(n \\log n)$ time:

```python
def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    \"\"\"Overlapping intervals become one.\"\"\"
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:  # they overlap
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
```

| Input | Output |
|---|---|
| `[(1, 3), (2, 6)]` | `[(1, 6)]` |
| `[(1, 2), (4, 5)]` | unchanged |

The length of the union is the sum over the merged intervals,

\\[
L = \\sum_{i=1}^{n} (b_i - a_i) \\le \\frac{1}{n}\\int_0^1 f(x)\\,dx .
\\]

That costs $5 and not $10. See [the documentation](https://example.com/x).
"""
HOSTILE = """<script>document.title = "owned"</script><img src="x" onerror="document.title='owned'">

![a picture](https://example.com/picture.png) and [a link](javascript:document.title='owned')
"""
THOUGHT = "<think>The person greets me. I should greet them too.</think>Hello! How can I help?"
LONG = " ".join(f"Sentence {n} of a long story." for n in range(1, 61))

EVERYDAY = """Water is H<sub>2</sub>O, and 2<sup>10</sup> is 1024. Press <kbd class="x">Ctrl</kbd>.

| Day | Work |
|---|---|
| Monday | one<br>two |

- [x] Buy **bread**
- [ ] Bake

<details>
<summary>More</summary>

A *hidden* text.
</details>

Not HTML: List<String>.
"""
RIGHT_TO_LEFT = """مرحبا بالعالم

An English paragraph.

- שלום

`code` ثم نص

```python
print(1)
```
"""
LINES = "".join(f"{n}. A line of a list\n" for n in range(1, 401))

REPLIES = {
    "summarize": "They spoke of x.",
    "code": MARKDOWN,
    "hostile": HOSTILE,
    "think": THOUGHT,
    "story": LONG,
    "html": EVERYDAY,
    "arabic": RIGHT_TO_LEFT,
    "list": LINES,
    "json": '{"city": "Paris", "people": 2102650}',
}
"""A word of the last message -> the answer."""


class Talker(FakeEngine):
    """Knows REPLIES, has room for long conversations, and goes on with an answer that is left open."""

    def __init__(self, delay: float = 0.0):
        super().__init__(delay=delay)
        self.client.info = msgspec.structs.replace(self.client.info, max_model_len=32768, model_name="talker")

    def _sequence(self, request: EngineRequest, choice: int) -> list[SaidToken]:
        assert self.tokenizer is not None
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
        before, _, said = prompt.rpartition("[assistant]")
        asked = before.rpartition("[user]")[2].lower()
        reply = next((text for word, text in REPLIES.items() if word in asked), REPLY)
        self.reply = reply.removeprefix(said)
        return super()._sequence(request, choice)
