"""What a process can tell of itself while it runs: where its threads are, what holds its memory, what its devices do.

Nothing here imports JAX before it is asked for what JAX knows.
"""

from typing import Literal

What = Literal["profile", "python_heap", "device_heap", "stacks", "trace"]
"""What a process can be asked for; see look.py."""
