"""How the vectors of a step with a batch are laid out, from its key alone."""

from __future__ import annotations

from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.packing import Packing, backbone_packing, decode_packing, head_packing
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.masks import mask_words


def step_packing(key: Key, sizes: StepSizes) -> Packing:
    """The first vector that a decode, a backbone or a head is sent."""
    match key.kind:
        case "decode":
            return decode_packing(key.size, sizes.has_states)
        case "head":
            return head_packing(key.size, mask_words(sizes.vocab_size) if key.variant.masked else 0)
        case "backbone":
            taps = sizes.taps if key.variant.recorded else ()
            limits = sizes.max_num_seqs, sizes.page_size, sizes.has_states
            return backbone_packing(key.size, *limits, taps, key.variant.patched)
    raise ValueError(f"a step of kind {key.kind} has no batch")
