"""Every registered loss x every reduction x every off-policy correction, in float64 on a small
linear policy: the loss and the gradient of the parameters do not depend on how the step is cut into
micro-batches, in which order, or with how much padding. What does is named here and tested to be
what it says. A combination that means nothing is refused: by the command line, and by the loss
where it can tell.

The lists are the registries' own: a new loss, reduction or correction is covered, or fails for want
of what the tables below say about it. Data-, tensor- and pipeline-parallel layouts:
tests/dist/test_algorithms.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arguments.parse import parse_args
from slime_like.config import ConfigError
from slime_like.losses import (
    LOSS_REDUCTIONS,
    LossOutput,
    LossTerms,
    OffPolicyConfig,
    compute_off_policy_correction,
    compute_policy_loss,
    policy_losses,
    token_weights,
)
from tests.unit.command_lines import complete
from tests.unit.losses.loss_cases import OF_SINGLE_RESPONSES, with_needed

# What a loss without a default needs, and settings that make another loss of it.
NEEDED: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.3}}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "dual_clip": ("ppo", {"eps_clip_c": 1.2}),
    "sapo_sequence": ("sapo", {"sapo_ratio_level": "sequence"}),
    "sapo_turn": ("sapo", {"sapo_ratio_level": "turn"}),
    "gspo_turn": ("gspo", {"eps_clip": 0.3, "gspo_ratio_level": "turn"}),
    "gspo_wide": ("gspo", {"eps_clip": 0.3}),
    "luspo_wide": ("luspo", {"eps_clip": 0.3}),
    "up_plain": ("up", {"eps_clip": 0.05, "eps_clip_c": 50.0}),
    "ipo_tight": ("ipo", {"ipo_threshold": 0.02, "ipo_kl_coef": 0.5}),
    "cispo_rollout": ("cispo", {"cispo_anchor": "rollout", "cispo_eps_clip_high": 0.2}),
    "dppo_kl": (
        "dppo",
        {"dppo_type": "binary_kl", "dppo_delta_low": 0.001, "dppo_delta_high": 0.001},
    ),
    "clip_cov_often": (
        "clip_cov",
        {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.02, "clip_cov_ub": 9.0},
    ),
}
VARIANTS = {**{name: (name, NEEDED.get(name, {})) for name in OF_SINGLE_RESPONSES}, **FURTHER}
# The documented exceptions: they choose tokens within a micro-batch.
CHOOSE_IN_A_MICRO_BATCH = {"clip_cov", "clip_cov_often", "kl_cov"}
IN_THE_CUT = "token_mean_legacy"
# What the specification forbids (section 5, "Combination", and section 2, "Reduction").
ANCHORED_ON_THE_SAMPLER = {"rollout_is", "cispo_rollout", "dppo", "dppo_kl", "ipo", "ipo_tight"}
WITHOUT_AN_OLD_POLICY = {"cross_entropy"}
NEEDS_A_SEQUENCE_REDUCTION = {"gmpo", "luspo", "luspo_wide"}
SEQUENCE_REDUCTIONS = {"sequence_mean", "rollout_mean"}

Config = OffPolicyConfig
# name: flags, the same as a configuration, and as the terms of the loss
CORRECTIONS: dict[str, tuple[str, OffPolicyConfig, dict[str, Any]]] = {
    "none": ("", Config(), {}),
    "token TIS": (
        "--tis-ratio-type token --token-tis-ratio-clip-high 1.2",
        Config(tis_ratio_type="token", token_tis_ratio_clip_high=1.2),
        {},
    ),
    "sequence TIS": (
        "--tis-ratio-type sequence --sequence-tis-ratio-clip-high 1.2",
        Config(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.2),
        {},
    ),
    "geometric mask": (
        "--sequence-mask-metric geometric --geo-mask-low 0.8 --geo-mask-high 1.2",
        Config(sequence_mask_metric="geometric", geo_mask_low=0.8, geo_mask_high=1.2),
        {},
    ),
    "product mask": ("--sequence-mask-metric product", Config(sequence_mask_metric="product"), {}),
    "outlier": (
        "--outlier-token-is-threshold-high 1.5",
        Config(outlier_token_is_threshold_high=1.5),
        {},
    ),
    "token mask": (
        "--token-mask-is-threshold-low 0.8 --token-mask-is-threshold-high 1.2",
        Config(token_mask_is_threshold_low=0.8, token_mask_is_threshold_high=1.2),
        {},
    ),
    "IcePop": (
        "--use-tis --custom-tis-function-path x.icepop_function --tis-clip-low 0.8 --tis-clip 1.2",
        Config(
            tis_ratio_type="token",
            token_tis_ratio_clip_low=0.8,
            token_tis_ratio_clip_high=1.2,
            token_mask_is_threshold_low=0.8,
            token_mask_is_threshold_high=1.2,
        ),
        {},
    ),
    "OPSM": ("--use-opsm --opsm-delta 0.01", Config(), {"opsm_delta": 0.01}),
    "ESTR": ("--estr-threshold 0.05", Config(), {"estr_threshold": 0.05}),
    "M2PO": ("--m2po-threshold 0.02", Config(m2po_threshold=0.02), {}),
    "all at once": (
        "--tis-ratio-type token --outlier-token-is-threshold-high 1.8 "
        "--sequence-mask-metric product --m2po-threshold 0.02 --use-opsm",
        Config(
            tis_ratio_type="token",
            outlier_token_is_threshold_high=1.8,
            sequence_mask_metric="product",
            m2po_threshold=0.02,
        ),
        {"opsm_delta": 1e-4},
    ),
}
TERMS = LossTerms(kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.07, positive_nll_coef=0.2)

COUNT, LENGTH, FEATURES, VOCAB = 7, 9, 5, 6
ROLLOUTS, PROMPTS = torch.tensor([0, 0, 1, 2, 3, 3, 4]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
WHOLE: list[list[int]] = [list(range(COUNT))]
# Another order, other sizes, and (see `cut_loss`) another padding of each.
CUT = [[6, 2, 0], [4], [5, 3, 1]]


@cache
def step() -> dict[str, Tensor]:
    """[7, 9, ...] of one optimizer step: the policy's features and tokens, and what old policy,
    sampler and reference say of them. One row is fully masked, one has a single active token,
    others have holes."""
    g = torch.Generator().manual_seed(4)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=g, dtype=torch.float64)

    mask = torch.rand(COUNT, LENGTH, generator=g) < 0.7
    mask[2], mask[3] = False, torch.arange(LENGTH) == 4
    features, weights = normal(COUNT, LENGTH, FEATURES), normal(FEATURES, VOCAB, scale=0.7)
    tokens = torch.randint(VOCAB, (COUNT, LENGTH), generator=g)
    old = log_probs_of(features, weights + normal(FEATURES, VOCAB, scale=0.1), tokens)[0]
    rewards = torch.tensor([1.0, 0.0, 1.0, -1.0, 0.5, 0.0, 1.0], dtype=torch.float64)[
        :, None
    ].expand(COUNT, LENGTH)
    good = mask & (rewards > 0)
    tensors = {
        "features": features,
        "tokens": tokens,
        "weights": weights,
        "loss_mask": mask,
        "old_log_probs": old,
        "rollout_log_probs": old + normal(COUNT, LENGTH, scale=0.15) + normal(COUNT, 1, scale=0.15),
        "ref_log_probs": log_probs_of(
            features, weights + normal(FEATURES, VOCAB, scale=0.2), tokens
        )[0],
        "advantages": 1.5 * normal(COUNT, 1) + 0.3 * normal(COUNT, LENGTH),
        "rewards": rewards,
        "nll_weights": good / good.sum(),
    }
    return with_needed(tensors, old)


def log_probs_of(features: Tensor, weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens and entropies [B, T], of a policy that is linear in the features."""
    log_p = (features @ weights).log_softmax(-1)
    return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@cache
def correction_of(name: str) -> dict[str, Any]:
    s = step()
    return compute_off_policy_correction(
        CORRECTIONS[name][1], s["old_log_probs"], s["rollout_log_probs"], s["loss_mask"]
    ).tensors


def u_of(reduction: str, mask: Tensor, micro_batch_size: int = COUNT) -> Tensor:
    more = {
        "rollout_mean": {"rollout_ids": ROLLOUTS},
        "prompt_mean": {"prompt_ids": PROMPTS},
        "seq_mean_token_sum_norm": {"loss_norm_length": 12},
        IN_THE_CUT: {"micro_batch_size": micro_batch_size},
    }
    return token_weights(reduction, mask, **more.get(reduction, {}))


def micro_batch_loss(
    variant: str,
    parameters: Tensor,
    rows: Sequence[int],
    padding: int,
    u: Tensor,
    terms: LossTerms,
    correction: Any,
) -> LossOutput:
    """The loss of some rows, each padded by `padding` tokens whose constants are NaN."""
    s = step()
    tensors: dict[str, Any] = {}
    for key, x in {**s, **correction, "loss_weights": u}.items():
        if not isinstance(x, Tensor) or key in ("weights", "features", "tokens"):
            continue
        poison = torch.full((len(rows), padding), key == "keep_mask")
        tensors[key] = torch.cat(
            [x[rows], poison if x.dtype == torch.bool else torch.full(poison.shape, float("nan"))],
            dim=1,
        )
    inputs = s["features"][rows], s["tokens"][rows]
    features, tokens = (
        torch.cat([x, x.new_zeros(len(rows), padding, *x.shape[2:])], dim=1) for x in inputs
    )
    log_probs, entropy = log_probs_of(features, parameters, tokens)
    name, settings = VARIANTS[variant]
    return compute_policy_loss(
        name,
        log_probs,
        tensors.pop("loss_mask"),
        tensors.pop("loss_weights"),
        entropy=entropy,
        terms=terms,
        config=policy_losses.get(name).config_type(**settings),
        importance_level=correction.get("importance_level", "token"),
        **tensors,
    )


def cut_loss(
    variant: str, parts: Sequence[Sequence[int]], u: Tensor, terms: LossTerms, correction: Any
) -> tuple[float, Tensor]:
    """Loss, and gradient of the parameters, summed over micro-batches. Padding grows from one to
    the next."""
    total = torch.zeros((), dtype=torch.float64)
    parameters = step()["weights"].clone().requires_grad_()
    for i, rows in enumerate(parts):
        total = (
            total
            + micro_batch_loss(
                variant, parameters, rows, 0 if len(parts) == 1 else 2 * i + 1, u, terms, correction
            ).loss
        )
    return total.item(), torch.autograd.grad(total, parameters)[0]


def legal(variant: str, correction: str) -> bool:
    _, config, terms = CORRECTIONS[correction]
    if variant in WITHOUT_AN_OLD_POLICY:
        return not config.enabled and not terms
    return not (config.weights and variant in ANCHORED_ON_THE_SAMPLER)


def same(a: tuple[float, Tensor], b: tuple[float, Tensor]) -> bool:
    return abs(a[0] - b[0]) <= 1e-11 * abs(a[0]) and float((a[1] - b[1]).norm()) <= 1e-11 * float(
        a[1].norm()
    )


def each_variant_and_correction() -> Iterator[Any]:
    """Every third is quick: each variant and each correction is among them."""
    variants = [v for v in VARIANTS if v not in CHOOSE_IN_A_MICRO_BATCH]
    for number, variant in enumerate(variants):
        for place, correction in enumerate(CORRECTIONS):
            quick = (number + place) % 3 == 0
            yield pytest.param(variant, correction, marks=() if quick else pytest.mark.extended)


def reductions_of(variant: str) -> Sequence[str]:
    """Those for which the loss is defined; `compute_policy_loss` refuses the others."""
    return policy_losses.get(VARIANTS[variant][0]).required_reductions or LOSS_REDUCTIONS


@pytest.mark.parametrize(("variant", "correction"), each_variant_and_correction())
def test_the_cut_does_not_matter(variant: str, correction: str) -> None:
    terms = dataclasses.replace(TERMS, **CORRECTIONS[correction][2])
    for reduction in reductions_of(variant):
        u = u_of(reduction, step()["loss_mask"])
        if not legal(variant, correction):
            with pytest.raises(ValueError, match="takes no"):
                cut_loss(variant, WHOLE, u, terms, correction_of(correction))
            continue
        full_one, cut = (
            cut_loss(variant, parts, u, terms, correction_of(correction)) for parts in (WHOLE, CUT)
        )
        assert float(full_one[1].norm()) > 1e-3
        assert same(full_one, cut), f"{reduction}: {full_one} and {cut}"


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_every_correction_does_something_here(correction: str) -> None:
    """Else the test above would show nothing."""
    terms = dataclasses.replace(TERMS, **CORRECTIONS[correction][2])
    u = u_of("rollout_mean", step()["loss_mask"])
    plain, corrected = (
        cut_loss("ppo", WHOLE, u, TERMS, {}),
        cut_loss("ppo", WHOLE, u, terms, correction_of(correction)),
    )
    assert float((plain[1] - corrected[1]).norm()) > 1e-3 * float(plain[1].norm())
    keep = correction_of(correction)["keep_mask"]
    if keep is not None and "TIS" not in correction:
        assert 0 < int((keep & step()["loss_mask"]).sum()) < int(step()["loss_mask"].sum())


@pytest.mark.parametrize(
    "correction",
    [
        name
        for name, (_, config, _) in CORRECTIONS.items()
        if config.enabled and config.m2po_threshold is None
    ],
)
def test_a_rank_corrects_its_own_sequences(correction: str) -> None:
    """Halves of the step, as two data-parallel ranks hold them. M2PO asks the other ranks:
    tests/dist/test_algorithms.py."""
    s, expected = step(), correction_of(correction)
    for rows in (slice(0, 3), slice(3, 7)):
        part = compute_off_policy_correction(
            CORRECTIONS[correction][1],
            s["old_log_probs"][rows],
            s["rollout_log_probs"][rows],
            s["loss_mask"][rows],
        ).tensors
        for name in ("keep_mask", "importance_weights"):
            assert (part[name] is None) == (expected[name] is None)
            assert part[name] is None or torch.equal(part[name], expected[name][rows])


# --- the exceptions, as documented ---


@pytest.mark.parametrize("variant", ["clip_cov_often", "kl_cov"])
def test_covariance_losses_choose_in_a_micro_batch(variant: str) -> None:
    """Their covariances and the number they choose are the micro-batch's, so that a cut is another
    loss. Padding is not; nor is order, but for clip_cov, which draws by place."""
    u = u_of("token_mean", step()["loss_mask"])
    full_one = cut_loss(variant, WHOLE, u, TERMS, {})
    assert not same(full_one, cut_loss(variant, CUT, u, TERMS, {})), (
        "no longer an exception: say so in the documents"
    )
    parameters = step()["weights"].clone().requires_grad_()
    padded = micro_batch_loss(variant, parameters, WHOLE[0], 3, u, TERMS, {}).loss
    if variant == "kl_cov":
        assert same(full_one, (padded.item(), torch.autograd.grad(padded, parameters)[0]))
        assert same(full_one, cut_loss(variant, [WHOLE[0][::-1]], u, TERMS, {}))
    alone = [micro_batch_loss(variant, parameters, [i], 0, u, TERMS, {}).metrics for i in (0, 1)]
    share = {"kl_cov": "kl_cov_sel_frac", "clip_cov_often": "clip_cov_frac"}[variant]
    for metrics in alone:
        assert float(metrics[share].value) >= 1, "one token at least of every micro-batch"


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("variant", sorted(CHOOSE_IN_A_MICRO_BATCH))
def test_where_covariance_losses_choose_nothing_or_all_the_cut_does_not_matter(
    variant: str, correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of them is as any loss: with nothing in the range, or the penalty on every token."""
    name, _ = VARIANTS[variant]
    settings = (
        {"clip_cov_lb": 1e6, "clip_cov_ub": 2e6} if name == "clip_cov" else {"kl_cov_frac": 1.0}
    )
    monkeypatch.setitem(VARIANTS, variant, (name, settings))
    terms = dataclasses.replace(TERMS, **CORRECTIONS[correction][2])
    for reduction in LOSS_REDUCTIONS:
        u = u_of(reduction, step()["loss_mask"])
        assert same(
            *(
                cut_loss(variant, parts, u, terms, correction_of(correction))
                for parts in (WHOLE, CUT)
            )
        ), reduction


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_legacy_mean_is_a_mean_of_micro_batch_means(variant: str) -> None:
    """With micro-batches of one sample: the mean over them of the token means of each, as a step of
    its own. So it depends on the cut."""
    mask, terms = step()["loss_mask"], dataclasses.replace(TERMS, positive_nll_coef=0.0)
    singles = [[i] for i in range(COUNT)]
    legacy = u_of(IN_THE_CUT, mask, micro_batch_size=1)
    found = cut_loss(variant, singles, legacy, terms, {})
    alone = [
        cut_loss(variant, [row], mask.double() / mask[row].sum().clamp(min=1), terms, {})
        for row in singles
    ]
    means = (
        sum(loss for loss, _ in alone) / COUNT,
        torch.stack([gradient for _, gradient in alone]).mean(0),
    )
    assert same(found, means)
    assert not same(found, cut_loss(variant, singles, u_of("token_mean", mask), terms, {}))


# --- what is legal ---


def flags_of(variant: str) -> list[str]:
    """The loss with its settings, as typed."""
    name, settings = VARIANTS[variant]
    flags = ["--policy-loss-type", name]
    for field, value in settings.items():
        flags += ["--" + field.replace("_", "-"), str(value)]
    return flags


def refused(folder: Path, flags: Sequence[str]) -> str:
    """What the command line says against it; empty where it is accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parse_args(complete(folder, "--num-steps-per-rollout", "2", *flags), 1)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in WITHOUT_AN_OLD_POLICY])
def test_the_command_line_takes_what_is_legal_and_nothing_else(
    tmp_path: Path, variant: str
) -> None:
    for reduction in LOSS_REDUCTIONS:
        arguments = [*flags_of(variant), "--loss-reduction", reduction]
        message = refused(
            tmp_path,
            [*arguments, "--loss-norm-length", "9"]
            if reduction == "seq_mean_token_sum_norm"
            else arguments,
        )
        if variant in NEEDS_A_SEQUENCE_REDUCTION and reduction not in SEQUENCE_REDUCTIONS:
            assert "--loss-reduction" in message and "sequence_mean" in message, reduction
        else:
            assert message == "", reduction
    for correction, (flags, config, _) in CORRECTIONS.items():
        message = refused(tmp_path, [*flags_of(variant), *flags.split()])
        if legal(variant, correction):
            assert message == "", correction
        else:
            assert "--tis-ratio-type" in message and "count double" in message, correction
        assert (
            "conflicts with"
            in refused(tmp_path, [*flags_of(variant), *flags.split(), "--use-rollout-logprobs"])
        ) == config.enabled, correction


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_supervised_training_takes_no_correction(tmp_path: Path, correction: str) -> None:
    assert "has no old policy" in refused(
        tmp_path, ["--loss-type", "sft_loss", *CORRECTIONS[correction][0].split()]
    )


def test_the_tables_are_complete() -> None:
    """Every setting that switches a correction on is in one of them, and every flag means the
    configuration next to it."""
    switched = {
        f.name
        for f in dataclasses.fields(OffPolicyConfig)
        for _, c, _ in CORRECTIONS.values()
        if getattr(c, f.name) != f.default
    }
    assert {"tis_ratio_type", "sequence_mask_metric", "m2po_threshold"} <= switched
    assert {name for name, _ in VARIANTS.values()} == set(OF_SINGLE_RESPONSES)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_flags_mean_the_configuration_that_is_tested(tmp_path: Path, correction: str) -> None:
    flags, off_policy, terms = CORRECTIONS[correction]
    config = parse_args(complete(tmp_path, "--num-steps-per-rollout", "2", *flags.split()), 1)
    assert config.off_policy == off_policy
    assert (config.algorithm.opsm_delta if config.algorithm.use_opsm else None) == terms.get(
        "opsm_delta"
    )
    assert config.algorithm.estr_threshold == terms.get("estr_threshold")
