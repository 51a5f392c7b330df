"""What an engine's log-probs say about its sampler and about places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_like.certify.log_probs import SampledTokens, compare_log_probs


def sampled(*, temperature: float = 1.0, count: int = 40, masks: bool = False) -> SampledTokens:
    """What a right engine reports: two responses of `count` tokens after 10 others."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(2 * count, 50, generator=generator, dtype=torch.float64)
    tokens = (logits / temperature).argsort(dim=1, descending=True)[:, 1]
    position = torch.arange(count).repeat(2)
    kept = None
    if masks:
        kept = tuple(row.topk(5).indices for row in logits)
    found = SampledTokens(logits, tokens, torch.zeros(2 * count), position + 10, position, kept)
    return replace(found, reported=found.expected(temperature).float().double())


def cause(found: SampledTokens, temperature: float = 1.0) -> tuple[str, str]:
    gaps = compare_log_probs("http://a", found, found, temperature)
    (finding,) = gaps.findings
    assert finding.subject == "http://a" and finding.site == "log-probs"
    return finding.cause, finding.evidence


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("masks", [False, True])
def test_right_log_probs_have_no_finding(temperature: float, masks: bool) -> None:
    found = sampled(temperature=temperature, masks=masks)
    gaps = compare_log_probs("engine", found, found, temperature)
    assert not gaps.findings and gaps.largest < 1e-6
    assert [start for start, _ in gaps.by_depth] == [10, 20, 30, 40]
    assert [start for start, _ in gaps.by_position] == [0, 10, 20, 30]


def test_another_temperature_is_named() -> None:
    name, text = cause(replace(sampled(), reported=sampled(temperature=0.7).expected(0.7)))
    assert (name, "temperature 0.7, not 1" in text) == ("temperature", True)
    found = sampled()
    name, text = cause(replace(found, reported=found.expected(0.7)))
    assert (name, "temperature 0.7, not 1" in text) == ("temperature", True)


def test_normalising_over_the_most_likely_tokens_is_named() -> None:
    found = sampled()
    log_probs = found.logits.log_softmax(-1)
    kept = log_probs.topk(8, dim=-1).values.logsumexp(-1)
    assert cause(replace(found, reported=found.reported - kept)) == (
        "top-k",
        "the log-probs are normalised over the 8 most likely tokens",
    )


def test_normalising_over_a_share_of_the_probability_is_named() -> None:
    found = sampled()
    ordered = found.logits.softmax(-1).sort(dim=-1, descending=True).values.cumsum(-1)
    mass = ordered.gather(1, (ordered < 0.9).sum(dim=1, keepdim=True))[:, 0]
    name, text = cause(replace(found, reported=found.reported - mass.log()))
    assert name == "top-p" and "0.9" in text


def test_a_shift_by_one_token_is_named() -> None:
    found = sampled()
    assert cause(replace(found, reported=found.reported.roll(1)))[0] == "order of tokens"


def test_one_token_has_no_neighbour() -> None:
    found = sampled(count=1)
    found = replace(found, **{n: torch.cat([getattr(found, n)] * 2) for n in ("logits", "tokens", "reported", "depth", "position")})  # fmt: skip
    noise = torch.tensor([0.3, -0.1, 0.2, 0.15])
    assert cause(replace(found, reported=found.reported + noise))[0] == "alike at all depths"


def test_a_difference_that_grows_with_the_depth() -> None:
    found = sampled()
    name, text = cause(replace(found, reported=found.reported - 1e-3 * found.position))
    assert name == "grows with the depth" and "rope, window or cache" in text


def test_a_difference_that_is_alike_at_all_depths() -> None:
    found = sampled()
    noise = 0.05 * torch.randn(80, generator=torch.Generator().manual_seed(1)).abs()
    assert cause(replace(found, reported=found.reported - noise))[0] == "alike at all depths"
