"""Settings of the optimizer's memory: what goes together, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.megatron_configs import Machine
from arguments.parse import parse_args
from slime_like.config import ConfigError
from tests.unit.command_lines import complete

SHARDED = "--use-distributed-optimizer"
PRECISE = f"{SHARDED} --use-precision-aware-optimizer"
OFFLOADED = f"--bf16 {PRECISE} --optimizer-cpu-offload"
GPU = dict(cuda=True)
# rule, flags, machine, flag that is named, words
CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("", "--exp-avg-dtype bf16", {}, "--exp-avg-dtype",
     "without --use-precision-aware-optimizer"),
    ("", "--main-grads-dtype bf16", {}, "--main-grads-dtype",
     "without --use-precision-aware-optimizer"),
    ("", "--use-precision-aware-optimizer", {},
     "--use-precision-aware-optimizer", "without --use-distributed-optimizer"),
    ("", f"{PRECISE} --optimizer sgd", {}, "--use-precision-aware-optimizer",
     "without --optimizer adam"),
    ("", f"{PRECISE} --lora-rank 4", {}, "--use-precision-aware-optimizer",
     "cannot be combined with --lora-rank"),
    ("check_optimizer_dtypes", f"{PRECISE} --exp-avg-sq-dtype fp8", {}, "--exp-avg-sq-dtype",
     "fp32, bf16"),
    ("check_optimizer_dtypes", f"{PRECISE} --main-params-dtype fp16", {}, "--main-params-dtype",
     "requires Transformer Engine"),
    ("check_optimizer_dtypes", PRECISE, dict(apex=True), "--use-precision-aware-optimizer", "Apex"),
    ("check_main_grads_dtype", f"{PRECISE} --main-grads-dtype bf16", {}, "--main-grads-dtype",
     "requires --bf16"),
    ("check_main_grads_dtype", f"{PRECISE} --bf16 --main-grads-dtype bf16 --grad-reduce-in-fp32",
     {}, "--main-grads-dtype", "conflicts with --grad"),
    ("check_main_grads_dtype", f"{PRECISE} --bf16 --main-grads-dtype fp32 --no-grad-reduce-in-fp32",
     {}, "--main-grads-dtype", "conflicts with --no-"),
    ("", "--optimizer-offload-fraction 0.5", {},
     "--optimizer-offload-fraction", "no effect without"),
    ("", "--no-pin-cpu-grads", {}, "--no-pin-cpu-grads", "no effect without"),
    ("", "--bf16 --optimizer-cpu-offload", {}, "--optimizer-cpu-offload",
     "without --use-precision-aware-optimizer"),
    ("", f"{PRECISE} --optimizer-cpu-offload", {}, "--optimizer-cpu-offload",
     "requires --bf16"),
    ("", f"{OFFLOADED} --no-decoupled-weight-decay", {},
     "--no-decoupled-weight-decay", "cannot be combined with --optimizer-cpu-offload"),
    ("", f"{OFFLOADED} --exp-avg-dtype bf16", {}, "--exp-avg-dtype",
     "cannot be combined with --optimizer-cpu-offload"),
    ("", f"{OFFLOADED} --optimizer-offload-fraction 0", {},
     "--optimizer-offload-fraction", "must be 0 < x"),
    ("check_optimizer_offload", f"{OFFLOADED} --optimizer-offload-fraction 0.5", GPU,
     "--optimizer-offload-fraction", "must be 1.0"),
]  # fmt: skip


def on_machine(monkeypatch: pytest.MonkeyPatch, **has: bool) -> None:
    machine = Machine(
        **{"cuda": False, "transformer_engine": False, "gradient_fusion": False, **has}
    )
    monkeypatch.setattr(Machine, "here", lambda: machine)


@pytest.mark.parametrize(
    ("rule", "flags", "machine", "flag", "message"),
    CASES,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)],
)
def test_wrong_combinations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    flags: str,
    machine: dict[str, bool],
    flag: str,
    message: str,
) -> None:
    on_machine(monkeypatch, **machine)
    with pytest.raises(ConfigError) as caught:
        parse_args(complete(tmp_path, *flags.split()), 1)
    assert [p for p in caught.value.problems if p.flag == flag and message in str(p)], str(
        caught.value
    )


def test_what_transformer_engine_can_do_passes_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second mistake is on the line, so that megatron-core is not asked."""
    on_machine(monkeypatch, cuda=True, transformer_engine=True)
    types = "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16"
    for flags in (f"--bf16 {PRECISE} {types}", f"{OFFLOADED} --optimizer-offload-fraction 0.5"):
        with pytest.raises(ConfigError) as caught:
            parse_args(complete(tmp_path, *flags.split(), "--gamma", "2"), 1)
        assert [p.flag for p in caught.value.problems] == ["--gamma"]


def test_types_reach_megatron_core(tmp_path: Path) -> None:
    flags = (
        f"--bf16 {PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16 "
        "--adam-beta2 0.98"
    )
    config = parse_args(complete(tmp_path, *flags.split()), 1)
    optimizer, bf16 = config.megatron.optimizer, torch.bfloat16
    assert (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype, optimizer.main_grads_dtype) == (
        bf16,
        bf16,
        bf16,
    )
    assert optimizer.main_params_dtype == torch.float32
    assert (
        optimizer.use_precision_aware_optimizer
        and optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    )
    assert config.megatron.ddp.grad_reduce_in_fp32 is False and "shrink" not in "".join(
        config.warnings
    )
    kept = parse_args(complete(tmp_path, *f"--bf16 {PRECISE}".split()), 1).megatron
    assert kept.optimizer.main_grads_dtype == torch.float32 and kept.ddp.grad_reduce_in_fp32 is True


def test_warnings(tmp_path: Path) -> None:
    message = "\n".join(
        map(
            str,
            parse_args(
                complete(tmp_path, *f"--bf16 {PRECISE} --exp-avg-sq-dtype bf16".split()), 1
            ).warnings,
        )
    )
    assert "--exp-avg-sq-dtype bf16 with --adam-beta2 0.999" in message
    offloaded = parse_args(complete(tmp_path, *OFFLOADED.split()), 1)
    assert "saves nothing without a GPU" in "\n".join(map(str, offloaded.warnings))
    assert offloaded.megatron.optimizer.optimizer_offload_fraction == 1.0
