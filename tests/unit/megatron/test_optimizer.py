"""Optimizer state in bf16, and on the CPU: the arithmetic, and checkpoints through megatron-core's
distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_patches
from arguments.rules.training import LARGEST_BETA2_OF_BF16
from megatron_patches import precision_adam
from megatron_patches.precision_adam import PrecisionAwareAdam

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS: dict[str, Any] = dict(lr=0.03, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)


def adam(
    parameters: list[torch.nn.Parameter],
    moments: torch.dtype = FP32,
    *,
    decoupled: bool = True,
    **settings: Any,
) -> PrecisionAwareAdam:
    types = dict(exp_avg_dtype=moments, exp_avg_sq_dtype=moments, master_weight_dtype=FP32)
    return PrecisionAwareAdam(
        parameters,
        adam_w_mode=decoupled,
        master_weights=True,
        use_decoupled_grad=True,
        **types,
        **{**SETTINGS, **settings},
    )


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_with_moments_in_fp32_it_is_torchs_adam(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, decoupled: bool
) -> None:
    """Bit by bit, on main parameters in fp32, in as many chunks as there are."""
    monkeypatch.setattr(precision_adam, "CHUNK", 64)
    local = [torch.nn.Parameter(random(n, seed=n).to(dtype)) for n in (200, 3)]
    main = [torch.nn.Parameter(p.detach().float()) for p in local]
    ours = adam(local, decoupled=decoupled)
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(main, **SETTINGS, foreach=False)
    for step in range(3):
        for i, (a, b) in enumerate(zip(local, main)):
            gradient = random(a.numel(), seed=10 * step + i)
            a.decoupled_grad = gradient  # type: ignore[attr-defined]
            b.grad = gradient.clone()
        ours.step()
        theirs.step()
    for a, b in zip(local, main):
        assert torch.equal(ours.state[a]["master_param"], b) and torch.equal(a, b.to(dtype))


def test_moments_in_bf16_are_rounded_after_every_step() -> None:
    """Against a loop in float64 that rounds what is stored, and nothing else."""
    start, betas = random(50, seed=1), SETTINGS["betas"]
    parameter = torch.nn.Parameter(start.to(BF16))
    optimizer = adam([parameter], BF16)
    w = parameter.detach().double().tolist()
    m, v = [0.0] * 50, [0.0] * 50

    def rounded(x: float) -> float:
        return float(torch.tensor(x, dtype=FP32).to(BF16))

    for step in (1, 2, 3):
        gradient = random(50, seed=100 + step).to(BF16)
        parameter.decoupled_grad = gradient  # type: ignore[attr-defined]
        optimizer.step()
        for i, g in enumerate(gradient.double().tolist()):
            first, second = (
                betas[0] * m[i] + (1 - betas[0]) * g,
                betas[1] * v[i] + (1 - betas[1]) * g * g,
            )
            m[i], v[i] = rounded(first), rounded(second)
            corrected = (first / (1 - betas[0] ** step)) / (
                math.sqrt(second / (1 - betas[1] ** step)) + 1e-8
            )
            w[i] = w[i] * (1 - 0.03 * 0.1) - 0.03 * corrected
    state = optimizer.state[parameter]
    assert {name: state[name].dtype for name in ("exp_avg", "exp_avg_sq", "master_param")} == {
        "exp_avg": BF16, "exp_avg_sq": BF16, "master_param": FP32,
    }  # fmt: skip
    # a value between two of bf16's may round to either in float32 and float64: a few moments are
    # one bit off
    torch.testing.assert_close(
        state["master_param"].double(), torch.tensor(w, dtype=torch.float64), rtol=3e-4, atol=3e-5
    )
    assert int((state["exp_avg"].double() != torch.tensor(m, dtype=torch.float64)).sum()) <= 2
    assert int((state["exp_avg_sq"].double() != torch.tensor(v, dtype=torch.float64)).sum()) <= 2


@pytest.mark.parametrize(
    ("beta2", "shrinks"), [(0.98, True), (LARGEST_BETA2_OF_BF16 - 1e-4, True), (0.999, False)]
)
def test_what_the_warning_about_second_moments_says(beta2: float, shrinks: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(256, dtype=BF16))
    optimizer = adam([parameter], BF16, betas=(0.9, beta2))
    optimizer.initialize_state(parameter)
    before = torch.linspace(1, 2, 256).to(BF16)
    optimizer.set_scaled_state(parameter, "exp_avg_sq", before)
    parameter.decoupled_grad = torch.zeros(256)  # type: ignore[attr-defined]
    optimizer.step()
    after = optimizer.state[parameter]["exp_avg_sq"]
    assert bool((after < before).all()) if shrinks else torch.equal(after, before)


# --- through megatron-core -----------------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[None]:
    megatron_patches.apply()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


PRECISE: dict[str, Any] = dict(use_precision_aware_optimizer=True)
OFFLOADED: dict[str, Any] = dict(**PRECISE, optimizer_cpu_offload=True)
KINDS: dict[str, dict[str, Any]] = {
    "fp32": PRECISE,
    "bf16": dict(**PRECISE, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", main_grads_dtype="bf16"),
    "offloaded": OFFLOADED,
    "half offloaded": dict(
        **OFFLOADED, optimizer_offload_fraction=0.5, overlap_cpu_optimizer_d2h_h2d=True
    ),
}


def model_and_optimizer(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Two linear layers in bf16 under the distributed optimizer, configured as the command line
    does."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import MegatronModule

    from arguments.megatron_configs import Machine, build_megatron_configs
    from arguments.schema import ModelConfig, ParallelConfig
    from slime_like.megatron.optimizer import build_optimizer

    core = dict(num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, bf16=True, lr=0.1, weight_decay=0.1,
                use_distributed_optimizer=True, clip_grad=0.5, **settings)  # fmt: skip
    machine = Machine(cuda=False, transformer_engine=False, gradient_fusion=False)
    built, problems = build_megatron_configs(
        core, model=ModelConfig(), parallel=ParallelConfig(), virtual_stages=None, machine=machine
    )
    assert built is not None and not problems

    class Net(MegatronModule):
        def __init__(self) -> None:
            super().__init__(built.transformer)
            torch.manual_seed(0)
            self.first, self.second = (
                torch.nn.Linear(3, 4, dtype=BF16),
                torch.nn.Linear(4, 2, dtype=BF16),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    model = DistributedDataParallel(built.transformer, built.ddp, Net())
    return model, build_optimizer(built.optimizer, [model])


def step(model: Any, optimizer: Any, seed: int) -> float:
    from slime_like.megatron.trained_network import step_if_finite

    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(random(5, 3, seed=seed).to(BF16)).float().pow(2).mean().backward()
    model.finish_grad_sync()
    stepped, norm = step_if_finite(optimizer)
    assert stepped
    return norm


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_optimizer_continues_as_if_never_stopped(
    one_process: None, tmp_path: Path, kind: str, steps_before: int
) -> None:
    from megatron.core import dist_checkpointing

    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    model, optimizer = model_and_optimizer(KINDS[kind])
    for seed in range(steps_before):
        step(model, optimizer, seed)
    random_state = torch.get_rng_state()
    saved = {
        "optimizer": optimizer.sharded_state_dict(
            model.module.sharded_state_dict(), metadata=metadata
        )
    }
    dist_checkpointing.save(saved, str(tmp_path), async_sharded_save=False)

    resumed, fresh = model_and_optimizer(KINDS[kind])
    torch.set_rng_state(random_state)
    template = {
        "optimizer": fresh.sharded_state_dict(
            resumed.module.sharded_state_dict(), is_loading=True, metadata=metadata
        )
    }
    fresh.load_state_dict(
        dist_checkpointing.load(template, str(tmp_path))["optimizer"]
    )  # classes are not unpickled
    assert torch.equal(torch.get_rng_state(), random_state), "no step with random gradients"
    resumed.module.load_state_dict(model.module.state_dict())
    for seed in (10, 11):
        assert step(model, optimizer, seed) == step(resumed, fresh, seed)
    for (name, expected), got in zip(model.module.named_parameters(), resumed.module.parameters()):
        assert torch.equal(expected, got), name


def test_a_resumed_optimizer_has_the_settings_of_its_run() -> None:
    """Whatever the layout: with another one, megatron-core keeps them itself."""
    from slime_like.megatron.optimizer import keep_own_settings

    own = {"betas": (0.5, 0.6), "eps": 1e-3, "max_lr": 1.0, "step": 0}
    saved = {"betas": [0.9, 0.999], "eps": 1e-3, "max_lr": 9.0, "step": 7}
    optimizer: Any = SimpleNamespace(param_groups=[dict(own), dict(own)])
    with keep_own_settings(optimizer) as changes:
        for group in optimizer.param_groups:
            group.update(saved)
    assert optimizer.param_groups == [{**own, "step": 7}] * 2
    assert set(changes) == {"Adam's betas (0.5, 0.6) (checkpoint: [0.9, 0.999])"}


def test_all_kinds_train_alike(one_process: None) -> None:
    """Against megatron-core's own fp32 main parameters: the same bits with fp32 state, offloaded or
    not up to the order of operations in torch's fused kernel, and near them in bf16."""
    plain = model_and_optimizer({})
    others = {kind: model_and_optimizer(settings) for kind, settings in KINDS.items()}
    for seed in range(4):
        norm = step(*plain, seed)
        for kind, (model, optimizer) in others.items():
            assert step(model, optimizer, seed) == pytest.approx(
                norm, rel=0.02 if kind == "bf16" else 1e-3
            ), kind
    expected = torch.cat([p.detach().flatten().float() for p in plain[0].parameters()])
    apart = {
        kind: float(
            (
                torch.cat([p.detach().flatten().float() for p in model.parameters()]) - expected
            ).norm()
            / expected.norm()
        )
        for kind, (model, _) in others.items()
    }
    assert (
        apart["fp32"] == 0
        and max(apart["offloaded"], apart["half offloaded"]) < 2e-3
        and 0 < apart["bf16"] < 0.02
    ), apart


def test_bytes_of_a_parameter(one_process: None) -> None:
    """Besides gradient buffer and bf16 weight: 12 with fp32 moments (main parameter included), 8
    with bf16 moments, none but the offloaded ones' own on the device."""
    found = {}
    for kind in ("fp32", "bf16"):
        model, optimizer = model_and_optimizer(KINDS[kind])
        step(model, optimizer, 0)
        states = optimizer.chained_optimizers[0].optimizer.state.values()
        size = sum(
            value.nbytes for state in states for name, value in state.items() if name != "step"
        )
        found[kind] = size / sum(p.numel() for p in model.parameters())
        assert model.buffers[0].grad_data.dtype == (BF16 if kind == "bf16" else FP32)
    assert found == {"fp32": 12, "bf16": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_from_outside_are_kept(one_process: None, kind: str) -> None:
    """After steps have made main parameters, weights are written and announced: the next step
    begins from them."""
    model, optimizer = model_and_optimizer(KINDS[kind])
    step(model, optimizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    optimizer.reload_model_params()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    step(model, optimizer, 1)
    assert all(bool((p - 3.0).abs().max() < 0.05) for p in model.parameters())


def test_the_norm_of_bf16_gradients_is_not_rounded(one_process: None) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradients = [random(1000, seed=seed).to(BF16) for seed in range(3)]
    expected = float(torch.cat(gradients).double().norm())
    assert float(
        get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD)
    ) == pytest.approx(expected, rel=1e-6)


class FusedAdam(torch.optim.Optimizer):
    """Apex's, before its first step: no state, no count, and no method that makes them."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})


def test_what_an_optimizer_would_create_in_its_first_step() -> None:
    """Apex's Adam gets moments, and its count by group is kept; torch's SGD is not known here."""
    from slime_like.megatron.optimizer import (
        allocate_moments,
        group_steps,
        moments,
        set_group_steps,
    )

    parameters = [torch.nn.Parameter(random(3, 2, seed=1).to(BF16))]
    wrapped: Any = SimpleNamespace(optimizer=FusedAdam(parameters))
    assert moments(wrapped) == [] and group_steps(wrapped) == [None]
    allocate_moments(wrapped)
    assert [(m.dtype, m.shape, float(m.abs().sum())) for m in moments(wrapped)] == [
        (FP32, (3, 2), 0.0)
    ] * 2
    wrapped.optimizer.state[parameters[0]]["exp_avg"] += 1
    allocate_moments(wrapped)  # what is there stays
    assert float(moments(wrapped)[0].sum()) == 6
    set_group_steps(wrapped, [5])
    assert group_steps(wrapped) == [5]
    set_group_steps(wrapped, None)
    assert group_steps(wrapped) == [None] and "step" not in wrapped.optimizer.param_groups[0]
    unknown: Any = SimpleNamespace(optimizer=torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(TypeError, match=r"the state of the optimizer torch.optim.sgd.SGD is not"):
        allocate_moments(unknown)
