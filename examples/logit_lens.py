"""What the model would say if it stopped at each layer: `python examples/logit_lens.py`."""

import numpy as np

from jaxllm import LLM

prompt = "The capital of France is"
with LLM("smollm2-135m") as llm:
    tokenizer = llm.get_tokenizer()
    # The residual stream after every layer, at the prompt's last token.
    (captures,) = llm.capture(prompt, {"residual": True}, "last", use_tqdm=False)
    for layer, states in captures["residual"].items():
        logits = llm.unembed(states[-1])  # through the last norm and the head
        best = np.argsort(-logits)[:4]
        print(f"layer {layer:2}", " ".join(repr(tokenizer.decode([token])) for token in best.tolist()))

    # Whole rows of logits are computed where they are looked at.
    (rows,) = llm.logits(prompt, use_tqdm=False)
    said = tokenizer.decode([int(rows[-1].argmax())])
    print(f"{rows.shape[0]} rows of {rows.shape[1]:,} logits; the last one says {said!r}")

    # Of given completions only their own tokens are scored; the prompt is computed once.
    answers = [" Paris", " Lyon", " London", " a city"]
    for answer, score in zip(answers, llm.score(prompt, answers, use_tqdm=False), strict=True):
        greedy = ", which greedy decoding gives" if score.is_greedy else ""
        print(f"{answer!r}: log-probability {score.total:.2f}{greedy}")
