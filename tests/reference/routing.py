"""How far a mixture-of-experts model of transformers is from choosing other experts; needs torch."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tests.reference.oracle import oracle_logits


def routing_gap(model: PreTrainedModel, ids: list[int]) -> float | None:
    """The smallest lead, over all layers and tokens, of the worst expert or group chosen over the best one that is not.

    Measured on what the choice is made by: softmax routers' logits, sigmoid routers' biased scores, and the scores of
    groups. None for a model without experts.
    """
    gaps: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith(("Router", "V1Gate"))]
    hooks = [
        r.register_forward_hook(lambda module, _, out: gaps.append(_gap(module, _logits(module, out)))) for r in routers
    ]
    oracle_logits(model, ids)
    for hook in hooks:
        hook.remove()
    return float(torch.cat(gaps).min()) if gaps else None


def _logits(router: torch.nn.Module, out: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The router's, up to what all have alike: Gemma 4's gives probabilities, Llama 4's the chosen scores first."""
    name = type(router).__name__
    return out[1] if name == "Llama4Router" else out[0].log() if name == "Gemma4TextRouter" else out[0]


def _gap(router: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """`[T]`, from the router's logits `[T, X]`."""
    if statics := getattr(router, "moe_statics", None):  # ERNIE's own place for a bias on the scores
        return _lead(statics(logits.softmax(-1)), router.top_k)
    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits if bias is None else logits.sigmoid() + bias
    if bias is None and getattr(router, "topk_method", "greedy") == "greedy":
        return _lead(scores, getattr(router, "top_k", None) or router.config.top_k_experts)
    grouped = scores.unflatten(-1, (router.num_group, -1))
    group_scores = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
    chosen = group_scores.topk(router.topk_group, dim=-1).indices
    among = grouped.gather(1, chosen[..., None].expand(-1, -1, grouped.shape[-1])).flatten(1)
    return torch.minimum(_lead(group_scores, router.topk_group), _lead(among, router.top_k))


def _lead(scores: torch.Tensor, count: int) -> torch.Tensor:
    if count == scores.shape[-1]:
        return torch.full(scores.shape[:-1], torch.inf)
    best = scores.topk(count + 1, dim=-1).values
    return best[..., -2] - best[..., -1]
