"""The critic's layout on the command line: what it takes over from the policy's, and that the
policy's rules hold for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.critic_layout import LAYOUT, PREFIX, layout_flags
from arguments.parse import parse_args
from arguments.run_config import RunConfig
from arguments.schema import CriticConfig, ParallelConfig
from tests.unit.arguments.hf.test_moe import on_experts
from tests.unit.command_lines import complete, problems_of

PPO = "--advantage-estimator ppo --num-steps-per-rollout 2 "
TP2, PP2, VP2 = (
    "--tensor-model-parallel-size 2 ",
    "--pipeline-model-parallel-size 2 ",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 ",
)


def critics(flags: str) -> str:
    return flags.replace("--", "--critic-")


def parse(folder: Path, flags: str, world_size: int = 4) -> RunConfig:
    return parse_args(complete(folder, *(PPO + flags).split()), world_size)


def layout(parallel: ParallelConfig) -> dict[str, Any]:
    """What is not 1, off or absent."""
    sizes = {name: getattr(parallel, name) for name in LAYOUT}
    short = {
        name.removesuffix("_model_parallel_size").removesuffix("_size"): value
        for name, value in sizes.items()
    }
    return {name: value for name, value in short.items() if value is True or (value or 1) > 1}


# flags, the critic's layout
TAKEN_OVER: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    (TP2 + "--sequence-parallel", {"tensor": 2, "sequence_parallel": True}),
    (TP2 + "--sequence-parallel " + critics(PP2),
     {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    (TP2 + "--sequence-parallel --critic-tensor-model-parallel-size 1", {}),
    (TP2 + "--sequence-parallel --no-critic-sequence-parallel", {"tensor": 2}),
    (critics(TP2 + "--sequence-parallel"), {"tensor": 2, "sequence_parallel": True}),
    (VP2, {"pipeline": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    (PP2 + "--num-layers-per-virtual-pipeline-stage 1 " + critics(TP2),
     {"tensor": 2, "pipeline": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    (VP2 + "--critic-num-virtual-stages-per-pipeline-rank 1", {"pipeline": 2}),
    (VP2 + "--critic-pipeline-model-parallel-size 1", {}),
    (VP2 + "--critic-pipeline-model-parallel-size 4", {"pipeline": 4}),
    (critics(VP2), {"pipeline": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    ("--context-parallel-size 2 --cp-comm-type all_gather --critic-context-parallel-size 1", {}),
    ("--cp-comm-type all_gather --critic-context-parallel-size 2", {"context_parallel": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "expected"), TAKEN_OVER, ids=[flags for flags, _ in TAKEN_OVER])
def test_what_is_taken_over(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    config = parse(tmp_path, flags)
    assert config.critic_model is not None
    assert layout(config.critic_model.parallel) == expected
    transformer = config.critic_model.megatron.transformer
    assert (transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size) == (
        expected.get("tensor", 1),
        expected.get("pipeline", 1),
    )
    assert transformer.sequence_parallel == expected.get("sequence_parallel", False)
    assert transformer.virtual_pipeline_model_parallel_size == expected.get(
        "num_virtual_stages_per_pipeline_rank"
    )
    assert transformer.variable_seq_lengths == (
        expected.get("pipeline", 1) > 1 and "num_virtual_stages_per_pipeline_rank" not in expected
    )


def test_who_has_groups_of_its_own(tmp_path: Path) -> None:
    """Sequence parallelism alone is no other grid, nor is a layout that says the same in other
    words."""

    def same(flags: str) -> bool:
        config = parse(tmp_path, flags)
        assert config.critic_model is not None
        return config.critic_model.parallel.grid == config.parallel.grid

    assert same(TP2 + "--sequence-parallel --no-critic-sequence-parallel") and same(
        "--critic-tensor-model-parallel-size 1"
    )
    assert same(VP2 + critics(PP2 + "--num-layers-per-virtual-pipeline-stage 1"))
    assert not same(VP2 + "--critic-num-virtual-stages-per-pipeline-rank 1") and not same(
        critics(TP2)
    )
    assert parse_args(complete(tmp_path), 4).critic_model is None


# flags; the flag that is named; words
REFUSED = [
    (critics(TP2 + "--pipeline-model-parallel-size 4"), "--critic-tensor-model-parallel-size",
     "x --critic-pipeline-model-parallel-size 4 = 8 does not divide the 4 processes"),
    ("--critic-sequence-parallel", "--critic-sequence-parallel",
     "without --critic-tensor-model-parallel-size above 1"),
    (TP2 + "--critic-tensor-model-parallel-size 4", "--critic-tensor-model-parallel-size",
     "--num-query-groups 2"),
    ("--critic-context-parallel-size 2 --hidden-dropout 0.1", "--hidden-dropout",
     "in the critic's layout (--critic-context-parallel-size 2), must be 0 with "
     "--critic-context-parallel-size above 1"),
    ("--critic-context-parallel-size 2 --cp-comm-type p2p", "--cp-comm-type",
     "in the critic's layout"),
    ("--critic-num-virtual-stages-per-pipeline-rank 2",
     "--critic-num-virtual-stages-per-pipeline-rank", "without --critic-pipeline-model"),
    (critics(VP2) + "--critic-num-layers-per-virtual-pipeline-stage 1",
     "--critic-num-layers-per-virtual-pipeline-stage", "cannot be combined with --critic-"),
    (critics(PP2 + "--num-virtual-stages-per-pipeline-rank 3"),
     "--critic-num-virtual-stages-per-pipeline-rank", "the 2 layers"),
    ("--critic-expert-model-parallel-size 2", "--critic-expert-model-parallel-size",
     "the network has no experts"),
    (TP2 + "--micro-batch-size 4 --critic-tensor-model-parallel-size 1", "--rollout-batch-size",
     "in the critic's layout (--critic-tensor-model-parallel-size 1), an optimizer step's 8 "
     "samples are not divisible by 4 data-parallel ranks"),
    (PP2 + TP2 + "--rollout-batch-size 1 --n-samples-per-prompt 4 --use-dynamic-batch-size "
                 "--max-tokens-per-gpu 64 "
     "--critic-pipeline-model-parallel-size 1 --critic-tensor-model-parallel-size 1",
     "--rollout-batch-size", "2 samples are fewer than the 4"),
    (critics(VP2) + "--log-probs-micro-batch-size 8", "--log-probs-micro-batch-size",
     "the interleaved schedule requires the 16 samples of a rollout to be divisible by 2 "
     "data-parallel ranks x 8 x --critic-pipeline-model"),
    (PP2 + TP2 + "--loss-reduction token_mean_legacy --micro-batch-size 8 "
                 "--critic-tensor-model-parallel-size 1", "--loss-reduction",
                 "in the critic's layout"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "flag", "message"), REFUSED, ids=[case[0] for case in REFUSED])
def test_the_policys_rules_hold(tmp_path: Path, flags: str, flag: str, message: str) -> None:
    (found,) = problems_of(complete(tmp_path, *(PPO + flags).split()), 4)
    assert found.flag == flag and message in str(found), str(found)


def test_what_is_wrong_with_both_is_reported_once(tmp_path: Path) -> None:
    argv = complete(
        tmp_path,
        *(
            PPO + "--tensor-model-parallel-size 3 --critic-pipeline-model-parallel-size 2 --lr -1"
        ).split(),
    )
    found = problems_of(argv, 4)
    assert [p.flag for p in found].count("--lr") == 1
    assert len({str(p) for p in found}) == len(found)
    assert any(
        "--critic-tensor-model-parallel-size (given: 3): x --critic-pipeline-model-parallel-size 2 "
        "= 6 does" in str(p)
        for p in found
    )


def test_experts(tmp_path: Path) -> None:
    """The experts' layout is checked in the critic's, and their tensor-parallel size follows the
    critic's own."""
    argv = on_experts(tmp_path, PPO)
    found = problems_of([*argv, "--critic-expert-model-parallel-size", "3"], 4)[0]
    assert found.flag == "--critic-expert-model-parallel-size" and "divisor of 8" in str(found)
    (found,) = problems_of([*argv, "--critic-tensor-model-parallel-size", "2"], 4)
    assert (
        found.flag == "--critic-sequence-parallel"
        and "--critic-tensor-model-parallel-size above 1" in str(found)
    )
    config = parse_args(
        [*argv, "--expert-model-parallel-size", "2", "--critic-expert-model-parallel-size", "4"], 4
    )
    assert (
        config.critic_model is not None
        and config.critic_model.megatron.transformer.expert_model_parallel_size == 4
    )


def test_every_size_has_a_flag() -> None:
    """What is left is of the whole program."""
    names = {
        name
        for name in ParallelConfig.__dataclass_fields__
        if not name.startswith(("distributed_", "heartbeat_"))
    }
    assert set(LAYOUT) == names and all(
        PREFIX + name in CriticConfig.__dataclass_fields__ for name in names
    )
    assert layout_flags(CriticConfig()) == {}
