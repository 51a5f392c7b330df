"""Requests of the SDK that never get a place in their model's order: the SDK has counted them, and the
model goes on all the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.e2e.api_server import KEY, ApiServer, batch, datum, policy
from tests.e2e.helpers import Workspace

pytestmark = pytest.mark.extended

OTHER_KEY = "tml-another-key-of-the-tests"
SOON_S = 60.0  # on a busy machine; the SDK's retries take 300 s, a gap of other clients 330 s


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{KEY}\n{OTHER_KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def small(
    work: Workspace, tmp_path_factory: pytest.TempPathFactory, keys: Path
) -> Iterator[ApiServer]:
    flags = ("--max-body-mb", "0.05", "--api-key-file", str(keys))
    with ApiServer(work.model, tmp_path_factory.mktemp("gaps"), *flags) as running:
        yield running


def goes_on(training: tinker.TrainingClient) -> None:
    """Passes and steps that wait for nothing. The first step may lack what did not come."""
    start = time.monotonic()
    training.forward_backward(batch(2), "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=r"never came.*send the batches again"):
        training.optim_step(types.AdamParams()).result(timeout=SOON_S)
    training.forward_backward(batch(2), "cross_entropy")
    training.optim_step(types.AdamParams()).result(timeout=SOON_S)
    assert time.monotonic() - start < SOON_S


def test_a_body_that_is_too_large(small: ApiServer) -> None:
    """Its number is in the body, which is not read."""
    training = policy(small.client(), small)
    large = datum(4_000_000, 0)
    with pytest.raises(tinker.APIStatusError, match="--max-body-mb") as raised:
        training.forward_backward([large], "cross_entropy").result(timeout=SOON_S)
    assert raised.value.status_code == 413
    goes_on(training)


def test_a_chunk_of_a_batch_that_is_too_large(small: ApiServer) -> None:
    """As the SDK's documentation does, the step is sent before the batch is waited for: nothing of
    the batch is applied."""
    client = small.client()
    training = policy(client, small)
    one = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
    training.holder._client_config = one
    before = training.forward(batch(2), "cross_entropy").result(timeout=SOON_S).metrics["loss:sum"]
    rows = [*batch(1), datum(4_000_000, 0), *batch(1, 5)]
    passes = training.forward_backward(rows, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    with pytest.raises(tinker.APIStatusError, match="--max-body-mb"):
        passes.result(timeout=SOON_S)
    with pytest.raises(tinker.RequestFailedError, match=r"never came.*send the batches again"):
        step.result(timeout=SOON_S)
    after = training.forward(batch(2), "cross_entropy").result(timeout=SOON_S).metrics["loss:sum"]
    assert after == before
    training.forward_backward(batch(2), "cross_entropy")
    training.optim_step(types.AdamParams()).result(timeout=SOON_S)


def test_a_key_that_is_unknown_for_a_while(small: ApiServer, keys: Path) -> None:
    """401, which the SDK does not try again."""
    training = policy(small.client(), small)
    known = keys.read_text()
    keys.write_text(f"{OTHER_KEY}\n")
    time.sleep(1.5)  # the file is read again
    try:
        with pytest.raises(tinker.AuthenticationError, match="--api-key-file"):
            training.optim_step(types.AdamParams()).result(timeout=SOON_S)
    finally:
        keys.write_text(known)
        time.sleep(1.5)
    goes_on(training)


def test_a_request_that_fails_in_the_client(small: ApiServer) -> None:
    """The SDK has no message for an image by its address: nothing is sent."""
    training = policy(small.client(), small)
    pointer = types.ImageAssetPointerChunk(format="png", location="a.png", expected_tokens=4)
    unsendable = types.Datum(
        model_input=types.ModelInput(chunks=[pointer]), loss_fn_inputs={"target_tokens": [1] * 4}
    )
    with pytest.raises(Exception, match="ImageAssetPointerChunk"):
        training.forward_backward([unsendable], "cross_entropy").result(timeout=SOON_S)
    goes_on(training)
