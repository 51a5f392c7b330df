"""Inspect an installation of vLLM without importing it, which takes seconds and may need a GPU."""

from __future__ import annotations

from pathlib import Path

from arguments.sglang_install import fields_of

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes


def engine_fields(vllm: Path) -> set[str]:
    """Arguments of a server: of its engine and of its HTTP side; switches also with "no_"."""
    files = [vllm / "engine" / "arg_utils.py", vllm / "entrypoints" / "launchers" / "cli_args.py"]
    names = fields_of([file for file in files if file.is_file()])
    return names | {f"no_{name}" for name in names}
