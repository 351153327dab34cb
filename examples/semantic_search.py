"""Search passages with an encoder, without a server: vectors first, then a cross-encoder on the best of them.

python examples/semantic_search.py [EMBEDDER [RERANKER]]

By default BAAI/bge-small-en-v1.5 and cross-encoder/ms-marco-MiniLM-L6-v2 from the hub; folders will do as well.
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

embedder = sys.argv[1] if len(sys.argv) > 1 else "BAAI/bge-small-en-v1.5"
with LLM(embedder) as llm:
    vectors = np.array([output.outputs.embedding for output in llm.embed([QUESTION, *PASSAGES], use_tqdm=False)])
similarities = vectors[1:] @ vectors[0]  # of unit length, so these are cosines
best = np.argsort(-similarities)[:2]
for index in best:
    print(f"{similarities[index]:.3f}  {PASSAGES[index]}")

# A cross-encoder reads question and passage together, which is slower and more exact.
reranker = sys.argv[2] if len(sys.argv) > 2 else "cross-encoder/ms-marco-MiniLM-L6-v2"
with LLM(reranker) as llm:
    pairs = [llm.get_tokenizer().encode_pair(QUESTION, PASSAGES[index]) for index in best]
    prompts, second_texts = zip(*pairs, strict=True)
    scores = llm.pool(list(prompts), PoolingParams(kind="logits"), use_tqdm=False, second_texts=second_texts)
for index, score in zip(best, scores, strict=True):
    print(f"{score.values[0]:.3f}  {PASSAGES[index]}")
