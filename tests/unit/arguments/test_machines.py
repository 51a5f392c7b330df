"""Every family's config.json on machines that are not this one: with a GPU, with Transformer Engine,
with Apex. What they decide, megatron-core must accept."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

import megatron_patches
from arguments.megatron_configs import Machine
from arguments.parse import parse_args
from arguments.run_config import RunConfig
from megatron_patches import patch
from scripts.make_tiny_model import ROOT, class_family, family_of, own_config, tiny_settings
from slime_like import doctor
from slime_like.errors import RunError
from slime_like.megatron.init import device_of_this_process
from slime_like.weights.families import model_families
from tests.unit.command_lines import complete, problems_of

MACHINES = {
    "GPU": Machine(cuda=True, transformer_engine=False, gradient_fusion=False),
    "Transformer Engine": Machine(cuda=True, transformer_engine=True, gradient_fusion=False),
    "all": Machine(cuda=True, transformer_engine=True, gradient_fusion=True, apex=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By architecture, a folder with a config.json of a tiny model."""
    root = tmp_path_factory.mktemp("configs")
    return {name: config_of(name, root / name) for name in model_families.names()}


def config_of(architecture: str, folder: Path) -> Path:
    from transformers import AutoConfig

    family = family_of(architecture)
    settings = tiny_settings(class_family(family), vocab_size=64, eos_token_id=1)
    config = AutoConfig.for_model(family.same_as or family.model_type, **settings).to_dict()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own_config(family, config)))
    return folder


def parse_model(folder: Path, flags: str = "") -> RunConfig:
    words = (
        f"--hf-checkpoint {folder} --debug-train-only --load-debug-rollout-data {folder}/"
        "r_{rollout_id} --num-rollout 1 --lr 1e-4 --rollout-batch-size 2 --n-samples-per-prompt 2"
    )
    return parse_args(f"{words} {flags}".split(), 1)


@pytest.mark.parametrize("precision", ["", "--bf16 --use-distributed-optimizer"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("architecture", model_families.names())
def test_defaults_of_every_family_are_accepted(
    architecture: str,
    machine: str,
    precision: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: MACHINES[machine])
    if machine != "GPU":
        for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
            monkeypatch.setattr(rope_utils, name, object())  # Transformer Engine's
    folder = folders[architecture]
    config = parse_model(folder, precision)
    expected = "local" if machine == "GPU" else "transformer_engine"
    assert config.megatron.transformer.transformer_impl == expected


def problems_on(
    machine: Machine, flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    monkeypatch.setattr(Machine, "here", lambda: machine)
    return {p.flag: p.message for p in problems_of(complete(folder, *flags.split()))}


def test_backends_that_cannot_serve_a_device_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Machine(cuda=False, transformer_engine=False, gradient_fusion=False)
    flag, mistake = "--distributed-backend", "--gamma 2"
    for machine, backend, words in (
        (cpu, "nccl", "requires CUDA"),
        (MACHINES["GPU"], "gloo", "cannot reduce the gradients of a GPU"),
    ):
        assert words in problems_on(machine, f"{flag} {backend}", tmp_path, monkeypatch)[flag]
    for machine, backend in ((cpu, "gloo"), (MACHINES["GPU"], "nccl"), (MACHINES["GPU"], "auto")):
        found = problems_on(machine, f"{flag} {backend} {mistake}", tmp_path, monkeypatch)
        assert list(found) == ["--gamma"]


def test_transformer_engine_without_its_extension_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install transformer-engine` leaves it, and with an extension where it looks for one."""
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('empty meta package')\n")
    monkeypatch.syspath_prepend(package.parent)
    assert patch.has_engine_without_extension() and not patch.has_transformer_engine()
    machine = Machine.here()
    assert machine.engine_without_extension and not machine.transformer_engine
    reported = problems_on(machine, "", tmp_path, monkeypatch)
    assert "without its extension for torch" in reported["--transformer-impl"]
    assert doctor.transformer_engine()[0].startswith("LACKS  Transformer Engine's extension")
    (package / "wheel_lib").mkdir()
    for place in (package.parent, package, package / "wheel_lib"):
        extension = place / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so"
        extension.touch()
        assert patch.has_transformer_engine() and not patch.has_engine_without_extension()
        extension.unlink()


def test_doctor_imports_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension built for another torch is there, and cannot be loaded."""
    monkeypatch.setattr(doctor, "has_engine_without_extension", lambda: False)
    monkeypatch.setattr(doctor, "has_transformer_engine", lambda: True)
    (line,) = doctor.transformer_engine()
    assert line.startswith("LACKS  a Transformer Engine that fits this torch: ")
    assert "No module named 'transformer_engine'" in line


@pytest.mark.parametrize(("version", "words"), [(91002, "here: 9.10"), (91800, None)])
def test_sinks_with_an_old_cudnn_are_a_warning(
    version: int,
    words: str | None,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.backends import cudnn

    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object())
    monkeypatch.setattr(cudnn, "version", lambda: version)
    monkeypatch.setattr(Machine, "here", lambda: MACHINES["Transformer Engine"])
    for architecture in ("GptOssForCausalLM", "Qwen3ForCausalLM"):
        found = [w for w in parse_model(folders[architecture]).warnings if "cuDNN" in w]
        has_sinks = architecture.startswith("GptOss")
        assert len(found) == int(words is not None and has_sinks)
        assert all(words is not None and words in warning for warning in found)
    monkeypatch.setattr(Machine, "here", lambda: MACHINES["GPU"])
    assert not any("cuDNN" in w for w in parse_model(folders["GptOssForCausalLM"]).warnings)


def test_doctor_names_versions_that_are_not_those_of_the_constraints() -> None:
    lines = (ROOT / "constraints-gpu.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned == doctor.TOGETHER

    def installed(**others: str) -> list[str]:
        have = {name.replace("_", "-"): version for name, version in others.items()}

        def version(package: str) -> str:
            if package not in have:
                raise metadata.PackageNotFoundError(package)
            return have[package]

        return doctor.together(version)

    assert installed(torch="2.13.0") == [], "no other package that pins it"
    assert installed(torch="2.14.1+cu130", sglang="0.5.23") == []
    (torch_line, te_line) = installed(torch="2.13.0", sglang="0.5.23", transformer_engine="2.8")
    assert torch_line.split() == [
        "other",
        "torch",
        "2.13.0",
        *["constraints-gpu.txt", "has", "2.14.1"],
    ]
    assert te_line.split()[:3] == ["other", "transformer-engine", "2.8"]


def test_nothing_is_compiled_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton needs a C compiler at run time, which small images do not have."""
    jit = megatron_patches.load_patch("jit_on_cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert jit.skip_reason() == ""
    assert doctor.compiler()[0].startswith("lacks  C compiler")
    for name in ("gcc", "clang"):
        program = tmp_path / name
        program.touch(0o755)
        assert jit.skip_reason() == "CUDA and a C compiler are there" and doctor.compiler() == []
        program.unlink()
    monkeypatch.setenv("CC", "/opt/cc")
    assert jit.skip_reason()


@pytest.mark.parametrize(
    ("rank", "count", "device"),
    [("0", 1, 0), ("3", 1, 0), ("3", 8, 3), ("8", 8, None), ("1", 2, 1)],
)
def test_the_gpu_of_a_process(
    monkeypatch: pytest.MonkeyPatch, rank: str, count: int, device: int | None
) -> None:
    """srun --gpus-per-task=1 shows each process one GPU, whatever its local rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("LOCAL_RANK", rank)
    if device is not None:
        assert device_of_this_process() == torch.device("cuda", device)
        return
    with pytest.raises(RunError, match=r"process 8 of this host has no GPU: 8 are visible"):
        device_of_this_process()
