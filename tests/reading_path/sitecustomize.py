"""Python imports this at the start of every process that finds it on its path: it notes which code of jaxllm runs.

The folder that FILES_RUN names starts and ends that: from when there is a file `begin` in it until there is one `end`.
The process then writes the files of which it ran a function to a file named by its number. Python 3.12 or newer.
"""

import importlib.util
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType


def _note(folder: Path) -> None:
    seen: set[str] = set()
    monitoring = sys.monitoring
    package = os.path.dirname(importlib.util.find_spec("jaxllm").origin)  # type: ignore[union-attr, type-var]

    def begins(code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(str(package)) and code.co_name != "<module>":
            seen.add(code.co_filename)
        return monitoring.DISABLE

    tool = monitoring.PROFILER_ID
    monitoring.use_tool_id(tool, "files")
    monitoring.register_callback(tool, monitoring.events.PY_START, begins)
    while not (folder / "begin").exists():
        time.sleep(0.01)
    monitoring.set_events(tool, monitoring.events.PY_START)
    (folder / f"{os.getpid()}.ready").touch()
    while not (folder / "end").exists():
        time.sleep(0.01)
    monitoring.set_events(tool, 0)
    written = folder / f"{os.getpid()}.part"
    written.write_text("\n".join(sorted(seen)))
    written.rename(written.with_suffix(".files"))


if "FILES_RUN" in os.environ:
    threading.Thread(target=_note, args=(Path(os.environ["FILES_RUN"]),), daemon=True).start()
