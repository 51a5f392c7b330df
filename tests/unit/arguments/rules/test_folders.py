"""Outputs do not take the place of what the run reads; a folder that cannot be written is refused at
the start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.command_lines import complete, parse_flags, problems_of, write_files

PPO = "--advantage-estimator ppo "
LORA = "--lora-rank 4 --transformer-impl local "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """hf, the same model as models/other, a checkpoint folder, foreign files, and an adapter."""
    write_files(tmp_path)
    shutil.copytree(tmp_path / "hf", tmp_path / "models" / "other")
    (tmp_path / "saved" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "output", "words"),
    [
        ("--save-hf {folder}/hf", "--save-hf", "would overwrite --hf-checkpoint"),
        ("--save-hf {folder}/hf/../hf/", "--save-hf", "would overwrite --hf-checkpoint"),
        ("--use-kl-loss --ref-load {folder}/models/other --save-hf {folder}/models/other",
         "--save-hf", "would overwrite --ref-load"),
        ("--use-kl-loss --ref-load {folder}/models/other --save-hf {folder}/models",
         "--save-hf", "would overwrite --ref-load"),
        (PPO + "--critic-load {folder}/models/other --save-hf {folder}/models/other",
         "--save-hf", "would overwrite --critic-load"),
        ("--load {folder}/models/other --save-hf {folder}/models/other",
         "--save-hf", "would overwrite --load"),
        ("--load {folder}/models/other --save {folder}/models/other",
         "--save", "would overwrite --load"),
        ("--load {folder}/saved --save-hf {folder}/saved", "--save-hf", "would overwrite --load"),
        (LORA + "--lora-save-path {folder}/hf", "--lora-save-path", "overwrite --hf-checkpoint"),
        ("--output-dir {folder}/hf", "--output-dir", "would overwrite --hf-checkpoint"),
        ("--save-hf {folder}/foreign", "--save-hf", "holds no Hugging Face model"),
        (LORA + "--lora-save-path {folder}/foreign", "--lora-save-path", "holds no adapter"),
    ],
)  # fmt: skip
def test_refused_at_the_start(folder: Path, flags: str, output: str, words: str) -> None:
    found = problems_of(complete(folder, *flags.replace("{folder}", str(folder)).split()))
    assert [p.flag for p in found] == [output] and words in str(found[0]), found


def test_the_number_of_the_last_rollout_is_part_of_the_folder(folder: Path) -> None:
    shutil.copytree(folder / "hf", folder / "out" / "2")
    flags = f"--use-kl-loss --ref-load {folder}/out/2 --save-hf {folder}/out/{{rollout_id}}"
    (found,) = problems_of(complete(folder, *flags.split()))
    assert found.flag == "--save-hf" and "would overwrite --ref-load" in str(found)


@pytest.mark.parametrize(
    "flags",
    [
        "--save {folder}/saved --load {folder}/saved --output-dir {folder}/saved",
        "--save-hf {folder}/models/other",  # of an earlier run
        "--save-hf {folder}/hf/next",
        "--output-dir {folder}",
        "--save-hf {folder}/out/{rollout_id}",
    ],
)
def test_accepted(folder: Path, flags: str) -> None:
    assert parse_flags(folder, flags)
