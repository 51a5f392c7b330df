"""The families that SGLang serves on a CPU: a server's log-probs, of prompts and of what it
generates, are those of the trainer's model, loaded from the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from scripts.make_tiny_model import make_tiny_model
from slime_like.servers.processes import ServerProcess, free_ports
from tests.dist.conftest import alone
from tests.dist.test_families import Ours
from tests.sglang.conftest import server_launch, wait_for

__all__ = ("alone",)  # a fixture

LENGTHS = (29, 48, 5)  # of prompts
NEW_TOKENS = 12
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
# By architecture, keys of config.json beyond those of its tiny model. Windows of Mistral and
# Ministral and dense layers of Qwen3-MoE are left out: SGLang computes them otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3},
    "Qwen3ForCausalLM": {"rope_parameters": YARN},
    "MinistralForCausalLM": {"layer_types": ["full_attention"] * 3},
    "Glm4MoeForCausalLM": {},
    "Qwen3MoeForCausalLM": {"mlp_only_layers": []},
    "MixtralForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": None},
}
# Both sides compute in float32. Measured: at most 1e-6, the rounding of a log-prob between -16 and
# -8; another processor may sum in another order. A window of one token more costs 0.7.
LIMIT = 1e-5


def ask(folder: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The answers of its own server, all prompts in one batch, which it continues greedily."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    process = ServerProcess(server_launch(folder, port, folder.parent / "server.log"))
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling}
    try:
        wait_for(f"{url}/health", process)
        answer = httpx.post(
            f"{url}/generate",
            json=body | {"return_logprob": True, "logprob_start_len": 0},
            timeout=120,
        )
        assert answer.status_code == 200, (answer.text, process.log_tail(3000))
    finally:
        process.end()
    return list(answer.json())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_trainers(family: str, alone: Any, tmp_path: Path) -> None:
    model = make_tiny_model(family, tmp_path / "model", **FAMILIES[family])
    generator = torch.Generator().manual_seed(3)
    vocab = model.config.get_text_config().vocab_size
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    sequences: list[Tensor] = []
    served: list[Tensor] = []
    for prompt, answer in zip(prompts, ask(tmp_path / "model", prompts), strict=True):
        meta = answer["meta_info"]
        pairs = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
        sequences.append(torch.tensor([*prompt, *answer["output_ids"]]))
        assert [pair[1] for pair in pairs] == sequences[-1].tolist()
        assert len(pairs) == len(prompt) + NEW_TOKENS
        served.append(torch.tensor([pair[0] for pair in pairs[1:]]))
    with torch.no_grad():
        logits = Ours(tmp_path / "model", alone, torch.float32).logits(sequences)
    for row, tokens, theirs in zip(logits, sequences, served, strict=True):
        own = row[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(theirs, own, atol=LIMIT, rtol=0)
