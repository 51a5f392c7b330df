"""Every family from Hugging Face's files to a checkpoint written in one layout, loaded in another,
and back: bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_patches
from arguments.hf.model import read_hf_model
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from slime_like.checkpoints.folders import writing_folder
from slime_like.checkpoints.manifest import MANIFEST, read_manifest
from slime_like.errors import RunError
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.families import model_families
from slime_like.weights.hf_save import complete_folder
from slime_like.weights.safetensors_writer import ShardPlan
from slime_like.weights.untrained import untrained_prefixes
from tests.dist.convert_worker import stored_weights
from tests.dist.test_convert import SIZES
from tests.dist.test_convert_moe import SELECTING

megatron_patches.apply()

from slime_like.conversion import to_hf  # noqa: E402
from slime_like.conversion.network import Converted, MetaNetwork, conversion_layout  # noqa: E402
from slime_like.conversion.to_hf import NetworkSource, convert_to_hf  # noqa: E402
from slime_like.conversion.to_megatron import convert_to_megatron  # noqa: E402
from slime_like.conversion.verify import compare_bits  # noqa: E402
from slime_like.megatron.checkpoint import save  # noqa: E402
from slime_like.megatron.network import Network  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402

# tensor, pipeline, virtual, expert, expert-tensor: as written, as loaded
DENSE = [((2, 1), (1, 2)), ((1, 2), (2, 1))]
EXPERTS = [((1, 1, 1, 2, 1), (1, 2, 1, 1, 1)), ((1, 2, 1, 1, 1), (1, 1, 1, 2, 1))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers

    root = tmp_path_factory.mktemp("models")
    for name in model_families.names():
        make_tiny_model(name, root / name, num_hidden_layers=4)
    make_tiny_model("Qwen2ForCausalLM", root / "tied", tie_word_embeddings=True)
    critic = transformers.Qwen2ForTokenClassification(
        transformers.Qwen2Config(**SIZES, num_labels=1)
    )
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(root / "critic")
    return {name: str(root / name) for name in (*model_families.names(), "tied", "critic")}


@pytest.mark.slow
def test_round_trips_from_one_layout_to_another(folders: dict[str, str], tmp_path: Path) -> None:
    cases: list[Any] = [(folders["tied"], (2, 1), (1, 1))]
    for name, folder in folders.items():
        if name != "tied":
            hf = read_hf_model(folder, value_head=name == "critic")
            layouts = EXPERTS if "num_moe_experts" in hf.transformer else DENSE
            cases += [(folder, *both) for both in layouts]
    arguments = {"cases": cases, "out": str(tmp_path)}
    results = run_ranks(
        "tests.dist.convert_checkpoints_worker:round_trips", 2, tmp_path / "run", arguments, 900
    )
    assert all(len(result) == len(cases) for result in results)


def test_an_interrupted_conversion_to_megatron_keeps_complete_files(
    alone: ParallelLayout, tmp_path: Path
) -> None:
    """A complete file is kept, one with a flipped byte is written again, and nothing of the first
    attempt remains that the checkpoint does not name."""
    model, root = str(tmp_path / "model"), str(tmp_path / "ck")
    make_tiny_model("Qwen3MoeForCausalLM", Path(model))
    hf = read_hf_model(model)
    network = MetaNetwork(hf, conversion_layout(hf), alone)
    written = []

    def fail_late(size: int) -> None:
        written.append(size)
        if sum(written) > network.nbytes // 2:
            raise OSError(28, "No space left on device")

    def convert(**more: Any) -> Converted:
        return convert_to_megatron(network, model, root, workers=1, file_bytes=20_000, **more)

    with pytest.raises(RunError, match=r"No space left on device; complete files are kept"):
        convert(advance=fail_late)
    folder = writing_folder(root, 0) / "policy"
    complete = sorted(path.with_suffix("").with_suffix("") for path in folder.glob("*.done.json"))
    assert len(complete) > 2 and not (folder / ".metadata").exists()
    content = bytearray(complete[0].read_bytes())
    content[-1] ^= 1
    complete[0].write_bytes(content)
    stamps = {path.name: path.stat().st_mtime_ns for path in complete[1:]}
    written.clear()
    done = convert(advance=written.append)
    assert (done.kept, sum(written)) == (len(complete) - 1, network.nbytes)
    for name, stamp in stamps.items():
        assert (done.folder / "policy" / name).stat().st_mtime_ns == stamp
    names = {
        str(path.relative_to(done.folder)) for path in done.folder.rglob("*") if path.is_file()
    }
    assert names == {*read_manifest(done.folder), MANIFEST}
    again = NetworkSource(
        MetaNetwork(hf, conversion_layout(hf), alone), done.folder / "policy", model
    )
    assert compare_bits(again, model) == len(network.parameters)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(
    alone: ParallelLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, root, output = str(tmp_path / "model"), tmp_path / "ck", tmp_path / "hf"
    make_tiny_model("LlamaForCausalLM", Path(model))
    hf = read_hf_model(model)
    network = MetaNetwork(hf, conversion_layout(hf), alone)
    with monkeypatch.context() as small:
        small.setattr(save, "free_bytes", lambda root: 1000)
        with pytest.raises(
            OSError, match=rf"--save {root}: needs 0\.\d+ GB .* 0\.000 GB free; name"
        ):
            convert_to_megatron(network, model, str(root), workers=1)
    assert not list(root.rglob("*.distcp"))
    done = convert_to_megatron(network, model, str(root), workers=1)
    source = NetworkSource(
        MetaNetwork(hf, conversion_layout(hf), alone), done.folder / "policy", model
    )
    monkeypatch.setattr(save, "free_bytes", lambda root: 1000)
    with pytest.raises(OSError, match=r"--output: needs 0\.\d+ GB .* 0\.000 GB free; name"):
        convert_to_hf(source, model, str(output), checkpoint=done.folder, max_shard_bytes=10**6)
    assert not output.exists() and not list(tmp_path.rglob(".hf.partial/*"))


def test_a_conversion_to_bfloat16_keeps_what_training_keeps_in_float32(
    alone: ParallelLayout, tmp_path: Path
) -> None:
    model, output = str(tmp_path / "model"), tmp_path / "hf"
    make_tiny_model("DeepseekV32ForCausalLM", Path(model))
    hf = read_hf_model(model)
    settings = conversion_layout(hf)
    half = MetaNetwork(hf, settings, alone, torch.bfloat16)
    done = convert_to_megatron(half, model, str(tmp_path / "ck"), workers=1)
    source = NetworkSource(MetaNetwork(hf, settings, alone), done.folder / "policy", model)
    convert_to_hf(source, model, str(output), checkpoint=done.folder, max_shard_bytes=10**6)
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(model), output))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        dtype = torch.float32 if name.endswith(SELECTING) else torch.bfloat16
        assert after[name].dtype == dtype and torch.equal(after[name], tensor.to(dtype)), name


@pytest.mark.parametrize(
    "name", ["DeepseekV32ForCausalLM", "Qwen4ExpForConditionalGeneration", "DeepseekV4ForCausalLM"]
)
def test_a_file_in_bfloat16_keeps_what_training_keeps_in_float32(
    alone: ParallelLayout, tmp_path: Path, name: str
) -> None:
    """From a checkpoint in float32, with what the run does not train, and with integer tables,
    which do not make a folder a quantised one."""
    model, output = tmp_path / "model", tmp_path / "hf"
    make_tiny_model(name, model, num_hidden_layers=4)
    weights = stored_weights(str(model))
    for n, tensor in weights.items():
        weights[n] = tensor + 1e-3 if tensor.is_floating_point() else tensor
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "model.safetensors.index.json").unlink(missing_ok=True)
    hf = read_hf_model(str(model))
    settings = conversion_layout(hf)
    half = MetaNetwork(hf, settings, alone, torch.bfloat16)
    kept = {
        plan.name
        for parameter in half.hf_export(hf, None, 2**20).parameters
        for plan in parameter.outputs
        if plan.dtype == torch.float32
    }
    assert kept
    full = MetaNetwork(hf, settings, alone)
    done = convert_to_megatron(full, str(model), str(tmp_path / "ck"), workers=1)
    source = NetworkSource(
        MetaNetwork(hf, settings, alone), done.folder / "policy", str(model), torch.bfloat16
    )
    convert_to_hf(source, str(model), str(output), checkpoint=done.folder, max_shard_bytes=10**8)
    after = stored_weights(str(output))
    assert after.keys() == weights.keys()
    endings = tuple(each.partition("layers.")[2].partition(".")[2] for each in kept)
    assert all(endings)
    for n, tensor in weights.items():
        dtype = torch.float32 if n.endswith(endings) else torch.bfloat16
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        assert after[n].dtype == dtype and torch.equal(after[n], tensor.to(dtype)), n
    assert compare_bits(source, str(output)) == len(full.parameters)
    config = json.loads((output / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def test_a_value_head_has_the_tables_that_it_reads(alone: ParallelLayout, tmp_path: Path) -> None:
    """DeepSeek-V4's experts by token are no weights; nothing else that is untrained is copied."""
    model, out = str(tmp_path / "model"), tmp_path / "out"
    make_tiny_model("DeepseekV4ForCausalLM", Path(model), num_hidden_layers=4)
    hf = read_hf_model(model, value_head=True)
    settings = conversion_layout(hf)
    network = MetaNetwork(hf, settings, alone, value_head=True)
    done = convert_to_megatron(network, model, str(tmp_path / "ck"), workers=1)
    network = MetaNetwork(hf, settings, alone, value_head=True)
    source = NetworkSource(network, done.folder / "critic", model)
    convert_to_hf(source, model, str(out), checkpoint=done.folder, max_shard_bytes=10**8)
    before, after = stored_weights(model), stored_weights(str(out))
    tables = [name for name in before if name.endswith(".tid2eid")]
    assert tables and all(torch.equal(before[name], after[name]) for name in tables)
    assert compare_bits(source, str(out)) == len(network.parameters)
    read_hf_model(str(out), value_head=True)
    trained = Network(network.config, network.gpt, "local", alone, value_head=True)
    trained.save_hf(str(tmp_path / "saved"), hf, model)
    saved = stored_weights(str(tmp_path / "saved"))
    assert saved.keys() == after.keys()
    assert all(torch.equal(before[name], saved[name]) for name in tables)


def test_a_conversion_continues_with_files_of_its_own_template_only(
    alone: ParallelLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run does not train is the template's. What is left of the conversion of another
    network is not published."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    output = tmp_path / "hf"
    make_tiny_model("DeepseekV3ForCausalLM", Path(one), num_nextn_predict_layers=1)
    hf = read_hf_model(one)
    settings = conversion_layout(hf)
    other = writing_folder(tmp_path / "ck", 0) / "critic"
    other.mkdir(parents=True)
    (other / "__0_0.distcp").write_text("large")
    network = MetaNetwork(hf, settings, alone)
    done = convert_to_megatron(network, one, str(tmp_path / "ck"), workers=1)
    assert not (done.folder / "critic").exists()
    weights = stored_weights(one)
    shutil.copytree(one, two)
    (untrained,) = untrained_prefixes(hf)
    changed = {n: t + 1 if n.startswith(untrained) else t for n, t in weights.items()}
    assert any(name.startswith(untrained) for name in weights)
    save_file(changed, f"{two}/model.safetensors", metadata={"format": "pt"})

    def convert(template: str) -> Converted:
        source = NetworkSource(MetaNetwork(hf, settings, alone), done.folder / "policy", template)
        return convert_to_hf(
            source, template, str(output), checkpoint=done.folder, max_shard_bytes=20_000
        )

    with monkeypatch.context() as full:
        full.setattr(to_hf, "complete_folder", fail)
        with pytest.raises(OSError, match="full"):
            convert(one)
    assert list(tmp_path.glob(".hf.partial/*.safetensors"))
    assert convert(two).kept == 0
    after = stored_weights(str(output))
    assert all(torch.equal(after[name], tensor) for name, tensor in changed.items())


def fail(*ignored: object, **also: object) -> None:
    raise OSError(28, "full")


def test_the_output_layer_of_a_tied_gemma_has_its_published_name(
    alone: ParallelLayout, tmp_path: Path
) -> None:
    """It is written if an adapter unties it, and a file may repeat the embedding under it."""
    folder, head = tmp_path / "model", "language_model.lm_head.weight"
    make_tiny_model("Gemma3ForConditionalGeneration", folder)
    hf = read_hf_model(str(folder))
    network = MetaNetwork(hf, conversion_layout(hf), alone)
    export = network.hf_export(hf, None, 2**20, untied_head=True)
    assert export.parameters[-1].outputs[0].name == head
    weights = stored_weights(str(folder))
    embedding = weights["language_model.model.embed_tokens.weight"]

    def rewrite(name: str, tensor: torch.Tensor, *, tied: bool) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["tie_word_embeddings"] = tied
        config["text_config"].pop("tie_word_embeddings", None)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({**weights, name: tensor}, folder / "model.safetensors")

    for name in (head, "lm_head.weight"):
        rewrite(name, embedding.clone(), tied=True)
        network.open_hf(str(folder)).files.close()
        rewrite(name, embedding + 1, tied=True)
        with pytest.raises(ValueError, match=rf"and {name} is another matrix"):
            network.open_hf(str(folder))
    made = tmp_path / "made"
    made.mkdir()
    shard = ShardPlan("model.safetensors", (TensorPlan.of(head, embedding),))
    complete_folder(made, folder, [shard])
    assert json.loads((made / "config.json").read_text())["tie_word_embeddings"] is False
    rewrite(head, embedding + 1, tied=False)
    untied = read_hf_model(str(folder))
    MetaNetwork(untied, conversion_layout(untied), alone).open_hf(str(folder)).files.close()
