"""What programs say before they train, serve or convert: what they are doing, and what is wrong with
the tokenizer of the model's folder, before the model is built."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace
from tests.e2e.programs import TrainServer

STARTS = re.compile(r"^start +\d+\.\d s: (.*)$", re.MULTILINE)
WEIGHTS = ("config.json", "generation_config.json", "model.safetensors")
REMEDY = "copy the model's tokenizer files into it"


def model_without_tokenizer(work: Workspace, folder: Path, kind: str) -> Path:
    """missing: no file of it; settings alone: no vocabulary; unreadable: damaged."""
    shutil.copytree(work.model, folder)
    if kind == "unreadable":
        (folder / "tokenizer.json").write_text('{"model": 3}')
        return folder
    kept = (*WEIGHTS, "tokenizer_config.json") if kind == "settings alone" else WEIGHTS
    for file in folder.iterdir():
        if file.name not in kept:
            file.unlink()
    return folder


@pytest.mark.parametrize("kind", ["missing", "settings alone", "unreadable"])
def test_a_tokenizer_that_cannot_be_used_is_named_before_the_model_is_built(
    server: TrainServer, work: Workspace, tmp_path: Path, kind: str
) -> None:
    """By train.py and the Tinker server as an error; by the conversions, which do not need it, as a
    warning."""
    model = model_without_tokenizer(work, tmp_path / "model", kind)
    words = "its tokenizer cannot be loaded" if kind == "unreadable" else "there is no tokenizer"
    wanted = f"--hf-checkpoint {model}: {words}"

    flags = work.flags(tmp_path / "out", hf_checkpoint=model)
    error = server.train(flags, tmp_path / "train").error()
    assert wanted in error and REMEDY in error

    flags = ["--hf-checkpoint", str(model), "--server-dir", str(tmp_path / "server")]
    done = server.run("slime_like.tinker.__main__", flags, tmp_path / "serve")
    assert wanted in done.error() and REMEDY in done.error()
    assert STARTS.findall(done.out)[-1].startswith("importing transformers, loading the tokenizer")

    root = tmp_path / "ck"
    to_megatron = ("--hf-checkpoint", model, "--save", root, "--no-progress")
    to_hf = ("--load", root, "--hf-checkpoint", model, "--output", tmp_path / "hf", "--no-progress")
    for program, argv in (("hf_to_megatron", to_megatron), ("megatron_to_hf", to_hf)):
        done = server.run(f"scripts.convert_{program}", argv, tmp_path / program).ok()
        (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
        assert wanted in warning and REMEDY in warning and "converted without it" in warning


def test_a_whole_tokenizer_is_worth_no_word(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    argv = ("--hf-checkpoint", work.model, "--save", tmp_path / "ck", "--no-progress")
    done = server.run("scripts.convert_hf_to_megatron", argv, tmp_path / "log").ok()
    assert "tokenizer" not in done.err


def test_the_server_says_what_it_is_doing_until_it_serves(api: Any) -> None:
    log = api.log()
    assert STARTS.findall(log)[:3] == [
        "reading the command line, importing torch and megatron-core",
        "importing transformers, loading the tokenizer and the base model",
        "starting the API process",
    ]
    assert log.index("starting the API process") < log.index(f"http://127.0.0.1:{api.port}")
