"""A chosen tenth of the tests on every Python of this machine, with the newest and the oldest versions that we allow.

    python tests/support/versions.py                  # each Python with the newest versions, then the oldest so
    python tests/support/versions.py 3.12 oldest      # these alone
    python tests/support/versions.py --newest-python  # the newest that we support, or else this one; `make` takes it

Pythons are looked for on PATH and among pyenv's. Each gets an environment of its own in .venv-versions; the tests are
those of CHOSEN. Any Python can run this file: it needs nothing but the standard library.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-versions"
OLDEST = "oldest"
"""Names the oldest Python that is here, with the lowest versions that pyproject.toml allows."""

CHOSEN: dict[str, tuple[str, ...]] = {
    "cpu_kernels/test_attention.py": ("test_matches_oracle",),
    "cpu_kernels/test_products.py": ("test_products", "test_mlp", "test_grouped_matmul"),
    "cpu_kernels/test_quantized_pages.py": (
        "test_matches_oracle",
        "test_heads_divided_over_devices_give_the_same_bits",
    ),
    "engine/core/test_batch.py": ("test_a_mixed_step_of_a_decode_and_chunks",),
    "engine/core/test_compiled_step.py": ("test_donated_pages_are_not_copied",),
    "engine/core/test_saved.py": ("test_a_loaded_step_does_what_the_compiled_one_did",),
    "engine/features/grammar/test_grammar.py": ("test_outputs_match_and_batch_mates_stay_what_they_are",),
    "looking/test_looking.py": ("test_a_profile_is_read_as_it_was_written",),
    "mcp/test_server.py": ("test_tools_are_listed_and_called_over_every_transport",),
    "models/test_encoders.py": ("test_a_text_alone",),
    "models/test_gpu_kernels.py": ("test_float32_says_what_transformers_says",),
    "models/test_parity.py": ("test_greedy_decoding_after_the_prompt",),
    "pallas_kernels/gpu/test_attention.py": ("test_matches_oracle", "test_lowers_for_cuda"),
    "pallas_kernels/gpu/test_block_scaled.py": ("test_few_rows", "test_tiles_of_each_groups_rows"),
    "pallas_kernels/gpu/test_experts.py": ("test_routing", "test_experts_are_the_dense_mixture"),
    "pallas_kernels/gpu/test_int8.py": (
        "test_inputs_are_rounded_as_in_plain_xla",
        "test_sums_of_integers",
        "test_tiles_of_each_groups_rows",
    ),
    "pallas_kernels/gpu/test_latent.py": ("test_queries_are_absorbed_and_latents_stored", "test_values_are_expanded"),
    "pallas_kernels/gpu/test_matmul.py": (
        "test_every_kind_with_a_kernel_is_expanded_right",
        "test_one_matrix",
        "test_few_rows",
        "test_few_rows_of_each_group",
        "test_lowers_for_cuda_without_expanding_weights",
    ),
    "pallas_kernels/gpu/test_ordered.py": ("test_inputs_are_brought_into_the_columns_order",),
    "pallas_kernels/test_causal_conv.py": ("test_each_token_sees_those_before_it",),
    "pallas_kernels/test_delta_rule.py": ("test_tokens_read_what_those_before_them_wrote",),
    "pallas_kernels/test_grouped_matmul.py": ("test_edges", "test_lowers_for_every_platform"),
    "pallas_kernels/test_packed_attention.py": ("test_each_text_attends_to_itself",),
    "pallas_kernels/test_reference.py": ("test_matches_oracle",),
    "pallas_kernels/test_ssd.py": ("test_tokens_read_what_those_before_them_left",),
    "pallas_kernels/test_tpu_attention.py": ("test_matches_oracle",),
    "quantization/test_products.py": ("test_rows_are_those_of_the_expansion", "test_experts"),
    "serving/anthropic/test_messages.py": ("test_create",),
    "test_compat.py": (
        "test_a_private_name_is_where_it_was",
        "test_what_comes_out_of_xlas_cache_is_not_saved",
        "test_a_compiler_option_that_xla_does_not_know_is_left_out_and_said_once",
        "test_every_setting_that_we_make_our_own_is_one_of_jax",
    ),
    "test_cpu_kernels.py": (
        "test_prompts_are_as_likely_as_transformers_finds_them",
        "test_a_greedy_token_is_the_same_with_and_without_scores",
    ),
    "test_examples.py": ("test_openai_client", "test_notebook"),
    "test_folders.py": ("test_an_engine_runs_where_no_cache_can_be_written",),
    "test_goldens.py": (
        "test_greedy_tokens",
        "test_prompt_logprobs",
        "test_text_is_tokenized_as_the_reference_tokenizes_it",
    ),
    "test_jax_settings.py": ("test_a_program_that_has_told_jax_otherwise_gets_the_same_tokens",),
    "test_llm.py": (
        "test_one_prompt_and_many_and_dicts",
        "test_what_cannot_be_honoured_is_refused",
        "test_inside_a_running_event_loop",
        "test_a_forked_process_is_told_that_the_engine_is_elsewhere",
    ),
    "test_saved_start.py": (
        "test_the_second_start_compiles_nothing",
        "test_executables_that_are_made_ahead_start_an_engine_that_keeps_nothing",
    ),
    "tpu/test_lowered.py": (
        "test_a_step_attends_through_jaxs_kernel_over_pages_in_place",
        "test_a_step_with_experts_multiplies_by_the_compilers_own_grouped_product",
    ),
    "weights/test_saved.py": ("test_a_model_comes_back_as_it_was",),
}
"""By file under tests/, the tests that look at what differs between versions."""

_ASK = "import ensurepip, platform, venv; print(platform.python_implementation(), platform.python_version())"


def supported() -> list[str]:
    """The Pythons that pyproject.toml names, oldest first: '3.11', …"""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def interpreters() -> dict[str, Path]:
    """By version, oldest first, the CPythons of this machine that run and can make environments."""
    found = {version: _interpreter(version) for version in supported()}
    return {version: path for version, path in found.items() if path is not None}


def newest_python() -> Path:
    """Starts no more Pythons than it has to, which somebody waits for."""
    return next(filter(None, map(_interpreter, reversed(supported()))), Path(sys.executable))


def _interpreter(version: str) -> Path | None:
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")  # both work without a home directory
    own = glob.glob(os.path.join(root, "versions", f"{version}.*", "bin", f"python{version}"))
    # What its shims start, slowly and only if that version is active, is among these.
    shims = os.path.join(root, "shims")
    on_path = [part for part in os.get_exec_path() if os.path.realpath(part) != os.path.realpath(shims)]
    candidates = [Path(part, f"python{version}") for part in on_path] + [
        Path(path) for path in sorted(own, reverse=True)
    ]
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        candidates.append(Path(sys.executable))
    return next((path for path in candidates if _runs(path, version)), None)


def _runs(path: Path, version: str) -> bool:
    """Whether it is that Python, and can make environments."""
    if not os.access(path, os.X_OK):
        return False
    asked = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.startswith(f"CPython {version}.")


def prepare(name: str, python: Path) -> Path:
    """An environment with this checkout installed into it as its tests need it; returns its Python."""
    directory = ENVIRONMENTS / name
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--allow-existing", "--seed", "--python", python, directory], check=True)
    resolution = ["--resolution", "lowest-direct"] if name == OLDEST else ["--upgrade"]
    inside = directory / "bin" / "python"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", inside, *resolution, "--editable", f"{ROOT}[dev]"], check=True
    )
    return inside


def main(arguments: Sequence[str]) -> int:
    """0 if all passed, 1 if some failed, 2 for a name that means nothing here."""
    if list(arguments) == ["--newest-python"]:
        print(newest_python())
        return 0
    here = interpreters()
    if not here:
        print(f"no Python {', '.join(supported())} was found on PATH or among pyenv's", file=sys.stderr)
        return 2
    known = {**here, OLDEST: next(iter(here.values()))}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        print(f"{unknown[0]} is not here; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in arguments or known:
        inside = prepare(name, known[name])
        print(f"== {name}: {_versions(inside)}", flush=True)
        chosen = [f"tests/{file}::{test}" for file, tests in CHOSEN.items() for test in tests]
        tests = [inside, "-m", "pytest", "-n", "3", "--dist", "worksteal", "-m", "not thorough", *chosen]
        if name == OLDEST:  # whose libraries themselves call what has been deprecated since
            tests += ["-W", "default::DeprecationWarning"]
        if subprocess.run(tests, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"== {'failed: ' + ', '.join(failed) if failed else 'all passed'}")
    return int(bool(failed))


def _versions(python: Path) -> str:
    program = (
        "import platform; from importlib.metadata import version; print('Python', platform.python_version(), "
        "*(f'{name} {version(name)}' for name in ('jax', 'flax', 'numpy', 'transformers')), sep=', ')"
    )
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
