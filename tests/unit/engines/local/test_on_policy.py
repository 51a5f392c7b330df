"""True on-policy sampling: what is sampled is what the trainer draws, however wrong the draft is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slime_like.engines.base import SamplingParams
from slime_like.engines.local.decoder import sample_tokens
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.local.on_policy import OnPolicyEngine
from tests.unit.engines.local.test_engine import FAMILIES, VOCAB, Built, _requests

SAMPLING = SamplingParams(max_new_tokens=16)


@dataclass
class Draws:
    """What another engine's model draws, in place of a Megatron network."""

    engine: LocalEngine
    noise: float = 0.0  # of its logits, by the tokens of the row, as if bits depended on all

    @property
    def head(self) -> SimpleNamespace:
        return SimpleNamespace(temperature=1.0)

    @torch.no_grad()
    def __call__(
        self, prompt: Sequence[int], response: Sequence[int], uniforms: Tensor
    ) -> tuple[list[int], list[float]]:
        rows = torch.tensor([[*prompt, *response]])
        logits = self.engine.model(rows).logits[0, len(prompt) - 1 : -1]
        seed = int(torch.tensor(response).sum())
        logits += self.noise * torch.randn(
            logits.shape, generator=torch.Generator().manual_seed(seed)
        )
        drawn, _ = sample_tokens(logits, uniforms, SamplingParams())
        taken = torch.tensor(response)[:, None]
        return drawn.tolist(), logits.log_softmax(-1).gather(1, taken)[:, 0].tolist()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(FAMILIES["qwen3_tied"], tmp_path_factory.mktemp("trainer"))


def drafting(trainer: Built, scale: float, noise: float = 0.0) -> OnPolicyEngine:
    """An engine whose draft has the trainer's weights times `scale`."""
    engine = OnPolicyEngine(Draws(trainer.engine, noise), trainer.folder, None)  # type: ignore[arg-type]
    weights = ((name, weight * scale) for name, weight in trainer.weights())
    engine.update_weights(weights, version=5)
    return engine


@pytest.mark.parametrize("scale", [1.0, 1.01, 0.3])
def test_the_draft_changes_nothing_but_the_time(trainer: Built, scale: float) -> None:
    engine = drafting(trainer, scale)
    requests = _requests(8, n_samples=2)
    outputs = engine.generate(requests, SAMPLING)
    expected = trainer.engine.generate(requests, SAMPLING)
    assert len({len(output.tokens) for output in expected}) > 1, "none ends early"
    for output, right in zip(outputs, expected, strict=True):
        assert output.sample_id == right.sample_id and output.failure is None
        assert (output.tokens, output.finish_reason) == (right.tokens, right.finish_reason)
        assert output.log_probs == pytest.approx(right.log_probs, abs=1e-5)
        assert output.weight_versions == (5,) * len(output.tokens)
    assert (engine.take_metrics()["rollout/true_on_policy_redrafts"] > 10) == (scale != 1.0)
    assert engine.take_metrics()["rollout/true_on_policy_redrafts"] == 0


def test_an_evaluation_is_answered_by_the_draft(trainer: Built) -> None:
    engine = drafting(trainer, 0.3)
    for sampling in (replace(SAMPLING, temperature=0), replace(SAMPLING, top_k=5)):
        requests = _requests(2)
        assert engine.generate(requests, sampling) == LocalEngine.generate(
            engine, requests, sampling
        )
    assert engine.take_metrics()["rollout/true_on_policy_redrafts"] == 0


def test_a_row_that_never_settles_is_a_failed_request(trainer: Built) -> None:
    """Bits that depend on the tokens that follow, much more than they do."""
    engine = drafting(trainer, 1.0, noise=5.0)
    outputs = engine.generate(_requests(2), replace(SAMPLING, max_new_tokens=8))
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert all("unsettled after 16 drafts" in (output.failure or "") for output in outputs)


def test_forced_tokens_are_taken_and_scored(trainer: Built) -> None:
    engine = trainer.engine
    requests = _requests(4)
    before = engine.generate(requests, SAMPLING)
    forced = [
        replace(request, forced=(*output.tokens[:2], 7)) if i % 2 else request
        for i, (request, output) in enumerate(zip(requests, before, strict=True))
    ]
    after = engine.generate(forced, SAMPLING)
    for i, (request, old, new) in enumerate(zip(forced, before, after, strict=True)):
        if i % 2 == 0:
            assert new.tokens == old.tokens
            continue
        assert new.tokens[:3] == request.forced
        tokens = torch.tensor([[*request.prompt_tokens, *new.tokens]])
        logits = trainer.reference(tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
        right = logits.log_softmax(-1).gather(1, torch.tensor(new.tokens)[:, None])[:, 0]
        assert new.log_probs == pytest.approx(right.tolist(), abs=1e-5)
    assert max(max(output.tokens) for output in after) < VOCAB
