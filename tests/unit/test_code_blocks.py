"""Every block of code in the documents is run, or read by what reads it. The blocks of the Chinese
pages are those of the English ones (test_docs.py); command lines of train.py, slime-like and the
server are parsed in scripts/test_example_command_lines.py, those of examples/extend run in the end-to-end
tests."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arguments.eval_sets import eval_sets_of
from arguments.parse import parse_args
from arguments.prompt_mix import prompt_sources_of
from slime_like.metrics.logger import MetricsLogger
from slime_like.metrics.trackers.base import trackers
from slime_like.tinker.loss_graph import LossGraph, check_graph
from slime_like.weights.families import olmo
from tests.unit.scripts.test_example_command_lines import FIRST_RUNS, PAGES, ROOT, demo_files

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page, language, text, f"{page.relative_to(ROOT)}:{i}")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for i, (language, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


NEEDED = ["--hf-checkpoint", "outputs/demo-sapo-tp2/sft/hf", "--prompt-data", "outputs/demo-sapo-tp2/train.jsonl", "--input-key", "messages", "--label-key", "answer", "--apply-chat-template", "--num-rollout", "1", "--lr", "1e-3", "--rm-type", "exact_match"]  # fmt: skip


def blocks(language: str) -> list[Any]:
    found = [
        pytest.param(page, text, id=where) for page, lang, text, where in BLOCKS if lang == language
    ]
    assert found
    return found


def test_languages_are_those_that_are_checked_here() -> None:
    """`text` and nothing are pictures and what programs print; console is in test_docs.py."""
    assert {language for _, language, _, _ in BLOCKS} == {
        "bash",
        "console",
        "python",
        "text",
        "yaml",
        "",
    }


@pytest.mark.parametrize(("page", "text"), blocks("bash"))
def test_shell(page: Path, text: str) -> None:
    """It is the shell's grammar, and make's targets and the scripts that it starts are there."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in text.replace("\\\n", " ").splitlines():
        words = [w for w in re.sub(r"\s#.*", "", line).split() if not re.match(r"\w+=", w)]
        if words[:1] == ["make"]:
            assert {w for w in words[1:] if not w.startswith("-")} <= targets, line
        scripts = re.findall(
            r"(?<![\w/])((?:scripts|examples|benchmarks)/[\w/.-]+\.(?:py|sh|sbatch))", line
        )
        assert not [s for s in scripts if not (ROOT / s).is_file()], line


def uploaded(loss: Any, ranks: Any) -> Any:
    """What the server accepts of a page's custom loss."""
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    handle = trace_loss(loss, ranks, "s")
    nodes = tuple(node.model_dump() for node in encode_graph(handle).nodes)
    check_graph(LossGraph("l", tuple((each.name, each.rank) for each in handle.inputs), nodes))
    return SimpleNamespace(result=lambda: handle)


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python(page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(text, str(page), "exec")
    names: dict[str, Any] = {"__name__": "of_a_page"}
    if page.name == "extend.md":
        return  # test_extend_guide.py: files that the end-to-end tests run
    if "tinker.ServiceClient" in text:
        pytest.importorskip("tinker")
        code = compile("import tinker\ntinker.ServiceClient", str(page), "exec")  # no server here
    if "outputs/demo-sapo-tp2/rl" in text:
        with MetricsLogger(tmp_path / "outputs/demo-sapo-tp2/rl") as logger:
            for step in range(1, 5):
                logger.log(
                    step,
                    {
                        f"perf/{n}_s": 1.0
                        for n in ["generate", "log_probs", "train", "sync", "step"]
                    },
                )
    if page.name == "policy_losses.md" and text.startswith("from slime_like.losses import compute"):
        (alone,) = [t for p, lang, t, _ in BLOCKS if p == FIRST_RUNS and "compute_advantages" in t]
        exec(compile(alone, "alone", "exec"), names)
        names |= {"loss_mask": names["mask"], "old_log_probs": names["old"]}
        names |= {
            n: names["per_token"](names[n[5:] if n == "loss_weights" else n])
            for n in ("advantages", "loss_weights")
        }
    if page.name == "add_a_family.md":  # an excerpt of that module
        names = dict(vars(olmo), POST_NORM_PARAMETERS=None)
    if "create_custom_loss" in text:
        pytest.importorskip("tinker")
        names |= {"torch": torch, "client": SimpleNamespace(create_custom_loss=uploaded)}
        names |= {"data": [], "training": SimpleNamespace(forward_backward_custom=lambda *_: None)}
    before = set(trackers.names())
    exec(code, names)
    if page.name == "add_a_family.md":
        assert names["POST_NORM_PARAMETERS"] == olmo.POST_NORM_PARAMETERS
    for name in set(trackers.names()) - before:
        trackers.remove(name)
    if "reward" in names and page.name in ("README.md", "first_runs.md"):
        sample = SimpleNamespace(response="tac", label="tab")
        assert names["reward"](None, sample) == 2 / 3


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml(page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file, with what it lacks on the command line; or a file of evaluation sets, or of the
    sources of a mix."""
    demo_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    is_run = "datasets:" not in text and "sources:" not in text
    config = parse_args([*(["--config", "run.yaml"] if is_run else []), *NEEDED], 1)
    assert config.rollout.num_rollout == 1, "the command line wins"
    if "sources:" in text:
        sources, problems = prompt_sources_of(replace(config.data, prompt_data="run.yaml"))
        assert not problems and [s.name for s in sources] == ["easy", "hard", "chat"]
    if "datasets:" in text:
        for folder in ("data/gsm8k", "data/math-500"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "test.jsonl").write_text("")
        sets, problems = eval_sets_of(replace(config.eval, eval_config="run.yaml"))
        assert not problems
        assert [s.name for s in sets] in (["aime", "easy"], ["gsm8k", "bare"])
