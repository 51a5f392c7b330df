"""The losses as a library: padded or packed tensors, torch alone, no process group."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from slime_like.losses import (
    LOSS_REDUCTIONS,
    OffPolicyConfig,
    compute_off_policy_correction,
    compute_policy_loss,
    off_policy_correction,
    policy_losses,
    token_weights,
)
from slime_like.losses.sapo import SAPOConfig
from tests.paths import ROOT
from tests.unit.losses.test_prescaling import OF_SAMPLES
from tests.unit.losses.test_total import TERMS, config_of, random_step

IN_A_FRESH_PROCESS = """
    import sys
    import torch
    from slime_like.advantages import compute_advantages
    from slime_like.losses import OffPolicyConfig, compute_off_policy_correction
    from slime_like.losses import compute_policy_loss, kl_estimate, policy_losses, token_weights

    mask = torch.ones(4, 5)
    old = -torch.rand(4, 5)
    rewards, group_ids = torch.tensor([1.0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    lengths, rollout = mask.sum(1), old + 0.1
    output = compute_advantages("grpo", rewards=rewards, group_ids=group_ids, lengths=lengths)
    advantages = output.values[:, None].expand(4, 5)
    tensors = dict(
        advantages=advantages, old_log_probs=old, rollout_log_probs=rollout, rewards=mask
    )
    config = OffPolicyConfig(sequence_mask_metric="product")
    correction = compute_off_policy_correction(config, old, rollout, mask)
    for name, loss in policy_losses.items():
        tensors["ref_log_probs"] = old if "ref_log_probs" in loss.needs else None
        config = loss.config_type(**({"dro_beta": 0.1} if name == "dro" else {}))
        leaf = (old + 0.05).requires_grad_()
        masks = {} if loss.correction == "forbidden" else correction.tensors
        u = token_weights("sequence_mean", mask)
        others = {need: mask for need in loss.needs - tensors.keys()}
        output = compute_policy_loss(
            name, leaf, mask, u, config=config, **tensors, **others, **masks
        )
        output.loss.backward()
        assert leaf.grad.abs().sum() > 0 or name == "rollout_is", name
    kl_estimate("k3", old, old - 0.1)
    assert not torch.distributed.is_initialized()
    print(" ".join(sorted({module.partition(".")[0] for module in sys.modules})))
"""


def test_torch_alone_is_needed() -> None:
    """Everything runs in a process that has imported neither Megatron nor transformers, nor the
    command line; what is imported besides torch is ours and the standard library's, so that the import
    costs a fraction of torch's."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_A_FRESH_PROCESS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    torch_alone = subprocess.run(
        [
            sys.executable,
            "-c",
            'import sys, torch; print(" ".join({m.partition(".")[0] for m in sys.modules}))',
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    new = set(done.stdout.split()) - set(torch_alone.stdout.split()) - sys.stdlib_module_names
    assert new == {"slime_like"}


def packed(step: dict[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """The rows of a padded step one after the other without their last tokens, shorter ones first;
    and the places of the tokens."""
    lengths = [9, 4, 6, 7, 9, 1, 3]
    rows = torch.cat([torch.arange(9)[:n] + 9 * i for i, n in enumerate(lengths)])
    return {name: x.flatten()[rows] for name, x in step.items()}, rows


@pytest.mark.parametrize("name", policy_losses.names())
def test_packed_is_padded_without_the_padding(name: str) -> None:
    step = random_step(8)
    tensors, rows = packed(step)
    seq_ids = rows // 9
    kept = torch.zeros(63, dtype=torch.bool).index_fill(0, rows, True).view(7, 9)
    step["loss_mask"] = step["loss_mask"] & kept
    results = []
    if name in ("clip_cov",):  # draws by place
        tensors, seq_ids = (
            {key: x.flatten() for key, x in step.items()},
            torch.arange(7).repeat_interleave(9),
        )
        rows = torch.arange(63)
    for batch, ids in ((step, None), (tensors, seq_ids)):
        batch = dict(batch)
        leaf, mask = batch.pop("log_probs").clone().requires_grad_(), batch.pop("loss_mask")
        u = token_weights("rollout_mean", mask, seq_ids=ids)
        output = compute_policy_loss(
            name, leaf, mask, u, seq_ids=ids, config=config_of(name), terms=TERMS, **batch
        )
        results.append((output.loss, torch.autograd.grad(output.loss, leaf)[0].flatten()))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1][rows], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_token_weights_sum_to_what_the_reduction_is_a_mean_of(reduction: str) -> None:
    """A loss of 1 for every token has the mean 1, less the empty sequences and rollouts that count
    in it."""
    mask = random_step(8)["loss_mask"]
    u = token_weights(reduction, mask, **OF_SAMPLES.get(reduction, {}))
    wanted = {
        "sequence_mean": 6 / 7,
        "rollout_mean": 4 / 5,
        "seq_mean_token_sum_norm": int(mask.sum()) / (7 * 40),
    }.get(reduction, 1.0)
    assert float((u * mask).sum()) == pytest.approx(wanted)


def test_every_sequence_is_a_rollout_by_default() -> None:
    mask = random_step(8)["loss_mask"]
    assert torch.equal(token_weights("rollout_mean", mask), token_weights("sequence_mean", mask))


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_the_correction_of_padded_tensors(kind: str) -> None:
    step = random_step(8)
    config = OffPolicyConfig(
        tis_ratio_type=kind, sequence_mask_metric="geometric", geo_mask_low=0.95, geo_mask_high=1.05
    )
    shaped = compute_off_policy_correction(
        config, step["old_log_probs"], step["rollout_log_probs"], step["loss_mask"]
    )
    flat = off_policy_correction(
        config,
        old_log_probs=step["old_log_probs"].flatten(),
        rollout_log_probs=step["rollout_log_probs"].flatten(),
        loss_mask=step["loss_mask"].flatten(),
        seq_ids=torch.arange(7).repeat_interleave(9),
        num_seqs=7,
    )
    assert (
        shaped.keep_mask is not None
        and shaped.importance_weights is not None
        and flat.keep_mask is not None
    )
    assert torch.equal(shaped.keep_mask.flatten(), flat.keep_mask) and not flat.keep_mask.all()
    assert torch.equal(shaped.importance_weights.flatten(), flat.importance_weights)  # type: ignore[arg-type]
    assert shaped.importance_level == kind and shaped.metrics.keys() == flat.metrics.keys()
    assert (
        compute_off_policy_correction(
            OffPolicyConfig(), *[step["old_log_probs"]] * 2, step["loss_mask"]
        ).keep_mask
        is None
    )


def test_illegal_settings_are_named() -> None:
    row, mask = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"SAPOConfig: sapo_tau_pos=0.0 must be > 0"):
        compute_policy_loss(
            "sapo",
            row,
            mask,
            mask,
            config=SAPOConfig(sapo_tau_pos=0.0),
            advantages=row,
            old_log_probs=row,
        )


def test_wrong_shapes_are_named() -> None:
    row, mask = torch.zeros(3), torch.ones(3)
    with pytest.raises(ValueError, match=r"log_probs has shape \(3,\).*with seq_ids"):
        compute_policy_loss("gpg", row, mask, mask, advantages=row)
    with pytest.raises(
        ValueError, match=r"advantages has shape \(2,\), log_probs has \(3,\); they must be equal"
    ):
        compute_policy_loss(
            "gpg", row, mask, mask, seq_ids=torch.zeros(3, dtype=torch.long), advantages=row[:2]
        )
    with pytest.raises(ValueError, match=r"loss_mask has shape \(3,\)"):
        token_weights("token_mean", mask)
    with pytest.raises(ValueError, match=r"seq_ids has shape \(2,\)"):
        token_weights("token_mean", mask, seq_ids=torch.zeros(2, dtype=torch.long))


def test_weights_of_another_reduction_are_refused_like_the_flag() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    tensors = {"advantages": torch.ones(2, 3), "old_log_probs": torch.full((2, 3), -1.0)}
    for name in ("gmpo", "geo_mean", "luspo"):
        with pytest.raises(ValueError, match="needs loss_weights of sequence_mean or rollout_mean"):
            compute_policy_loss(name, log_probs, mask, token_weights("token_mean", mask), **tensors)
        for reduction in ("sequence_mean", "rollout_mean"):
            u = token_weights(reduction, mask)
            assert compute_policy_loss(name, log_probs, mask, u, **tensors).loss.isfinite()
    u = token_weights("token_mean", mask)  # the same weights where all lengths are equal
    assert compute_policy_loss("ppo", log_probs, mask, u, **tensors).loss.isfinite()
    full = torch.ones(2, 3)
    u = token_weights("token_mean", full)
    assert compute_policy_loss("gmpo", log_probs, full, u, **tensors).loss.isfinite()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda mask, x: compute_policy_loss("ppo", x, mask, mask.double(), advantage=x),
         "compute_policy_loss has no argument 'advantage'; did you mean advantages?"),
        (lambda mask, x: compute_policy_loss("ppo", x, mask, mask.double(), zzz=x),
         "compute_policy_loss has no argument 'zzz'; legal: policy_weights, advantages, "),
        (lambda mask, x: token_weights("rollout_mean", mask, rollout_id=torch.tensor([0, 1])),
         "token_weights has no argument 'rollout_id'; did you mean rollout_ids?"),
    ],
)  # fmt: skip
def test_unknown_arguments_are_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(torch.ones(2, 3), torch.full((2, 3), -1.0))
    assert str(caught.value).startswith(words)
