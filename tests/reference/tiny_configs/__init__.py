"""The tiny models: config.json contents by family. Sizes are unequal on purpose, so that no two can be mixed up."""

from __future__ import annotations

from tests.reference.tiny_configs import (
    classifier,
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mistral,
    olmo,
    others,
    phi,
    qwen,
    stablelm,
)
from tests.reference.tiny_configs.variant import Variant

VARIANTS: dict[str, Variant] = {
    **llama.VARIANTS,
    **mistral.VARIANTS,
    **phi.VARIANTS,
    **qwen.VARIANTS,
    **stablelm.VARIANTS,
    **gemma.VARIANTS,
    **deepseek.VARIANTS,
    **glm.VARIANTS,
    **lfm2.VARIANTS,
    **olmo.VARIANTS,
    **exaone.VARIANTS,
    **cohere.VARIANTS,
    **granite.VARIANTS,
    **ernie.VARIANTS,
    **others.VARIANTS,
    **gpt_oss.VARIANTS,
}

CLASSIFIERS: dict[str, Variant] = classifier.VARIANTS
"""Models with a classification head, which generate no text."""

__all__ = ["CLASSIFIERS", "VARIANTS", "Variant"]
