"""megatron_patches: conditions, target checks, the report, and what each patch is for. CPU only."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_patches
from megatron_patches.patch import megatron_version, release

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the patches are for machines without CUDA"
)
REPOSITORY = Path(megatron_patches.__file__).parents[1]

# What the installed megatron-core does not need, any more or yet.
NOT_NEEDED = [
    name
    for name, needed in (
        ("recompute_rest", release() < (0, 17)),
        ("moe_no_te", release() < (0, 17)),
        ("moe_permute", release() < (0, 17)),
        ("mla_no_te", release() < (0, 17)),
        ("mla_no_q_norm", release() >= (0, 19)),
    )
    if not needed
]

# Runs before anything has been patched: what existed in torch must be the same object afterwards.
FRESH_PROCESS = """
import inspect, json, sys
import megatron_patches
cheap = not {"torch", "megatron"} & set(sys.modules)
import torch, torch._dynamo  # dynamo wraps torch.manual_seed when it is imported
places = {"torch": torch, "torch.cuda": torch.cuda, "torch.Tensor": torch.Tensor, "torch.distributed": torch.distributed}
def attribute(place, name):
    return inspect.getattr_static(places[place], name, None)
before = {(place, name): attribute(place, name) for place, owner in places.items() for name in dir(owner) if name != "__dict__"}
first = megatron_patches.apply()
changed = [f"{place}.{name}" for (place, name), value in before.items() if attribute(place, name) is not value]

def snapshot():
    values = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("megatron.core"):
            for key, value in vars(module).items():
                values[name, key] = value
                if isinstance(value, type):
                    values.update({(name, key, attribute): member for attribute, member in vars(value).items()})
    return values
once = snapshot()
second = megatron_patches.apply()
twice = snapshot()
print(json.dumps({
    "cheap": cheap,
    "changed": changed,
    "real_torch_kept": sys.modules["torch"] is torch and torch.zeros.__module__ != "megatron_patches.torch_on_cpu",
    "same_report": first == second,
    "applied": [entry.name for entry in first.applied],
    "skipped": [entry.name for entry in first.skipped],
    "moved_by_second": [str(key) for key in once if twice.get(key) is not once[key]],
}))
"""


def test_fresh_process() -> None:
    """Import is cheap; torch keeps all it had but Tensor.cuda; a second apply() changes nothing."""
    run = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["cheap"]
    assert result["changed"] == ["torch.Tensor.cuda"]
    assert result["real_torch_kept"]
    assert result["same_report"]
    assert result["moved_by_second"] == []
    assert result["applied"] == [name for name in megatron_patches.ORDER if name not in NOT_NEEDED]
    assert result["skipped"] == NOT_NEEDED


@pytest.fixture(scope="module", autouse=True)
def applied() -> megatron_patches.Report:
    return megatron_patches.apply()


def test_one_applies_on_a_machine_with_cuda_and_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: (
            object() if name.startswith("transformer_engine") else real(name, *rest)
        ),
    )
    monkeypatch.setattr(megatron_patches, "_installed", {})
    report = megatron_patches.apply()
    always = [
        "torch_norm_sp",
        "recompute_rest",
        "moe_permute",
        "mla_tp_grads",
        "mla_no_q_norm",
        "geglu_clamp",
        "rope_thd",
        "yarn_parts",
        "known_shapes",
    ]
    always += ["offload_ckpt", "safe_checkpoints"]
    always = [name for name in always if name not in NOT_NEEDED]
    assert [entry.name for entry in report.applied] == always
    assert [entry.name for entry in report.skipped] == [
        name for name in megatron_patches.ORDER if name not in always
    ]
    reasons = dict(report.skipped)
    assert reasons["rng_on_cpu"] == "CUDA is available"
    assert reasons["moe_no_te"] == "Transformer Engine is installed"


def test_on_cuda_without_transformer_engine_only_the_other_patches_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    due = [
        name
        for name in megatron_patches.ORDER
        if not megatron_patches.load_patch(name).skip_reason()
    ]
    assert due == [
        name
        for name in (
            "torch_norm_sp",
            "recompute_no_te",
            "recompute_rest",
            "moe_no_te",
            "latent_moe_no_te",
            "moe_permute",
            "mla_no_te",
            "mla_tp_grads",
            "mla_no_q_norm",
            "geglu_clamp",
            "rope_thd",
            "yarn_parts",
            "known_shapes",
            "torch_norms",
            "precision_adam",
            "torch_adam_ckpt",
            "offload_ckpt",
            "safe_checkpoints",
        )
        if name not in NOT_NEEDED
    ]


def test_a_patch_goes_where_megatron_core_has_mended_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch = importlib.import_module("megatron_patches.patch")
    fixed = dataclasses.replace(megatron_patches.load_patch("tensor_cuda"), fixed_in="0.18")
    for version, idle in (((0, 16, 1), ""), ((0, 17, 9), ""), ((0, 18, 0), "0.18"), ((1,), "0.18")):
        monkeypatch.setattr(patch, "_version", lambda version=version: version)
        assert fixed.skip_reason() == (idle and f"fixed in megatron-core {idle}")
    late = dataclasses.replace(fixed, since="0.17")
    monkeypatch.setattr(patch, "_version", lambda: (0, 16, 1))
    assert late.skip_reason() == "needed since megatron-core 0.17"
    monkeypatch.setattr(patch, "_version", lambda: (0, 17, 0))
    assert late.skip_reason() == ""


def test_the_release_is_that_of_the_megatron_core_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout on PYTHONPATH goes before the installed distribution, whose metadata says another
    release."""
    patch = importlib.import_module("megatron_patches.patch")
    info = importlib.import_module("megatron.core.package_info")
    assert patch.release() == (info.MAJOR, info.MINOR)
    checkout = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: checkout)
    monkeypatch.setattr(patch, "_version", patch._version.__wrapped__)
    (tmp_path / "package_info.py").write_text(
        "MAJOR = 1\nMINOR = 42\nPATCH = 3\nPRE_RELEASE = ''\n"
    )
    assert patch.release() == (1, 42) and patch.megatron_version() == "1.42.3"
    (tmp_path / "package_info.py").unlink()
    monkeypatch.setattr(patch.metadata, "version", lambda name: "0.19.2rc1")
    assert patch.release() == (0, 19) and patch.megatron_version() == "0.19.2"


def test_report_prints_as_a_table() -> None:
    report = megatron_patches.Report(
        [megatron_patches.Entry("one", "no CUDA device")],
        [megatron_patches.Entry("twenty_one", "CUDA is available")],
    )
    assert str(report).splitlines() == [
        "patch       state    reason",
        "one         applied  no CUDA device",
        "twenty_one  skipped  CUDA is available",
    ]


TARGETS = [
    ("torch_on_cpu", "dist_checkpointing.mapping", "ShardedTensor.init_data"),
    ("type_strings", "optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    (
        "type_strings",
        "optimizer.distrib_optimizer",
        "DistributedOptimizer._build_model_and_main_param_groups",
    ),
    ("type_strings", "optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("rng_on_cpu", "tensor_parallel.random", "_get_cuda_rng_state"),
    ("rng_on_cpu", "tensor_parallel.random", "_set_cuda_rng_state"),
    ("rng_on_cpu", "tensor_parallel.random", "CudaRNGStatesTracker.fork"),
    ("torch_norm_sp", "transformer.torch_norm", "WrappedTorchNorm.__new__"),
    ("recompute_no_te", "tensor_parallel.random", "CheckpointWithoutOutput.__init__"),
    *(
        [("recompute_rest", "transformer.transformer_block", "TransformerBlock._get_layer")]
        if "recompute_rest" not in NOT_NEEDED
        else []
    ),
    ("moe_no_te", "transformer.moe.moe_utils", "RouterGatingLinearFunction.forward"),
    ("latent_moe_no_te", "transformer.moe.moe_layer", "MoELayer.__init__"),
    ("mla_no_te", "transformer.multi_latent_attention", "MultiLatentAttention.__init__"),
    ("mla_tp_grads", "transformer.multi_latent_attention", "MLASelfAttention.__init__"),
    (
        "mla_tp_grads",
        "transformer.multi_latent_attention",
        "MLASelfAttention.get_query_key_value_tensors",
    ),
    *(
        [("mla_no_q_norm", "transformer.mla_qk_norm_config", "QKNormConfigResolver.resolve")]
        if "mla_no_q_norm" not in NOT_NEEDED
        else []
    ),
    ("geglu_clamp", "transformer.mlp", "weighted_bias_quick_geglu_impl"),
    ("geglu_clamp", "transformer.moe.experts", "weighted_bias_quick_geglu_impl"),
    ("rope_thd", "models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_thd"),
    *(
        (
            "yarn_parts",
            "models.common.embeddings.yarn_rotary_pos_embedding",
            f"YarnRotaryEmbedding.{method}",
        )
        for method in ("__init__", "get_emb")
    ),
    ("moe_split_sizes", "transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"),
    ("gloo_uneven", "tensor_parallel.mappings", "_gather_along_first_dim"),
    ("gloo_uneven", "tensor_parallel.mappings", "_reduce_scatter_along_first_dim"),
    ("precision_adam", "optimizer", "is_te_min_version"),
    ("precision_adam", "optimizer", "_get_megatron_optimizer_based_on_param_groups"),
    ("torch_norms", "optimizer.clip_grads", "l2_norm_impl"),
    ("moe_permute", "transformer.moe.moe_utils", "permute"),
    ("moe_permute", "transformer.moe.token_dispatcher", "permute"),
    ("torch_norms", "optimizer.clip_grads", "multi_tensor_scale_impl"),
    ("known_shapes", "pipeline_parallel.p2p_communication", "P2PCommunicator._communicate_shapes"),
    (
        "precision_adam",
        "optimizer.distrib_optimizer",
        "DistributedOptimizer._copy_model_params_to_main_params",
    ),
    (
        "offload_on_cpu",
        "optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
    ),
    ("offload_ckpt", "optimizer.distrib_optimizer", "DistributedOptimizer.state_dict"),
    (
        "offload_ckpt",
        "optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
    ),
    ("torch_adam_ckpt", "optimizer.distrib_optimizer", "DistributedOptimizer.sharded_state_dict"),
    (
        "torch_adam_ckpt",
        "optimizer.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
    ),
    ("torch_adam_ckpt", "optimizer.distrib_optimizer", "DistributedOptimizer.load_state_dict"),
    ("safe_checkpoints", "dist_checkpointing.strategies.torch", "_get_filesystem_reader"),
    ("safe_checkpoints", "dist_checkpointing.strategies.torch", "MCoreLoadPlanner"),
    (
        ("safe_checkpoints", "dist_checkpointing.serialization", "load_common_state_dict")
        if release() >= (0, 17)
        else (
            "safe_checkpoints",
            "dist_checkpointing.strategies.common",
            "TorchCommonLoadStrategy.load_common",
        )
    ),
]


@pytest.mark.parametrize(("patch", "module_name", "path"), TARGETS, ids=lambda value: str(value))
def test_a_missing_target_fails_loudly(
    monkeypatch: pytest.MonkeyPatch, patch: str, module_name: str, path: str
) -> None:
    # the checks of these two look at what installation has changed: let them see the unpatched
    # state
    if patch == "torch_on_cpu":
        for name in importlib.import_module("megatron_patches.torch_on_cpu").MODULES:
            monkeypatch.setattr(importlib.import_module(f"megatron.core.{name}"), "torch", torch)
    if patch == "type_strings":
        monkeypatch.setattr(
            importlib.import_module("megatron_patches.type_strings"),
            "TARGETS",
            (f"{module_name}:{path}",),
        )
    owner: Any = importlib.import_module(f"megatron.core.{module_name}")
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, last)
    with pytest.raises(RuntimeError) as caught:
        megatron_patches.load_patch(patch).check()
    for word in (
        f"megatron_patches/{patch}.py",
        f"megatron.core.{module_name} has no {path}",
        f"megatron-core {megatron_version()}",
        ">=0.16.1,<0.20",
    ):
        assert word in str(caught.value)


def test_a_missing_module_or_a_changed_body_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = importlib.import_module("megatron_patches.torch_on_cpu")
    monkeypatch.setattr(on_cpu, "MODULES", ("no_such_module",))
    with pytest.raises(
        RuntimeError,
        match=rf"module megatron\.core\.no_such_module not found in megatron-core {megatron_version()}",
    ):
        on_cpu.check()
    monkeypatch.setattr(on_cpu, "MODULES", ("package_info",))
    with pytest.raises(RuntimeError, match=r"package_info has no global named torch"):
        on_cpu.check()
    # applied above: the constants are gone from this function, as they would be from a new
    # version's
    strings = importlib.import_module("megatron_patches.type_strings")
    with pytest.raises(RuntimeError, match="no longer names a CUDA tensor type"):
        strings.check()
    monkeypatch.setattr(
        importlib.import_module("megatron_patches.tensor_cuda"),
        "torch",
        SimpleNamespace(Tensor=object),
    )
    with pytest.raises(RuntimeError, match=r"torch\.Tensor\.cuda"):
        megatron_patches.load_patch("tensor_cuda").check()


def test_a_failing_check_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every due patch is checked before the first is installed."""
    installed: dict[str, Any] = {}
    monkeypatch.setattr(megatron_patches, "_installed", installed)
    monkeypatch.setattr(megatron_patches, "ORDER", ("tensor_cuda", "torch_norm_sp"))
    monkeypatch.setattr(torch.Tensor, "cuda", "as it was")
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    monkeypatch.delattr(norm, "__new__")
    with pytest.raises(RuntimeError, match="WrappedTorchNorm"):
        megatron_patches.apply()
    assert torch.Tensor.cuda == "as it was"
    assert installed == {}


def test_torch_on_cpu() -> None:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer import clip_grads

    assert parallel_state.torch is clip_grads.torch is not torch
    seen = clip_grads.torch
    assert seen.zeros(2, device="cuda").device.type == "cpu"
    assert seen.empty(2, device=seen.cuda.current_device(), pin_memory=True).device.type == "cpu"
    assert seen.device("cuda", 0) == torch.device("cpu") == seen.device("cpu")
    assert seen.Tensor is torch.Tensor
    assert seen.cuda.is_available() is False
    with seen.cuda.stream(seen.cuda.Stream()), seen.autocast("cuda", dtype=torch.bfloat16):
        seen.cuda.current_stream().wait_stream(seen.cuda.default_stream())
        seen.cuda.synchronize()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    sharded = ShardedTensor.from_rank_offsets("key", torch.zeros(3))
    sharded.init_data("cuda")
    assert sharded.data.device.type == "cpu"
    with pytest.raises(AttributeError):
        _ = seen.no_such_name


def test_type_strings_clip_a_cpu_gradient() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8, 0.0]))
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    half.grad = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):  # megatron-core's own: gradients are clipped in fp32 only
        clip_grad_by_total_norm_fp32([half], max_norm=1.0, total_norm=5.0)


def test_tensor_cuda() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor is tensor.cuda(0, non_blocking=True)


def test_random_states_fork_nest_and_continue(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draws(seed: int, count: int) -> list[float]:
        return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()

    caplog.set_level(logging.WARNING)
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(5)
    tracker.add("one", 7)
    tracker.add("two", 11)
    got: dict[str, list[float]] = {"default": [torch.rand(1).item()], "one": [], "two": []}
    with tracker.fork("one"):
        got["one"].append(torch.rand(1).item())
        with tracker.fork("two"):
            got["two"].append(torch.rand(1).item())
        got["one"].append(torch.rand(1).item())
    got["default"].append(torch.rand(1).item())
    with contextlib.suppress(KeyError), tracker.fork("two"):
        got["two"].append(torch.rand(1).item())
        raise KeyError
    got["default"].append(torch.rand(1).item())
    assert got == {"default": draws(5, 3), "one": draws(7, 2), "two": draws(11, 2)}
    assert not caplog.records
    with (
        pytest.raises(ValueError, match="'three' is unknown; known: one, two"),
        tracker.fork("three"),
    ):
        pass


def _config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, **changes
    )


def test_torch_norm_is_marked_for_sequence_parallelism() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = _config(normalization="RMSNorm", params_dtype=torch.bfloat16)
    config.sequence_parallel = True
    norm = WrappedTorchNorm(config, 8, eps=1e-3)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert norm.weight.sequence_parallel is True  # type: ignore[attr-defined]
    assert norm.weight.dtype == torch.bfloat16
    x = torch.randn(3, 8)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm.float()(x), expected)
    layer_norm = WrappedTorchNorm(_config(normalization="LayerNorm"), 8)
    assert isinstance(layer_norm, torch.nn.LayerNorm)
    assert layer_norm.bias.sequence_parallel is False  # type: ignore[attr-defined]
    config.normalization = "L2Norm"
    with pytest.raises(ValueError, match=r"L2Norm.*LayerNorm, RMSNorm"):
        WrappedTorchNorm(config, 8)


def test_selective_recomputation_gives_the_same_gradient() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, get_cuda_rng_tracker

    get_cuda_rng_tracker()
    x = torch.randn(4, requires_grad=True)
    checkpoint = CheckpointWithoutOutput(fp8=False)
    middle = checkpoint.checkpoint(torch.tanh, x)
    out = (middle * middle).sum()
    checkpoint.discard_output_and_register_recompute(out)
    out.backward()
    y = x.detach().requires_grad_()
    torch.tanh(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_router_without_transformer_engine() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    out = router_gating_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(out, x @ weight.t())
    out.sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(2, 4))


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_packed_rows_are_rotated_as_their_sequences_are(cp_size: int, cp_rank: int) -> None:
    """Against megatron-core's own loop, to the last bit; queries after keys, and another row after
    the first."""
    from megatron.core.models.common.embeddings import rope_utils

    rotate = rope_utils._apply_rotary_pos_emb_thd
    unit = 1 if cp_size == 1 else 2 * cp_size
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank)
    angles = torch.randn(4 * unit, 1, 1, 6)
    for lengths in ([3, 1, 4, 2], [2, 2], [4], [1, 1, 1, 1]):  # in units; the last fill the table
        bounds = torch.tensor([0, *(n * unit for n in lengths)]).cumsum(0).int()
        for heads in (1, 2):
            rows = torch.randn(int(bounds[-1]) // cp_size, heads, 8)
            found = rotate(rows, bounds, angles, cp_group=group)
            assert torch.equal(found, rotate.__wrapped__(rows, bounds, angles, cp_group=group))
            # megatron-core 0.20 names the longest sequence as well
            if sum(lengths) != 4 or release() >= (0, 20):
                longest = max(lengths) * unit
                named = rotate(rows, bounds, angles, cp_group=group, max_seqlen=longest)
                assert torch.equal(named, found)


def test_split_sizes_of_a_cpu_tensor() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    for module in (moe_utils, token_dispatcher):
        assert module.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True).tolist() == [
            2,
            3,
        ]
        assert not torch.is_tensor(
            module.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True)
        )
        assert torch.is_tensor(module.maybe_move_tensor_to_cpu(torch.tensor([2, 3])))
        assert module.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


@pytest.fixture
def one_process() -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _model_and_optimizer() -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule

    class Net(MegatronModule):
        def __init__(self) -> None:
            super().__init__(_config())
            torch.manual_seed(0)
            self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    net = Net()
    model = DistributedDataParallel(
        net.config, DistributedDataParallelConfig(use_distributed_optimizer=True), net
    )
    config = OptimizerConfig(
        optimizer="adam", lr=0.1, weight_decay=0.1, use_distributed_optimizer=True, clip_grad=0.0
    )
    return model, get_megatron_optimizer(config, [model])


def _step(model: Any, optimizer: Any, seed: int) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).pow(2).mean().backward()
    model.finish_grad_sync()
    optimizer.step()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_resumed_adam_continues_as_if_never_stopped(
    one_process: None, tmp_path: Path, steps_before: int
) -> None:
    from megatron.core import dist_checkpointing

    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    model, optimizer = _model_and_optimizer()
    for seed in range(steps_before):
        _step(model, optimizer, seed)
    parts = {
        "optimizer": optimizer.sharded_state_dict(
            model.module.sharded_state_dict(), metadata=metadata
        )
    }
    dist_checkpointing.save(parts, str(tmp_path), async_sharded_save=False)

    resumed, fresh = _model_and_optimizer()
    template = {
        "optimizer": fresh.sharded_state_dict(
            resumed.module.sharded_state_dict(), is_loading=True, metadata=metadata
        )
    }
    fresh.load_state_dict(dist_checkpointing.load(template, str(tmp_path))["optimizer"])
    resumed.module.load_state_dict(model.module.state_dict())
    for seed in (10, 11):
        _step(model, optimizer, seed)
        _step(resumed, fresh, seed)
    for (name, expected), got in zip(model.module.named_parameters(), resumed.module.parameters()):
        assert torch.equal(expected, got), name


def test_another_project_called_apex_is_not_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_patches.patch import has_apex

    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('another project')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_apex()
    (package / "optimizers").mkdir()
    assert has_apex()
