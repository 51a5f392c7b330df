"""Losses that the client sends: on the server they give the bits that they give in the client."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from tests.e2e.api_server import ApiServer, datum, policy, sampler_folder, weights_of

RANKS: Any = {"logprobs": 1, "old": 1, "advantages": 1, "scale": 0, "groups": 1}


def clipped(
    logprobs: Tensor, old: Tensor, advantages: Tensor, scale: Tensor, groups: Tensor
) -> Any:
    """With a term of the whole sequence, an input of integers and one without dimensions."""
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    kept = torch.where(groups > 0, gain, 0.0)
    sequence = (logprobs - old).mean().square()
    metrics = {
        "custom/ratio:mean": ratio.mean(),
        "custom/clipped:sum": (ratio != torch.clamp(ratio, 0.8, 1.2)).float().sum(),
    }
    return scale * sequence - kept.sum(), metrics


def data(count: int = 5) -> list[types.Datum]:
    made = []
    for i in range(count):
        rng = np.random.default_rng(i)
        n = int(rng.integers(4, 17))
        one = datum(n, i, old=rng.normal(size=n) - 4, advantages=rng.normal(size=n), scale=0.5 + i)
        groups = types.TensorData.from_numpy(rng.integers(0, 2, n))
        inputs = {**one.loss_fn_inputs, "groups": groups}
        made.append(types.Datum(model_input=one.model_input, loss_fn_inputs=inputs))
    return made


def in_client(handle: Any) -> Any:
    return dataclasses.replace(handle, loss_id=None)


def trained(
    api: ApiServer, training: tinker.TrainingClient, handle: Any, batches: list[list[types.Datum]]
) -> tuple[list[types.ForwardBackwardOutput], dict[str, Tensor]]:
    """Results of the batches, and the weights after a step with all of them."""
    results = [training.forward_backward_custom(each, handle).result() for each in batches]
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    path = training.save_weights_for_sampler("end").result().path
    return results, weights_of(sampler_folder(api, path))


def check_equal(mine: types.ForwardBackwardOutput, theirs: types.ForwardBackwardOutput) -> None:
    for one, other in zip(mine.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name].to_torch(), other[name].to_torch()), name
    assert mine.metrics.keys() >= theirs.metrics.keys() - {"entropy:mean"}
    for name, value in theirs.metrics.items():
        if name != "entropy:mean":
            assert mine.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def test_the_server_gives_the_bits_of_the_client(api: ApiServer) -> None:
    client = api.client()
    handle = client.create_custom_loss(clipped, RANKS).result()
    assert handle.loss_id is not None
    batches = [data(5), data(2)[1:]]
    mine, weights = trained(api, policy(client, api), handle, batches)
    theirs, expected = trained(api, policy(client, api), in_client(handle), batches)
    for one, other in zip(mine, theirs, strict=True):
        check_equal(one, other)
    assert {"custom/ratio:mean", "custom/clipped:sum", "surrogate_loss:sum"} <= mine[
        0
    ].metrics.keys()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_several_targets_per_token(api: ApiServer) -> None:
    """logprobs [T, K], with another K in each datum."""

    def matched(logprobs: Tensor, teacher: Tensor) -> Any:
        loss = (teacher.exp() * (teacher - logprobs)).sum()
        return loss, {"custom/gap:mean": (teacher - logprobs).abs().mean()}

    rng = np.random.default_rng(0)
    batch = []
    for n, k in ((6, 3), (4, 2)):
        one = datum(n, n)
        targets = rng.permuted(np.tile(np.arange(5, 90), (n, 1)), axis=1)[:, :k].copy()
        teacher = np.log(rng.dirichlet(np.ones(k), size=n)).astype(np.float32)
        arrays = {"target_tokens": targets.astype(np.int64), "teacher": teacher}
        batch.append(types.Datum(model_input=one.model_input, loss_fn_inputs=arrays))
    client = api.client()
    handle = client.create_custom_loss(matched, {"logprobs": 2, "teacher": 2}).result()
    mine, weights = trained(api, policy(client, api), handle, [batch])
    theirs, expected = trained(api, policy(client, api), in_client(handle), [batch])
    check_equal(mine[0], theirs[0])
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_what_a_custom_loss_refuses(api: ApiServer) -> None:
    """By future, so that the model goes on; nothing of a refused batch is in the gradient."""
    client = api.client()
    training = policy(client, api)
    handle = client.create_custom_loss(clipped, RANKS).result()
    other = api.client().create_custom_loss(clipped, RANKS).result()

    def refused(batch: list[types.Datum], loss: str, config: dict[str, Any]) -> str:
        with pytest.raises(tinker.RequestFailedError) as error:
            training.forward_backward(batch, loss, config).result()
        return str(error.value)

    def indexed(logprobs: Tensor, old: Tensor) -> Any:
        return logprobs[old.long()].sum(), {}

    def constant(logprobs: Tensor, old: Tensor) -> Any:
        return old.sum(), {}

    def unbounded(logprobs: Tensor, old: Tensor) -> Any:
        return logprobs.sum() - (old - old).log().sum(), {}

    two: Any = {"logprobs": 1, "old": 1}
    assert "needs loss_fn_config['loss_id']" in refused(data(1), "custom", {})
    assert "does not exist in session" in refused(data(1), "custom", {"loss_id": "a"})
    assert "does not exist in session" in refused(data(1), "custom", {"loss_id": other.loss_id})
    needs = refused([datum(4, 1)], "custom", {"loss_id": handle.loss_id})
    assert "datum 0: loss_fn 'custom' needs advantages, groups, old, scale" in needs
    short = [datum(4, 1, old=[1.0, 2.0])]
    plain = client.create_custom_loss(indexed, two).result()
    assert "old has 2 entries and shape [2], must be [4]" in refused(
        short, "custom", {"loss_id": plain.loss_id}
    )
    beyond = [datum(4, 1, old=[0, 1, 2, 4])]
    assert "loss 'indexed', node 'getitem': index 4 is out of bounds" in refused(
        beyond, "custom", {"loss_id": plain.loss_id}
    )
    fixed = client.create_custom_loss(constant, two).result()
    assert "does not depend on logprobs" in refused(beyond, "custom", {"loss_id": fixed.loss_id})
    with pytest.raises(tinker.RequestFailedError, match="send the batches again"):
        training.optim_step(types.AdamParams()).result()  # of nothing but refusals
    endless = client.create_custom_loss(unbounded, two).result()
    assert "the loss of this batch is nan" in refused(
        beyond, "custom", {"loss_id": endless.loss_id}
    )
    with pytest.raises(tinker.RequestFailedError, match="send the batches again"):
        training.optim_step(types.AdamParams()).result()
    training.forward_backward(data(1), "custom", {"loss_id": handle.loss_id}).result()
    training.optim_step(types.AdamParams()).result()


def test_a_graph_that_is_not_allowed_is_refused_when_it_is_sent(api: ApiServer) -> None:
    client = api.client()

    def product(logprobs: Tensor) -> Any:
        return torch.outer(logprobs, logprobs).matmul(logprobs).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match="method 'matmul' is not allowed"):
        client.create_custom_loss(product, {"logprobs": 1}).result()
