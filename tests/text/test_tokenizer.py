import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from jaxllm.errors import CheckpointError, InvalidRequestError
from jaxllm.text.template_process import TemplateProcesses
from jaxllm.text.tokenizer import Tokenizer as JaxLLMTokenizer
from jaxllm.text.tokenizer import has_chat_template, load_tokenizer
from tests.weights.models import real_model

TEXTS = [
    "Hello world",
    "  two  spaces,\n\n\ttabs and\r\nlines  ",
    "I'll we've O'NEIL's 12345 3.14159 x=f(y)[0];",
    "Grüße aus Köln, Привет мир, مرحبا بالعالم, नमस्ते दुनिया",
    "你好，世界。こんにちは 안녕하세요",
    "🤖👩‍👩‍👧‍👦🏳️‍🌈 é vs e\u0301 ½ ² ①",
    "",
]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
GO_ON = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="session")
def smollm2(cache):
    return load_tokenizer(real_model("smollm2-135m"), cache_dir=cache)


@pytest.fixture(scope="session")
def gemma3(cache):
    return load_tokenizer(real_model("gemma3-270m"), cache_dir=cache)


@pytest.fixture(params=["smollm2", "gemma3"])
def real(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(real, text):
    assert real.decode(real.encode(text)) == text


def test_known_ids(smollm2, gemma3):
    assert smollm2.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, [2], 49152)
    assert gemma3.encode("Hello world") == [2, 9259, 1902]
    assert gemma3.encode("<end_of_turn>", add_special_tokens=False) == [106]
    assert (gemma3.bos_token_id, gemma3.eos_token_ids, gemma3.vocab_size) == (2, [1], 262144)


def test_smollm2_splits_as_its_published_tokenizer_does(smollm2):
    """The published tokenizer.json: Digits(individual), then ByteLevel with GPT-2's regex."""
    oracle = Tokenizer.from_str(smollm2.backend.to_str())
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert smollm2.encode(text) == oracle.encode(text).ids, text


def test_gemma_bos_is_added_once(gemma3):
    assert gemma3.encode("a").count(2) == 1
    assert gemma3.encode_chat("<bos>a") == gemma3.encode("a")


def test_token_text_keeps_leading_spaces(real):
    for text in ("Hello world, again", "<|im_end|> x"):
        assert "".join(map(real.token_text, real.encode(text, add_special_tokens=False))) == text


SPELLED_IN_BYTES = "Zoë says: 你好 𓀀𓂀 🤖👩‍👩‍👧‍👦, ½\n\tጀ end"


def test_the_bytes_of_tokens_join_to_the_text(real):
    """SmolLM2 is byte-level BPE, Gemma SentencePiece with byte tokens; both have some of these only as parts."""
    parts = [real.token_bytes(token) for token in real.encode(SPELLED_IN_BYTES, add_special_tokens=False)]
    assert b"".join(parts) == SPELLED_IN_BYTES.encode()
    assert any(b"\xef\xbf\xbd" in real.token_text(token).encode() for token in real.encode(SPELLED_IN_BYTES))


@pytest.mark.parametrize("wrap", [lambda decoder: decoder, lambda decoder: decoders.Sequence([decoder])])
def test_bytes_of_a_tokenizer_json(wrap):
    """Byte-level as Hugging Face writes it, where an added token may have letters that are bytes elsewhere."""
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = wrap(decoders.ByteLevel())
    backend.add_tokens(["<é�>"])
    tokenizer = JaxLLMTokenizer(backend, special_tokens={})
    text = "é 世 <é�> �"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_the_second_load_comes_from_the_cache(smollm2, cache, monkeypatch):
    monkeypatch.setattr("jaxllm.text.gguf_tokenizer.write_gguf_tokenizer", lambda *args: pytest.fail("built again"))
    again = load_tokenizer(real_model("smollm2-135m"), cache_dir=cache)
    assert again.encode(TEXTS[2]) == smollm2.encode(TEXTS[2])


def test_smollm2_chat(smollm2):
    text = smollm2.apply_chat_template([{"role": "system", "content": "Be brief."}, *HI])
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode_chat(text)[0] == 1


def test_a_base_model_has_no_chat(gemma3):
    assert gemma3.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        gemma3.apply_chat_template(HI)
    assert gemma3.apply_chat_template(HI, chat_template="{{ messages[0].content }}") == "hi"


# GGUF files of our own


def write_gguf(
    path, *, tokens, types, model="gpt2", pre="smollm", architecture="llama", merges=None, scores=None, numbers=None,
    **more,
):  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    if scores:
        writer.add_token_scores(scores)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    for key, value in (numbers or {}).items():
        writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path, specials=("<s>", "</s>"), **more):
    tokens = [*BYTES, "ab", "abc", *specials]
    types = [1] * (len(BYTES) + 2) + [3] * len(specials)
    return write_gguf(path, tokens=tokens, types=types, merges=["a b", "ab c"], **more)


@pytest.mark.parametrize(
    "pre",
    [
        "llama-bpe",
        "falcon3",
        "qwen2",
        "hunyuan",
        "qwen35",
        "tekken",
        "gpt-4o",
        "minimax-m2",
        "gpt-2",
        "smollm",
        "deepseek-v3",
        "glm4",
    ],
)
def test_every_split_keeps_the_text(tmp_path, pre):
    tokenizer = load_tokenizer(byte_level_gguf(tmp_path / "x.gguf", pre=pre), cache_dir=tmp_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", " see", " ", "123", "45", " —\n\n", " x"]),
        ("qwen2", ["I", "'LL", " see", " ", "1", "2", "3", "4", "5", " —\n\n", " x"]),
        ("gpt-2", ["I", "'", "LL", " see", " 12345", " —", "\n\n", " x"]),
        ("exaone4", ["I", "'", "LL", " see", " 12345", " —", "\n\n", " x"]),
        ("seed-coder", ["I", "'LL", " see", " ", "1", "2", "3", "4", "5", " —", "\n\n", " x"]),
        ("hunyuan-dense", ["I", "'LL", " see", " ", "123", "45", " —\n\n", " x"]),
        ("smollm", ["I", "'", "LL", " see", " ", "1", "2", "3", "4", "5", " —", "\n\n", " x"]),
    ],
)
def test_splits(tmp_path, pre, pieces):
    tokenizer = load_tokenizer(byte_level_gguf(tmp_path / "x.gguf", pre=pre), cache_dir=tmp_path)
    text = "I'LL see 12345 —\n\n x"
    found = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == pieces


def test_marks_belong_to_the_words_of_qwen_3_5(tmp_path):
    """As the expression of transformers' own tokenizer has them; in Qwen 2's a mark ends a word."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    text = "हिन्दी स्वागत  I'LL see 12345 —\n\n x é\u0301.\u0301\r\n"
    exact = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated").pre_tokenize_str(text)
    pieces = {}
    for pre in ("qwen35", "qwen2"):
        tokenizer = load_tokenizer(byte_level_gguf(tmp_path / f"{pre}.gguf", pre=pre), cache_dir=tmp_path)
        pieces[pre] = [span for _, span in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces["qwen35"] == [span for _, span in exact] != pieces["qwen2"]


def test_an_unknown_split_is_refused(tmp_path):
    for pre in ("my-own-bpe", None):
        with pytest.raises(CheckpointError, match=rf"tokenizer.ggml.pre is {pre!r}; supported are .*llama-bpe.*smollm"):
            load_tokenizer(byte_level_gguf(tmp_path / "x.gguf", pre=pre), cache_dir=tmp_path)
    assert not list(tmp_path.glob("*/"))


def test_an_unknown_model_and_none_at_all_are_refused(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"tokenizer\.ggml\.model is 'rwkv'; supported are 'gpt2', 'llama', 'gemma4', 'bert' and 't5'",
    ):
        load_tokenizer(byte_level_gguf(tmp_path / "x.gguf", model="rwkv"), cache_dir=tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "bare.gguf", cache_dir=tmp_path)


def test_end_of_turn_tokens_are_eos_too(tmp_path):
    specials = ("<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>")
    first = len(BYTES) + 2
    path = byte_level_gguf(
        tmp_path / "x.gguf", specials, bos_token_id=first, eos_token_id=first + 1, eot_token_id=first + 2,
        chat_template="{{ messages }}<|im_end|>",
    )  # fmt: skip
    assert load_tokenizer(path, cache_dir=tmp_path).eos_token_ids == [first + 1, first + 2, first + 3]


def test_bos_follows_the_metadata_and_the_split(tmp_path):
    first = len(BYTES) + 2
    for number, (pre, flag, expected) in enumerate(
        [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)]
    ):
        more = {} if flag is None else {"add_bos_token": flag}
        path = byte_level_gguf(tmp_path / f"{number}.gguf", pre=pre, bos_token_id=first, **more)
        ids = load_tokenizer(path, cache_dir=tmp_path).encode("abc")
        assert ids == [first] * expected + [len(BYTES) + 1]


def test_sentencepiece_with_byte_fallback_and_space_prefix(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    types = [2, 3, 3, *[6] * 256, *[1] * 6]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -3.0, -1.0, -2.0]
    more = dict(tokens=tokens, types=types, scores=scores, model="llama", pre="default", bos_token_id=1, eos_token_id=2)
    plain = load_tokenizer(write_gguf(tmp_path / "x.gguf", **more), cache_dir=tmp_path)
    pieces = [plain.backend.id_to_token(token) for token in plain.encode("ab a é")]
    assert pieces == ["<s>", "▁ab", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert plain.decode(plain.encode("ab a é")) == "ab a é"
    assert plain.token_text(plain.backend.token_to_id("▁ab")) == " ab"
    bare = load_tokenizer(write_gguf(tmp_path / "y.gguf", add_space_prefix=False, **more), cache_dir=tmp_path)
    assert [bare.backend.id_to_token(token) for token in bare.encode("ab a")] == ["<s>", "ab", "▁a"]


def test_gemma_4_merges_as_listed_and_never_past_newlines(tmp_path):
    """As llama.cpp: spaces are written ▁, runs of newlines stand by themselves, other characters are bytes."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "\n", "▁a", "ab", "▁ab", "\n\n", "a\n", "<turn|>"]
    types = [3, 3, 3, 2, *[6] * 256, *[1] * 9, 3]
    merges = ["a \n", "a b", "▁ ab", "▁ a", "\n \n"]
    path = write_gguf(
        tmp_path / "x.gguf", tokens=tokens, types=types, merges=merges, model="gemma4", pre=None,
        architecture="gemma4", bos_token_id=2, eos_token_id=1, unk_token_id=3, chat_template="{{ messages }}<turn|>",
    )  # fmt: skip
    tokenizer = load_tokenizer(path, cache_dir=tmp_path)
    pieces = [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(" ab a\n\n\n aé")]
    assert pieces == ["<bos>", "▁ab", "▁a", "\n\n", "\n", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" ab a\n\n\n aé")) == " ab a\n\n\n aé"
    assert tokenizer.eos_token_ids == [1, len(tokens) - 1]


# Hugging Face directories


def write_directory(path, tokenizer_config=None, **files):
    vocabulary = {token: index for index, token in enumerate([*BYTES, "<s>", "</s>", "<|im_start|>", "<|im_end|>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(3)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_special_tokens_in_both_spellings(tmp_path):
    path = write_directory(
        tmp_path, {"eos_token": {"content": "</s>", "lstrip": False}}, special_tokens_map={"bos_token": "<s>"}
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, [257])
    assert len(tokenizer.encode("long enough text")) == 17  # no truncation, one BOS


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"generation_config": {"eos_token_id": [259, 257]}, "config": {"eos_token_id": 1}}, [257, 259]),
        ({"generation_config": {"eos_token_id": 259}}, [257, 259]),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, [257]),
        ({"config": {"eos_token_id": 259}}, [257, 259]),
    ],
)
def test_generation_config_adds_eos(tmp_path, files, eos):
    assert load_tokenizer(write_directory(tmp_path, {"eos_token": "</s>"}, **files)).eos_token_ids == eos


@pytest.mark.parametrize(
    ("template", "flags", "ids"),
    [
        ("$A </s>", {"bos_token": None, "add_bos_token": False}, "a</s>"),
        ("<s> $A", {"add_eos_token": True}, "<s>a</s>"),
        ("<s> $A </s>", {"add_eos_token": False}, "<s>a"),
    ],
    ids=["Qwen3-Embedding", "e5-mistral", "without eos"],
)
def test_only_the_end_that_is_stated_is_replaced(tmp_path, template, flags, ids):
    path = write_directory(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", **flags})
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    specials = [("<s>", 256), ("</s>", 257)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    backend.save(str(path / "tokenizer.json"))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == ids


def test_a_pair_is_one_input(tmp_path):
    tokenizer = load_tokenizer(
        write_directory(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True})
    )
    pair = tokenizer.decode(tokenizer.encode_pair("a", "b")[0], skip_special_tokens=False)
    assert pair == "<s>a</s><s>b</s>"  # as transformers writes its templates for two texts


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [256, 64]), ({"add_bos_token": False}, [64]), ({"add_bos_token": True}, [256, 64]),
        ({"add_bos_token": True, "add_eos_token": True}, [256, 64, 257]), ({"add_bos_token": None}, [256, 64]),
    ],
)  # fmt: skip
def test_stated_bos_and_eos_win(tmp_path, flags, ids):
    path = write_directory(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", **flags})
    ids = [BYTES.index("a") if token == 64 else token for token in ids]
    assert load_tokenizer(path).encode("a") == ids


def test_chat_template_sources(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template(HI) == "D"
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "T1"
    assert tokenizer.apply_chat_template(HI, chat_template="tool_use", tools=[]) == "T0"
    (tmp_path / "chat_template.jinja").write_text("J{{ extra }}")
    assert load_tokenizer(tmp_path).apply_chat_template(HI, extra=5) == "J5"
    write_directory(tmp_path, {"chat_template": named[1:]})
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "P"}')
    assert has_chat_template(tmp_path)
    assert load_tokenizer(tmp_path).apply_chat_template(HI) == "P"
    (tmp_path / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template is 5"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(InvalidRequestError, match="it has templates named tool_use"):
        load_tokenizer(tmp_path).apply_chat_template(HI)


def test_smollm3s_first_template_gets_tools_by_the_name_that_it_knows(tmp_path):
    named = "{%- if xml_tools -%}{%- for tool in xml_tools[:] -%}{{ tool.name }}{%- endfor -%}{%- endif -%}."
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template(HI) == "."
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "get_time"}]) == "get_time."
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "a"}], xml_tools=[{"name": "b"}]) == "b."


def test_rendered_bos_is_not_doubled(tmp_path):
    tokenizer = load_tokenizer(write_directory(tmp_path, {"bos_token": "<s>", "chat_template": TEMPLATE}))
    text = tokenizer.apply_chat_template(HI)
    assert text.startswith("<s><|im_start|>user")
    assert tokenizer.encode_chat(text).count(256) == 1


def test_templates_render_as_transformers_renders_them():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    from jaxllm.text.chat_template import render

    template = """
    {%- for m in messages %}
        {%- if loop.index0 == 3 %}{% break %}{% endif %}
        {% generation %}{{ m.content | trim }}{% endgeneration %}
      {{ {"a": "<ü>", "b": [1, none]} | tojson }} {{ tools | tojson(indent=2) }}
        {%- set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }} {{ strftime_now("%Y") }}
    {% endfor %}
    {%- if documents is none %}none{% endif %}"""
    messages = [{"role": "user", "content": f" {n} "} for n in range(5)]
    tools = [{"name": "f", "parameters": {"é": 1}}]
    expected, _ = utils.render_jinja_template([messages], tools=tools, chat_template=template)
    assert render(template, messages, tools=tools, documents=None, add_generation_prompt=False) == expected[0]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("m.content", "m.content | trim")])
@pytest.mark.parametrize("content", ["Sure, ", "  Sure", "Sure"])
def test_continue_final_message_is_transformers_s(tmp_path, template, content):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokenizer = load_tokenizer(write_directory(tmp_path, {"bos_token": "<s>", "chat_template": template}))
    messages = [*HI, {"role": "assistant", "content": content}]
    expected, _ = utils.render_jinja_template(
        [messages], chat_template=template, continue_final_message=True, bos_token="<s>"
    )
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == expected[0]
    assert messages[-1]["content"] == content
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        tokenizer.apply_chat_template(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses these messages: Roles must alternate"),
        ("{% if %}", "invalid at line 1"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages[7].content.x }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_the_requests_error(tmp_path, template, message):
    tokenizer = load_tokenizer(write_directory(tmp_path))
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template(HI, chat_template=template)


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        (HI, {"chat_template": 5}, "chat_template is 5; it must be a text"),
        ([{"role": "user", "content": None}], GO_ON, "a last message whose content is text"),
    ],
)
def test_what_a_template_cannot_get_is_refused(tmp_path, messages, arguments, message):
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": "{{ messages }}"}))
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template(messages, **arguments)


EACH_PART = "{% for part in m['content'] %}{{ part.text }}/{% endfor %}"


def parts(*given):
    return [*HI, {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *given]}]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (
            parts({"type": "image_url", "image_url": {"url": "data:,"}}),
            r"messages\[1\].content\[1\] has type 'image_url'; ",
        ),
        (parts({"type": "input_audio", "input_audio": {}}), r"messages\[1\].content\[1\] has type 'input_audio'; "),
        (parts({"image": "cat.png"}), r"messages\[1\].content\[1\] has type None; "),
        (parts({"type": "text", "text": "", "image": "cat.png"}), r"messages\[1\].content\[1\] has 'image'; "),
        (parts({"type": "text"}), r"messages\[1\].content\[1\] has no text; "),
        (parts("cat.png"), r"messages\[1\].content\[1\] is 'cat.png'; "),
        ([{"role": "tool", "content": {"type": "image", "data": "x"}}], r"messages\[0\].content has type 'image'; "),
        (
            [{"role": "user", "content": {"type": "text", "text": "Hi"}}],
            r"messages\[0\].content is a part without a list",
        ),
        ([{"role": "user", "content": b"Hi"}], r"messages\[0\].content is "),
        ([{"role": "user", "content": "Hi", "images": ["x"]}], r"messages\[0\].images is not available"),
        (["Hi"], r"messages\[0\] is 'Hi'; it must be an object"),
    ],
)
@pytest.mark.parametrize(
    "template", [TEMPLATE, "{% for m in messages %}{{ m.content[0].text }}{% endfor %}", "left out"]
)
def test_what_is_no_text_is_refused_by_name_whatever_the_template_makes_of_it(tmp_path, template, messages, named):
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": template}))
    with pytest.raises(InvalidRequestError, match=f"^{named}"):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "hi|What is this?\nA cat|"),
        (f"{{% for m in messages %}}{EACH_PART}|{{% endfor %}}", "hi/|What is this?/A cat/|"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            f"{EACH_PART}{{% endif %}}|{{% endfor %}}",
            "hi|What is this?/A cat/|",
        ),
    ],
)
def test_texts_reach_the_prompt_however_the_template_reads_contents(tmp_path, template, rendered):
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": template}))
    assert tokenizer.apply_chat_template(parts({"type": "text", "text": "A cat", "image": None})) == rendered


def test_a_checkpoints_template_that_never_ends_is_stopped(tmp_path, monkeypatch):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": endless}))
    monkeypatch.setattr(tokenizer, "_template_processes", TemplateProcesses(seconds=2))
    with pytest.raises(
        InvalidRequestError, match="the chat template needs more than 2 seconds of processor time to render"
    ):
        tokenizer.apply_chat_template(HI)
    tokenizer.close()


def test_broken_directories(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not readable as JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_gemma3_encodes_as_transformers_conversion_does(gemma3):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from jaxllm.weights.gguf_file import read_header

    metadata = read_header(real_model("gemma3-270m"), skip=()).metadata
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    oracle, _ = mapping.convert_gguf_tokenizer("gemma3", fields)
    for text in [*TEXTS, "<table>\n\n\n     x <unused5> <end_of_turn>", Path(__file__).read_text(encoding="utf-8")]:
        assert gemma3.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False).ids


def test_half_of_a_character_is_named(tmp_path):
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": "{{ messages[0].content }}"}))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_pair("a", text)):
        with pytest.raises(InvalidRequestError, match=r"^the text has U\+D83D, half of a character, at position 2$"):
            encode("hi\ud83d")
