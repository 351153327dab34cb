"""What the compiler says of the step functions: pages and slots are updated in place, and shapes stay few."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm import EngineConfig
from jaxllm.engine.core.keys import PLAIN, SAMPLED, Key
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.plan import step_functions
from jaxllm.engine.start.platform import Platform
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from tests.reference.tiny import write_checkpoint

OPTIMIZED = True


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def functions(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("llama_gqa", directory)
    config = EngineConfig(
        model=str(directory), dtype=request.param, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory=2**26
    )
    checkpoint = open_checkpoint(directory)
    blueprint = make_blueprint(config, checkpoint, Platform("cpu", 1, None, 2**33))
    sizes = replace(blueprint.sizes, num_pages=20_000)  # so that a copied buffer would stand out
    return step_functions(replace(blueprint, sizes=sizes), build_meshes(1)[0])


@pytest.mark.parametrize(
    "key",
    [Key("decode", 4, PLAIN), Key("decode", 4, SAMPLED), Key("backbone", 32)],
    ids=["decode", "sampled", "backbone"],
)
def test_donated_pages_are_not_copied(functions, key):
    function, args = functions.step(key)
    memory = function.lower(*args).compile().memory_analysis()
    pages = functions.state.abstract()["caches"]
    one_buffer = np.prod(pages[0][0].shape) * pages[0][0].dtype.itemsize
    every_page = 2 * len(pages) * one_buffer
    assert memory.alias_size_in_bytes >= every_page  # outputs share the inputs' memory
    assert memory.temp_size_in_bytes < one_buffer  # and not even one buffer is copied on the way
