"""Causes of a difference in one layer, in cases that no model of the planted faults has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.certify import causes
from slime_like.certify.causes import LayerCauses, SearchTime
from slime_like.certify.compare import Reference, relative_gap
from slime_like.certify.layered import Call
from slime_like.certify.run import file_model


def test_a_layer_that_lower_precisions_do_not_round() -> None:
    """The rounding of small integers is 0."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randint(-8, 8, (1, 20, 16), generator=generator).double()
    observed = {"layers.0": hidden[0] + torch.randn(20, 16, generator=generator)}
    search = LayerCauses(
        torch.nn.Identity(),
        [Call(hidden, (), {})],
        "layers.0",
        observed,
        {"layers.0": 1e-6},
        "",
        relative_gap,
    )
    assert search.find() is None


def test_the_searches_of_all_layers_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, with the pass in progress. What differs is named all the same."""
    make_tiny_model("Qwen3ForCausalLM", tmp_path / "model", num_hidden_layers=3)
    exact = file_model(str(tmp_path / "model"), torch.float64, False)
    sequences = [torch.arange(3, 40), torch.arange(20, 60)]
    inputs = exact.run(sequences)
    generator = torch.Generator().manual_seed(1)
    found = dict(inputs)
    for layer in (1, 2):  # nothing explains it
        noise = torch.randn(inputs[f"layers.{layer}.mlp"].shape, generator=generator).double()
        found[f"layers.{layer}.mlp"] = inputs[f"layers.{layer}.mlp"] + noise
    clock = [1000.0]
    passes: list[str] = []
    run_layer = causes.run_layer

    def one_minute(layer: torch.nn.Module, calls: list[Call], site: str) -> dict[str, torch.Tensor]:
        clock[0] += 60.0
        passes.append(site)
        return run_layer(layer, calls, site)

    monkeypatch.setattr(causes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(causes, "run_layer", one_minute)

    def examine(search_time: SearchTime) -> list[tuple[str, str, str]]:
        passes.clear()
        reference = Reference(exact, exact, sequences, inputs, search_time=search_time)
        findings = reference.examine("engine", found, exact.weights()).findings
        return [(f.site, f.cause, f.evidence) for f in findings]

    ended = "the search for a cause was ended after 10 minutes (--certify-search-minutes)"
    ((site, cause, evidence),) = examine(SearchTime(600.0))
    assert (site, cause) == ("layers.1.mlp", "unknown")
    assert evidence.startswith("100% of the tokens differ") and evidence.endswith(ended)
    assert passes == ["layers.1"] * 10, "of both layers"
    ((site, cause, evidence),) = examine(SearchTime(float("inf")))
    assert (site, cause) == ("layers.1.mlp", "unknown") and "minutes" not in evidence
    assert len(set(passes)) == 2 and len(passes) > 100
