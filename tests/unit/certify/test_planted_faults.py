"""Faults planted in an engine or in the trainer are named with their layer and their cause; where
all is equal nothing is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.steps import parallel
from slime_like.certify.weights import fingerprints
from slime_like.megatron.parallel_layout import ParallelLayout
from tests.unit.certify.planted import (
    DENSE,
    FAULTS,
    TRAINER_FAULTS,
    Fault,
    layer,
    output_times,
    stale,
    weight,
)
from tests.unit.certify.worlds import World, make_world

# each of them with three seeds, and three of them in bfloat16, engine and trainer: 99 clean runs
CLEAN = (
    *("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"),
    *("Gemma3ForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM", "Olmo2ForCausalLM"),
    *("Gemma4ForCausalLM", "GraniteForCausalLM", "Lfm2ForCausalLM", "MiMoV2FlashForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM", "DeepseekV4ForCausalLM"),
    "Step3p7ForConditionalGeneration",
)
ROUNDED = ("Qwen3ForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM")


class Worlds:
    """A world of each family, made when it is first asked for."""

    def __init__(self, folder: Path, layout: ParallelLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._made: dict[str, World] = {}

    def __getitem__(self, family: str) -> World:
        if family not in self._made:
            self._made[family] = self.new(family)
        return self._made[family]

    def new(self, family: str, flags: str = "", seed: int = 1) -> World:
        folder = self._folder / f"{family}-{seed}"
        return make_world(family, folder, flags, layout=self._layout, seed=seed)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with parallel() as layout:
        yield Worlds(tmp_path_factory.mktemp("certify"), layout)
    dist.destroy_process_group()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_the_engine_is_named(fault: Fault, worlds: Worlds) -> None:
    found = worlds[fault.family].examine_engine(fault.plant).findings
    assert found, "nothing was found"
    first = found[0]
    where = (first.cause, first.site, first.expert)
    assert where == (fault.cause, fault.site, fault.expert), first.text
    assert fault.says in first.evidence, first.text
    assert len(found) == 1 or fault.name in ("layers swapped", "every epsilon"), [
        f.text for f in found
    ]


@pytest.mark.parametrize("fault", TRAINER_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_the_trainer_is_named(fault: Fault, worlds: Worlds) -> None:
    world = worlds.new(fault.family)
    with torch.no_grad():
        fault.plant(world.backend)
    found = world.examine_trainer().findings
    assert found, "nothing was found"
    first = found[0]
    assert (first.subject, first.cause, first.site) == ("trainer", fault.cause, fault.site), (
        first.text
    )
    assert fault.says in first.evidence and len(found) == 1, [f.text for f in found]
    assert not world.examine_engine(lambda model: None).findings


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("family", CLEAN)
def test_a_clean_run_has_no_findings(family: str, seed: int, worlds: Worlds) -> None:
    check_clean(worlds.new(family, seed=seed))


@pytest.mark.parametrize("family", ROUNDED)
def test_a_clean_run_in_bfloat16_has_no_findings(family: str, worlds: Worlds) -> None:
    check_clean(worlds.new(family, "--bf16"))


def check_clean(world: World) -> None:
    of_trainer = world.examine_trainer()
    of_engine = world.examine_engine(lambda model: None)
    assert [f.text for f in (*of_trainer.findings, *of_engine.findings)] == []
    assert {"layers.0.attention", "layers.1", "logits"} <= {*of_trainer.gaps, *of_engine.gaps}


def test_a_layer_with_the_weights_of_an_earlier_version_is_named_with_it(worlds: Worlds) -> None:
    world = worlds.new(DENSE, seed=2)
    before = {name: weight.clone() for name, weight in world.engine.model.state_dict().items()}

    def old_layer(model: torch.nn.Module) -> None:
        stale(model)  # what an earlier version had

    model = world.engine.model
    with torch.no_grad():
        stale(model)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    world.reference._comparison._earlier = {"weight version 3": fingerprints(old)}
    (found,) = world.examine_engine(old_layer).findings
    assert (found.cause, found.layer) == ("stale layer", 1)
    assert "has the numbers of weight version 3" in found.evidence


@pytest.mark.parametrize("times", [0, 2, 3])
def test_an_adapter_that_is_merged_a_wrong_number_of_times(times: int, worlds: Worlds) -> None:
    """The reference has base + B A; the engine base + times * B A."""
    world = worlds[DENSE]
    name = "model.layers.1.self_attn.o_proj.weight"
    merged = world.reference.weights[name].clone()
    generator = torch.Generator().manual_seed(3)
    update = 0.02 * torch.randn(merged.size(0), 2, generator=generator)
    update = update @ torch.randn(2, merged.size(1), generator=generator)
    world.reference._comparison._base = {name: merged - update}

    def plant(model: torch.nn.Module) -> None:
        weight(model, name).copy_(merged - update + times * update)

    try:
        (found,) = world.examine_engine(plant).findings
    finally:
        world.reference._comparison._base = {}
    expected = "stale weights" if times == 0 else "adapter merged a wrong number of times"
    assert (found.cause, found.layer) == (expected, 1), found.text
    assert times == 0 or f"plus {times} times its update, of rank 2" in found.evidence


def test_a_weight_that_no_token_uses_is_named_without_a_difference(worlds: Worlds) -> None:
    world = worlds[DENSE]
    used = set(torch.cat(list(world.reference.sequences)).tolist())
    unused = next(token for token in range(world.backend.gpt.vocab_size or 0) if token not in used)

    def plant(model: torch.nn.Module) -> None:
        weight(model, "model.embed_tokens.weight")[unused].mul_(3)

    (found,) = world.examine_engine(plant).findings
    assert (found.cause, found.gap) == ("different weights", None)
    assert f"1 of 101 rows, {unused} first" in found.evidence
    assert "without an effect on these tokens" in found.evidence


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_in_bfloat16_ties_of_experts_hide_no_fault(family: str, worlds: Worlds) -> None:
    """Tokens that choose other experts by rounding differ much; they set no limit."""
    world = worlds.new(family, "--bf16")
    assert world.reference.limits["layers.1.mlp"] < 0.5, "not that of tied tokens"
    found = world.examine_engine(lambda model: output_times(layer(model, 1).mlp, 1.5)).findings
    assert [(f.site, f.cause) for f in found] == [("layers.1.mlp", "wrong scale")], found
