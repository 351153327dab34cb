"""A tiny model as transformers computes it; needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.reference.tiny import tiny_config
from tests.reference.tiny_configs.encoders import SECOND_TEXT

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOADING_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def load_oracle(name: str, directory: Path) -> PreTrainedModel:
    """The model that `write_checkpoint(name, directory)` wrote, at float32 with eager attention and experts.

    Raises:
        AssertionError: transformers misses a tensor, has no place for one, or expects another shape.
    """
    import torch
    import transformers

    # Types that transformers serves with another one's class have that of their own code in their files.
    model_class = getattr(transformers, tiny_config(name)["architectures"][0], transformers.AutoModelForCausalLM)
    model, loading = model_class.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    for problem in LOADING_PROBLEMS:
        assert not loading[problem], f"{name}: {problem} {loading[problem]}"
    return model.eval()


def oracle_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[T, V]`, the logits after every token of one pass over all of them; of a classifier `[T, labels]`.

    transformers itself gives a classifier's after the last token only.
    """
    import torch

    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[0]
        if logits.ndim == 2:
            return logits
        every = model.score(model.base_model(tokens, use_cache=False).last_hidden_state)[0]
    assert torch.equal(every[-1], logits)
    return every


def encoder_output(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[T, E]`, the last hidden states of an encoder, or of a classifier `[labels]`; the prompt is a pair of texts."""
    import torch

    types: dict[str, torch.Tensor] = {}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        types["token_type_ids"] = torch.tensor([[int(i >= SECOND_TEXT) for i in range(len(ids))]])
    with torch.inference_mode():
        output = model(torch.tensor([ids]), **types)
        return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0]
