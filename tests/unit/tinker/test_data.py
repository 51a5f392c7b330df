"""Tensors of a datum: what sparse bytes describe, and what is refused with its name."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tinker import types

from slime_like.tinker import proto
from slime_like.tinker.data import DataLimits, check_forward_backward
from slime_like.tinker.errors import Refused
from slime_like.tinker.loss_graph import LossGraph
from slime_like.tinker.losses import served_loss
from slime_like.tinker.schemas import AdamParams, TensorData

LIMITS = DataLimits(vocab_size=50, max_length=32, max_tokens=200)


def request(targets: Any, weights: Any | None, loss: str = "cross_entropy", length: int = 4) -> Any:
    """As the SDK writes it."""
    from tinker.proto.request_conv import forward_backward_request_to_proto

    inputs = {"target_tokens": targets} | ({} if weights is None else {"weights": weights})
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))), loss_fn_inputs=inputs
    )
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn=loss),
        model_id="m",
        seq_id=1,
    )
    return proto.ForwardBackwardRequest.FromString(
        forward_backward_request_to_proto(asked).SerializeToString()
    )


def checked(message: Any) -> dict[str, list[Any]]:
    return check_forward_backward(message, role="policy", limits=LIMITS).fields


def test_sparse_tensors_are_what_the_sdk_left_out() -> None:
    """Over many patterns, empty rows and empty matrices included."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        weights = torch.tensor(
            rng.normal(size=(4, 12)) * (rng.random((4, 12)) < 0.15), dtype=torch.float32
        )
        targets = torch.tensor(rng.integers(1, 50, (4, 12))) * (weights != 0)
        message = request(targets, weights)
        assert message.data[0].loss_fn_inputs["weights"].WhichOneof("encoding") == "sparse_csr"
        fields = checked(message)
        assert np.array_equal(fields["label_sets"][0], targets.numpy()) and np.array_equal(
            fields["label_weights"][0], weights.numpy()
        )


def spoiled(**changes: Any) -> Any:
    weights = torch.zeros(4, 12)
    weights[1, 2] = weights[1, 3] = weights[3, 0] = 1.0
    message = request((weights > 0).long() * 7, weights)
    csr = message.data[0].loss_fn_inputs["weights"].sparse_csr
    for name, values in changes.items():
        setattr(
            csr,
            name,
            values if isinstance(values, bytes) else np.array(values, dtype="<i8").tobytes(),
        )
    return message


@pytest.mark.parametrize(
    "changes",
    [
        {"crow_indices": [0, 0, 2, 2]},
        {"crow_indices": [0, 0, 2, 2, 4]},
        {"crow_indices": [0, 3, 2, 2, 3]},
        {"crow_indices": [1, 1, 2, 2, 3]},
        {"crow_indices": []},
        {"col_indices": [2, 3, 12]},
        {"col_indices": [2, -1, 0]},
        {"col_indices": [2, 3]},
        {"col_indices": [2, 2, 0]},
        {"col_indices": b"abc"},
        {"values": b"\0" * 8},
    ],
)
def test_sparse_bytes_that_are_no_matrix(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"datum 0: .*weights"):
        checked(spoiled(**changes))


def test_shapes_that_are_refused() -> None:
    two = torch.ones(4, 2)
    cases = [
        (request(two.long(), None), "need weights of shape"),
        (request(two.long(), torch.ones(4)), "weights has 4 entries"),
        (
            request(two.long(), torch.ones(4, 3)),
            "only cross_entropy supports several targets per token",
        ),
        (request(two.long() * 60, two), "token 60 is outside the vocabulary"),
        (request(torch.ones(4, 60).long(), torch.ones(4, 60)), "60 targets per token"),
        (request(torch.ones(4, 50).long(), torch.ones(4, 50), length=4), None),
        (request(torch.ones(5, 41).long(), torch.ones(5, 41), length=5), "more than 200"),
        (request(two.long(), two * float("inf")), "not finite"),
        (request(torch.ones(4).long(), two), "only cross_entropy supports"),
    ]
    for message, words in cases:
        if words is None:
            assert checked(message)["label_sets"][0].shape == (4, 50)
        else:
            with pytest.raises(Refused, match=words):
                checked(message)


@pytest.mark.parametrize("loss", ["cross_entropy", "custom"])
def test_labels_are_counted_as_they_are_padded(loss: str) -> None:
    """One datum with many targets and others with many tokens are small, but not together."""
    graph = LossGraph("l", (("logprobs", 2),), ())
    message = request(torch.ones(1, 50).long(), torch.ones(1, 50), length=1)
    long = request(torch.ones(5, 1).long(), torch.ones(5, 1), length=5)
    if loss == "custom":
        for each in (message, long):
            del each.data[0].loss_fn_inputs["weights"]
        message.loss_fn = loss
        message.loss_fn_config_v2["loss_id"].text = "l"
    both = proto.ForwardBackwardRequest.FromString(message.SerializeToString())
    both.data.extend(long.data)
    check = partial(
        check_forward_backward, role="policy", limits=LIMITS, find_graph=lambda id: graph
    )
    assert check(message).fields["label_sets"][0].shape == (1, 50)
    with pytest.raises(Refused, match="6 tokens with the 50 targets of the widest datum"):
        check(both)


def test_weights_that_some_datums_lack_are_1() -> None:
    message = request(np.array([3, 4, 5, 6]), np.array([0.5, 0, -1, 2], dtype=np.float32))
    message.data.add().CopyFrom(request(np.array([3, 4, 5]), None, length=3).data[0])
    weights = [w.tolist() for w in checked(message)["loss_weights"]]
    assert weights == [[0.5, 0.0, -1.0, 2.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("ppo", {"clip_high_threshold": 1e39}),
        ("cispo", {"clip_high_threshold": 1e300}),
        ("dro", {"beta": 1e-39}),
        ("ppo_critic", {"value_clip": 1e39}),
        ("sapo", {"sapo_tau_pos": 1e39}),
        ("sapo", {"sapo_tau_neg": 1e-40}),
        ("sapo", {"entropy_coef": 1e39}),
        ("sapo", {"sapo_tau_pos": float("nan")}),
    ],
)
def test_settings_that_float32_cannot_hold(loss: str, config: dict[str, float]) -> None:
    with pytest.raises(Refused, match=next(iter(config))):
        served_loss(loss, config)


@pytest.mark.parametrize("token", [2**31, 2**70, -2])
def test_tokens_to_score_that_an_array_cannot_hold(token: int) -> None:
    body = {"data": [1, token], "dtype": "int64", "shape": [2, 1]}
    with pytest.raises(ValidationError, match=r"data\.1"):
        TensorData.model_validate(body)
    assert TensorData.model_validate({**body, "data": [1, -1]}).data == [1, -1]


@pytest.mark.parametrize(
    "adam",
    [{"learning_rate": 1e38}, {"eps": 0.0}, {"eps": 1e-30}, {"weight_decay": 1e30}, {"beta1": 1.0}],
)
def test_adam_that_float32_cannot_hold(adam: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(adam))):
        AdamParams.model_validate(adam)
