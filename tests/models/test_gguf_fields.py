import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.gguf import GGUF_FIELDS
from jaxllm.weights.fields import check_fields


@pytest.mark.parametrize("name", ["expert_count", "expert_used_count", "rope.dimension_count", "attention.key_length"])
def test_a_count_of_zero_is_an_integer_too(name: str) -> None:
    check_fields({name: 0}, GGUF_FIELDS)
    with pytest.raises(CheckpointError, match=f"{name} is 0.0; accepted is an integer"):
        check_fields({name: 0.0}, GGUF_FIELDS)


def test_a_factor_of_zero_may_be_either() -> None:
    for zero in (0, 0.0):
        check_fields({"rope.scaling.factor": zero, "rope.scale_linear": zero}, GGUF_FIELDS)
