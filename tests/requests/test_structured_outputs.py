"""Grammars that strangers send: what is honest compiles, and what is not hurts nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.structured_outputs import (
    MAX_GRAMMAR_LENGTH,
    GrammarCache,
    GrammarProcesses,
    StructuredOutputs,
    compile_grammar,
)


def chained_defs(count: int) -> str:
    """Each of `count` definitions is a list of the next."""
    defs = ",".join(f'"{i}":{{"type":"array","items":{{"$ref":"#/$defs/{i + 1}"}}}}' for i in range(count))
    return f'{{"$ref":"#/$defs/0","$defs":{{{defs},"{count}":{{}}}}}}'


def chained_objects(count: int) -> dict[str, Any]:
    def node(i: int) -> dict[str, Any]:
        properties = {"name": {"type": "string"}, "next": {"$ref": f"#/$defs/node_{i + 1}"}}
        return {"type": "object", "properties": properties, "required": ["name", "next"]}

    defs = {f"node_{i}": node(i) for i in range(count)} | {f"node_{count}": {"type": "string"}}
    return {"$ref": "#/$defs/node_0", "$defs": defs}


def lark_chain(count: int, rule: str = "r{next}") -> str:
    rules = (f"r{i}:{rule.format(next=i + 1)}\n" for i in range(count))
    return f'start: r0\n{"".join(rules)}r{count}:"a"\n'


def gbnf_chain(count: int) -> str:
    return "root ::= r0\n" + "".join(f'r{i} ::= "x" r{i + 1}\n' for i in range(count)) + f'r{count} ::= "a"\n'


def nested(opening: str, count: int, closing: str, inside: str = "a") -> str:
    return opening * count + inside + closing * count


LONGEST: dict[str, dict[str, Any]] = {
    "chained $defs": {"json": chained_defs(9_000)},
    "chained objects": {"json": chained_objects(3_000)},
    "chained anyOf": {
        "json": chained_defs(9_000).replace('"type":"array","items":{', '"anyOf":[{').replace('"}}', '"}]}')
    },
    "Lark chain": {"grammar": lark_chain(38_000)},
    "GBNF chain": {"grammar": gbnf_chain(18_000)},
    "Lark chain with text": {"grammar": lark_chain(24_000, '"x" r{next}')},
    "Lark chain of options": {"grammar": lark_chain(24_000, '("x" r{next})?')},
    "Lark terminals": {"grammar": lark_chain(24_000, '"x" r{next}').replace("r", "R").replace("staRt", "start")},
    "structural tag": {
        "structural_tag": json.dumps(
            {"structures": [{"begin": "<a>", "schema": json.loads(chained_defs(6_000)), "end": "</a>"}]}
            | {"triggers": ["<a"]}
        )
    },
    "regex of 250,000 letters": {"regex": "ab" * 125_000},
}
"""As long a chain as MAX_GRAMMAR_LENGTH allows of each kind."""

SLOW = {"type": "integer", "multipleOf": 10_000_019}
"""Nine seconds of a 4.2 GHz core, in which it takes all the memory it may."""

PANICS = "start: " + '"x"? ' * 40_000

TOO_DEEP: dict[str, dict[str, Any]] = {
    "lists": {"json": nested('{"type":"array","items":', 5_000, "}", "{}")},
    "Lark parentheses": {"grammar": "start: " + nested("(", 5_000, ")", '"a"')},
    "regex groups": {"regex": nested("(b", 5_000, ")?")},
    "a pattern's groups": {"json": {"type": "string", "pattern": f"^{nested('(b', 5_000, ')?')}$"}},
    "GBNF parentheses": {"grammar": "root ::= " + nested('( "b" ', 500, ")?", '"a"') + "\n"},
}

FOLLOW = """
import sys, json
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from jaxllm.engine.features.grammar.grammar import Grammars
from jaxllm.requests.structured_outputs import StructuredOutputs

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
backend.decoder = decoders.ByteLevel()
grammars = Grammars(backend, len(letters), [0])
for name, fields in json.load(sys.stdin).items():
    constraint = grammars.build(StructuredOutputs(**fields))
    for _ in range(40):
        mask = np.zeros((1, len(letters) // 32), np.int32)
        grammars.fill([constraint], mask)
        constraint.forced()
        if constraint.complete:
            break
        constraint.accept(int(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0][0]))
    print(name, flush=True)
"""


@pytest.fixture
def patient() -> Iterator[GrammarProcesses]:
    """With as little stack, and more time than a busy machine takes."""
    processes = GrammarProcesses(seconds=120, stack_bytes=2**20)
    yield processes
    processes.close()


@pytest.fixture
def impatient() -> Iterator[GrammarProcesses]:
    processes = GrammarProcesses(seconds=2, stack_bytes=2**20)
    yield processes
    processes.close()


def test_an_engine_follows_the_longest_chains():
    """In a process of its own, which an overflow would end."""
    run = subprocess.run(
        [sys.executable, "-c", FOLLOW], input=json.dumps(LONGEST), capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout.splitlines()) == (0, list(LONGEST)), run.stderr


@pytest.mark.parametrize("fields", TOO_DEEP.values(), ids=TOO_DEEP)
def test_what_is_nested_too_deeply_is_refused(fields):
    kind = next(iter(fields))
    with pytest.raises(
        InvalidRequestError, match=f"^{kind} (cannot be enforced: |is malformed: |is nested more)"
    ) as caught:
        compile_grammar(StructuredOutputs(**fields))
    assert caught.value.param == kind and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("json", json.dumps(chained_objects(2_000)), "to compile it takes more than 1,048,576 bytes of stack"),
        ("grammar", lark_chain(8_000, '"x" r{next}'), "a chain of too many rules or \\$refs"),
        ("grammar", gbnf_chain(8_000), "a chain of too many rules or \\$refs"),
        ("grammar", PANICS, r"panic: assertion failed: grammar\.symbols\.len\(\) < u16::MAX as usize - 10$"),
    ],
)
def test_what_ends_the_compiler_is_refused_and_the_next_one_compiles(patient, kind, value, problem):
    check_refused(patient, kind, value, problem)


def test_what_takes_too_long_is_refused_and_the_next_one_compiles(impatient):
    check_refused(impatient, "json", json.dumps(SLOW), "takes more than 2 seconds of processor time to compile")


def check_refused(processes: GrammarProcesses, kind: str, value: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{kind} .*{problem}") as caught:
        processes.compile(kind, value)
    assert caught.value.param == kind
    assert processes.compile("regex", "a+")


def test_a_slow_grammar_holds_up_no_other(impatient):
    refused = []

    def compile_slowly() -> None:
        with pytest.raises(InvalidRequestError) as caught:
            impatient.compile("json", json.dumps(SLOW))
        refused.append(caught)

    slow = threading.Thread(target=compile_slowly)
    slow.start()
    assert impatient.compile("json", '{"type": "integer"}')
    assert slow.is_alive()
    slow.join()
    assert len(refused) == 1


def test_a_long_list_of_choices_is_followed_or_refused():
    assert compile_grammar(StructuredOutputs(choice=[f"word {i}" for i in range(5_000)]))
    with pytest.raises(InvalidRequestError, match=f"it may have {MAX_GRAMMAR_LENGTH}"):
        compile_grammar(StructuredOutputs(choice=[f"word {i}" for i in range(100_000)]))


def test_grammars_are_kept_by_their_size():
    cache = GrammarCache(10)
    cache.put(b"a", "12345")
    cache.put(b"b", "1234")
    assert cache.get(b"a") == "12345"
    cache.put(b"c", "12")  # for which the one used least recently makes room
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["12345", None, "12"]
    cache.put(b"d", "x" * 11)
    assert [cache.get(key) for key in (b"a", b"b", b"c", b"d")] == [None] * 4
    cache.put(b"a", "1234567890")
    assert cache.get(b"a") == "1234567890"
