"""Networks with sparse attention: what config.json says of their indexers, and which layouts they
take."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from arguments.parse import parse_args
from arguments.rules.network import ShardedNetwork, layout_problems
from arguments.rules.sglang import check_indexer_replay
from arguments.schema import ParallelConfig
from slime_like.config import ConfigError
from tests.unit.command_lines import HF_CONFIG, complete, problems_of

GLM_5: dict[str, Any] = {
    **HF_CONFIG,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 8,
    "num_key_value_heads": HF_CONFIG["num_attention_heads"],
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"index_topk": 16, "index_n_heads": 4, "index_head_dim": 8},
}
DEEPSEEK_V3 = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 1},
    **{"topk_group": 1, "index_topk": None, "index_n_heads": None, "index_head_dim": None},
}
SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
SHARED = [0, 0, 0, 1, 1, 1, 0, 1]


def write(folder: Path, **changes: Any) -> str:
    (folder / "hf").mkdir(exist_ok=True)
    (folder / "hf" / "config.json").write_text(json.dumps({**GLM_5, **changes}))
    return str(folder / "hf")


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, None),
        (SHARING, SHARED),
        ({"index_topk_pattern": "FFFSSSFS"}, SHARED),
        ({"indexer_types": ["full", *["shared"] * 7]}, [0, *[1] * 7]),
        ({"indexer_types": [("full", "shared")[n] for n in SHARED], **SHARING}, SHARED),
    ],
)
def test_who_has_an_indexer(
    tmp_path: Path, changes: dict[str, Any], shared: list[int] | None
) -> None:
    model = read_hf_model(write(tmp_path, **changes))
    assert model.transformer["index_shared"] == shared
    assert model.transformer["index_rotary_interleaved"]
    unused = [f"model.layers.{n}.self_attn.indexer." for n, s in enumerate(shared or []) if s]
    assert list(model.untrained_prefixes) == unused


def test_the_schedule_is_that_of_transformers(tmp_path: Path) -> None:
    import transformers

    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=78, **SHARING)
    model = read_hf_model(write(tmp_path, num_hidden_layers=78, **SHARING))
    kinds = [("full", "shared")[n] for n in model.transformer["index_shared"]]
    assert kinds == theirs.indexer_types and kinds.count("full") == 21


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave False"),
        ({"index_head_dim": 4}, "index_head_dim 4 is smaller than qk_rope_head_dim 8"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"indexer_types": ["shared", *["full"] * 7]}, "the first one 'full'"),
        ({"indexer_types": ["full"] * 7}, "each of the 8 layers"),
        ({"index_topk_pattern": "FFFFFFFX"}, "must be 'full' or 'shared'"),
        ({"indexer_types": ["full"] * 8, **SHARING}, "differ from index_topk_pattern or"),
        ({"layer_types": ["full_attention"] * 8}, "only 'indexed_attention' is supported"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hf_model(write(tmp_path, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "core", "first"),
    [
        ({"pipeline_model_parallel_size": 2}, {}, 4),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, {}, 4),
        ({"pipeline_model_parallel_size": 2}, {"num_layers_in_first_pipeline_stage": 2}, None),
        ({"pipeline_model_parallel_size": 2}, {"num_layers_in_last_pipeline_stage": 2}, None),
        ({"pipeline_model_parallel_size": 2}, {"num_layers_in_last_pipeline_stage": 1}, 7),
        ({"pipeline_model_parallel_size": 3}, {"account_for_embedding_in_pipeline_split": True}, 5),
        ({"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_layout": "Et*6|ttL"}, None),
        ({"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_layout": "Et*5|tttL"}, 5),
    ],
)  # fmt: skip
def test_stages_begin_with_an_indexer(
    tmp_path: Path, settings: dict[str, Any], core: dict[str, Any], first: int | None
) -> None:
    """first: of the stage that does not."""
    network = {**read_hf_model(write(tmp_path, **SHARING)).transformer, **core}
    sizes = ParallelConfig(**settings)
    found = [str(p) for p in layout_problems(ShardedNetwork(sizes, network, 6))]
    words = f"begins with layer {first} of 0 to 7"
    about = [p for p in found if "begins with layer" in p]
    assert about == [] if first is None else words in about[0] and "one of 0, 1, 2, 6" in about[0]
    assert not layout_problems(ShardedNetwork(sizes, {**network, "index_shared": None}, 6))


def test_flags_of_slime(tmp_path: Path) -> None:
    flags = ("--freeze-indexer", "--allgather-cp", "--context-parallel-size", "2", "--bf16")
    argv = complete(tmp_path, *flags)
    write(tmp_path)
    assert parse_args(argv, 2).megatron.transformer.index_topk == 16
    argv = [word if word != "--allgather-cp" else "--cp-comm-type=p2p" for word in argv]
    (problem,) = problems_of(argv, 2)
    assert "use all_gather" in str(problem)


REPLAY = "--use-rollout-indexer-replay"
SERVERS = (
    "--rollout-engine",
    "sglang",
    "--no-sglang-router",
    "--rollout-external-engine-addrs",
    "127.0.0.1:30000",
)


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, (), None),
        ({}, SERVERS, None),
        ({}, ("--loss-type", "sft_loss"), "--loss-type sft_loss"),
        ({}, ("--rollout-engine", "vllm", *SERVERS[3:]), "--rollout-engine vllm"),
        (DEEPSEEK_V3, (), "has no effect without a network with indexers"),
    ],
)
def test_who_replays_an_indexers_choice(
    tmp_path: Path, changes: dict[str, Any], flags: tuple[str, ...], words: str | None
) -> None:
    argv = complete(tmp_path, *flags, REPLAY)
    write(tmp_path, **changes)
    if words is None:
        config = parse_args(argv, 1)
        assert config.replayed == ("indexer_topk",) and not config.old_is_current
        return
    found = [str(p) for p in problems_of(argv, 1)]
    assert any(REPLAY in p and words in p for p in found), found


def test_servers_that_report_keys(tmp_path: Path) -> None:
    """Not of pools, and only where each GPU has the attention of its own requests."""
    model = read_hf_model(write(tmp_path)).transformer
    started = {"rollout_engine": "sglang", "use_rollout_indexer_replay": True}

    def found(core: dict[str, Any], gpus: int, **flags: object) -> list[str]:
        settings = SimpleNamespace(
            rollout=SimpleNamespace(**started),
            core=core,
            sglang=SimpleNamespace(
                rollout_num_gpus=8,
                colocate=False,
                rollout_num_gpus_per_engine=gpus,
                sglang_server_flags=flags,
            ),
        )
        return [str(p) for p in check_indexer_replay(settings)]  # type: ignore[arg-type]

    assert found(model, 1) == [] == found(model, 4, enable_dp_attention=True, dp_size="4")
    for flags in ({}, {"dp_size": "4"}, {"enable_dp_attention": True, "dp_size": "2"}):
        (problem,) = found(model, 4, **flags)
        assert "requires --sglang-enable-dp-attention --sglang-dp-size 4" in problem
    for other in ({"index_pool": 4}, {"multi_latent_attention": False}):
        (problem,) = found({**model, **other}, 1)
        assert REPLAY in problem and "not supported with --rollout-engine sglang" in problem
