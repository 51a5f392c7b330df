"""Top-k log-probs of the server: against torch on the same model, and as the SDK reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinker.proto.response_conv import deserialize_sample_response
from transformers import AutoModelForCausalLM

from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.tinker.data import DataLimits
from slime_like.tinker.errors import Refused
from slime_like.tinker.results import sample_output
from slime_like.tinker.sampler import SampleCommand, add_top_tokens, plain_output, top_tokens
from slime_like.tinker.sampling import sample_body
from slime_like.tinker.schemas import Sample
from tests.fake_sglang import make_served_model

PROMPT, K, TEMPERATURE = (7, 8, 9), 4, 0.7
SAMPLING = {
    "temperature": TEMPERATURE,
    "top_p": 0.9,
    "top_k": 3,
    "max_new_tokens": 5,
    "stop": [],
    "stop_token_ids": [],
    "ignore_end_tokens": True,
}


def test_top_k_log_probs_are_those_of_log_softmax(tmp_path: Path) -> None:
    """Those of the prompt at temperature 1 and of the samples at theirs, before top-k and top-p."""
    folder = make_served_model(tmp_path / "model", seed=0)
    engine = LocalEngine(folder, None)
    engine.update_weights(iter(load_file(Path(folder) / "model.safetensors").items()), 1)
    prompts = [np.array(PROMPT, "<i4").tobytes()]
    command = SampleCommand.from_plain(SAMPLING, prompts, counts=[2], seeds=[0], top_k_sample=K)
    params = SamplingParams(**{**SAMPLING, "stop": (), "stop_token_ids": ()})
    outputs = engine.generate([GenerateRequest(j, PROMPT, seed=j) for j in range(2)], params)
    samples = {(0, j): plain_output(output) for j, output in enumerate(outputs)}
    add_top_tokens(engine, command, samples)
    content, _ = sample_output(
        {
            "sequences": list(samples.values()),
            "prompt_log_probs": None,
            "top_prompt": top_tokens(engine, PROMPT, 0, K, 1.0),
        }
    )
    read = deserialize_sample_response(content)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert read.topk_prompt_logprobs is not None and read.topk_prompt_logprobs[0] is None
    for output, sequence in zip(outputs, read.sequences, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output.tokens])).logits[0, :-1]
        prompt, rest = logits.split([len(PROMPT) - 1, len(output.tokens)])
        assert sequence.topk_logprobs is not None
        for of_logits, rows in (
            (prompt, read.topk_prompt_logprobs[1:]),
            (rest / TEMPERATURE, sequence.topk_logprobs),
        ):
            wanted = of_logits.log_softmax(-1).topk(K)
            for tokens, log_probs, row in zip(wanted.indices, wanted.values, rows, strict=True):
                assert row is not None and [token for token, _ in row] == tokens.tolist()
                assert [p for _, p in row] == pytest.approx(log_probs.tolist(), abs=1e-5)
        for token, own, row in zip(output.tokens, output.log_probs, sequence.topk_logprobs):
            assert dict(row or [])[token] == pytest.approx(own, abs=1e-5)  # top_k 3 is within K


def test_too_many_top_k_log_probs_are_refused() -> None:
    limits = DataLimits(vocab_size=100, max_length=32, max_tokens=64)
    body = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(8))}]},
        "sampling_params": {"max_tokens": 8},
    }
    allowed = sample_body(
        Sample.model_validate({**body, "topk_prompt_logprobs": 8, "topk_sample_logprobs": 4}),
        limits,
    )
    assert (allowed["top_k_prompt"], allowed["top_k_sample"]) == (8, 4)
    for part, most in (("prompt", 8), ("sample", 4)):
        for k in (most + 1, 101, -1):
            refused = Sample.model_validate({**body, f"topk_{part}_logprobs": k})
            with pytest.raises(Refused, match=f"topk_{part}_logprobs is {k}"):
                sample_body(refused, limits)
