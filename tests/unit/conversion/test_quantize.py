"""slime-like quantize: which weights are quantised, with which bits, and what a folder says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatron_patches

megatron_patches.apply()

from scripts.make_tiny_model import make_tiny_model  # noqa: E402
from slime_like.cli import quantize  # noqa: E402
from slime_like.config import ConfigError  # noqa: E402
from slime_like.conversion.quantize import Method, QuantizedCopy, quantize_folder  # noqa: E402
from slime_like.weights.families import model_families  # noqa: E402
from slime_like.weights.quantized import encode_tensors  # noqa: E402
from slime_like.weights.safetensors_reader import (  # noqa: E402
    INDEX,
    WeightFiles,
    stored_format,
    weight_files,
)
from tests.paths import ROOT  # noqa: E402

MADE: dict[str, dict[str, Any]] = {
    "fp8": dict(block=(8, 8)),
    "ue8m0": dict(scales="ue8m0", block=(8, 16)),
    "int4": dict(group=8),
    "int8": dict(group=4),
    "mxfp4": {},
}
LIKE = {"mxfp4": ("gpt-oss-20b", {"intermediate_size": 64})}
# matrices of layers that published folders have unquantised
SMALL = re.compile(
    r"\.(gate|router|router\.layer|router\.proj|shared_expert_gate|in_proj_(a|b|ba)|conv1d"
    r"|[qkv]_conv1d|conv\.(conv|in_proj|out_proj)|weights_proj|b_proj|[fg]_[ab]_proj|mixer\.in_proj"
    r"|mixer\.out_proj|eh_proj|shared_head\.head|embed_tokens)\.weight$"
    r"|hyper_connection|\.ple\.|\.indexer\.index_"
)
NO_FORM = {"DeepseekV4ForCausalLM": "nothing to quantise"} | dict.fromkeys(
    ("GptOssForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM",
     "Qwen3VLMoeForConditionalGeneration", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), "all experts of a layer in one tensor",
)  # fmt: skip


def method(name: str, **given: Any) -> Method:
    kind = "fp8" if name == "ue8m0" else name
    return Method(kind, **{**dict(scales="float", block=(8, 8), group=8, excluded=()), **given})


def tiny(folder: Path, name: str = "fp8") -> Path:
    like, changes = LIKE.get(name, ("Qwen3-30B-A3B", {}))
    make_tiny_model(like, folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    bf16 = {n: t.bfloat16() for n, t in tensors.items()}
    save_file(bf16, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in weight_files(folder) for n, t in load_file(path).items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (t.dtype, t.shape) == (b[n].dtype, b[n].shape)
        and torch.equal(t.flatten().view(torch.uint8), b[n].flatten().view(torch.uint8))
        for n, t in a.items()
    )


@pytest.mark.parametrize("name", MADE)
def test_its_bits_are_those_of_a_weight_update(name: str, tmp_path: Path) -> None:
    """In several files, which one after the other are read back within the format's bound."""
    source = tiny(tmp_path / "bf16", name)
    copy = QuantizedCopy(str(source), method(name, **MADE[name]))
    out = tmp_path / "out"
    done = quantize_folder(copy, str(source), str(out), max_shard_bytes=20_000, workers=2)
    assert done.files > 2 and done.kept == 0
    plain, found = stored(source), stored(out)
    how = stored_format(str(out))
    assert len(how) > 5 and same(found, encode_tensors(plain, how))
    with WeightFiles(str(out)) as files:
        assert files.names == plain.keys()
        for weight in how:
            back = files.read(weight, 0, 0, files.shape(weight)[0])
            # mantissas of 3 bits and 1 bit, integers of 4 and 8, against a block's largest value
            bound = {"fp8": 2**-4, "ue8m0": 2**-4, "mxfp4": 1 / 4, "int4": 1 / 14, "int8": 1 / 254}
            largest = plain[weight].float().abs().max()
            assert (back - plain[weight]).abs().max() <= 1.01 * bound[name] * largest
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values()) == done.bytes
    scales = [t for n, t in found.items() if n.endswith("weight_scale_inv")]
    powers = [bool((torch.frexp(t)[0] == 0.5).all()) for t in scales]
    assert all(powers) if name == "ue8m0" else not all(powers) or name != "fp8"
    config, before = (json.loads((f / "config.json").read_text()) for f in (out, source))
    assert config.pop("quantization_config") == copy.config
    assert config == before
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()  # fmt: skip


@pytest.mark.parametrize("name", ["fp8", "ue8m0", "mxfp4"])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    """Without an accelerator it dequantises: every weight has the value that our reader gives it."""
    source = tiny(tmp_path / "bf16", name)
    changes = {} if name == "mxfp4" else {**MADE[name], "block": (8, 8)}
    copy = QuantizedCopy(str(source), method(name, **changes))
    quantize_folder(copy, str(source), str(tmp_path / "out"), max_shard_bytes=10**9)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    model.save_pretrained(tmp_path / "theirs")
    theirs = stored(tmp_path / "theirs")
    with WeightFiles(str(tmp_path / "out")) as files:
        assert theirs.keys() == files.names
        for weight, tensor in theirs.items():
            ours = files.read(weight, 0, 0, files.shape(weight)[0]).bfloat16()
            assert torch.equal(tensor.bfloat16(), ours), weight


def skipped_by_sglang(module: str, ignored: list[str]) -> bool:
    """As its fp8 does: a module of the list, or one within it."""
    return any(f".{name}." in f".{module}." for name in ignored)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in ("Qwen3NextForCausalLM", "GptOssForCausalLM", "DeepseekV32ForCausalLM") else pytest.mark.extended)
        for name in model_families.names()
    ],
)  # fmt: skip
def test_which_weights_of_a_family(architecture: str, tmp_path: Path) -> None:
    """The matrices of the text's layers, but for routers and small projections; the config lists
    what is left, as engines and transformers match it, and nothing that is quantised."""
    make_tiny_model(architecture, tmp_path)
    size = method("fp8", block=(2, 8))  # heads of 7 values in MiMo-V2's
    if message := NO_FORM.get(architecture):
        with pytest.raises(ConfigError, match=message):
            QuantizedCopy(str(tmp_path), size)
        return
    copy = QuantizedCopy(str(tmp_path), size)
    with WeightFiles(str(tmp_path), predicts=True) as files:
        shapes = {name: files.shape(name) for name in files.names}
    tower = re.compile("vis|multi_modal|mm_proj")
    expected = {
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and "layers." in name and name.endswith(".weight")
        if not SMALL.search(name) and not tower.search(name)
    }
    assert copy.quantized.keys() == expected
    ignored = copy.config["modules_to_not_convert"]
    for name, shape in shapes.items():
        if len(shape) > 1 and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            assert skipped_by_sglang(module, ignored) == (name not in expected), name


def test_integers_leave_latent_attention(tmp_path: Path) -> None:
    """As Kimi-K2-Thinking; compressed-tensors compares names, and has patterns for what is within a
    module."""
    make_tiny_model("deepseek-v3", tmp_path)
    copy = QuantizedCopy(str(tmp_path), method("int4"))
    assert copy.quantized and not any("self_attn" in name for name in copy.quantized)
    ignored = copy.config["ignore"]
    assert "lm_head" in ignored and r"re:(.*\.)?layers\.1\.self_attn\..*" in ignored
    pattern = next(i for i in ignored if "1" in i and i.startswith("re:")).removeprefix("re:")
    assert re.match(pattern, "model.layers.1.self_attn.o_proj")
    assert not re.match(pattern, "model.layers.11.self_attn.o_proj")


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    given = ["slime-like quantize", *map(str, words), "--no-progress"]
    monkeypatch.setattr(sys, "argv", given)
    return quantize.main()


WRONG: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["--block-size", "24", "8"], "does not fit --block-size 24 8"),
    ({}, [], "does not fit --block-size 128 128"),
    ({}, ["--method", "int4", "--group-size", "20"], "does not fit --group-size 20"),
    ({}, ["--method", "int4", "--group-size", "0"], "--group-size 0: must be >= 1"),
    ({}, ["--block-size", "0", "8"], "--block-size 0 8: must be >= 1"),
    ({}, ["--method", "mxfp4"], "is the format of the experts of GptOssForCausalLM"),
    ({}, ["--method", "int8", "--scale-format", "ue8m0"], "--scale-format: is of --method fp8"),
    ({}, ["--group-size", "8"], "--group-size: is of --method int4 and int8"),
    ({}, ["--block-size", "8", "8", "--modules-to-not-convert", "q"], "is no module that would be"),
    ({}, ["--block-size", "8", "8", "--modules-to-not-convert", "q_proj"], "v_proj.weight, which engines load as one"),
    ({}, ["--block-size", "8", "8", "--modules-to-not-convert", "experts.1"], "which engines load as one"),
    ({}, ["--max-shard-size", "many"], "--max-shard-size many"),
    ({"quantization_config": {"quant_method": "awq"}}, [], "or use the unquantised model"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "words", "message"), WRONG)
def test_wrong_command_lines(
    config: dict[str, Any],
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = tiny(tmp_path / "bf16"), tmp_path / "out"
    given = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**given, **config}))
    status = command(monkeypatch, "--hf-checkpoint", source, "--output", out, *words)
    assert status == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


def test_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there is not replaced, and what is quantised not quantised again."""
    source, out = tiny(tmp_path / "bf16"), tmp_path / "out"
    words = ("--block-size", 8, 8, "--modules-to-not-convert", "self_attn")
    assert command(monkeypatch, "--hf-checkpoint", source, "--output", out, *words) == 0
    assert not any("self_attn" in name for name in stored_format(str(out)))
    assert command(monkeypatch, "--hf-checkpoint", source, "--output", out, *words) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert command(monkeypatch, "--hf-checkpoint", out, "--output", tmp_path / "2", *words) == 2
    assert "is already quantised (quant_method fp8)" in capsys.readouterr().err


def test_an_interrupted_copy_is_no_folder_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tiny(tmp_path / "bf16"), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    good = tensors[name].clone()
    tensors[name][0, 0] = torch.inf
    words = ("--hf-checkpoint", source, "--output", out, "--block-size", 8, 8, "--workers", 1, "--max-shard-size", "20KB")  # fmt: skip
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert command(monkeypatch, *words) == 1
    assert f"{name} has numbers that are not finite" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        WeightFiles(str(tmp_path / ".out.partial"))
    copied = tmp_path / "copied"
    copy = QuantizedCopy(str(source), method("fp8"))
    monkeypatch.setattr(QuantizedCopy, "stream", failing(QuantizedCopy.stream, after=3))
    save_file({**tensors, name: good}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="disk full"):
        quantize_folder(copy, str(source), str(copied), max_shard_bytes=20_000)
    monkeypatch.undo()
    again = quantize_folder(copy, str(source), str(copied), max_shard_bytes=20_000)
    assert again.kept == 3 and again.files == 4
    assert command(monkeypatch, *words) == 0
    assert same(stored(out), stored(copied))


def failing(stream: Any, after: int) -> Any:
    """A `stream` that cannot go on after so many files."""
    files = []

    def limited(self: QuantizedCopy, file: Any) -> Any:
        files.append(file)
        if len(files) > after:
            raise OSError("disk full")
        return stream(self, file)

    return limited


MEASURED = """
import sys
from pathlib import Path
from slime_like.cli.exit_status import on_the_cpu
on_the_cpu()
import megatron_patches
megatron_patches.apply()
from slime_like.conversion.quantize import Method, QuantizedCopy, quantize_folder

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

copy = QuantizedCopy(sys.argv[1], Method("fp8", "float", (128, 128), 8, ()))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
quantize_folder(copy, sys.argv[1], sys.argv[2], max_shard_bytes=10**9)
print(peak() - before)
"""


@pytest.mark.extended
def test_memory_is_that_of_a_weight(tmp_path: Path) -> None:
    """Of 20 weights of 17 MB, in one file."""
    weight = torch.zeros(2048, 4096, dtype=torch.bfloat16)
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": weight.clone() for n in range(20)}
    (tmp_path / "bf16").mkdir()
    save_file(tensors, tmp_path / "bf16/model.safetensors")
    config = {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "bf16/config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path / "bf16", tmp_path / "out"],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=True,
    )  # fmt: skip
    assert 17 < int(done.stdout.split()[-1]) / 1000 < 8 * 17
