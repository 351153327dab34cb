"""The tiny models: config.json contents by family. Sizes are unequal on purpose, so that no two can be mixed up."""

from __future__ import annotations

from tests.reference.tiny_configs import (
    alibi,
    classifier,
    cohere,
    deepseek,
    encoders,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    granite,
    kin,
    lfm2,
    llama,
    llama4,
    mamba,
    mistral,
    olmo,
    others,
    phi,
    qwen,
    qwen_delta,
    stablelm,
    vision,
)
from tests.reference.tiny_configs.variant import Variant

VARIANTS: dict[str, Variant] = {
    **llama.VARIANTS,
    **llama4.VARIANTS,
    **mistral.VARIANTS,
    **phi.VARIANTS,
    **qwen.VARIANTS,
    **qwen_delta.VARIANTS,
    **stablelm.VARIANTS,
    **gemma.VARIANTS,
    **gemma4.VARIANTS,
    **deepseek.VARIANTS,
    **glm.VARIANTS,
    **lfm2.VARIANTS,
    **olmo.VARIANTS,
    **exaone.VARIANTS,
    **cohere.VARIANTS,
    **granite.VARIANTS,
    **ernie.VARIANTS,
    **others.VARIANTS,
    **mamba.VARIANTS,
    **gpt.VARIANTS,
    **gpt_oss.VARIANTS,
    **alibi.VARIANTS,
    **kin.VARIANTS,
}

CLASSIFIERS: dict[str, Variant] = classifier.VARIANTS
"""Models with a classification head, which generate no text."""

ENCODERS: dict[str, Variant] = encoders.VARIANTS
"""Models whose tokens see those behind them too; their goldens are hidden states, or the scores of classes."""

VISION: dict[str, Variant] = vision.VISION
"""Models with a tower for images; `vision.py` beside the goldens' maker says what these have."""

__all__ = ["CLASSIFIERS", "ENCODERS", "VARIANTS", "VISION", "Variant"]
