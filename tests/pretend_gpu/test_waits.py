"""A budget of waits: the host may stop the device where waits.json says so, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parity.models import make_model
from benchmarks.parity.ranks import run_ranks
from megatron_patches.patch import release
from scripts.make_tiny_model import make_tiny_model
from slime_like.losses.registry import policy_losses
from tests.pretend_gpu.waits_budget import FILE, PAGES, blocks, measure, with_table


@pytest.mark.skipif(release() != (0, 16), reason="the budget is of megatron-core 0.16")
def test_no_line_waits_more_often_than_the_budget(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A new wait fails it; one that has gone asks for `python -m tests.pretend_gpu.waits_budget`,
    which also writes the table of the pages."""
    budget = json.loads(FILE.read_text())
    found = measure(tmp_path, environment)
    assert found.keys() == budget.keys()
    for name, rows in found.items():
        allowed = {tuple(row[:5]): row[5] for row in budget[name]}
        seen = {tuple(row[:5]): row[5] for row in rows}
        more = {wait: n for wait, n in seen.items() if n > allowed.get(wait, 0)}
        less = {wait: n for wait, n in allowed.items() if n > seen.get(wait, 0)}
        assert (more, less) == ({}, {}), f"{name}: more than the budget, and less"


@pytest.mark.skipif(release() != (0, 16), reason="the budget is of megatron-core 0.16")
def test_no_loss_waits(tmp_path: Path, environment: dict[str, str]) -> None:
    """With every policy loss, all terms of the loss, and a critic, a training pass waits where the
    dense model's does."""
    make_model(tmp_path / "model", seed=3)
    (found,) = run_ranks(
        "tests.pretend_gpu.waits_worker:losses", 1, tmp_path,
        {"folder": str(tmp_path / "model")}, 300, environment=environment,
    )  # fmt: skip
    assert found.keys() == {*policy_losses.names(), "critic"}
    allowed = json.loads(FILE.read_text())["dense"]
    more = {
        name: surplus
        for name, rows in found.items()
        if (surplus := [row for row in rows if blocks(row) and row not in allowed])
    }
    assert more == {}


def test_the_local_engine_waits_once_a_token(tmp_path: Path, environment: dict[str, str]) -> None:
    """And once more where the sampling mask, or the experts of all layers, are reported."""
    models = {"dense": "Qwen3ForCausalLM", "experts": "Qwen3MoeForCausalLM"}
    for name, architecture in models.items():
        make_tiny_model(architecture, tmp_path / name)
    cases = {
        "plain": ("dense", {}),
        "padded, top-p": ("dense", {"top_p": 0.9, "top_k": 8}),
        "mask": ("dense", {"top_p": 0.9, "report_sampling_mask": True}),
        "experts": ("experts", {"report_routed_experts": True}),
    }
    chosen = {name: (str(tmp_path / model), sampling) for name, (model, sampling) in cases.items()}
    (found,) = run_ranks(
        "tests.pretend_gpu.waits_worker:decoding", 1, tmp_path / "run", {"cases": chosen}, 200,
        environment=environment,
    )  # fmt: skip
    waits = {
        name: [row for row in rows if blocks(row) and "integrations/moe.py" not in row[4]]
        for name, rows in found.items()
    }  # transformers' experts wait in float32
    counts = {name: sum(row[5] for row in rows) for name, rows in waits.items()}
    assert counts == {"plain": 100, "padded, top-p": 100, "mask": 200, "experts": 200}, waits


def test_the_pages_have_the_table_of_the_budget() -> None:
    rows = json.loads(FILE.read_text())
    for language, page in PAGES.items():
        text = page.read_text()
        assert with_table(text, rows, language) == text
