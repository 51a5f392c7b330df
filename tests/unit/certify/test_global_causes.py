"""A setting of a whole model is named by log-probs alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.certify.global_causes import ModelCauses
from slime_like.certify.layered import LayeredModel
from slime_like.certify.log_probs import compare_log_probs, sampled_tokens
from slime_like.certify.run import file_model
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

    def gap() -> torch.Tensor:
        again = sampled_tokens(exact, requests, outputs)
        return (again.expected(1.0) - again.reported).abs()

    found = compare_log_probs(
        "server", sampled, sampled, 1.0, lambda limit: ModelCauses(exact, gap, limit).find()
    ).findings
    assert len(found) == 1
    if cause is None:
        assert found[0].cause in ("alike at all depths", "grows with the depth")
    else:
        assert found[0].cause == cause and says in found[0].evidence, found[0].text
        assert found[0].evidence.endswith(", in all layers")
    after = exact.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def output_of(tokens: list[int], log_probs: list[float]) -> GenerateOutput:
    return GenerateOutput(0, tuple(tokens), tuple(log_probs), "length", (1,) * len(tokens))
