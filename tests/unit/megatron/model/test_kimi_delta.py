"""The decays of Kimi delta attention, of either kind, against transformers' gates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like.megatron.model.kimi_delta import KimiDeltaNet

HEADS, DIM, HIDDEN, TOKENS = 6, 4, 5, 9


@pytest.mark.parametrize("bound", [None, -5.0], ids=["Kimi-Linear", "GLM-5.3"])
def test_decays(bound: float | None) -> None:
    """Of all heads, and of those from the third on, as a context-parallel rank has them."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {"A_log": random(HEADS), "dt_bias": random(HEADS * DIM)}
    raw = 3 * random(TOKENS, HEADS, DIM)
    own: Any = SimpleNamespace(
        **weights, key_dim=DIM, config=SimpleNamespace(linear_decay_bound=bound)
    )
    gate = theirs(bound)
    gate.load_state_dict(
        {n: weights[n].view(p.shape) for n, p in gate.named_parameters() if n in weights},
        strict=False,
    )
    gate.f_a_proj, gate.f_b_proj = torch.nn.Identity(), torch.nn.Identity()
    expected = gate(raw.flatten(1).unsqueeze(0))[0].detach()
    for first in (0, 2):
        found = KimiDeltaNet._log_decay(own, raw[:, first:], first)
        torch.testing.assert_close(found, expected[:, first:], rtol=1e-5, atol=1e-6)
    assert bound is None or float(expected.min()) > bound


def theirs(bound: float | None) -> Any:
    config: Any = SimpleNamespace(
        linear_head_dim=DIM, linear_num_heads=HEADS, hidden_size=HIDDEN, linear_lower_bound=bound
    )
    if bound is None:
        kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        return kimi.KimiLinearForgetGate(config)
    glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    return glm.Glm5NextTextForgetGate(config)
