"""Compute goldens/inside/NAME.npz of the models named in inside.py; needs torch (see README.md).

python -m tests.reference.make_inside_goldens [NAME ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reference import load_golden
from tests.reference.inside import (
    ATTENDED,
    ATTENDED_TOKENS,
    DIFFERENTIATED,
    FOLDER,
    HOOKED,
    LOSS_TOKENS,
    PATCHED_PLACES,
    POSITIONS,
    STEERED,
    STEERED_LAYER,
    STEERED_POSITIONS,
    patches,
    steering_vector,
)
from tests.reference.oracle import load_oracle
from tests.reference.tiny import tiny_prompt, write_checkpoint

STEERED_TOKENS = 8


def activations(name: str, model: Any) -> dict[str, np.ndarray]:
    """At each point of each layer, of the prompt and the greedy tokens after it."""
    ids = tiny_prompt(name) + load_golden(name).greedy_token_ids[:-1]
    found: dict[str, np.ndarray] = {}

    def hook(point: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            found[point] = output.detach().reshape(len(ids), -1).numpy()[POSITIONS]

        return keep

    for index, layer in enumerate(model.model.layers):
        mixer = next(getattr(layer, mixer) for mixer in HOOKED[name].mixers if hasattr(layer, mixer))
        mixer.register_forward_hook(hook(f"attention_out.{index}"))
        getattr(layer, HOOKED[name].mlp).register_forward_hook(hook(f"mlp_out.{index}"))
        layer.register_forward_hook(hook(f"residual.{index}"))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    for index in range(len(model.model.layers)):
        found[f"residual_before.{index}"] = states[index][0].numpy()[POSITIONS]
    found["final.-1"] = states[-1][0].numpy()[POSITIONS]
    return found


def derivative(name: str, model: Any) -> dict[str, np.ndarray]:
    """Of the mean negative log-probability of the prompt's first tokens."""
    ids = tiny_prompt(name)[:LOSS_TOKENS]
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    loss.backward()
    gradient = model.get_input_embeddings().weight.grad.numpy()[ids]
    assert np.abs(gradient).max() > 1e-3, f"{name}: the derivative is next to nothing"
    return {"loss": np.float64(loss.item()), "gradient": gradient}


def followed(name: str, model: Any, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the prompt, and the greedy tokens after it, each of them computed anew with all before it."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(STEERED_TOKENS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            best = logits[-1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, f"{name}: two tokens are nearly tied"
            ids.append(int(best.indices[0]))
    return logits[: len(prompt)].numpy(), np.array(ids[len(prompt) :])


def steered(name: str, model: Any) -> dict[str, np.ndarray]:
    """Logits of the prompt, and the greedy tokens after it, of a model that is steered."""
    prompt = tiny_prompt(name)
    vector = torch.from_numpy(steering_vector(model.config.hidden_size))
    found: dict[str, np.ndarray] = {}
    for which, positions in STEERED_POSITIONS.items():

        def add(module: Any, inputs: Any, output: Any, positions: range = positions) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            states = states.clone()
            states[:, positions.start : positions.stop] += vector
            return (states, *output[1:]) if isinstance(output, tuple) else states

        handle = model.model.layers[STEERED_LAYER].register_forward_hook(add)
        logits, tokens = followed(name, model, prompt)
        handle.remove()
        found |= {f"steered.{which}": logits, f"tokens.{which}": tokens}
    return found


def patched(name: str, model: Any) -> dict[str, np.ndarray]:
    """Logits of the prompt, and the greedy tokens after it, of a model whose stream is patched."""
    prompt, found = tiny_prompt(name), {}
    for which in PATCHED_PLACES:
        handles = []
        for (layer, position), value in patches(which, model.config.hidden_size).items():

            def put(module: Any, inputs: Any, output: Any, position: int = position, value: Any = value) -> Any:
                states = (output[0] if isinstance(output, tuple) else output).clone()
                if position < states.shape[1]:
                    states[:, position] = torch.from_numpy(value)
                return (states, *output[1:]) if isinstance(output, tuple) else states

            handles.append(model.model.layers[layer].register_forward_hook(put))
        logits, tokens = followed(name, model, prompt)
        for handle in handles:
            handle.remove()
        found |= {f"patched.{which}": logits, f"patched_tokens.{which}": tokens}
    return found


def attention(name: str, model: Any) -> dict[str, np.ndarray]:
    """Weights, and what the cache holds, of each layer that attends."""
    ids = torch.tensor([tiny_prompt(name)[:ATTENDED_TOKENS]])
    with torch.inference_mode():
        told = model(ids, use_cache=True, output_attentions=True)
    found: dict[str, np.ndarray] = {}
    attending = [index for index, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn")]
    weights = [weights for weights in told.attentions if weights is not None]
    assert len(attending) == len(weights)
    for index, of_layer in zip(attending, weights, strict=True):
        cached = told.past_key_values.layers[index]
        found[f"weights.{index}"] = of_layer[0].numpy()
        found |= {f"keys.{index}": cached.keys[0], f"values.{index}": cached.values[0]}
    return {key: np.asarray(value) if "weights" in key else kept(value) for key, value in found.items()}


def kept(cached: Any) -> np.ndarray:
    """`[K, T, D]`, of which a layer with a window keeps the last tokens -> `[T, K, D]`."""
    return np.ascontiguousarray(cached.numpy().swapaxes(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(dict.fromkeys([*HOOKED, *DIFFERENTIATED])))
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as scratch:
            model = load_oracle(name, write_checkpoint(name, Path(scratch)))
            arrays = derivative(name, model) if name in DIFFERENTIATED else {}
            if name in STEERED:
                arrays |= steered(name, model) | patched(name, model)
            if name in ATTENDED:
                arrays |= attention(name, model)
            if name in HOOKED:
                arrays |= activations(name, model)
        np.savez(FOLDER / f"{name}.npz", **arrays)
        print(name, f"{sum(array.nbytes for array in arrays.values()) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
