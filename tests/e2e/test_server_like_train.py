"""A loop against the SDK is train.py's: from the samples that a run of train.py took, the same
optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from slime_like.metrics.logger import read_metrics
from slime_like.rollout.recording import load_rollout
from slime_like.types import Sample
from tests.e2e.api_server import ApiServer, policy, sampler_folder, weights_of
from tests.e2e.helpers import Workspace
from tests.e2e.programs import TrainServer

pytestmark = pytest.mark.extended

STEPS, GROUPS, GROUP = 2, 4, 4
SAPO = {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, "entropy_coef": 0.01}


def datum(sample: Sample, advantage: float, samples_of_step: int) -> types.Datum:
    """A sequence counts with the mean of its tokens, a step with the mean of its sequences, as
    train.py's default reduction has it."""
    count = sample.response_length

    def spread(values: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        full_run = np.zeros(len(sample.tokens) - 1, dtype=np.float32)
        full_run[-count:] = values
        return full_run

    arrays = {
        "target_tokens": np.array(sample.tokens[1:], dtype=np.int64),
        "logprobs": spread(sample.rollout_log_probs),
        "advantages": spread(advantage),
        "mask": spread(1.0),
        "weights": spread(1.0 / count / samples_of_step),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(sample.tokens[:-1])), loss_fn_inputs=arrays
    )


def test_from_the_same_samples_the_same_weights(
    server: TrainServer, api: ApiServer, work: Workspace, tmp_path: Path
) -> None:
    dump = tmp_path / "rollout_{rollout_id}"
    flags = work.flags(
        tmp_path / "run", num_rollout=1, entropy_coef=0.01, sapo_tau_pos=1.0, sapo_tau_neg=1.05, save_debug_rollout_data=dump,
        save_hf=tmp_path / "hf", lr_decay_style="constant",
    )  # fmt: skip
    server.train(flags, tmp_path / "log").ok()
    groups = load_rollout(str(dump), 0)
    training, norms = policy(api.client(), api), []
    for step in range(STEPS):
        data = []
        for group in groups[step * GROUPS // STEPS : (step + 1) * GROUPS // STEPS]:
            rewards = np.array([sample.reward for sample in group.samples])
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            data += [
                datum(sample, float(a), GROUPS // STEPS * GROUP)
                for sample, a in zip(group.samples, advantages, strict=True)
            ]
        training.forward_backward(data, "sapo", SAPO)
        adam = types.AdamParams(
            learning_rate=1e-3, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
        )
        norms.append(training.optim_step(adam).result().metrics["grad_norm"])
    row = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert np.mean(norms) == pytest.approx(row["train/grad_norm"], rel=1e-5)
    ours, theirs = (
        weights_of(sampler_folder(api, training.save_weights_for_sampler("same").result().path)),
        weights_of(tmp_path / "hf"),
    )
    start = weights_of(work.model)
    for name, tensor in theirs.items():
        assert (tensor - start[name]).norm() > 0
        assert (ours[name] - tensor).norm() < 1e-3 * (tensor - start[name]).norm(), name
