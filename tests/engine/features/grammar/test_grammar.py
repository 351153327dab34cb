"""Requests with a grammar among requests without: what they give, and that nobody else notices."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxllm import SamplingParams
from jaxllm.engine.features.grammar.grammar import Grammars
from jaxllm.errors import InvalidRequestError
from jaxllm.requests import structured_outputs
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.text.reasoning import REASONING_FORMATS
from tests.engine.real_vocabulary import llm_with_real_vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "nickname": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["nickname", "age", "favourite_colours"],
    "additionalProperties": False,
}
PROMPTS = [f"{i}. Describe {name} in JSON:" for i, name in enumerate(("Bob", "a wolf", "Ada Lovelace", "the sea"))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with llm_with_real_vocabulary(tmp_path_factory.mktemp("llama"), eos_token_id=2) as llm:
        yield llm


def params(**more) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 96, "temperature": 0} | more)


def texts(outputs) -> list[str]:
    return [choice.text for output in outputs for choice in output.outputs]


def test_outputs_match_and_batch_mates_stay_what_they_are(llm):
    """Greedy and sampled, with logprobs and penalties, four choices at once; preempted, with a stream beside them."""
    schema = StructuredOutputs(json=SCHEMA)
    asked = [
        params(structured_outputs=schema),
        params(structured_outputs=schema, temperature=1.0, seed=5, n=4),
        params(structured_outputs=schema, temperature=1.0, seed=6, logprobs=2, repetition_penalty=1.1),
        params(max_tokens=40),
    ]
    alone = [llm.generate(p, a, use_tqdm=False)[0] for p, a in zip(PROMPTS, asked, strict=True)]
    before = llm.stats().num_preemptions
    together = llm.generate(PROMPTS, asked, use_tqdm=False)
    assert llm.stats().num_preemptions > before
    assert texts(alone) == texts(together)
    for output in together[:3]:
        for choice in output.outputs:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert len(together[2].outputs[0].logprobs) == len(together[2].outputs[0].token_ids)
    assert llm.stats().num_free_pages == llm.stats().num_pages


def test_fast_forwarded_tokens_are_those_that_sampling_would_have_chosen(llm):
    """Log-probabilities turn fast-forwarding off; with and without it the text is the same, in fewer steps with it."""
    schema = StructuredOutputs(json=SCHEMA)
    steps = []
    found = []
    for more in ({}, {"logprobs": 0}):
        before = llm.stats().num_steps
        found.append(llm.generate(PROMPTS[0], params(structured_outputs=schema, **more), use_tqdm=False)[0].outputs[0])
        steps.append(llm.stats().num_steps - before)
    assert found[0].text == found[1].text
    assert steps[0] < steps[1]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_regex_choice_and_grammar(llm, temperature):
    regex = r"\d{4}-[01]\d-[0-3]\d( \w+)?"
    choices = ("yes", "no", "I could not say")
    asked = [
        params(structured_outputs=StructuredOutputs(regex=regex), temperature=temperature, seed=1),
        params(structured_outputs=StructuredOutputs(choice=choices), temperature=temperature, seed=2),
        params(structured_outputs=StructuredOutputs(grammar='root ::= "a" ("b" | "c")+ "d"'), max_tokens=96),
        params(structured_outputs=StructuredOutputs(json_object=True), temperature=temperature, seed=3, max_tokens=150),
    ]
    date, choice, gbnf, obj = texts(llm.generate(PROMPTS, asked, use_tqdm=False))
    assert re.fullmatch(regex, date, re.ASCII)
    assert choice in choices
    assert re.fullmatch("a[bc]+d", gbnf) or re.fullmatch("a[bc]+", gbnf)
    assert obj.startswith("{")


def test_the_grammar_begins_behind_a_marker(llm):
    """Anything may come before the marker; here the prompt's own continuation brings it."""
    prompt = "one two three four, one two three four, one two three four, one two"
    free = llm.generate(prompt, params(max_tokens=12), use_tqdm=False)[0].outputs[0].text
    marker = free.split()[1]
    outputs = StructuredOutputs(choice=("[yes]", "[no]"), after=marker)
    text = llm.generate(prompt, params(structured_outputs=outputs), use_tqdm=False)[0].outputs[0].text
    head, marker_found, tail = text.partition(marker)
    assert free.startswith(head + marker_found) and tail in ("[yes]", "[no]", ",[yes]", ",[no]")


def test_an_answer_that_does_not_open_with_the_marker_is_constrained_from_its_first_token(llm):
    """The opening is one token here, which a bias keeps away in the first request and brings about in the second."""
    outputs = StructuredOutputs(choice=("[yes]", "[no]"), openings=("<|im_start|>",), after="<|im_end|>")
    opening = llm.tokenizer.encode("<|im_start|>", False)[0]
    closing = llm.tokenizer.encode("<|im_end|>", False)[0]
    asked = params(structured_outputs=outputs, logit_bias={opening: -100})
    assert llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0].text in ("[yes]", "[no]")
    asked = params(
        structured_outputs=outputs, logit_bias={opening: 100, closing: 90}, frequency_penalty=2, ignore_eos=True,
        skip_special_tokens=False, max_tokens=90, presence_penalty=2,
    )  # fmt: skip
    text = llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0].text
    assert text.startswith("<|im_start|>")
    assert "<|im_end|>" not in text or text.endswith(("[yes]", "[no]"))


OPENS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{% if enable_thinking is false %}</think>\n{% endif %}"
)


def test_a_chat_is_constrained_behind_the_reasoning_that_its_prompt_opens(llm):
    asked = params(structured_outputs=StructuredOutputs(choice=("[yes]", "[no]")), max_tokens=32)
    hello = [{"role": "user", "content": "Is it so?"}]

    def answer(**variables) -> str:
        outputs = llm.chat(hello, asked, False, chat_template=OPENS, chat_template_kwargs=variables)
        return outputs[0].outputs[0].text

    thought, closing, text = answer().partition("</think>")
    assert thought and closing and text.strip() in ("[yes]", "[no]")
    assert answer(enable_thinking=False) in ("[yes]", "[no]")


@pytest.mark.parametrize("known", REASONING_FORMATS, ids=lambda known: known.name)
def test_a_model_that_does_not_reason_is_constrained_whatever_the_marks(llm, known):
    """Most marks are several tokens of this vocabulary."""
    after = known.answer or known.close
    outputs = StructuredOutputs(json=SCHEMA, openings=known.openings, after=after)
    first = llm.tokenizer.encode(known.open, False)[0]
    asked = params(structured_outputs=outputs, logit_bias={first: -100})
    jsonschema.validate(json.loads(texts(llm.generate(PROMPTS[0], asked, use_tqdm=False))[0]), SCHEMA)


@pytest.mark.parametrize("known", REASONING_FORMATS, ids=lambda known: known.name)
def test_reasoning_may_come_first_whole(llm, known):
    """The grammar may share the beginning of the marks."""
    backend = llm.tokenizer.backend
    grammars = Grammars(backend, 49152, [0, 2])
    after = known.answer or known.close
    choices = (f"{known.open[:1]}yes", f"{known.open[:1]}no")
    constraint = grammars.build(StructuredOutputs(choice=choices, openings=known.openings, after=after))
    reasoning = known.open + "I think,\n" + known.close + known.answer
    mask = np.empty((1, 49152 // 32), np.int32)

    def allows(token):
        grammars.fill([constraint], mask)
        return bool(mask[0].view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)

    for token in backend.encode(reasoning, add_special_tokens=False).ids:
        assert allows(token) and not allows(0) and not allows(2), backend.decode([token])
        constraint.accept(token)
    assert not allows(backend.encode("a").ids[0])
    for token in backend.encode(choices[1], add_special_tokens=False).ids:
        assert not constraint.complete and allows(token)
        constraint.accept(token)
    assert constraint.complete


def test_what_follows_the_closing_mark_in_its_last_token_is_constrained_too(llm):
    """In this vocabulary `">` is one token, so that a mark that ends with `"` may end inside one."""
    backend = llm.tokenizer.backend
    token = backend.token_to_id('">')
    for choices, allowed in (((">yes", ">no"), True), (("yes", "no"), False)):
        constraint = Grammars(backend, 49152, [0, 2]).build(StructuredOutputs(choice=choices, after='"'))
        assert not constraint.active
        if not allowed:
            with pytest.raises(InvalidRequestError, match=r"begins the answer with '>', which the constraint does not"):
                constraint.accept(token)
            continue
        constraint.accept(token)
        for rest in backend.encode("no", add_special_tokens=False).ids:
            constraint.accept(rest)
        assert constraint.complete


def test_an_answer_cannot_end_inside_its_reasoning(llm):
    """A model that would rather stop there thinks on, up to max_tokens, and says so."""
    outputs = StructuredOutputs(choice=("[yes]", "[no]"), after="<|im_start|>")
    closing = llm.tokenizer.encode("<|im_start|>", False)[0]
    asked = params(structured_outputs=outputs, logit_bias={2: 100, closing: -100})
    assert llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_stop_strings_and_min_tokens_go_with_a_grammar(llm):
    asked = params(structured_outputs=StructuredOutputs(regex="[ab]{3}END[ab]{3}"), stop="END")
    choice = llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch("[ab]{3}", choice.text) and choice.stop_reason == "END"
    asked = params(structured_outputs=StructuredOutputs(regex="[ab]{2,30}"), min_tokens=6, max_tokens=30)
    choice = llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0]
    assert len(choice.token_ids) >= 6 and re.fullmatch("[ab]*", choice.text)


def test_what_no_token_can_satisfy_fails_alone(llm):
    """The grammar wants letters, allowed_token_ids leaves none of them."""
    impossible = params(
        structured_outputs=StructuredOutputs(regex="[a-z]+"), allowed_token_ids=[llm.tokenizer.encode("7")[0]]
    )
    with pytest.raises(InvalidRequestError, match=r"grammar .*allowed_token_ids"):
        llm.generate(PROMPTS[0], impossible, use_tqdm=False)
    assert llm.generate(PROMPTS[0], params(max_tokens=3), use_tqdm=False)[0].outputs[0].finish_reason == "length"


TEXTS = {"type": "string"}
WIDE = {f"column_{i}": TEXTS for i in range(1000)}
EVENTS = [{"type": "object", "properties": {f"event_{i}_{k}": TEXTS for k in range(5)}} for i in range(300)]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": WIDE}, {"column_0": "a", "column_500": "b", "column_999": "c"}),
        ({"anyOf": EVENTS}, {"event_299_0": "a", "event_299_4": "b"}),
    ],
    ids=["1,000 optional properties", "anyOf of 300 objects"],
)
def test_wide_schemas_are_followed(llm, schema, value):
    """One character after the other: as many places as possible at which a mask is filled."""
    backend = llm.tokenizer.backend
    grammars = Grammars(backend, 49152, [0, 2])
    constraint = grammars.build(StructuredOutputs(json=schema))
    mask = np.empty((1, 49152 // 32), np.int32)
    for character in json.dumps(value):
        assert not constraint.complete
        grammars.fill([constraint], mask)
        constraint.accept(backend.encode(character, add_special_tokens=False).ids[0])
    assert constraint.complete
    constraint.check()


def test_a_grammar_that_gives_up_in_the_middle_is_an_error_and_no_end(llm, monkeypatch):
    """It would allow the answer's end, and nothing else; the schema's beginning leaves no choice."""
    monkeypatch.setattr(structured_outputs, "MAX_ITEMS_PER_MASK", 50_000, raising=False)
    row = {"type": "object", "properties": WIDE}
    schema = {"type": "object", "properties": {"note": {"const": "abc " * 12}, "row": row}, "required": ["note", "row"]}
    asked = params(structured_outputs=StructuredOutputs(json=schema))
    with pytest.raises(InvalidRequestError, match=r"the grammar failed: .*Too many items \(limit \d+; [^<]*$"):
        llm.generate(PROMPTS[0], asked, use_tqdm=False)
    assert llm.generate(PROMPTS[0], params(max_tokens=3), use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_grammar_that_gives_up_at_once_is_refused_before_the_first_token(llm, monkeypatch):
    monkeypatch.setattr(structured_outputs, "MAX_ITEMS_PER_MASK", 50_000, raising=False)
    with pytest.raises(InvalidRequestError, match="Too many items"):
        Grammars(llm.tokenizer.backend, 49152, [0, 2]).build(
            StructuredOutputs(json={"type": "object", "properties": WIDE})
        )


ENDLESS = {
    "at once": "start: a\na: b\nb: a",
    "later": 'start: "x"~20 a\na: b\nb: a',
    "in one alternative": "root ::= [x]{20} a\na ::= b\nb ::= a",
    "to itself": 'start: "x" a\na: "y" a',
    "to itself later": 'start: "x" /[a-z]/~20 a\na: "y" a',
    "to itself in GBNF": 'root ::= [a-z]{20} a\na ::= "y" b\nb ::= "z" a',
}


@pytest.mark.parametrize("name", ENDLESS)
def test_rules_that_never_end_are_said_to_in_one_line(llm, name):
    asked = params(structured_outputs=StructuredOutputs(grammar=ENDLESS[name]), max_tokens=1000)
    with pytest.raises(
        InvalidRequestError, match=r"\bgrammar( cannot be enforced|: the grammar failed): it accepts no text"
    ) as error:
        llm.generate(PROMPTS[0], asked, use_tqdm=False)
    assert "\n" not in str(error.value) and "<" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json": {"not": {"type": "string"}}}, 'json cannot be enforced: Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": '{"type": '}, "json is malformed"),
        ({"json": '{"type":"array","items":' * 3000 + "{}" + "}" * 3000}, "json"),
        ({"regex": "(a"}, "regex cannot be enforced"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g>"]}}, "<f>"),
        ({"choice": ()}, "choice"),
        ({"choice": ("a", "")}, "choice"),
        ({}, "nothing is set"),
        ({"json": "{}", "regex": "a"}, "json and regex are set"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name(llm, fields, said):
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as refused:
        llm.generate("a", params(structured_outputs=StructuredOutputs(**fields)), use_tqdm=False)
    assert "\n" not in str(refused.value)


def test_a_grammar_that_explodes_does_not_hold_up_the_others(llm):
    """It fails or it does not: the stream beside it ends either way."""
    wild = params(structured_outputs=StructuredOutputs(regex="((a|b|ab)*c){0,400}(x+x+)+y"), max_tokens=8)
    beside = llm.generate(PROMPTS[1], params(max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids
    llm.generate([PROMPTS[0], PROMPTS[1]], [wild, params(max_tokens=8)], use_tqdm=False)
    assert llm.generate(PROMPTS[1], params(max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids == beside


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_random_schemas_are_followed(llm, count):
    """Small schemas drawn at random, sampled at temperature 1: each output is valid."""
    rng = np.random.default_rng(7)
    schemas = [random_schema(rng, depth=2) for _ in range(count)]
    asked = [
        params(structured_outputs=StructuredOutputs(json=s), temperature=1.0, seed=i, max_tokens=160)
        for i, s in enumerate(schemas)
    ]
    outputs = llm.generate([f"Some JSON, number {i}:" for i in range(count)], asked, use_tqdm=False)
    ended = [(o.outputs[0], s) for o, s in zip(outputs, schemas, strict=True) if o.outputs[0].finish_reason == "stop"]
    assert len(ended) >= 0.8 * count  # the others ran into max_tokens, inside a number or a long list
    for choice, schema in ended:
        jsonschema.validate(json.loads(choice.text), schema)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_choices_and_regexes_are_followed(llm):
    rng = np.random.default_rng(8)
    words = ["alpha", "beta ", "ga,mma", 'de"lta', "e\\n", "äö", "你好", "zeta"]
    pieces = [r"[a-f]{1,4}", r"\d{2,3}", "(yes|no)", r"x*y", r"\w\.", "é?", r"[^\s]", r"( |-)"]
    asked, checks = [], []
    for i in range(200):
        if i % 2:
            chosen = tuple(rng.choice(words, 3, replace=False).tolist())
            outputs, check = StructuredOutputs(choice=chosen), chosen.__contains__
        else:
            regex = "".join(rng.choice(pieces, rng.integers(1, 6)))
            outputs, check = StructuredOutputs(regex=regex), re.compile(regex, re.ASCII).fullmatch
        asked.append(params(structured_outputs=outputs, temperature=1.0, seed=i, max_tokens=100))
        checks.append(check)
    found = llm.generate([f"Number {i}:" for i in range(200)], asked, use_tqdm=False)
    for output, check, request in zip(found, checks, asked, strict=True):
        if output.outputs[0].finish_reason == "stop":
            assert check(output.outputs[0].text), (request.structured_outputs, output.outputs[0].text)
    assert sum(output.outputs[0].finish_reason == "stop" for output in found) >= 180


def random_schema(rng: np.random.Generator, depth: int) -> dict:
    kinds = ["string", "integer", "number", "boolean", "enum", "null"] + ["object", "array"] * 2 * (depth > 0)
    match kinds[rng.integers(len(kinds))]:
        case "object":
            names = ["id", "title", "size", "tags"][: rng.integers(1, 5)]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": 1,
                "maxItems": int(rng.integers(1, 4)),
            }
        case "string":
            return {"type": "string", "minLength": int(rng.integers(0, 3)), "maxLength": int(rng.integers(3, 12))}
        case "integer":
            low = int(rng.integers(-50, 50))
            return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 1000))}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1}
        case "enum":
            return {"enum": ["red", 3, None, "gr\u00fcn", True][: rng.integers(1, 6)]}
        case kind:
            return {"type": kind}


def test_a_model_without_an_end_of_sequence_token_refuses_grammars_alone():
    """Which end by that token. Reading the vocabulary in good time, as every engine does, must not fail for it."""
    backend = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    grammars = Grammars(backend, 2, [])
    grammars.prepare()
    with pytest.raises(InvalidRequestError, match="names no end-of-sequence token"):
        grammars.build(StructuredOutputs(regex="a"))
