"""Files among the parts of messages, told to the model as text; pdfium takes one thread, so a process reads them."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.own_process import AskedProcesses, Died, TimedOut, answer_questions

MAX_FILES, MAX_BYTES, MAX_PAGES, MAX_CHARACTERS, SECONDS = 100, 32 * 2**20, 2000, 2 * 2**20, 20.0
_OWN = {"file", "source", "title", "context", "file_data", "file_id", "file_url", "filename", "detail"}
_processes = AskedProcesses("jaxllm.serving.http.documents")


def text_of(data: bytes) -> str:
    """A text's own, or a PDF's page by page; blocks. Raises InvalidRequestError, whose subject is the file."""
    try:
        problem, text = json.loads(_processes.ask(data, processor_seconds=SECONDS))
    except (TimedOut, Died):
        problem = f"takes more than {SECONDS:g} seconds, or too much memory, to read"
    if problem:
        raise InvalidRequestError(problem)
    return str(text)


def _read(data: bytes) -> tuple[str, str]:
    """The problem and the text, one of which is empty. Pictures of pages, for models that see, would be made here."""
    if not data or len(data) > MAX_BYTES:
        return f"is empty, or larger than {MAX_BYTES} bytes", ""
    try:
        if b"%PDF-" not in data[:1024]:
            return "", data.decode("utf-8-sig")
        from pypdfium2 import PdfDocument, PdfiumError

        document = PdfDocument(data)
        texts = [document[at].get_textpage().get_text_range() for at in range(min(len(document), MAX_PAGES))]
    except UnicodeDecodeError:
        return "is neither a PDF nor text in UTF-8", ""
    except ImportError:
        return "is a PDF, which the server can read once it has pypdfium2: pip install 'jaxllm[pdf]'", ""
    except PdfiumError as error:
        return "is encrypted and needs a password" if "assword" in str(error) else "is a damaged PDF", ""
    if len(document) > MAX_PAGES or sum(map(len, texts)) > MAX_CHARACTERS:
        return f"has more than {MAX_PAGES} pages or {MAX_CHARACTERS} characters", ""
    pages = "\n\n".join(f"[Page {at}]\n{text.strip()}" for at, text in enumerate(texts, 1) if text.strip())
    return "" if pages else "has no text: its pages are pictures, such as scans", pages.replace("\r\n", "\n")


def file_parts(value: Any, *path: str | int) -> Iterator[tuple[dict[str, Any], Field]]:
    """The files in a body's messages or items, with their places."""
    if type(value) is list:  # of parts: token ids have a type of their own
        for at, one in enumerate(value):
            yield from file_parts(one, *path, at)
    elif isinstance(value, dict) and value.get("type") in ("file", "input_file", "document"):
        yield value, Field(*path)
    elif isinstance(value, dict):
        for name in ("content", "output") if path else ("messages", "input", "items"):
            yield from file_parts(value.get(name), *path, name)


async def tell(files: Any, owner: str | None, part: dict[str, Any], place: Field) -> None:
    """Make a part the text of its file. Raises InvalidRequestError, and APIError 404 for an id that `files` lack."""
    inner = part.get("source" if part["type"] == "document" else "file")
    sent: Any = part | inner if isinstance(inner, dict) else part
    name, data = sent.get("filename") or sent.get("title"), sent.get("file_data", sent.get("data"))
    try:
        if isinstance(file_id := sent.get("file_id"), str):
            file, path = await files.located(file_id, owner)
            name, fits = name or file.filename, file.bytes <= MAX_BYTES
            data = await asyncio.to_thread(path.read_bytes) if fits else b""
        elif not isinstance(data, str):
            raise InvalidRequestError("has neither file_data nor file_id; files at other addresses are not fetched")
        elif sent["type"] != "text":
            data = await asyncio.to_thread(b64decode, data.rpartition(",")[2], validate=True)
        text = data if isinstance(data, str) else await asyncio.to_thread(text_of, data)
    except (InvalidRequestError, ValueError) as error:
        problem = error if isinstance(error, InvalidRequestError) else "is no base64"
        raise InvalidRequestError([place, f" {problem}"]) from None
    told = f"{sent.get('context') or ''}\n{name or 'document'}:\n{text}".lstrip()
    for key in _OWN & part.keys():
        del part[key]
    part |= {"type": "input_text" if part["type"] == "input_file" else "text", "text": told}


if __name__ == "__main__":
    answer_questions(lambda data: json.dumps(_read(data)).encode(), 2**30, idle_seconds=60)
