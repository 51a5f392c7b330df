"""A setting of a whole model is named by log-probs alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.certify import causes, run
from slime_like.certify.global_causes import ModelCauses
from slime_like.certify.layered import LayeredModel
from slime_like.certify.log_probs import compare_log_probs, sampled_tokens
from slime_like.certify.run import SettingSearch, file_model
from slime_like.engines.base import GenerateOutput, GenerateRequest
from tests.unit.certify.planted import every_epsilon, rope_base, rope_factor

LIMIT = 2e-5


def scale_all(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5


def relu_everywhere(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()


def residuals_whole(model: Any) -> None:
    for layer in model.model.layers:
        layer.residual_multiplier = 1.0


def norms_around_one(model: Any) -> None:
    for path, module in model.named_modules():
        if path.endswith("norm"):
            module.weight.data.add_(1.0)


def one_layer(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 0.5


@pytest.mark.parametrize(
    ("family", "plant", "cause", "says"),
    [
        ("Qwen3ForCausalLM", every_epsilon, "norm epsilon", "is 0.001"),
        ("Qwen3ForCausalLM", rope_base, "rope base", "250000"),
        ("Qwen3ForCausalLM", rope_factor, "rope scaling", "0.5 times"),
        ("Qwen3ForCausalLM", scale_all, "softmax scale", "scaling is 0.125"),
        ("Qwen3ForCausalLM", relu_everywhere, "activation function", "relu"),
        ("Qwen3ForCausalLM", norms_around_one, "norm around zero or one", "1 more"),
        ("GraniteForCausalLM", residuals_whole, "setting", "residual_multiplier is 1,"),
        ("Qwen3ForCausalLM", one_layer, None, ""),  # no setting of the whole model
    ],
)
def test_the_setting_is_named(
    family: str, plant: Callable[[Any], None], cause: str | None, says: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path / "model", num_hidden_layers=2)
    exact = file_model(str(tmp_path / "model"), torch.float64, False)
    other = copy.deepcopy(exact.model)
    with torch.no_grad():
        plant(other)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(90, (3, 40), generator=generator)
    requests = [GenerateRequest(i, tuple(row[:20].tolist()), seed=i) for i, row in enumerate(rows)]
    served = LayeredModel(other)
    outputs = []
    for row in rows:
        log_probs = served.run([row])["logits"].log_softmax(-1)[19:-1]
        own = log_probs.gather(1, row[20:, None])[:, 0]
        outputs.append(output_of(row[20:].tolist(), own.tolist()))
    before = {name: value.clone() for name, value in exact.model.state_dict().items()}
    sampled = sampled_tokens(exact, requests, outputs)

    search = SettingSearch(exact, 1.0)
    find = partial(search.find, "server", requests, outputs)
    found = compare_log_probs("server", sampled, sampled, 1.0, find).findings
    assert len(found) == 1
    if cause is None:
        assert found[0].cause in ("alike at all depths", "grows with the depth")
    else:
        assert found[0].cause == cause and says in found[0].evidence, found[0].text
        assert found[0].evidence.endswith(", in all layers")
    after = exact.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.fixture
def unexplained(tmp_path: Path) -> tuple[LayeredModel, list[GenerateRequest], list[GenerateOutput]]:
    """A reference, and what a server answered that has nothing to do with it."""
    make_tiny_model("Qwen3ForCausalLM", tmp_path / "model", num_hidden_layers=1)
    exact = file_model(str(tmp_path / "model"), torch.float64, False)
    requests = [GenerateRequest(i, (3 + i, 4, 5), seed=i) for i in range(2)]
    return exact, requests, [output_of([7, 8, 9], [-1.0, -30.0, -2.0]) for _ in requests]


def test_a_search_ends_in_time(
    unexplained: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the pass in progress; the next servers have what is left."""
    exact, requests, outputs = unexplained
    clock = [1000.0]
    passes = []

    def one_minute(model: LayeredModel, *args: Any) -> Any:
        clock[0] += 60.0
        passes.append(clock[0])
        return sampled_tokens(model, *args)

    monkeypatch.setattr(causes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run, "sampled_tokens", one_minute)
    search = SettingSearch(exact, 1.0, 600.0)
    assert search.find("http://a", requests, outputs, LIMIT) is None
    assert len(passes) == 10
    assert "log-probs of http://a was ended after 10 minutes (--certify-search-minutes)" in (
        caplog.text
    )
    others = [output_of([7, 8, 6], [-1.0, -30.0, -2.0]) for _ in requests]
    assert search.find("http://b", requests, others, LIMIT) is None
    assert len(passes) == 10


def test_servers_that_answer_alike_are_searched_once(
    unexplained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, requests, outputs = unexplained
    searches = []
    monkeypatch.setattr(ModelCauses, "find", lambda self: searches.append(self))
    search = SettingSearch(exact, 1.0)
    near = [output_of([7, 8, 9], [-1.0 + LIMIT / 2, -30.0, -2.0]) for _ in requests]
    far = [output_of([7, 8, 9], [-1.0 + 2 * LIMIT, -30.0, -2.0]) for _ in requests]
    for name, answers in {"a": outputs, "b": outputs, "c": near, "d": far}.items():
        assert search.find(name, requests, answers, LIMIT) is None
    assert len(searches) == 2


def output_of(tokens: list[int], log_probs: list[float]) -> GenerateOutput:
    return GenerateOutput(0, tuple(tokens), tuple(log_probs), "length", (1,) * len(tokens))
