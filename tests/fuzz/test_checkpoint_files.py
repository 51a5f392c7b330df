"""Checkpoints and model folders that somebody else has written: whatever their files hold, a reader
ends soon, with a sentence that names the file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from arguments.hf.model import read_hf_model
from megatron_patches.safe_checkpoints import read_metadata
from slime_like.checkpoints.files import write_file
from slime_like.checkpoints.folders import (
    TRACKER,
    checkpoint_folder,
    clean_up,
    newest_step,
    publish,
    writing_folder,
)
from slime_like.checkpoints.manifest import (
    MANIFEST,
    damaged_files,
    read_identity,
    read_manifest,
    write_manifest,
)
from slime_like.checkpoints.state import TRAINER_FILE, read_trainer_state
from slime_like.cli.exit_status import UsageError
from slime_like.cli.inspect_checkpoint import look
from slime_like.weights.safetensors_reader import INDEX, WeightFiles, weights_digest

CLEAN = (ValueError, OSError)  # ConfigError is a ValueError
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "layer_types": ["full_attention"], "sliding_window": None, "torch_dtype": "float32",
}  # fmt: skip
MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, "head_dim": 4,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 2,
    "kv_lora_rank": 4, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_scaling": {"type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
NAMES = st.sampled_from(
    ["policy/a.distcp", "../../etc/passwd", "/dev/zero", "/etc/passwd", "fifo", "", ".", "a\0b", "a\nb", "x" * 5000]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), NAMES,
    st.sampled_from([10**30, -1, 2**63, 1e30, float("nan"), float("inf")]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def ends_cleanly(read: Callable[[], object]) -> None:
    """It returns, or raises what the program prints as one sentence."""
    with suppress(*CLEAN):
        read()


@st.composite
def mutated(draw: st.DrawFn, original: Any) -> Any:
    """A JSON value with one to three of its places replaced, removed or added to."""
    value = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        holder = value
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = draw(st.sampled_from(keys)) if keys else None
            deeper = None if key is None else holder[key]
            if isinstance(deeper, dict | list) and deeper and draw(st.booleans()):
                holder = deeper
                continue
            break
        if key is None:
            return draw(VALUES)
        how = draw(st.sampled_from(["replace", "remove", "rename"]))
        if how == "replace" or isinstance(holder, list):
            holder[key] = draw(VALUES)
        else:
            content = holder.pop(key)
            if how == "rename":
                holder[draw(NAMES)] = content
    return value


def metadata(places: int = 100) -> Metadata:
    size = torch.Size([4])
    tensor = TensorStorageMetadata(
        TensorProperties(torch.float32), size, [ChunkStorageMetadata(torch.Size([0]), size)]
    )
    return Metadata(
        state_dict_metadata={"a.weight": tensor, "b": BytesStorageMetadata()},
        storage_data={
            MetadataIndex("a.weight", torch.Size([0])): _StorageInfo("a.distcp", 0, places)
        },
        storage_meta=StorageMeta(),
    )


STATE = {
    "step": 2, "world_size": 1, "layout": "1 process", "has_rng": True, "random_states": {"policy": "1 process"},
    "networks": {"policy": {"optimizer": ["Adam"], "optimizer_step": 2.0, "scheduler": {}, "layout": "1 process"}},
    "fingerprints": [{"policy": {"weights": "a:b"}}], "model": {"hidden_size": 8},
}  # fmt: skip


def write_checkpoint(root: Path) -> Path:
    temporary = writing_folder(root, 2)
    (temporary / "policy").mkdir(parents=True)
    contents = {
        TRAINER_FILE: json.dumps(STATE).encode(),
        "policy/.metadata": pickle.dumps(metadata()),
        "policy/a.distcp": bytes(100),
    }
    records = {name: write_file(temporary / name, content) for name, content in contents.items()}
    write_manifest(temporary, records, {"model": STATE["model"], "tokenizer": {"vocabulary": "a"}})
    return publish(root, 2)


def read_everything(root: Path) -> None:
    """As a run does that resumes, as far as no model is needed; and what a user looks with."""
    there = checkpoint_folder(root, 2)

    def load() -> None:
        records = read_manifest(there)
        read_identity(there)
        assert isinstance(damaged_files(there, records, records, threads=1), list)

    ends_cleanly(load)
    ends_cleanly(lambda: read_trainer_state(there))
    ends_cleanly(lambda: read_metadata(there / "policy" / ".metadata"))
    ends_cleanly(lambda: newest_step(root))
    try:
        json.dumps(look(root, verify=True))
    except UsageError:
        assert not list(root.glob("iter_*"))
    ends_cleanly(lambda: clean_up(root))


@given(st.data())
def test_manifests_trackers_and_states(data: st.DataObject) -> None:
    with folder() as root:
        there = write_checkpoint(root)
        victim = data.draw(st.sampled_from([MANIFEST, TRAINER_FILE]))
        content = json.loads((there / victim).read_text())
        if victim == MANIFEST and data.draw(st.booleans()):
            content["files"] = data.draw(mutated(content["files"]))
        else:
            content = data.draw(mutated(content))
        (there / victim).write_text(json.dumps(content))
        if data.draw(st.booleans()):
            (root / TRACKER).write_bytes(data.draw(st.binary(max_size=80)))
        read_everything(root)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": _fifo,
    "device": _link_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "outside": _link_to("/etc/passwd"),
    "folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "deep": lambda path: path.write_text("[" * 200_000) and None,
    "number": lambda path: path.write_text("9" * 10_000) and None,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00") and None,
}


@pytest.mark.parametrize("name", [MANIFEST, TRAINER_FILE, "policy/.metadata", "policy/a.distcp"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_files_that_are_none(tmp_path: Path, name: str, kind: str) -> None:
    there = write_checkpoint(tmp_path)
    (there / name).unlink()
    SPECIAL[kind](there / name)
    read_everything(tmp_path)
    problems = damaged_or_refused(there)
    assert any(name.split("/")[-1] in text for text in problems), problems


def damaged_or_refused(there: Path) -> list[str]:
    try:
        records = read_manifest(there)
    except ValueError as error:
        return [str(error)]
    return damaged_files(there, records, records, threads=1)


@pytest.mark.parametrize("kind", SPECIAL)
def test_trackers_that_are_no_files(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / TRACKER).unlink()
    SPECIAL[kind](tmp_path / TRACKER)
    step, warning = newest_step(tmp_path)
    assert step == 2 and warning is not None
    read_everything(tmp_path)


@given(st.data())
def test_metadata_of_tensors(data: st.DataObject) -> None:
    """Numbers, names and kinds of entries are drawn; and bytes of the pickle are changed."""
    changed: Any = metadata(data.draw(st.sampled_from([100, 101, -1, 10**30, 0])))
    if data.draw(st.booleans()):
        place = next(iter(changed.storage_data))
        info = changed.storage_data[place]
        field = data.draw(st.sampled_from(["relative_path", "offset", "length"]))
        setattr(info, field, data.draw(VALUES))
    if data.draw(st.booleans()):
        entry = changed.state_dict_metadata["a.weight"]
        setattr(
            entry, data.draw(st.sampled_from(["size", "chunks", "properties"])), data.draw(VALUES)
        )
    if data.draw(st.booleans()):
        changed.state_dict_metadata = data.draw(VALUES)
    content = bytearray(pickle.dumps(changed))
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with folder() as root:
        there = write_checkpoint(root)
        (there / "policy" / ".metadata").write_bytes(content)
        ends_cleanly(lambda: read_metadata(there / "policy" / ".metadata"))
        look(root, verify=False)


@given(st.data())
def test_files_of_weights(data: st.DataObject) -> None:
    with folder() as model:
        shard = model / "model-00001-of-00001.safetensors"
        save_file({"a": torch.zeros(4), "b": torch.ones(2, 2, dtype=torch.int64)}, shard)
        index = {"metadata": {}, "weight_map": {"a": shard.name, "b": shard.name}}
        if data.draw(st.booleans()):
            index = data.draw(mutated(index))
        else:
            content = shard.read_bytes()
            size = int.from_bytes(content[:8], "little")
            header = data.draw(mutated(json.loads(content[8 : 8 + size])))
            text = json.dumps(header).encode()
            length = data.draw(st.sampled_from([len(text), 0, 2**63, len(text) + 1]))
            shard.write_bytes(length.to_bytes(8, "little") + text + content[8 + size :])
        (model / INDEX).write_text(json.dumps(index))

        def read() -> None:
            weights_digest(str(model))
            with WeightFiles(str(model)) as files:
                for name in files.names & {"a"}:
                    files.read(name, 0, 0, files.shape(name)[0] if files.shape(name) else 0)

        ends_cleanly(read)


@given(st.data())
def test_config_json(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from([LLAMA, MOE, DEEPSEEK]))
    with folder() as model:
        (model / "config.json").write_text(json.dumps(data.draw(mutated(original))))
        ends_cleanly(lambda: read_hf_model(str(model)))


@pytest.mark.parametrize("original", [LLAMA, MOE, DEEPSEEK])
def test_the_originals_are_read(tmp_path: Path, original: dict[str, Any]) -> None:
    """Else the tests above would test refusals only."""
    (tmp_path / "config.json").write_text(json.dumps(original))
    assert read_hf_model(str(tmp_path)).transformer["num_layers"] == 2


def test_the_original_checkpoint_is_whole(tmp_path: Path) -> None:
    there = write_checkpoint(tmp_path)
    assert damaged_or_refused(there) == []
    found = look(tmp_path, verify=True)
    assert (found["problems"], found["checkpoints"][0]["problems"]) == ([], [])
