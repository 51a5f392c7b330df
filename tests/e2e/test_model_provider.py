"""Whole runs of networks that a function of the user's builds (--custom-model-provider-path)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer

PROVIDERS = """
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from slime_like.compat.slime.api import model_class, model_settings

class Counting(GPTModel):
    calls = 0

    def forward(self, *inputs, **keywords):
        Counting.calls += 1
        return super().forward(*inputs, **keywords)

def plain(pre_process=True, post_process=True, vp_stage=None):
    settings = model_settings()
    assert settings["vp_stage"] == vp_stage
    return Counting(**settings, pre_process=pre_process, post_process=post_process)

def of_the_run(pre_process, post_process):
    class Own(model_class()):
        pass
    return Own(**model_settings(), pre_process=pre_process, post_process=post_process)

def half(pre_process, post_process):
    # only the first layer learns
    model = GPTModel(**model_settings(), pre_process=pre_process, post_process=post_process)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0." in name)
    return model

def further(pre_process, post_process):
    model = plain(pre_process, post_process)
    model.decoder.layers[0].gate = torch.nn.Parameter(torch.ones(1))
    return model

def unpacked(pre_process, post_process):
    settings = {**model_settings(), "transformer_layer_spec": get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")}
    return GPTModel(**settings, pre_process=pre_process, post_process=post_process)

def other(pre_process, post_process):
    return torch.nn.Linear(2, 2)

def count(*values):
    from pathlib import Path
    Path(__file__).with_name("calls").write_text(str(Counting.calls))
    return False
"""
FLAG = "custom_model_provider_path"


@pytest.fixture
def providers(tmp_path: Path) -> Path:
    file = tmp_path / "providers.py"
    file.write_text(PROVIDERS)
    return file


def test_a_subclass_with_the_runs_settings_changes_nothing(
    server: TrainServer, work: Workspace, tmp_path: Path, providers: Path
) -> None:
    """Bit by bit, the reference model's KL included; the same on two stages of a pipeline. The class
    may be GPTModel, or that of the run."""
    kl: dict[str, Any] = {"use_kl_loss": "", "kl_loss_coef": 0.1, "ref_load": work.model}
    hook = {"custom_rollout_log_function_path": f"{providers}:count"}
    own = {**kl, **hook, FLAG: f"{providers}:plain"}
    runs: dict[str, tuple[dict[str, Any], int]] = {
        "without": (kl, 1),
        "own": (own, 1),
        "of_the_run": ({**own, FLAG: f"{providers}:of_the_run"}, 1),
        "two": ({**own, "pipeline_model_parallel_size": 2}, 2),
    }
    for name, (more, ranks) in runs.items():
        argv = work.flags(tmp_path / name, **more)
        server.train(argv, tmp_path / f"log_{name}", ranks=ranks).ok()
    assert int((tmp_path / "calls").read_text()) > 0
    expected = rows_of(tmp_path / "without")
    for name in ("own", "of_the_run"):
        assert same_numbers(rows_of(tmp_path / name)) == same_numbers(expected)
    for ours, theirs in zip(rows_of(tmp_path / "two"), expected, strict=True):
        assert abs(ours["train/loss"] - theirs["train/loss"]) < 1e-5


def test_what_a_provider_freezes_stays(
    server: TrainServer, work: Workspace, tmp_path: Path, providers: Path
) -> None:
    hf = tmp_path / "hf"
    more = {FLAG: f"{providers}:half", "save_hf": hf, "num_rollout": 1}
    server.train(work.flags(tmp_path / "out", **more), tmp_path / "log").ok()
    before, after = weights_of(work.model), weights_of(hf)
    moved = {name for name in after if not after[name].equal(before[name])}
    assert moved and all(".layers.0." in name for name in moved)


WRONG = {
    "other": "returned Linear; return model_class()(**model_settings(), ...) or megatron-core's GPTModel",
    "unpacked": "self_attention.core_attention is megatron-core's DotProductAttention, without packed sequences",
    "further": "decoder.layers.0.gate",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_network_that_cannot_be_trained_is_reported(
    name: str, server: TrainServer, work: Workspace, tmp_path: Path, providers: Path
) -> None:
    argv = work.flags(tmp_path / "out", **{FLAG: f"{providers}:{name}"})
    assert WRONG[name] in server.train(argv, tmp_path / "log").error()
