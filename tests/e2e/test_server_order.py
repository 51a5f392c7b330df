"""Order, repetition and refusal, by requests that the SDK would not send: every request of a model
at its number, once, whatever arrives when."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from transformers import AutoModelForCausalLM

from tests.e2e.api_server import ApiServer, batch, datum, policy, sampler_folder, tokens, weights_of

pytestmark = pytest.mark.extended

PROTOBUF = {"Accept": "application/x-protobuf", "Content-Type": "application/x-protobuf"}


class Raw:
    """A session by hand."""

    def __init__(self, api: ApiServer) -> None:
        self.api, self.http = api, api.http()
        self.session = self.post(
            "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}
        )["session_id"]

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.json()

    def create(self, number: int = 0, status: int = 200, **more: Any) -> str:
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": str(self.api.model),
            "type": "create_model",
            **more,
        }
        future = self.post("create_model", body, status)
        return str(self.wait(future["request_id"])["model_id"])

    def pass_body(
        self,
        model: str,
        seq: int,
        data: list[types.Datum],
        loss: str = "cross_entropy",
        **config: Any,
    ) -> bytes:
        inputs = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config or None)
        request = types.ForwardBackwardRequest(
            forward_backward_input=inputs, model_id=model, seq_id=seq
        )
        return bytes(forward_backward_request_to_proto(request).SerializeToString())

    def send_pass(self, body: bytes, status: int = 200) -> str:
        answer = self.http.post("forward_backward", content=body, headers=PROTOBUF)
        assert answer.status_code == status, answer.text
        return str(answer.json().get("request_id", answer.text))

    def step(self, model: str, seq: int, **adam: float) -> str:
        return str(
            self.post(
                "optim_step",
                {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-2, **adam}},
            )["request_id"]
        )

    def save(self, model: str, seq: int) -> str:
        future = self.post(
            "save_weights_for_sampler", {"model_id": model, "seq_id": seq, "path": "end"}
        )
        return str(self.wait(future["request_id"])["path"])

    def wait(self, request: str) -> Any:
        """The result: JSON, or the SDK's ForwardBackwardOutput."""
        answer = self.http.post(
            "retrieve_future",
            json={"request_id": request},
            headers={"Accept": "application/x-protobuf"},
        )
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return deserialize_forward_backward_output(answer.content)
        return answer.json()

    def refused(self, request: str) -> str:
        """The message of a request that failed for a reason of the client's."""
        result = self.wait(request)
        assert result["category"] == "user", result
        return str(result["error"])


@pytest.fixture(scope="module")
def raw(api: ApiServer) -> Raw:
    return Raw(api)


def test_shuffled_and_repeated_requests_give_the_same_bits(api: ApiServer) -> None:
    """Three chunks, a step, two chunks, a step: in order; and out of order, each sent twice."""
    chunks = [batch(2, seed) for seed in range(5)]
    ends, results = [], []
    for order in ([1, 2, 3, 4, 5, 6, 7], [2, 3, 7, 1, 4, 1, 6, 2, 5, 7, 5]):
        raw = Raw(api)
        model = raw.create()
        bodies = {
            seq: raw.pass_body(model, seq, chunk)
            for seq, chunk in zip((1, 2, 3, 5, 6), chunks, strict=True)
        }
        ids: dict[int, str] = {}
        for seq in order:
            id = raw.step(model, seq) if seq in (4, 7) else raw.send_pass(bodies[seq])
            assert ids.setdefault(seq, id) == id, "a repetition is the same request"
        results.append([raw.wait(ids[seq]) for seq in range(1, 8)])
        ends.append(weights_of(sampler_folder(api, raw.save(model, 8))))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    for one, other in zip(*results, strict=True):
        if isinstance(one, dict):
            assert one == other
        else:
            assert one.metrics == other.metrics


def test_chunks_of_the_sdk_make_one_batch(api: ApiServer) -> None:
    """The SDK sends the first chunk last; cut small, a batch gives the same gradient as whole."""
    norms, losses = [], []
    for length in (1024, 2):
        client = api.client()
        training = policy(client, api)
        reported = {
            "fwdbwd_max_chunk_len": length,
            "proto_compress_fwdbwd": length == 2,
        }  # the second time also packed with zstd
        training.holder._client_config = training.holder._client_config.model_copy(update=reported)
        result = training.forward_backward(batch(7, 3), "cross_entropy")
        norms.append(training.optim_step(types.AdamParams()).result().metrics["grad_norm"])
        losses.append(result.result().metrics["loss:sum"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and losses[0] == pytest.approx(
        losses[1], rel=1e-5
    )


def test_another_request_at_the_same_number_is_refused_for_good(raw: Raw) -> None:
    model = raw.create(1)
    raw.send_pass(raw.pass_body(model, 1, batch(1)))
    assert "was used by another request" in raw.send_pass(raw.pass_body(model, 1, batch(1, 8)), 422)
    raw.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}, 422)


def test_a_failed_request_uses_its_number_up(raw: Raw) -> None:
    model = raw.create(2)
    failed = raw.send_pass(raw.pass_body(model, 1, batch(1), "nonsense"))
    assert "unknown loss_fn 'nonsense'; accepted: cross_entropy" in raw.refused(failed)
    assert raw.wait(raw.send_pass(raw.pass_body(model, 2, batch(1)))).metrics["loss:sum"]


def test_a_client_goes_on_after_settings_that_are_refused(api: ApiServer) -> None:
    """With the SDK, which counts what was refused: --seq-gap-s is 2 here, after which a gap fails."""
    client = api.client()
    model = policy(client, api)
    with pytest.raises(tinker.UnprocessableEntityError, match="eps"):
        model.optim_step(types.AdamParams(eps=0.0)).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="learning_rate"):
        model.optim_step(types.AdamParams(learning_rate=1e4)).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="path"):
        model.save_state("a/b").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="path"):
        model.load_state("weights/a").result()
    assert model.forward_backward(batch(2), "cross_entropy").result().metrics["loss:sum"]
    assert model.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0


def test_a_gap_that_stays_fails_what_is_behind_it(raw: Raw) -> None:
    """--seq-gap-s is 2 here. The missing one is named, comes too late, and the next ones are
    executed."""
    model = raw.create(3)
    behind = [raw.send_pass(raw.pass_body(model, seq, batch(1))) for seq in (3, 2)]
    assert all(f"request 1 of {model}" in raw.refused(id) for id in behind)
    assert "is too low; the next is 4" in raw.send_pass(raw.pass_body(model, 1, batch(1)), 422)
    assert raw.wait(raw.send_pass(raw.pass_body(model, 4, batch(1)))).metrics


def test_a_question_for_a_result_is_held(raw: Raw) -> None:
    """An early "not yet" would make clients ask in a circle."""
    model = raw.create(4)
    waiting = raw.send_pass(raw.pass_body(model, 2, batch(1)))
    started = time.monotonic()
    assert "never came" in raw.wait(waiting)["error"] and time.monotonic() - started > 1.0


def test_results_that_never_were(raw: Raw) -> None:
    assert raw.http.post("retrieve_future", json={"request_id": "nothing/1"}).status_code == 404
    assert raw.http.post("session_heartbeat", json={"session_id": "nothing"}).status_code == 404


BAD_DATUMS: list[tuple[str, dict[str, Any], types.Datum, str]] = [
    ("ppo_critic", {}, datum(3, 1), "only for critic models"),
    ("stable_reinforce", {}, datum(3, 1, advantages=[1, 1, 1]), "loss_fn_input_spans cover 0 of 3 targets"),
    ("custom", {"loss_id": "x"}, datum(3, 1), "custom loss x does not exist in session"),
    ("cross_entropy", {"beta": 1.0}, datum(3, 1), "unknown loss_fn_config 'beta'"),
    ("ppo", {"clip_low_threshold": 1.2}, datum(3, 1, logprobs=[0, 0, 0], advantages=[1, 1, 1]), "0 <= x <= 1"),
    ("dro", {}, datum(3, 1, logprobs=[0, 0, 0], advantages=[1, 1, 1]), "needs loss_fn_config['beta']"),
    ("gspo", {"clip_low_threshold": 0.9}, datum(3, 1), "needs loss_fn_config['clip_high_threshold']"),
    ("importance_sampling", {}, datum(3, 1, logprobs=[0, 0, 0]), "needs advantages"),
    ("importance_sampling", {}, datum(3, 1, logprobs=[0, 0], advantages=[1, 1, 1]), "logprobs has 2 entries"),
    ("cross_entropy", {}, datum(3, 1, weights=[1, float("nan"), 1]), "not finite"),
    ("cross_entropy", {}, datum(3, 1, weights=[1, 1, 1], extra=[1, 1, 1]), "unknown loss_fn_inputs extra"),
    ("cross_entropy", {}, datum(3, 1, targets=[1, 2, 5000]), "outside the vocabulary"),
    ("cross_entropy", {}, datum(600, 1), "exceed the maximum sequence length, 512"),
    ("sapo", {"sapo_tau_pos": -1.0}, datum(3, 1, logprobs=[0, 0, 0], advantages=[1, 1, 1], mask=[1, 1, 1]), "sapo_tau_pos is -1.0"),
    ("gmpo", {}, datum(3, 1, logprobs=[0, 0, 0], advantages=[1, 1, 1], mask=[0, 0, 0]), "mask is 0 everywhere"),
]  # fmt: skip


def test_what_a_batch_may_not_be(raw: Raw) -> None:
    """The message names model and, where there is one, datum; the server continues."""
    model = raw.create(5)
    good = datum(4, 0)
    for seq, (loss, config, bad, wording) in enumerate(BAD_DATUMS, start=1):
        message = raw.refused(raw.send_pass(raw.pass_body(model, seq, [bad], loss, **config)))
        assert wording in message and model in message, message
    seq = len(BAD_DATUMS) + 1
    common = {"logprobs": [0] * 4, "advantages": [1] * 4, "mask": [1] * 4}
    mixed = [datum(4, 0, **common, rollout_logprobs=[0] * 4), datum(4, 0, **common)]
    assert "some datums have rollout_logprobs" in raw.refused(
        raw.send_pass(raw.pass_body(model, seq, mixed, "sapo"))
    )
    request = pb.ForwardBackwardRequest.FromString(raw.pass_body(model, seq + 1, [good]))
    request.data[0].model_input.add().image.data = b"png"
    assert "datum 0: a chunk of kind image" in raw.refused(
        raw.send_pass(request.SerializeToString())
    )
    request = pb.ForwardBackwardRequest.FromString(raw.pass_body(model, seq + 2, [good]))
    request.data[0].loss_fn_inputs["target_tokens"].shape[:] = [2, 2]
    assert "several targets per token" in raw.refused(raw.send_pass(request.SerializeToString()))
    assert raw.wait(raw.send_pass(raw.pass_body(model, seq + 3, [good]))).metrics


def test_roles(api: ApiServer) -> None:
    """Every rule about critics, with the model in its message; the role may be given in either way."""
    raw = Raw(api)

    def create(number: int, **more: Any) -> str:
        body = {
            "session_id": raw.session,
            "model_seq_id": number,
            "base_model": str(api.model),
            **more,
        }
        return raw.refused(raw.post("create_model", body)["request_id"])

    as_critic = {"user_metadata": {"model_role": "critic"}}
    assert "create a policy before its critic" in create(0, **as_critic)
    assert "unknown model_role 'judge'; accepted: policy, critic" in create(1, model_role="judge")
    assert "give one of them" in create(2, model_role="policy", **as_critic)
    assert "is not served here" in create(3, base_model="another/model")
    assert "must be adamw" in create(5, optimizer_config={"type": "dimuon"})
    raw.create(6)
    nothing = {"rank": 8, "train_attn": False, "train_mlp": False}
    assert "train_attn and train_mlp are both False: a critic" in create(
        4, lora_config=nothing, **as_critic
    )
    judge = raw.create(7, model_role="critic")
    assert "one critic per policy" in create(8, **as_critic)
    values = {"values": np.zeros(3, np.float32), "returns": np.ones(3, np.float32)}
    rows = types.ModelInput.from_ints(tokens(3, 1))

    def refused(seq: int, loss: str, **inputs: Any) -> str:
        one = types.Datum(
            model_input=rows,
            loss_fn_inputs={name: np.asarray(v, dtype=np.float32) for name, v in inputs.items()},
        )
        message = raw.refused(raw.send_pass(raw.pass_body(judge, seq, [one], loss)))
        assert judge in message
        return message

    assert "a critic batch must use loss_fn 'ppo_critic'" in refused(1, "cross_entropy")
    assert "give both values and returns, or neither" in refused(
        2, "ppo_critic", values=values["values"]
    )
    assert "values and returns are required for every response token" in refused(
        3, "ppo_critic", values=[0, 0], returns=[1, 1]
    )
    assert "required for every response token" in refused(4, "ppo_critic")
    saved = raw.post("save_weights_for_sampler", {"model_id": judge, "seq_id": 5, "path": "x"})
    assert "sampler checkpoints are for policies only" in raw.refused(saved["request_id"])
    state = raw.wait(
        raw.post("save_weights", {"model_id": judge, "seq_id": 6, "path": "x"})["request_id"]
    )
    assert state["path"] == f"tinker://{judge}/weights/x"


def test_losses_are_those_of_their_formulas(api: ApiServer) -> None:
    """Each as Tinker's documents write it, on log-probs that the server itself reports; sums,
    without any normalisation."""
    training = policy(api.client(), api)
    rng = np.random.default_rng(0)
    lengths = (6, 9)
    asked = [datum(n, i) for i, n in enumerate(lengths)]
    now = [
        out["logprobs"].to_torch().double()
        for out in training.forward(asked, "cross_entropy").result().loss_fn_outputs
    ]
    old = [lp.float().numpy() + rng.normal(size=len(lp)) * 0.3 for lp in now]
    advantages = [rng.normal(size=n) for n in lengths]
    masks = [np.array([0] * 2 + [1] * (n - 2)) for n in lengths]

    def data(*names: str) -> list[types.Datum]:
        tables = {
            "logprobs": old,
            "advantages": advantages,
            "sequence_ratio_mask": masks,
            "mask": masks,
        }
        rows = [{name: tables[name][i] for name in names} for i in range(2)]
        for row in rows:
            if "sequence_ratio_mask" in row or "mask" in row:
                row["advantages"] = row["advantages"] * (
                    row.get("mask", row.get("sequence_ratio_mask"))
                )
        return [datum(n, i, **rows[i]) for i, n in enumerate(lengths)]

    r = [
        torch.exp(lp - torch.tensor(q, dtype=torch.float32).double())
        for lp, q in zip(now, old, strict=True)
    ]
    a = [torch.tensor(x, dtype=torch.float32).double() for x in advantages]
    m = [torch.tensor(x).double() for x in masks]
    d = [x.log() for x in r]
    s = [torch.exp((x * y).sum() / y.sum()) for x, y in zip(d, m, strict=True)]
    formulas: list[tuple[str, dict[str, Any], tuple[str, ...], list[torch.Tensor]]] = [
        ("importance_sampling", {}, (), [-x * y for x, y in zip(r, a, strict=True)]),
        ("ppo", {}, (), [-torch.minimum(x * y, x.clamp(0.8, 1.2) * y) for x, y in zip(r, a, strict=True)]),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}, (), [-torch.minimum(x * y, x.clamp(0.9, 1.5) * y) for x, y in zip(r, a, strict=True)]),
        ("cispo", {"clip_high_threshold": 1.1}, (), [-x.clamp(0, 1.1) * lp * y for x, lp, y in zip(r, now, a, strict=True)]),
        ("dro", {"beta": 0.3}, (), [-(lp * y - 0.15 * x * x) for lp, x, y in zip(now, d, a, strict=True)]),
        ("gspo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}, ("sequence_ratio_mask",),
         [-torch.minimum(x * y * z, x.clamp(0.95, 1.02) * y * z) for x, y, z in zip(s, a, m, strict=True)]),
        ("gpg", {}, ("mask",), [-lp * y * z for lp, y, z in zip(now, a, m, strict=True)]),
    ]  # fmt: skip
    for name, config, more, expected in formulas:
        names = ("advantages", *more) if name == "gpg" else ("logprobs", "advantages", *more)
        output = training.forward(data(*names), name, config or None).result()
        for got, wanted in zip(output.loss_fn_outputs, expected, strict=True):
            torch.testing.assert_close(
                got["elementwise_loss"].to_torch().double(), wanted, atol=2e-5, rtol=1e-4
            )
        assert output.metrics["loss:sum"] == pytest.approx(
            sum(float(x.sum()) for x in expected), rel=1e-4, abs=1e-4
        )
        assert all(key.count(":") == 1 for key in output.metrics)


def test_entropy_comes_off_the_loss_and_is_trained(api: ApiServer) -> None:
    """Against transformers' own logits; and the gradient raises the entropy."""
    training = policy(api.client(), api)
    data = [datum(8, 0, mask=np.array([0, 0] + [1] * 6), advantages=np.zeros(8))]
    model = AutoModelForCausalLM.from_pretrained(api.model, dtype=torch.float64)
    with torch.no_grad():
        log_probs = model(torch.tensor([data[0].model_input.to_ints()])).logits[0].log_softmax(-1)
    expected = 0.3 * (log_probs.exp() * log_probs).sum(-1) * torch.tensor([0, 0] + [1] * 6)
    before = training.forward_backward(data, "gpg", {"entropy_coef": 0.3}).result()
    torch.testing.assert_close(
        before.loss_fn_outputs[0]["elementwise_loss"].to_torch().double(),
        expected,
        atol=2e-5,
        rtol=1e-4,
    )
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = training.forward(data, "gpg", {"entropy_coef": 0.3}).result()
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"] - 1e-4
    with pytest.raises(tinker.RequestFailedError, match="entropy_coef"):
        training.forward(data, "gpg", {"entropy_coef": -1.0}).result()


def test_checkpoints_have_names_and_not_paths(raw: Raw) -> None:
    model = raw.create(6)
    for seq, path in enumerate(
        ("../../etc/passwd", "/etc/passwd", "a/b", "..", ".hidden", "", "x" * 200, "a\0b"), start=1
    ):
        for call in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
            raw.post(call, {"model_id": model, "seq_id": seq, "path": path}, 422)
    for path in (
        "tinker://../../etc/weights/x",
        f"tinker://{model}/weights/../../x",
        "tinker:///etc/passwd",
    ):
        body = {
            "session_id": raw.session,
            "model_seq_id": 900 + len(path),
            "path": path,
            "optimizer": False,
        }
        assert "does not exist" in raw.refused(raw.post("load_weights", body)["request_id"])
        raw.post(
            "create_sampling_session",
            {"session_id": raw.session, "sampling_session_seq_id": 7, "model_path": path},
            422,
        )
        raw.post("weights_info", {"tinker_path": path}, 404)


def test_what_is_not_sampled_is_refused(api: ApiServer) -> None:
    client = api.client()
    sampler = client.create_sampling_client(base_model=str(api.model)).result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    with pytest.raises(tinker.RequestFailedError, match="prompt_alt_tokens_k"):
        sampler.sample(
            prompt, 1, types.SamplingParams(max_tokens=2), prompt_alt_tokens_k=5000
        ).result()
    for bad, wording in (
        (types.ModelInput.from_ints([1, 99999]), "outside the vocabulary"),
        (types.ModelInput.from_ints([1] * 600), "exceed"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=wording):
            sampler.sample(bad, 1, types.SamplingParams(max_tokens=2)).result()


def test_a_session_ends_with_its_models(api: ApiServer) -> None:
    client = api.client()
    training = policy(client, api)
    session = training.model_id.split(":")[0]
    client.close("success").result()
    http = api.http()
    assert http.post("session_heartbeat", json={"session_id": session}).status_code == 410
    future = http.post(
        "optim_step", json={"model_id": training.model_id, "seq_id": 1, "adam_params": {}}
    ).json()
    result = http.post("retrieve_future", json=future).json()
    assert result["category"] == "server" and "its session has finished" in result["error"]


def test_a_result_is_json_for_who_reads_json(raw: Raw) -> None:
    """No successful answer has a field `error`; protobuf is sent to those who ask for it."""
    model = raw.create(7)
    id = raw.send_pass(raw.pass_body(model, 1, batch(1)))
    raw.wait(id)
    assert raw.http.post("retrieve_future", json={"request_id": id}).status_code == 406
    info = raw.post("get_info", {"model_id": model})
    assert "error" not in info and json.loads(json.dumps(info)) == info
