"""stable_reinforce: on what the server has recorded of samples, by provenance spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.api_server import ApiServer, policy

LOSS: Any = "stable_reinforce"
PROMPT = [9, 8, 7, 30]


def sampled(
    sampler: tinker.SamplingClient, *, count: int = 3, **params: Any
) -> list[types.SampledSequence]:
    settings = types.SamplingParams(max_tokens=6, seed=3, **params)
    prompt = types.ModelInput.from_ints(PROMPT)
    return list(sampler.sample(prompt, count, settings).result().sequences)


def datum(
    sequence: types.SampledSequence, advantage: float, *, first: int = 0, shift: int = 0
) -> types.Datum:
    """Prompt and answer, shifted by one; the spans of inputs and targets. first: token of the
    answer at which the spans begin; shift: of the targets, to spoil them."""
    answer = list(sequence.tokens)
    row = PROMPT + answer
    targets = np.array(row[1:]) + shift
    n = len(PROMPT) - 1
    advantages = np.array([0.0] * n + [advantage] * len(answer), dtype=np.float32)
    prompt = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=len(PROMPT))
    one = types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={"target_tokens": targets.astype(np.int64), "advantages": advantages},
    )
    inside = types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=len(answer) - 1)
    before = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=n)
    answered = types.SampledProvenanceSpan(
        sequence_id=sequence.sequence_id, offset=first, length=len(answer)
    )
    return one.with_provenance(model_input=[prompt, inside], loss_fn_inputs=[before, answered])


def expected(
    log_probs: torch.Tensor, recorded: torch.Tensor, advantage: float, bound: float, kl: float
) -> torch.Tensor:
    ratio = (log_probs - recorded).exp().clamp(max=bound)
    return -ratio * advantage * log_probs + kl * 0.5 * (log_probs - recorded).square()


@pytest.mark.parametrize("restricted", [{}, {"top_k": 4, "top_p": 0.9}])
def test_the_loss_is_that_of_its_page(api: ApiServer, restricted: dict[str, Any]) -> None:
    """On-policy the log-probs are the recorded ones, restricted or not; after a large step ratios
    are cut at the bound."""
    client = api.client()
    training = policy(client, api)
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    if not isinstance(sampler, tinker.SamplingClient):
        sampler = sampler.result()
    sequences = sampled(sampler, **restricted)
    advantages = [1.0, -2.0, 0.5]
    data = [datum(s, a) for s, a in zip(sequences, advantages, strict=True)]
    # log-probs that the cookbook sends along: the record counts
    for each in data:
        each.loss_fn_inputs["logprobs"] = types.TensorData.from_torch(
            torch.full((each.model_input.length,), -7.0)
        )
    recorded = [torch.tensor(s.logprobs) for s in sequences]
    config = {"kl_coeff": 0.3, "ratio_bound": 1.5}
    cut = 0
    for step in range(2):
        result = training.forward_backward(data, LOSS, config).result()
        assert result.metrics["is_open_equivalent_of_stable_reinforce:mean"] == 1.0
        total = 0.0
        for out, old, advantage in zip(result.loss_fn_outputs, recorded, advantages, strict=True):
            log_probs = out["logprobs"].to_torch()[len(PROMPT) - 1 :]
            losses = out["elementwise_loss"].to_torch()
            if step == 0:
                torch.testing.assert_close(log_probs, old, atol=1e-5, rtol=1e-5)
            cut += int(((log_probs - old).exp() > 1.5).sum())
            assert not losses[: len(PROMPT) - 1].any()
            wanted = expected(log_probs, old, advantage, 1.5, 0.3)
            torch.testing.assert_close(losses[len(PROMPT) - 1 :], wanted, atol=1e-5, rtol=1e-5)
            total += float(wanted.sum())
        assert result.metrics["loss:sum"] == pytest.approx(total, abs=1e-4)
        training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    assert cut > 0, "the second pass meets the bound"


def test_what_the_records_refuse(api: ApiServer) -> None:
    client = api.client()
    training = policy(client, api)
    path = training.save_weights_for_sampler("a").result().path
    recording = client.create_sampling_client(path, record_stability_info=True)
    (free,) = sampled(recording, count=1)
    (narrow,) = sampled(recording, count=1, top_k=3)
    (plain,) = sampled(client.create_sampling_client(path), count=1)

    def refused(data: list[types.Datum], config: dict[str, Any] | None = None) -> str:
        with pytest.raises(tinker.RequestFailedError) as error:
            training.forward_backward(data, LOSS, config).result()
        return str(error.value)

    assert "no record of sequence" in refused([datum(plain, 1.0)])
    assert "are not tokens 0 to 6 of sequence" in refused([datum(free, 1.0, shift=1)])
    assert "are not tokens 1 to 7 of sequence" in refused([datum(free, 1.0, first=1)])
    assert "some datums were sampled with top_k" in refused([datum(free, 1.0), datum(narrow, 1.0)])
    assert "ratio_bound'] is 0.5, must be >= 1" in refused([datum(free, 1.0)], {"ratio_bound": 0.5})
    other = policy(api.client(), api)
    with pytest.raises(tinker.RequestFailedError, match="no record of sequence"):
        other.forward_backward([datum(free, 1.0)], LOSS).result()
    with pytest.raises(tinker.RequestFailedError, match=r"temperature is 0\.7"):
        sampled(recording, count=1, temperature=0.7)
    with pytest.raises(tinker.RequestFailedError, match="send the batches again"):
        training.optim_step(types.AdamParams()).result()
    training.optim_step(types.AdamParams()).result()
