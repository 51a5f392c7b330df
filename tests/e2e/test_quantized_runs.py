"""A model in fp8, as a user has it: converted both ways, and trained with servers that have it in
fp8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from scripts.make_tiny_model import make_tiny_model
from slime_like.weights.quantized import MxExperts
from slime_like.weights.safetensors_reader import WeightFiles, stored_format
from tests.dist.test_convert_moe import SIZES, make_models
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.fake_sglang import FakeServer
from tests.quantized_models import add_untrained_layer, fp8_config, fp8_matrix, write_model

BLOCK = (8, 8)


@pytest.fixture(scope="module")
def models(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The workspace's model with projections in fp8, and what they stand for."""

    folder = tmp_path_factory.mktemp("fp8") / "models"
    return write_model(str(work.model), folder, fp8_config(BLOCK), fp8_matrix, is_projection)


def is_projection(name: str) -> bool:
    return "_proj" in name


def weights_of(folder: Path | str) -> dict[str, Tensor]:
    with WeightFiles(str(folder)) as files:
        return {name: files.read(name, 0, 0, files.shape(name)[0]) for name in files.names}


@pytest.mark.extended
def test_converted_there_and_back(server: TrainServer, tmp_path: Path) -> None:
    """DeepSeek-V3. What transformers computes with the weights that the stored ones stand for is what
    megatron-core does; back in fp8, or not. A layer that is not trained comes through."""
    made = make_models(tmp_path, ["deepseek-v3"])["deepseek-v3"]
    add_untrained_layer(made, SIZES["num_hidden_layers"])
    quantized, plain = write_model(
        made, tmp_path / "fp8", fp8_config(BLOCK), fp8_matrix, is_projection
    )
    words = ("--hf-checkpoint", quantized, "--save", tmp_path / "ck", "--no-progress", "--verify", "checksums", "logits")  # fmt: skip
    done = server.run("scripts.convert_hf_to_megatron", words, tmp_path / "log1").ok()
    assert done.out.count("verified: ") == 2
    common = ("--load", tmp_path / "ck", "--hf-checkpoint", quantized, "--no-progress")
    server.run(
        "scripts.convert_megatron_to_hf",
        (*common, "--output", tmp_path / "out", "--verify", "checksums", "logits"),
        tmp_path / "log2",
    ).ok()
    expected, found = load_file(f"{plain}/model.safetensors"), weights_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    server.run(
        "scripts.convert_megatron_to_hf",
        (*common, "--output", tmp_path / "again", "--quantized"),
        tmp_path / "log3",
    ).ok()
    stored = load_file(tmp_path / "again/model.safetensors")
    source = load_file(f"{quantized}/model.safetensors")
    untrained = [n for n in source if n.startswith(f"model.layers.{SIZES['num_hidden_layers']}.")]
    assert len(untrained) == 5 and all(same_bits(stored[n], source[n]) for n in untrained)
    assert {n: (t.shape, t.dtype) for n, t in stored.items()} == {
        n: (t.shape, t.dtype) for n, t in source.items()
    }
    for name, weight in weights_of(tmp_path / "again").items():
        largest = float(expected[name].abs().max())
        assert (weight - expected[name]).abs().max() <= largest * 2**-4
    refused = server.run(
        "scripts.convert_megatron_to_hf",
        (*common, "--output", tmp_path / "no", "--quantized", "--verify", "logits"),
        tmp_path / "log4",
    )
    assert refused.status == 2 and "--verify" in refused.err and "--quantized" in refused.err


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.extended
def test_trained_with_servers_in_fp8(
    server: TrainServer, work: Workspace, models: tuple[str, str], tmp_path: Path
) -> None:
    """They get the weights in their format after every step; what is saved is not quantised."""
    folder = tmp_path / "model"  # with the tokenizer
    shutil.copytree(models[0], folder)
    received: list[dict[str, Tensor]] = []
    with FakeServer(str(folder)) as sglang:
        sglang.spoil = lambda weights: received.append(dict(weights))
        done = server.train(
            work.flags(
                tmp_path / "out", hf_checkpoint=folder, rollout_engine="sglang", no_sglang_router="",
                rollout_external_engine_addrs=sglang.address, update_weight_transport="disk", save_hf=tmp_path / "hf",
            ),
            tmp_path / "log", timeout_s=90,
        ).ok()  # fmt: skip
    source = load_file(folder / "model.safetensors")
    assert len(received) == 2
    for weights in received:
        tied = {"lm_head.weight"}
        assert weights.keys() - tied == source.keys() - tied
        assert all(t.dtype == source[n].dtype for n, t in weights.items())
    name = next(n for n in source if n.endswith("down_proj.weight"))
    assert not torch.equal(received[0][name].float(), received[1][name].float())
    assert 0 < rows_of(tmp_path / "out")[0]["rollout/train_rollout_log_prob_diff_mean"] < 0.1
    saved = json.loads((tmp_path / "hf/config.json").read_text())
    assert "quantization_config" not in saved, done.out
    assert {str(t.dtype) for t in load_file(tmp_path / "hf/model.safetensors").values()} == {
        "torch.float32"
    }


def test_trained_with_servers_in_mxfp4(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """gpt-oss as it is published: new weights of the experts arrive as blocks and scales."""
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    make_tiny_model(
        "gpt-oss-20b", folder, intermediate_size=64, vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name)
        coded = MxExperts(name, tuple(weight.shape), (), f"{name}_blocks", f"{name}_scales")
        tensors |= coded.encode(weight)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    received: list[dict[str, Tensor]] = []
    with FakeServer(str(folder)) as sglang:
        sglang.spoil = lambda weights: received.append(dict(weights))
        server.train(
            work.flags(
                tmp_path / "out", hf_checkpoint=folder, rollout_engine="sglang", no_sglang_router="",
                rollout_external_engine_addrs=sglang.address, update_weight_transport="disk", lr=0.02,
            ),
            tmp_path / "log", timeout_s=120,
        ).ok()  # fmt: skip
    name = "model.layers.0.mlp.experts.down_proj"
    coded = stored_format(str(folder))[name]

    def values(stored: dict[str, Tensor]) -> Tensor:
        return coded.decode(lambda n, first, last: stored[n][first:last], 0, coded.shape[0])

    before, after = (values(weights) for weights in received)
    assert torch.equal(before, values(tensors)), "what was loaded is sent as it was"
    assert not torch.equal(before, after)
    assert {weights[f"{name}_blocks"].dtype for weights in received} == {torch.uint8}
    assert 0 < rows_of(tmp_path / "out")[1]["rollout/train_rollout_log_prob_diff_mean"] < 0.1


def test_bf16_weights_trained_with_servers_of_a_quantised_copy(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """The run starts from the checkpoint's weights, not from the copy's; the first update brings the
    servers, which started from the copy, to them, and what is saved is not quantised. The learning
    rate changes no bit."""
    copy, checkpoint = tmp_path / "fp8", tmp_path / "ck"
    words = ("--hf-checkpoint", work.model, "--output", copy, "--block-size", 8, 8, "--no-progress")
    server.run("slime_like.cli.quantize", words, tmp_path / "log1").ok()
    words = ("--hf-checkpoint", work.model, "--save", checkpoint, "--no-progress")
    server.run("scripts.convert_hf_to_megatron", words, tmp_path / "log2").ok()
    received: list[dict[str, Tensor]] = []
    with FakeServer(str(copy)) as sglang:
        sglang.spoil = lambda weights: received.append(dict(weights))
        server.train(
            work.flags(
                tmp_path / "out", hf_checkpoint=copy, load=checkpoint, rollout_engine="sglang",
                no_sglang_router="", rollout_external_engine_addrs=sglang.address,
                update_weight_transport="disk", save_hf=tmp_path / "hf", lr=1e-30,
            ),
            tmp_path / "log3", timeout_s=120,
        ).ok()  # fmt: skip
    stored, source = load_file(copy / "model.safetensors"), load_file(work.model / "model.safetensors")  # fmt: skip
    for weights in received:
        assert all(same_bits(weights[name], stored[name]) for name in stored)
    assert 0 < rows_of(tmp_path / "out")[0]["rollout/train_rollout_log_prob_diff_mean"] < 0.1
    saved = weights_of(tmp_path / "hf")
    with WeightFiles(str(copy)) as files:
        assert len(files.quantized) > 5
        assert all(torch.equal(saved[name], source[name]) for name in files.quantized)
