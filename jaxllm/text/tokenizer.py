"""Text to token ids and back, and chats to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxllm.errors import CheckpointError, InvalidRequestError, one_line, rust_errors
from jaxllm.folders import cache_or_temporary, user_folder
from jaxllm.text.backend import (
    ADDED_TOKEN_FIELDS,
    TIKTOKEN_FILE,
    add_special_tokens,
    add_stated_tokens,
    cached_tiktoken_tokenizer,
    load_backend,
    named_extras,
    text_of,
)
from jaxllm.text.spellings import REPLACEMENT, piece_bytes
from jaxllm.text.template_process import TemplateProcesses
from jaxllm.weights.fields import FLAG, NULL, TEXT, FieldKind, FieldKinds, check_fields, either, many, shown
from jaxllm.weights.folder import EOS_FIELDS, gguf_models, model_file, read_generation_config, read_object, read_text

LONG_TEXT = 16 * 1024
"""Characters, or tokens, from which on other threads go on while the library works: only its batch calls let them."""
_SMOLLM3_TOOLS = "xml_tools"  # the only tools that SmolLM3's first template looks for; later ones take both
_CACHE_DIR = user_folder("XDG_CACHE_HOME", "~/.cache") / "tokenizers"
_NAMED_TEMPLATE = FieldKind(
    "an object with a name and a template",
    lambda value: isinstance(value, dict) and TEXT.fits(value.get("name")) and TEXT.fits(value.get("template")),
)
_TEMPLATE_FIELDS: FieldKinds = {"chat_template": either(TEXT, many(_NAMED_TEMPLATE, 64), NULL)}  # of chat_template.json
_CONFIG_FIELDS: FieldKinds = (  # of tokenizer_config.json
    ADDED_TOKEN_FIELDS | _TEMPLATE_FIELDS | {"add_bos_token": either(FLAG, NULL), "add_eos_token": either(FLAG, NULL)}
)


def _check_characters(text: str) -> None:
    """Raises InvalidRequestError where Python's text is none: it may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequestError(f"the text has {half}, half of a character, at position {error.start}") from None


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Attributes:
        backend: the `tokenizers` object, for incremental detokenization.
        vocab_size: ids are below it; the model's logits may be padded to more.
        bos_token_id: the beginning-of-sequence token, or None.
        eos_token_ids: the tokenizer's eos and generation_config's, without repeats.
        chat_template: the default Jinja template, or None.
        special_tokens: bos_token, eos_token, … as a template sees them.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special_tokens: dict[str, str], extra_eos_token_ids: Sequence[int] = (),
        templates: dict[str, str] | None = None,
    ):  # fmt: skip
        self.backend = backend
        self.special_tokens = special_tokens
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = list(dict.fromkeys([*([] if eos is None else [eos]), *extra_eos_token_ids]))
        self._templates = templates or {}
        self._template_processes = TemplateProcesses()
        self.chat_template = self._templates.get("default")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; a rendered chat goes to `encode_chat`. Raises InvalidRequestError where this fails."""
        _check_characters(text)
        with rust_errors(InvalidRequestError, "the tokenizer fails on this text: "):
            if len(text) < LONG_TEXT:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def exceeds(self, text: str, most: int) -> bool:
        """True where `text` surely has more than `most` tokens, found out without encoding much more than these.

        Slices are encoded by themselves, and each loses what a cut may add: the longest token and one more.
        """
        if len(text) <= max(most, LONG_TEXT):
            return False  # `encode` is no slower
        found = 0
        for start in range(0, len(text), LONG_TEXT):
            slice_tokens = len(self.encode(text[start : start + LONG_TEXT], add_special_tokens=False))
            found += max(slice_tokens - self._cut_slack, 0)
            if found > most:
                return True
        return False

    @cached_property
    def _cut_slack(self) -> int:
        return 1 + max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def encode_pair(self, text: str, other: str) -> tuple[list[int], int]:
        """Token ids of two texts as one input, as models that compare them were trained on.

        Also where the tokens of the second type begin, which encoders tell from the first; 0 where all are of one type.
        """
        _check_characters(text)
        _check_characters(other)
        with rust_errors(InvalidRequestError, "the tokenizer fails on this text: "):
            found = self.backend.encode(text, other)
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else 0

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat: special tokens are those in the text, and no second BOS is put before it."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no whole character become U+FFFD."""
        if len(ids) < LONG_TEXT:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """The text one token adds in mid-text: ' world' where decode([id]) alone may drop the leading space."""
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds in mid-text, which may be a part of a character.

        Worked example: b"\xc3" and b"\xa9" of a tokenizer that spells "é" in the byte tokens <0xC3> and <0xA9>.
        """
        text = self.token_text(token_id)
        part = piece_bytes(self.backend.id_to_token(token_id) or "") if REPLACEMENT in text else None
        return text.encode() if part is None else part

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, chat_template: str | None = None, **template_kwargs: Any,
    ) -> str:  # fmt: skip
        """Render a chat to the prompt text; encode it with `encode_chat`.

        `chat_template` is Jinja source, or the name of one of the checkpoint's templates; without it the checkpoint's
        default is used, or its `tool_use` template when `tools` are given. It is rendered in a process of its own.
        Raises InvalidRequestError when there is no template, it refuses the messages, it needs too much to render, or
        a message holds anything but text.
        """
        from jaxllm.text.chat_template import check_text, in_format  # they load jinja2

        check_text(messages)
        values = self.chat_template_values(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            chat_template=chat_template, **template_kwargs,
        )  # fmt: skip
        values["messages"] = in_format(values["messages"], values["template"])
        return self._template_processes.render(values)

    def chat_template_values(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, chat_template: str | None = None, **template_kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The arguments of `chat_template.render` for `apply_chat_template`, of checked messages; raises as it does."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        template_kwargs = {"tools": None, "documents": None, **template_kwargs}
        template = self._template(chat_template, with_tools=bool(template_kwargs["tools"]))
        if template_kwargs["tools"] and _SMOLLM3_TOOLS in template:
            template_kwargs.setdefault(_SMOLLM3_TOOLS, template_kwargs["tools"])
        return {
            **self.special_tokens,
            "template": template,
            "messages": messages,
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
            **template_kwargs,
        }

    def render(self, values: dict[str, Any], own: str | None = None) -> str:
        """The prompt of `chat_template_values`: a template of the checkpoint or `own` runs here, another in a process.

        Raises InvalidRequestError as `apply_chat_template` does.
        """
        if values["template"] != own and values["template"] not in self._templates.values():
            return self._template_processes.render(values)
        from jaxllm.text.chat_template import json_text, render  # it loads jinja2

        return render(**json.loads(json_text(values)))  # a sandboxed template gets plain values only

    def close(self) -> None:
        self._template_processes.close()

    def _template(self, wanted: str | None, with_tools: bool) -> str:
        if not isinstance(wanted, str | None):
            raise InvalidRequestError(f"chat_template is {one_line(wanted)}; it must be a text", param="chat_template")
        if wanted is not None:
            return self._templates.get(wanted, wanted)
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if self.chat_template is None:
            named = f" by default; it has templates named {', '.join(self._templates)}" if self._templates else ""
            raise InvalidRequestError(
                f"this model has no chat template{named}; use completions, or start with a chat_template",
                param="messages",
            )
        return self.chat_template


def load_tokenizer(path: Path, *, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint directory (with tokenizer.json, or Kimi's tiktoken.model) or of a .gguf file.

    Those of GGUF and tiktoken files are converted once and kept in `cache_dir` (default ~/.cache/jaxllm/tokenizers).
    Raises CheckpointError when there is no tokenizer, it is corrupt, or its kind is unknown.
    """
    path = tokenizer_directory(path, cache_dir=cache_dir)
    backend = load_backend(path)
    config = _read(path, "tokenizer_config.json", _CONFIG_FIELDS)
    special_tokens = _special_tokens(_read(path, "special_tokens_map.json")) | _special_tokens(config)
    special_tokens |= named_extras(config)
    rows = _embedding_rows(path)
    add_stated_tokens(path, backend, config, special_tokens, rows)
    _set_added_tokens(path, backend, config, special_tokens)
    add_special_tokens(path, backend, config, special_tokens, rows)
    eos, templates = _generation_eos(path), _templates(path, config)
    return Tokenizer(backend, special_tokens=special_tokens, extra_eos_token_ids=eos, templates=templates)


def tokenizer_directory(path: Path, *, cache_dir: Path | None = None) -> Path:
    """The directory with the tokenizer's files: `path` itself, or one with converted ones. Raises as above."""
    if path.is_dir() and not (path / "tokenizer.json").exists():
        if model_file(path, TIKTOKEN_FILE).exists():
            return cached_tiktoken_tokenizer(path, _kept(cache_dir))
        ggufs = gguf_models(path)
        if len(ggufs) != 1:
            raise CheckpointError(f"{path}: holds no tokenizer.json")
        path = model_file(path, ggufs[0].name)
    if not path.is_file():
        return path
    from jaxllm.text.gguf_tokenizer import cached_gguf_tokenizer

    return cached_gguf_tokenizer(path, _kept(cache_dir))


def _kept(cache_dir: Path | None) -> Path:
    return cache_or_temporary(cache_dir or _CACHE_DIR, "converted tokenizers", "set XDG_CACHE_HOME")


def has_chat_template(path: Path) -> bool:
    """True where the tokenizer of a folder or .gguf file has a default chat template. Raises as load_tokenizer does."""
    directory = tokenizer_directory(path)
    return "default" in _templates(directory, _read(directory, "tokenizer_config.json", _CONFIG_FIELDS))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {key: text_of(value) for key, value in config.items() if key.endswith("_token") and key[:4] != "add_"}
    return {key: value for key, value in named.items() if value is not None}


def _set_added_tokens(
    path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """add_bos_token and add_eos_token, where tokenizer_config.json states one, win over that end of tokenizer.json's.

    The other end stays as it is: Qwen3-Embedding states that no BOS is added, and ends a text by tokenizer.json alone.
    """
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    before, after = found = _added_tokens(path, backend)
    for name in ("bos_token", "eos_token"):
        stated, token = config.get(f"add_{name}"), special_tokens.get(name)
        if stated is None:
            continue
        if stated and token is not None and backend.token_to_id(token) is None:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: {name} is {shown(token)}, which is not in the vocabulary"
            )
        added = [token] if stated and token is not None else []
        before, after = (added, after) if name == "bos_token" else (before, added)
    if (before, after) != found:
        single = [*before, "$A", *after]
        other = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        with rust_errors(CheckpointError, f"{path / 'tokenizer_config.json'}: add_bos_token or add_eos_token: "):
            backend.post_processor = processors.TemplateProcessing(
                single=single,
                pair=single + other,
                special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
            )


def _added_tokens(path: Path, backend: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    with rust_errors(CheckpointError, f"{path / 'tokenizer.json'}: "):
        plain, full = (backend.encode("a", add_special_tokens=added).tokens for added in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), None)
    if start is None:
        raise CheckpointError(f"{path / 'tokenizer.json'}: its post_processor leaves out the text")
    return full[:start], full[start + len(plain) :]


def _generation_eos(path: Path) -> list[int]:
    """generation_config.json's eos_token_id, or config.json's where there is no generation_config.json."""
    has_own = model_file(path, "generation_config.json").exists()
    eos = (read_generation_config(path) if has_own else _read(path, "config.json", EOS_FIELDS)).get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _embedding_rows(path: Path) -> int | None:
    config = _read(path, "config.json")
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    return rows if type(rows) is int else None


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/*.jinja, over chat_template.json or else `config`."""
    stated = _read(path, "chat_template.json", _TEMPLATE_FIELDS).get("chat_template") or config.get("chat_template")
    if isinstance(stated, list):
        templates = {entry["name"]: entry["template"] for entry in stated}
    else:
        templates = {"default": stated} if stated else {}
    more = "additional_chat_templates"
    files = sorted(model_file(path, more).glob("*.jinja"))
    templates |= {file.stem: read_text(path, f"{more}/{file.name}") for file in files}
    if model_file(path, "chat_template.jinja").exists():
        templates["default"] = read_text(path, "chat_template.jinja")
    return templates


def _read(path: Path, name: str, kinds: FieldKinds | None = None) -> dict[str, Any]:
    if not model_file(path, name).exists():
        return {}
    given = read_object(path, name)
    check_fields(given, kinds or {}, f"{path / name}: ")
    return given
