"""Tables show every value whole and as it is, on a terminal and in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxllm.cli
from jaxllm.cli.main import main
from jaxllm.cli.terminal import print_table

ID = "resp_887b9f33a56d4ca59185a97a2513d7ac"


def test_a_value_is_on_one_line_where_programs_read_it(capsys):
    print_table(("id", "models"), [(ID, "/srv/" + "m" * 200)])
    row = next(line for line in capsys.readouterr().out.splitlines() if ID in line)
    assert "/srv/" + "m" * 200 in row


def test_a_value_goes_on_in_the_next_line_of_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    print_table(("id", "what"), [(ID, "x" * 60)])
    printed = capsys.readouterr().out
    assert "…" not in printed and printed.count("x") == 60


def test_brackets_are_no_markup(capsys):
    print_table(("name [b]", ""), [("/models/[/red]/a", "[bold]x")], title="Plan for [/i]")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("name [b]", "/models/[/red]/a", "[bold]x", "Plan for [/i]"))


def test_a_model_in_a_folder_with_brackets_is_shown(capsys, monkeypatch):
    monkeypatch.setattr("jaxllm.cli.models.describe", lambda config: {"path": "/models/a [/red]/m"})
    with pytest.raises(SystemExit) as ended:
        main(["show", "smollm2-135m"])
    assert not ended.value.code and "/models/a [/red]/m" in capsys.readouterr().out


def test_every_table_is_printed_in_this_way():
    files = Path(jaxllm.cli.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "from rich.table import" in file.read_text()] == ["terminal.py"]
