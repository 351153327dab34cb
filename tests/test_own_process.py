"""Processes of ours run a module of ours, and nothing of the program that started them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from jaxllm import own_process
from jaxllm.own_process import AskedProcesses, PipedProcess, command
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

PROGRAM = """
print("the program runs")
from jaxllm import LLM, SamplingParams

llm = LLM(
    {model!r}, engine_process=True, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=96,
    max_num_seqs=2, max_num_batched_tokens=32, kv_cache_memory="16MiB",
)
[output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids), "tokens")
"""
WORKER = """
from jaxllm.own_process import answer_questions

answer_questions(lambda asked: asked[::-1], 2**30)
"""


@pytest.mark.parametrize("way", ["file", "standard input"])
def test_a_program_without_a_main_guard_has_an_engine_process(tmp_path: Path, way: str) -> None:
    program = PROGRAM.format(model=str(write_checkpoint("llama_gqa", tmp_path)))
    script = tmp_path / "script.py"
    script.write_text(program)
    arguments, given = ([str(script)], None) if way == "file" else (["-"], program)
    ended = subprocess.run([sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines() == ["the program runs", "4 tokens"], ended.stderr


def test_a_file_of_the_working_directory_is_not_taken_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "struct.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    pool = AskedProcesses("tests.support.asked_worker")
    try:
        assert pool.ask(b"reverse abc", seconds=60) == b"cba"
    finally:
        pool.close()


def test_a_process_finds_what_the_program_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_of_a_test.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = AskedProcesses("worker_of_a_test")
    try:
        assert pool.ask(b"abc", seconds=60) == b"cba"
    finally:
        pool.close()


def test_a_process_has_the_flags_of_the_program() -> None:
    program = (
        "import subprocess; from jaxllm.own_process import command; subprocess.run(command('tests.support.flags'))"
    )
    said = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True)
    assert said.stdout == "2\n", said.stderr


def test_a_function_of_the_program_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "__module__", "__main__")
    with pytest.raises(ValueError, match="command must be a function of a module"):
        PipedProcess(command)  # type: ignore[arg-type]


def test_the_end_of_all_processes_takes_one_along_that_is_about_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    there, start = threading.Event(), own_process._start

    def slowly(*given: Any) -> Any:
        process = start(*given)
        there.set()
        time.sleep(0.5)  # it runs, and nobody knows of it
        return process

    monkeypatch.setattr(own_process, "_start", slowly)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(PipedProcess, wait_for_ever)
        assert there.wait(60)
        own_process.kill_all()
        assert starting.result(60).wait(20)


def wait_for_ever(pipe: Connection) -> None:
    while True:
        time.sleep(60)
