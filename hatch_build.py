"""Builds wheels that carry the compiled CPU kernels: hatchling, and a hook that compiles as a first start would.

`$JAXLLM_WHEEL_KERNELS` is `auto`, which leaves them out where they cannot be compiled and says why; `on`, which fails
there; or `off`. An editable install compiles nothing: its first start does.
"""

import importlib.util
import os
import platform
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling import build
from hatchling.build import *  # noqa: F403  what PEP 517 asks for beside get_requires_for_build_wheel
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
CHOICES = ("auto", "on", "off")


def _load_compiler() -> Any:
    """`jaxllm.cpu_kernels.compiler`, without what importing its package would need."""
    path = ROOT / "jaxllm/cpu_kernels/compiler.py"
    spec = importlib.util.spec_from_file_location("jaxllm_compiler", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiler = _load_compiler()


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """jaxlib as well, for its headers, where there is something to compile with."""
    try:
        _chosen_compiler()
    except compiler.BuildError:
        return build.get_requires_for_build_wheel(config_settings)
    return [*build.get_requires_for_build_wheel(config_settings), _jaxlib()]


def _chosen_compiler() -> str:
    choice = os.environ.get("JAXLLM_WHEEL_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"JAXLLM_WHEEL_KERNELS is {choice!r}; accepted are {', '.join(CHOICES)}")
    if choice == "off":
        raise compiler.BuildError("JAXLLM_WHEEL_KERNELS is off")
    if sys.platform != "linux":
        raise compiler.BuildError("they are packaged for Linux only")
    return compiler.find_compiler()


def _jaxlib() -> str:
    """The releases of jaxlib that the project takes."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(re.sub(r"^jax\b", "jaxlib", name) for name in dependencies if re.match(r"jax\b", name))


def _headers() -> Path:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None:
        raise compiler.BuildError(f"{_jaxlib()}, whose headers they need, is not installed beside hatchling")
    return Path(spec.submodule_search_locations[0]) / "include"


class KernelsHook(BuildHookInterface):
    """Compiles the kernels into a wheel of this platform, for every instruction set of its architecture."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        machine = platform.machine()
        self.work = tempfile.TemporaryDirectory()  # until the wheel is written
        library = Path(self.work.name) / compiler.LIBRARY
        try:
            compiler.compile_library(_chosen_compiler(), machine, _headers(), library)
        except compiler.BuildError as error:
            if os.environ.get("JAXLLM_WHEEL_KERNELS") == "on":
                raise
            self.app.display_warning(f"this wheel has no compiled CPU kernels: {error}")
            return
        inside = f"jaxllm/cpu_kernels/packaged/{compiler.sources_version(machine)}/{compiler.LIBRARY}"
        build_data["force_include"][str(library)] = inside
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{self.build_config.builder.get_best_matching_tag().split('-')[-1]}"
