import pytest

from jaxllm.errors import CheckpointError
from jaxllm.weights.fields import OBJECT, check_fields


def test_a_large_value_is_not_shown_whole():
    nested = {f"key {n}": {f"inner {m}": ["x" * 50] * 9 for m in range(9)} for n in range(9)}
    with pytest.raises(CheckpointError) as raised:
        check_fields({"settings": [nested] * 9}, {"settings": OBJECT}, inside="model.")
    message = str(raised.value)
    assert len(message) < 300 and message.startswith("model.settings is [{'key 0'")
    assert message.endswith("…; accepted is an object")
