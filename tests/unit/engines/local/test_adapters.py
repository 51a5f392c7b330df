"""The local engine with adapters beside the base model: in float32 the merged weights' log-probs; in
bfloat16 those of a small update that merging would lose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.make_tiny_model import make_tiny_model
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.tinker.sampler import weights_in

SAMPLING = SamplingParams(max_new_tokens=16)
REQUESTS = [GenerateRequest(i, (7, 20 + i, 30), seed=i) for i in range(4)]
SCALE = 2.0
MODULES = ("q_proj", "down_proj", "lm_head")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tied"
    make_tiny_model("Qwen3-", folder, tie_word_embeddings=True)
    return str(folder)


def factors(model: str, size: float, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    network = AutoModelForCausalLM.from_pretrained(model)
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in MODULES:
            rows, columns = module.weight.shape
            for half, shape in (("A", (4, columns)), ("B", (rows, 4))):
                tensor = torch.randn(shape, generator=generator) * size
                found[f"base_model.model.{name}.lora_{half}.weight"] = tensor
    return found


def log_probs(
    model: str, adapter: dict[str, Tensor], tokens: list[int], dtype: torch.dtype
) -> Tensor:
    """Of transformers' model in float32, with merged weights; the base is rounded to `dtype`."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).float()
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.clone())  # untied
    with torch.no_grad():
        for name, module in network.named_modules():
            first = adapter.get(f"base_model.model.{name}.lora_A.weight")
            if first is not None:
                second = adapter[f"base_model.model.{name}.lora_B.weight"]
                module.weight += SCALE * (second @ first)
        logits = network(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_answers_are_those_of_merged_weights(model: str) -> None:
    engine = LocalEngine(model, None, lora_scale=SCALE)
    assert engine.takes_adapter
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(REQUESTS, SAMPLING)
    for version in (1, 2):
        adapter = factors(model, 0.2, version)
        engine.update_weights(iter(adapter.items()), version)
        for request, output in zip(REQUESTS, engine.generate(REQUESTS, SAMPLING), strict=True):
            assert output.weight_versions == (version,) * len(output.tokens)
            whole = log_probs(
                model, adapter, [*request.prompt_tokens, *output.tokens], torch.float32
            )
            own = whole[len(request.prompt_tokens) - 1 :]
            torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)


def test_a_small_update_is_not_lost_in_bfloat16(model: str) -> None:
    """One step of all weights of a layer, too small for most of their bits, on an input that sums
    it up: the output moves by it, but for the output's own rounding. Merged, most of it is lost."""
    layer = "model.layers.0.mlp.down_proj"
    engine = LocalEngine(model, None, dtype=torch.bfloat16, lora_scale=SCALE)
    linear = engine.model.get_submodule(layer)
    rows, columns = linear.weight.shape
    half = (1e-4 / (4 * SCALE)) ** 0.5
    adapter = {
        f"base_model.model.{layer}.lora_A.weight": torch.full((4, columns), half),
        f"base_model.model.{layer}.lora_B.weight": torch.full((rows, 4), half),
    }
    x = torch.ones(1, columns, dtype=torch.bfloat16)
    before = linear(x).float()
    engine.update_weights(iter(adapter.items()), 1)
    step = SCALE * 4 * half**2
    exact = torch.full((1, rows), step * columns)
    merged = (linear.weight.float() + step).bfloat16().float()
    seen = x.float() @ (merged - linear.weight.float()).T
    own = (linear(x).float() - before - exact).norm() / exact.norm()
    assert own < 0.4 < (seen - exact).norm() / exact.norm()


def test_every_row_of_a_batch_has_its_own_adapter(model: str) -> None:
    """Several beside the base model, of other ranks and scales, interleaved, with a prompt that all
    share: each answers as alone, and as merged weights do."""
    engine = LocalEngine(model, None)
    engine.update_weights(weights_in(model), 1)
    adapters = {"a": factors(model, 0.2, 1), "b": factors(model, 0.3, 2), "": {}}
    for name in "ab":
        engine.load_adapter(name, adapters[name].items(), SCALE)
    names = ["b", "", "a", "b", "a", ""]
    prompts = [(7, 20, 30), (7, 20, 30), (7, 20, 30), (9, 11), (12, 13, 14, 15), (9, 11)]
    requests = [
        GenerateRequest(i, prompt, seed=i, adapter=name)
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    for request, output in zip(requests, engine.generate(requests, SAMPLING), strict=True):
        (alone,) = engine.generate([request], SAMPLING)
        assert output.tokens == alone.tokens
        row = [*request.prompt_tokens, *output.tokens]
        whole = log_probs(model, adapters[request.adapter], row, torch.float32)
        own = whole[len(request.prompt_tokens) - 1 :]
        torch.testing.assert_close(torch.tensor(output.log_probs), own, rtol=0, atol=1e-5)
        (scores,) = engine.prompt_log_probs([tuple(row)], [request.adapter])
        torch.testing.assert_close(torch.tensor(scores), whole, rtol=0, atol=1e-5)
        rows = engine.log_prob_rows(row, 1, 1.0, request.adapter)
        torch.testing.assert_close(
            rows.gather(1, torch.tensor(row[1:])[:, None])[:, 0], whole, rtol=0, atol=1e-5
        )
    engine.drop_adapter("b")
    with pytest.raises(ValueError, match="the engine has no adapter 'b'"):
        engine.generate(requests, SAMPLING)
    assert engine.generate(requests[1:2], SAMPLING)[0].tokens


WRONG = {
    "an unknown layer": ("base_model.model.model.layers.0.mlp.none.lora_A.weight", (4, 32)),
    "another shape": ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 5)),
}


@pytest.mark.parametrize("name", WRONG)
def test_factors_that_do_not_fit_are_named(model: str, name: str) -> None:
    key, shape = WRONG[name]
    engine = LocalEngine(model, None, lora_scale=SCALE)

    def wrong() -> Iterator[tuple[str, Tensor]]:
        yield from {**factors(model, 0.2), key: torch.zeros(shape)}.items()

    with pytest.raises(ValueError, match="are of no linear layer of its model: " + key[17:40]):
        engine.update_weights(wrong(), 1)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(REQUESTS, SAMPLING)
