"""slime-like convert hf-to-megatron ..., slime-like convert megatron-to-hf ..."""

from __future__ import annotations

import sys

from slime_like.cli.__main__ import Command, dispatch

DIRECTIONS = {
    "hf-to-megatron": Command(
        "slime_like.cli.convert_hf_to_megatron",
        "a Hugging Face folder to a checkpoint for --load, --ref-load and --critic-load",
    ),
    "megatron-to-hf": Command(
        "slime_like.cli.convert_megatron_to_hf", "a checkpoint of a run to a Hugging Face folder"
    ),
}


def main() -> int:
    return dispatch("slime-like convert", DIRECTIONS, sys.argv[1:])
