"""Search passages with an encoder, without a server: vectors first, then a cross-encoder on the best of them, if any.

python examples/semantic_search.py [EMBEDDER [RERANKER]]

By default the built-in all-minilm-l6-v2 alone. A cross-encoder is cross-encoder/ms-marco-MiniLM-L6-v2, for example.
"""

import sys

import numpy as np

from jaxllm import LLM, PoolingParams

PASSAGES = [
    "Paris is the capital of France.",
    "Water boils at 100 degrees Celsius at sea level.",
    "The cheetah is the fastest land animal.",
    "France has been a member of the European Union since its beginning.",
]
QUESTION = "Which city is the capital of France?"

embedder = sys.argv[1] if len(sys.argv) > 1 else "all-minilm-l6-v2"
with LLM(embedder) as llm:
    vectors = np.array([output.outputs.embedding for output in llm.embed([QUESTION, *PASSAGES], use_tqdm=False)])
similarities = vectors[1:] @ vectors[0]  # of unit length, so these are cosines
best = np.argsort(-similarities)[:2]
for index in best:
    print(f"{similarities[index]:.3f}  {PASSAGES[index]}")

if len(sys.argv) < 3:
    sys.exit()
# A cross-encoder reads question and passage together, which is slower and more exact.
with LLM(sys.argv[2]) as llm:
    pairs = [llm.get_tokenizer().encode_pair(QUESTION, PASSAGES[index]) for index in best]
    prompts, second_texts = zip(*pairs, strict=True)
    scores = llm.pool(list(prompts), PoolingParams(kind="logits"), use_tqdm=False, second_texts=second_texts)
for index, score in zip(best, scores, strict=True):
    print(f"{score.values[0]:.3f}  {PASSAGES[index]}")
