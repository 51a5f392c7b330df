"""Quantised Hugging Face folders in several layouts: loaded to the bit as what they stand for, and
written and sent in their own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from arguments.hf.model import read_hf_model
from benchmarks.parity.ranks import run_ranks
from slime_like.servers.weight_spec import compare_with_checkpoint
from slime_like.tinker.sampler import weights_in
from slime_like.weights.safetensors_reader import WeightFiles, stored_format
from tests.dist.test_convert_moe import SIZES, make_models
from tests.fake_sglang import FakeServer
from tests.quantized_models import (
    add_untrained_layer,
    compressed_config,
    fp8_config,
    fp8_weight,
    packed_weight,
    write_model,
)

# tensor, pipeline, virtual, expert, expert-tensor
LAYOUTS = [(2, 1, 1, 1, 2), (2, 1, 1, 2, 1), (1, 2, 1, 1, 1), (1, 1, 1, 1, 1)]
SERVED_LAYOUTS = 2  # the first ones
BLOCK, GROUP = (16, 16), 4  # shards begin and end within them
UNTRAINED = f"model.layers.{SIZES['num_hidden_layers']}."
TRANSPORTS = ["disk", "broadcast", "tensor"]
Models = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """DeepSeek-V3 in fp8, with routers and the output layer as they are; Qwen3 with experts in int4,
    these alone quantised, as Kimi-K2-Thinking has it."""
    folder = tmp_path_factory.mktemp("models")
    plain = make_models(folder, ["deepseek-v3", "qwen3-moe"])
    add_untrained_layer(plain["deepseek-v3"], SIZES["num_hidden_layers"])

    def fp8(shape: tuple[int, int], draw: Any) -> tuple[dict[str, Tensor], Tensor]:
        stored, value = fp8_weight(shape, BLOCK, draw)
        return {"weight": stored["weight"], "weight_scale_inv": stored["scale"]}, value

    return {
        "fp8": write_model(
            plain["deepseek-v3"],
            folder / "fp8",
            fp8_config(BLOCK),
            fp8,
            lambda name: "_proj" in name or "_a_" in name or "_b_" in name,
        ),
        "int4": write_model(
            plain["qwen3-moe"],
            folder / "int4",
            compressed_config("pack-quantized", group_size=GROUP),
            lambda shape, draw: packed_weight(shape, GROUP, 4, draw),
            lambda name: ".experts." in name,
        ),
    }


def values(folder: str) -> dict[str, Tensor]:
    with WeightFiles(folder) as files:
        return {name: files.read(name, 0, 0, files.shape(name)[0]) for name in sorted(files.names)}


def stored(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.extended
def test_in_every_layout(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with FakeServer(models["fp8"][0]) as server:
        received: list[dict[str, Tensor]] = []
        server.spoil = lambda weights: received.append(dict(weights))
        arguments = {
            "layouts": LAYOUTS, "models": models, "out": str(out), "urls": [server.url], "served": "fp8",
            "transports": TRANSPORTS, "served_layouts": SERVED_LAYOUTS,
        }  # fmt: skip
        results = run_ranks(
            "tests.dist.quantized_worker:load_and_export", 2, tmp_path / "run", arguments, timeout_s=240
        )  # fmt: skip
    assert results == [[], []]
    for name, (quantized, _) in models.items():
        before, source = trained(values(quantized)), trained(stored(quantized))
        folders = [out / f"{name}-{number}" for number in range(len(LAYOUTS))]
        written = [stored(folder) for folder in folders]
        compare_with_checkpoint({n: tuple(t.shape) for n, t in written[0].items()}, quantized)
        assert {n: t.dtype for n, t in written[0].items()} == {
            n: t.dtype for n, t in source.items()
        }
        for other in written[1:]:  # the same bits from every layout
            assert all(same_bits(other[n], t) for n, t in written[0].items())
        for folder in folders:
            read_hf_model(str(folder))
            config = json.loads((folder / "config.json").read_text())
            assert config["quantization_config"]["quant_method"] in ("fp8", "compressed-tensors")
        after = values(str(folders[0]))
        assert after.keys() == before.keys()
        coded = stored_format(quantized)
        assert coded
        for weight, value in after.items():
            if weight in coded:
                assert (value - before[weight]).abs().max() <= largest_error(name, before[weight])
            else:
                assert torch.equal(value, before[weight])
        if name == "fp8":
            for weights in received:
                assert weights.keys() == source.keys()
                assert all(same_bits(weights[n], t) for n, t in written[0].items())
    assert len(received) == SERVED_LAYOUTS * len(TRANSPORTS)
    for number in range(len(LAYOUTS)):  # unquantised, with the layer that is not trained
        assert "quantization" not in (out / f"plain-{number}/config.json").read_text()
        found, expected = stored(out / f"plain-{number}"), stored(models["fp8"][1])
        assert found.keys() == expected.keys() != trained(expected).keys()
        assert all(torch.equal(found[n], t) for n, t in expected.items())


def test_the_weights_that_a_sampler_gets(models: Models) -> None:
    """Of the Tinker API's server, from a base model that nobody trained."""
    for quantized, plain in models.values():
        found = dict(weights_in(quantized))
        expected = trained(stored(plain))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], t) for n, t in expected.items())


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if not n.startswith(UNTRAINED)}


def largest_error(name: str, weight: Tensor) -> float:
    """Half a step at the largest number: 2^-4 of it in e4m3; of 15 steps from end to end in int4,
    whose scale is rounded to bf16 too."""
    return float(weight.abs().max()) * (2**-4 if name == "fp8" else 1.01 / 14)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
    )
