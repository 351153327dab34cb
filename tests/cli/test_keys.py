"""`jaxllm keys new`: what it prints is what the server takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.serving.access.keys import digest_of, read_keys


def test_the_line_for_the_file_holds_the_hash_of_the_key(cli, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    shown = []
    for name in ("alice", "on"):
        result = cli("keys", "new", name)
        assert result.code == 0 and result.out.count("\n") == 1
        with file.open("a") as keys:
            keys.write(result.out)
        shown.append(result.err.split()[-1])
    found = read_keys(file)
    assert [key.name for key in found] == ["alice", "on"], "also a name that is something else in YAML"
    assert [key.digest for key in found] == [digest_of(key) for key in shown]
    assert all(key not in file.read_text() for key in shown) and len(set(shown)) == 2


def test_json(cli) -> None:
    result = cli("keys", "new", "alice", "--json")
    made = json.loads(result.out)
    assert made["name"] == "alice" and made["hash"] == f"sha256:{digest_of(made['key']).hex()}" and not result.err


@pytest.mark.parametrize("name", ["", "a b", "-", "a" * 65])
def test_a_name_that_the_file_could_not_have_is_refused(cli, name: str) -> None:
    result = cli("keys", "new", "--", name)
    assert result.code == 2 and f"NAME is {name!r}: it must have 1 to 64 letters" in result.err
