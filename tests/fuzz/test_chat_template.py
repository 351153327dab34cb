"""Chat templates: rendered in a process that can be stopped, or refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.text.template_process import MAX_PROMPT_CHARACTERS, TemplateProcesses
from tests.fuzz.harness import COUNTS, check_message, fuzz
from tests.fuzz.mutants import JUNK, pick

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c or [] %}{{ p['text'] }}{% endfor %}"
    "{% endif %}{%- endmacro %}{% for m in messages %}[{{ m['role'].upper() }}] {{ text(m.content) }}{% endfor %}",
    "{%- set ns = namespace(last=0, found=false) %}{% for m in messages[::-1] %}"
    "{% if not ns.found and m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.last * 2 }}"
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "{% for m in messages %}{% if m.tool_calls %}{% for t in m.tool_calls %}{{ t.function | tojson(indent=2) }}"
    "{% endfor %}{% else %}{{ m.content[:5] ~ '\\n' }}{% endif %}{% endfor %}{{ strftime_now('%Y') }}",
)
PIECES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ range(10**9) | list }}",
    "{% for i in range(100000) %}x{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'a' %}",
    "{{ 'a'.format(x) }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '%s' % messages }}",
    "{{ messages | map(attribute='x') }}",
    "{% set x = x | default('') ~ messages %}",
    "{% break %}",
    "{% generation %}",
    "{% endfor %}",
    "{% raw %}",
    "{# ",
    "{{",
    "}}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 1 / 0 }}",
    "{{ [][0] }}",
    "{{ {}['a'].b }}",
    "{{ x.y.z }}",
    "{{ messages | sort }}",
    "{{ messages | join | int + none }}",
    "{{ loop.index }}",
    "{{ 'é' | tojson }}",
    "\x00",
    "\ud800",
    "{{ (" + "(" * 200,
    "{% if 1 %}" * 30 + "{% endif %}" * 30,
    "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "{{ strftime_now('%' * 100) }}",
    "{{ raise_exception('two\nlines') }}",
    "{{ raise_exception(messages) }}",
    "{{ tools | length }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages | groupby('role') }}",
    "{{ dict(a=1) | dictsort }}",
)


@pytest.fixture(scope="module")
def process():
    process = TemplateProcesses()
    yield process
    process.close()


def mutate_template(rng: np.random.Generator, template: str) -> str:
    """One to three places are cut out, doubled, exchanged for characters, or have a piece put in."""
    for _ in range(pick(rng, 1, 1, 1, 2)):
        at, to = sorted(int(place) for place in rng.integers(len(template) + 1, size=2))
        to = min(to, at + 30)
        match rng.choice(["piece", "cut", "double", "noise", "word", "word"]):
            case "piece":
                template = template[:at] + pick(rng, *PIECES) + template[at:]
            case "cut":
                template = template[:at] + template[to:]
            case "double":
                template = template[:to] + template[at:]
            case "noise":
                template = template[:at] + pick(rng, *"{}%#|'\"()[].~-+*/\\ \n") + template[at + 1 :]
            case "word":
                words = ("messages", "role", "content", "tojson", "for", "if", "set", "macro", "0", "none")
                template = template.replace(pick(rng, *words), pick(rng, *words), 1)
    return template


@COUNTS
def test_a_template_renders_or_is_refused(count, process):
    def attempt(rng: np.random.Generator) -> None:
        strange = [{"role": pick(rng, *JUNK), "content": pick(rng, *JUNK)}] if rng.random() < 0.2 else []
        messages = [*MESSAGES, *strange]
        template = mutate_template(rng, pick(rng, *TEMPLATES))
        text = process.render({"template": template, "messages": messages, "bos_token": "<s>", "tools": None})
        assert isinstance(text, str) and len(text) <= MAX_PROMPT_CHARACTERS

    refused = fuzz(count, attempt)
    assert count / 4 < refused < count * 9 / 10


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__subclasses__() }}",
        "{{ messages | attr('__class__') | string | upper ~ x.y }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.name }}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_nothing_outside_is_reached(template, process):
    with pytest.raises(InvalidRequestError) as caught:
        process.render({"template": template, "messages": MESSAGES})
    check_message(str(caught.value))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ range(10**9) | list }}",
        "{{ 'x' * 10**10 }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ 'a' | center(10**10) }}",
        "{{ lipsum(10**9) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'aaaa' | replace('a', 'a' * 9999) | replace('a', 'a' * 9999) }}",
    ],
)
def test_a_template_without_end_is_stopped_and_the_next_one_renders(template):
    process = TemplateProcesses(seconds=2)
    before = sum(os.times()[2:4])
    with pytest.raises(InvalidRequestError) as caught:
        process.render({"template": template, "messages": MESSAGES})
    check_message(str(caught.value))
    assert sum(os.times()[2:4]) - before < 3, "processor seconds of processes that have ended"
    assert process.render({"template": "{{ messages[0].content }}", "messages": MESSAGES}) == "Be brief."
    process.close()


def test_messages_that_are_no_json(process):
    with pytest.raises(InvalidRequestError, match="messages are no JSON values"):
        process.render({"template": "", "messages": [{"role": "user", "content": object()}]})


def test_the_process_ends_with_its_owner():
    process = TemplateProcesses()
    process.render({"template": "", "messages": []})
    [child] = process.processes.processes
    assert child.poll() is None
    del process
    assert child.poll() is not None
