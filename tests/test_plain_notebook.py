"""A notebook without ipywidgets: what takes long says nothing but how far it is."""

from __future__ import annotations

from importlib.util import find_spec

import nbformat
import pytest
from nbclient import NotebookClient

LOADS = """
import time
from jaxllm.progress import progress_bar

with progress_bar("Loading") as on_progress:
    on_progress(1, 2)
    time.sleep(0.3)
"""
GENERATES = """
from contextlib import nullcontext
from jaxllm.engine.doors.streams import Stream

class Empty(nullcontext):
    def __iter__(self):
        return iter(())

Stream.drive(Empty(), lambda sequence, delta: True, 3, True)
"""


@pytest.mark.skipif(find_spec("ipywidgets") is not None, reason="ipywidgets is installed")
def test_bars_warn_of_nothing() -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in (LOADS, GENERATES)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120).execute()
    written = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "Requests" in written and "Warn" not in written, written
