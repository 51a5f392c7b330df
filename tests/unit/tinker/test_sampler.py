"""The sampler of one process: which adapters it holds beside the base model, and of which base."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from arguments.hf.model import read_hf_model
from arguments.hf.peft_adapter import adapter_config
from arguments.schema import ModelConfig
from slime_like.megatron.lora.peft import BASE_DIGEST
from slime_like.tinker.sampler import PromptSamples, SampleCommand, SnapshotSampler
from slime_like.weights.safetensors_reader import weights_digest
from tests.fake_sglang import make_served_model

PROMPT = (7, 8, 9)
SAMPLING: dict[str, Any] = {"max_new_tokens": 4, "stop": [], "stop_token_ids": []}
LAYER = "base_model.model.model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("base") / "model", seed=0)


@pytest.fixture
def sampler(base: str) -> SnapshotSampler:
    layout: Any = SimpleNamespace(rank=0, world_size=1)
    return SnapshotSampler(
        ModelConfig(hf_checkpoint=base),
        layout,
        None,
        max_engines=1,
        max_adapters=2,
        local_batch_size=None,
        dtype=torch.float32,
    )


def write_adapter(folder: Path, base: str, seed: int, *, digest: str = "") -> str:
    core = read_hf_model(base).transformer
    sizes = int(core["hidden_size"]), int(core["ffn_hidden_size"])
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {
        f"{LAYER}.lora_A.weight": torch.randn(2, sizes[1], generator=generator),
        f"{LAYER}.lora_B.weight": torch.randn(sizes[0], 2, generator=generator),
    }
    folder.mkdir()
    metadata = {"format": "pt", BASE_DIGEST: digest or weights_digest(base)}
    save_file(factors, folder / "adapter_model.safetensors", metadata)
    config = adapter_config(rank=2, alpha=32.0, modules=["down_proj"], base_model=base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def ask(sampler: SnapshotSampler, base: str, adapters: list[str]) -> list[PromptSamples]:
    """One sample of each adapter, of the same prompt with the same seed."""
    count = len(adapters)
    command = SampleCommand.from_plain(
        SAMPLING,
        [np.array(PROMPT, "<i4").tobytes()] * count,
        counts=[1] * count,
        seeds=[3] * count,
        prompt_log_probs=True,
        adapters=adapters,
    )
    return sampler.sample(base, command)


def tokens_of(answers: list[PromptSamples]) -> list[tuple[bytes, bytes | None]]:
    """And the log-probs of the prompts, which are scored one by one; those of samples are rounded
    otherwise in a larger batch."""
    return [(each["sequences"][0]["tokens"], each["prompt_log_probs"]) for each in answers]


def held(sampler: SnapshotSampler) -> set[str]:
    (engine,) = sampler._engines.values()
    assert set(engine.adapters) == set(sampler._adapters)
    return {Path(name).name for name in engine.adapters}


def test_adapters_make_room_but_not_those_in_use(
    sampler: SnapshotSampler, base: str, tmp_path: Path
) -> None:
    a, b, c = (write_adapter(tmp_path / name, base, seed) for seed, name in enumerate("abc"))
    alone = [ask(sampler, base, [each])[0] for each in (a, b, c)]
    assert held(sampler) == {"b", "c"}
    assert tokens_of(ask(sampler, base, [b, a])) == tokens_of([alone[1], alone[0]])
    assert held(sampler) == {"a", "b"}, "the least recently used one made room"
    plain = ask(sampler, base, [""])
    found = ask(sampler, base, [c, "", a])
    assert tokens_of(found) == tokens_of([alone[2], *plain, alone[0]])
    assert held(sampler) == {"a", "c"}
    assert len({str(each["prompt_log_probs"]) for each in alone}) == 3
    found = ask(sampler, base, [c, b, a])
    assert held(sampler) == {"a", "b", "c"}, "never one in use, also over the limit"
    assert tokens_of(found) == tokens_of(alone[::-1])


def test_whole_weights_and_adapters_take_turns_in_one_engine(
    sampler: SnapshotSampler, base: str, tmp_path: Path
) -> None:
    """Adapters leave with the base model, and are loaded again with it."""
    whole = make_served_model(tmp_path / "whole", seed=1)
    a = write_adapter(tmp_path / "a", base, 5)
    before = [ask(sampler, base, [a]), ask(sampler, base, [""])]
    command = SampleCommand.from_plain(
        SAMPLING, [np.array(PROMPT, "<i4").tobytes()], counts=[1], seeds=[3], prompt_log_probs=True
    )
    of_whole = sampler.sample(whole, command)
    assert held(sampler) == set()
    assert of_whole not in before
    assert [ask(sampler, base, [a]), ask(sampler, base, [""])] == before
    assert sampler.sample(whole, command) == of_whole


def test_adapters_of_another_base_are_refused(
    sampler: SnapshotSampler, base: str, tmp_path: Path
) -> None:
    """They may fit it, and would answer nonsense."""
    other = write_adapter(tmp_path / "other", base, 1, digest="0123")
    with pytest.raises(ValueError, match="of another base model than --hf-checkpoint"):
        ask(sampler, base, [other])
    with pytest.raises(ValueError, match=r"the snapshot .*none is gone"):
        ask(sampler, base, [str(tmp_path / "none")])
    broken = write_adapter(tmp_path / "broken", base, 1)
    (Path(broken) / "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match="cannot be read"):
        ask(sampler, base, [broken])
    assert ask(sampler, base, [""])[0]["sequences"]
