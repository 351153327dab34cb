from __future__ import annotations

import random
import string

import psutil

from jaxllm.text.tokenizer import load_tokenizer
from tests.weights.models import real_model


def test_a_stranger_s_words_are_not_kept_for_ever(tmp_path):
    """Ten thousand words of 200 letters would take 65 MB, in each thread that encodes."""
    tokenizer, dice = load_tokenizer(real_model("smollm2-135m"), cache_dir=tmp_path), random.Random(0)
    held = []
    for _ in range(12):
        tokenizer.encode(" ".join("".join(dice.choices(string.ascii_letters, k=200)) for _ in range(1000)))
        held.append(psutil.Process().memory_info().rss)
    assert held[-1] - held[1] < 20e6, held
