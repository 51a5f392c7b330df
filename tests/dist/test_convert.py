"""slime_like/weights: logits against transformers and bit-equal round trips under every layout;
saving; errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import randomize
from tests.dist import convert_worker

# tensor, pipeline, virtual
LAYOUTS = [(2, 2, 2)]
MORE_LAYOUTS = [(4, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]
SIZES: dict[str, Any] = dict(
    # 96 or 128 with padding: the last of four tensor-parallel ranks has nothing but padding
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,  # fewer than tensor-parallel ranks in one layout
    max_position_embeddings=16384,
    initializer_range=0.1,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=50000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-untied": ("Llama", dict(tie_word_embeddings=False, rope_parameters=LLAMA3)),
    "llama-linear-tied": (
        "Llama",
        dict(
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
        ),
    ),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-untied": ("Qwen2", dict(tie_word_embeddings=False, num_key_value_heads=4)),
    "qwen3-untied": ("Qwen3", dict(tie_word_embeddings=False, head_dim=16)),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True, head_dim=16, num_key_value_heads=1)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models as transformers saves them, with what they answer to some tokens. One is in
    several files."""
    import transformers

    result = {}
    for number, (name, (family, settings)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        config = getattr(transformers, f"{family}Config")(
            **{**SIZES, **settings}, attn_implementation="eager"
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        randomize(model)
        with torch.no_grad():
            tokens = torch.randint(0, SIZES["vocab_size"], (24,))
            logits = model(tokens[None]).logits[0]
        folder = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folder, max_shard_size="20KB" if name == "qwen2-tied" else "5GB")
        torch.save({"tokens": tokens, "logits": logits}, folder / "expected.pt")
        (folder / "tokenizer.json").write_text("{}")
        result[name] = str(folder)
    return result


@pytest.fixture(scope="module")
def four(
    folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("four")
    taken = folder / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("do not lose me")
    arguments = {
        "layouts": LAYOUTS,
        "folders": list(folders.values()),
        "out": str(folder / "out"),
        "taken": str(taken),
    }
    return run_ranks(
        "tests.dist.convert_worker:check_all", 4, folder / "run", arguments, timeout_s=240
    ), folder


def test_logits_and_round_trips_under_every_layout(four: tuple[list[dict[str, Any]], Path]) -> None:
    ranks = [result["logits"] for result in four[0]]
    assert not convert_worker.over_the_limit(ranks, len(LAYOUTS) * len(MODELS))


@pytest.mark.extended
def test_more_layouts(folders: dict[str, str], tmp_path: Path) -> None:
    arguments = {"layouts": MORE_LAYOUTS, "folders": list(folders.values())}
    ranks = run_ranks(
        "tests.dist.convert_worker:check_layouts", 4, tmp_path, arguments, timeout_s=240
    )
    assert not convert_worker.over_the_limit(ranks, len(MORE_LAYOUTS) * len(MODELS))


def test_saved_folder_is_read_by_transformers(
    four: tuple[list[dict[str, Any]], Path], folders: dict[str, str]
) -> None:
    import transformers

    out = four[1] / "out"
    expected = torch.load(Path(folders["llama-llama3-untied"]) / "expected.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager"
    ).eval()
    assert torch.equal(model(expected["tokens"][None]).logits[0], expected["logits"])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert {path.name for path in out.iterdir()} == {
        *files,
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "generation_config.json",
    }
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "out",
        "run",
        "taken",
    ]  # no temporary folder is left
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_errors_of_saving_reach_every_rank(four: tuple[list[dict[str, Any]], Path]) -> None:
    results, folder = four
    for result in results:
        taken, same = result["errors"]
        assert "holds no Hugging Face model" in taken
        assert "folder that the model came from" in same
    assert (folder / "taken" / "thesis.txt").read_text() == "do not lose me"


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with convert_worker.parallel() as layout:
        yield layout
    dist.destroy_process_group()


def _load(folder: Path, layout: Any, source: str, **changes: Any) -> list[Any]:
    """Build after `source`, load from `folder`."""
    import dataclasses

    chunks, hf, gpt = convert_worker.build(source, layout)
    before = [parameter.clone() for parameter in chunks[0].parameters()]
    try:
        convert_worker.load_hf_weights(
            chunks, str(folder), hf=dataclasses.replace(hf, **changes), gpt=gpt, layout=layout
        )
    except ValueError:
        assert all(torch.equal(a, b) for a, b in zip(before, chunks[0].parameters())), (
            "an error must come before any change"
        )
        raise
    return chunks


def _rewritten(source: str, folder: Path, change: Any) -> Path:
    weights = load_file(Path(source) / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def _rename(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.mlp.gate.weight"] = weights.pop("model.layers.0.mlp.gate_proj.weight")


def _narrow(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.self_attn.k_proj.weight"] = weights[
        "model.layers.1.self_attn.k_proj.weight"
    ][:8].clone()


def _quantise(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _rename,
            [
                "missing tensors: model.layers.0.mlp.gate_proj.weight",
                "unexpected tensors: model.layers.0.mlp.gate.weight",
            ],
        ),
        (_narrow, ["model.layers.1.self_attn.k_proj.weight", "(8, 32)", "(16, 32)"]),
        (_quantise, ["model.norm.weight", "I8", "BF16"]),
        (
            lambda weights: weights.update(
                {f"model.layers.{n}.extra": torch.ones(1) for n in range(20)}
            ),
            ["model.layers.0.extra", "and 12 more"],
        ),
    ],
)
def test_wrong_tensors_are_named(
    alone: Any, folders: dict[str, str], tmp_path: Path, change: Any, words: list[str]
) -> None:
    source = folders["llama-llama3-untied"]
    with pytest.raises(ValueError, match="weights in") as caught:
        _load(_rewritten(source, tmp_path, change), alone, source)
    for word in [str(tmp_path), *words]:
        assert word in str(caught.value)


def test_wrong_files_are_named(alone: Any, folders: dict[str, str], tmp_path: Path) -> None:
    single, sharded = folders["llama-llama3-untied"], folders["qwen2-tied"]
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        _load(tmp_path, alone, single)
    content = (Path(single) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read, it may be truncated"):
        _load(tmp_path, alone, single)
    copy = tmp_path / "sharded"
    shutil.copytree(sharded, copy)
    lost = sorted(copy.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"names files that are not there: {lost.name}"):
        _load(copy, alone, sharded)
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="not an index"):
        _load(copy, alone, sharded)


def test_a_model_of_another_architecture_is_refused(alone: Any, folders: dict[str, str]) -> None:
    qwen2, qwen3 = folders["qwen2-untied"], folders["qwen3-untied"]
    with pytest.raises(
        ValueError, match=r"not built as Qwen2ForCausalLM; missing parameters: .*linear_qkv\.bias"
    ):
        _load(Path(qwen2), alone, folders["llama-llama3-untied"], architecture="Qwen2ForCausalLM")
    with pytest.raises(ValueError, match=r"unexpected parameters: .*q_layernorm"):
        _load(Path(qwen3), alone, qwen3, architecture="LlamaForCausalLM")
    with pytest.raises(
        ValueError,
        match=r"unknown architecture 'GPT2LMHeadModel'; legal values: .*LlamaForCausalLM",
    ):
        _load(Path(qwen3), alone, qwen3, architecture="GPT2LMHeadModel")


def test_what_transformers_ignores_is_ignored(
    alone: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    """Old Llama files hold rotary tables, and some tied models repeat the embedding."""
    source = folders["llama-linear-tied"]
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": convert_worker.stored_weights(source)["model.embed_tokens.weight"],
    }
    chunks = _load(
        _rewritten(source, tmp_path, lambda weights: weights.update(extra)), alone, source
    )
    embedding = chunks[0].embedding.word_embeddings.weight
    assert torch.equal(
        embedding[:90], convert_worker.stored_weights(source)["model.embed_tokens.weight"]
    )
    assert embedding.shape == (96, 32)
    assert not embedding[90:].any()


@pytest.mark.parametrize("row", [0, 89])
def test_a_head_that_a_tied_model_would_lose_is_refused(
    alone: Any, folders: dict[str, str], tmp_path: Path, row: int
) -> None:
    """transformers unties such a model."""
    source = folders["llama-linear-tied"]

    def add_head(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["lm_head.weight"][row, 3] += 1

    with pytest.raises(ValueError, match=r"lm_head\.weight is another matrix than .* to false"):
        _load(_rewritten(source, tmp_path, add_head), alone, source)


def test_two_models_in_one_folder_are_refused(
    alone: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    """A model that was saved again in one file, next to the index of the older one."""
    copy = tmp_path / "both"
    shutil.copytree(folders["qwen2-tied"], copy)
    weights = convert_worker.stored_weights(folders["qwen2-tied"])
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds two models: model\.safetensors, which transform"):
        _load(copy, alone, folders["qwen2-tied"])
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    _load(copy, alone, folders["qwen2-tied"])


def test_names_of_the_transformer_engine_spec(alone: Any, folders: dict[str, str]) -> None:
    """There the norms before a linear layer are parameters of that layer. Move them as it would
    have them, then load and export."""
    source = folders["qwen3-untied"]
    chunks, hf, gpt = convert_worker.build(source, alone)
    for layer in chunks[0].decoder.layers:
        layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
        layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
        layer.input_layernorm, layer.pre_mlp_layernorm = torch.nn.Identity(), torch.nn.Identity()
    convert_worker.load_hf_weights(chunks, source, hf=hf, gpt=gpt, layout=alone)
    stored = convert_worker.stored_weights(source)
    layer = chunks[0].decoder.layers[2]
    assert torch.equal(
        layer.self_attention.linear_qkv.layer_norm_weight,
        stored["model.layers.2.input_layernorm.weight"],
    )
    assert torch.equal(
        layer.mlp.linear_fc1.layer_norm_weight,
        stored["model.layers.2.post_attention_layernorm.weight"],
    )
    exported = dict(convert_worker.HfExport(chunks, hf=hf, gpt=gpt, layout=alone).stream())
    assert exported.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())


def test_a_failing_disk_leaves_nothing_behind(
    alone: Any, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime_like.weights import hf_save

    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_save, "save_tensors", full)
    taken = []
    stream = ((name, taken.append(name) or torch.zeros(10)) for name in ("a", "b", "c"))
    with pytest.raises(OSError, match="No space left on device"):
        hf_save.save_hf(str(tmp_path / "out"), stream, folders["qwen3-tied"], max_shard_bytes=40)  # type: ignore[arg-type]
    assert taken == ["a", "b", "c"], "the stream is taken to its end, the other ranks are in it"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"no config\.json"):
        hf_save.save_hf(str(tmp_path / "out"), iter([]), str(tmp_path))
