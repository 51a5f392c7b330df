"""The unmodified SDK drives the server: train, save, load, sample; and the numbers are those of a
plain implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.api_server import (
    ApiServer,
    batch,
    critic,
    datum,
    policy,
    sampler_folder,
    tokens,
    weights_of,
)
from tests.e2e.helpers import Workspace

ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=5.0)


@pytest.fixture(scope="module")
def client(api: ApiServer) -> tinker.ServiceClient:
    return api.client()


def reference(work: Workspace) -> Any:
    return AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)


def log_probs(model: Any, one: types.Datum) -> torch.Tensor:
    """[N] of target_tokens."""
    ids = torch.tensor([one.model_input.to_ints()])
    targets = torch.tensor(one.loss_fn_inputs["target_tokens"].data)
    return model(ids).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]


def test_a_training_run_is_that_of_torch(
    api: ApiServer, client: tinker.ServiceClient, work: Workspace
) -> None:
    """Cross-entropy with weights of any sign, two calls for each step, Adam's settings at every
    step."""
    model = reference(work)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-12,
    )
    training = policy(client, api)
    info = training.get_info()
    assert info.is_lora is False and info.model_data.model_name == str(work.model)
    for step in range(3):
        first, second = batch(3, 2 * step), batch(2, 2 * step + 1)
        futures = [training.forward_backward(data, "cross_entropy") for data in (first, second)]
        done = training.optim_step(ADAM)
        expected = []
        for one in [*first, *second]:
            scores = log_probs(model, one)
            weights = torch.tensor(one.loss_fn_inputs["weights"].data)
            (-(scores * weights).sum()).backward()
            expected.append((scores.detach(), -(scores.detach() * weights)))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        adam.step()
        adam.zero_grad()
        outputs = [output for future in futures for output in future.result().loss_fn_outputs]
        for output, (scores, losses) in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output["logprobs"].to_torch(), scores, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(
                output["elementwise_loss"].to_torch(), losses, atol=2e-5, rtol=1e-5
            )
        total = sum(float(losses.sum()) for _, losses in expected)
        assert sum(f.result().metrics["loss:sum"] for f in futures) == pytest.approx(
            total, rel=1e-4, abs=1e-4
        )
        assert done.result().metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    saved = weights_of(
        sampler_folder(api, training.save_weights_for_sampler("trained").result().path)
    )
    names = dict(model.named_parameters())
    for name, tensor in saved.items():
        if name in names:
            torch.testing.assert_close(tensor, names[name].detach(), atol=5e-4, rtol=1e-3)


def test_targets_need_not_be_the_next_tokens(
    client: tinker.ServiceClient, api: ApiServer, work: Workspace
) -> None:
    data = [datum(9, 1, targets=tokens(9, 77)), datum(5, 2, targets=tokens(5, 78))]
    outputs = policy(client, api).forward(data, "cross_entropy").result().loss_fn_outputs
    for output, one in zip(outputs, data, strict=True):
        torch.testing.assert_close(
            output["logprobs"].to_torch(),
            log_probs(reference(work), one).detach(),
            atol=2e-5,
            rtol=1e-5,
        )


def test_several_weighted_targets_a_token(
    client: tinker.ServiceClient, api: ApiServer, work: Workspace
) -> None:
    """Soft targets [N, K], of another K in each datum, one of them sparse: log-probs, losses and
    gradient norm of plain torch, for every weight and adapter."""
    rng = np.random.default_rng(4)
    rows, shapes = [tokens(n, 70 + n) for n in (8, 5, 11)], [(8, 3), (5, 1), (11, 30)]
    targets = [torch.tensor(rng.integers(5, 90, shape)) for shape in shapes]
    weights = [torch.tensor(rng.normal(size=shape), dtype=torch.float32) for shape in shapes]
    weights[2][torch.tensor(rng.random(shapes[2]) < 0.9)] = 0.0
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row),
            loss_fn_inputs={"target_tokens": t, "weights": w},
        )
        for row, t, w in zip(rows, targets, weights, strict=True)
    ]
    assert (
        data[2].loss_fn_inputs["weights"].sparse_crow_indices is not None
        and data[0].loss_fn_inputs["weights"].sparse_crow_indices is None
    )
    training = policy(client, api)
    result = training.forward_backward(data, "cross_entropy").result()
    model = reference(work)
    for row, t, w, output in zip(rows, targets, weights, result.loss_fn_outputs, strict=True):
        scores = model(torch.tensor([row])).logits[0].log_softmax(-1).gather(1, t)
        losses = -(scores * w).sum(-1)
        losses.sum().backward()
        torch.testing.assert_close(
            output["logprobs"].to_torch(), scores.detach(), atol=2e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            output["elementwise_loss"].to_torch(), losses.detach(), atol=1e-4, rtol=1e-4
        )
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert training.optim_step(ADAM).result().metrics["grad_norm"] == pytest.approx(
        float(norm), rel=1e-4
    )


def test_a_forward_pass_leaves_the_gradients_alone(
    client: tinker.ServiceClient, api: ApiServer
) -> None:
    """Bit by bit: the same steps with and without forward passes between them."""
    paths = []
    for asks in (False, True):
        training = policy(client, api)
        for step in range(2):
            training.forward_backward(batch(3, step), "cross_entropy")
            if asks:
                training.forward(batch(4, 9), "cross_entropy")
                training.forward(
                    [datum(6, 4, logprobs=np.zeros(6), advantages=np.ones(6))],
                    "importance_sampling",
                )
            training.optim_step(ADAM).result()
        paths.append(training.save_weights_for_sampler("end").result().path)
    one, other = (weights_of(sampler_folder(api, path)) for path in paths)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_saved_state_continues_bit_by_bit(client: tinker.ServiceClient, api: ApiServer) -> None:
    training = policy(client, api)
    for step in range(2):
        training.forward_backward(batch(3, step), "cross_entropy")
        training.optim_step(ADAM)
    path = training.save_state("middle").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training.save_state("middle").result()
    assert training.save_state("middle", overwrite=True).result().path == path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    weights_only = client.create_training_client_from_state(path).result()
    losses, ends = [], []
    for one in (training, resumed, weights_only):
        for step in range(2, 4):
            future = one.forward_backward(batch(3, step), "cross_entropy")
            one.optim_step(ADAM)
            losses.append(future.result().metrics["loss:sum"])
        ends.append(
            weights_of(sampler_folder(api, one.save_weights_for_sampler("end").result().path))
        )
    assert losses[0:2] == losses[2:4], "the optimizer was not restored"
    assert losses[4] == losses[0] and losses[5] != losses[1], (
        "weights alone: the second step is another"
    )
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    rest = tinker.RestClient(base_url=api.url, api_key="tml-key-of-the-tests")
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert info.base_model == str(api.model) and info.is_lora is False
    listed = {
        c.tinker_path: c for c in rest.list_checkpoints(training.model_id).result().checkpoints
    }
    assert listed[path].size_bytes and listed[path].size_bytes > 10_000
    assert listed[path].expires_at is None
    for seconds in (3600, None):
        rest.set_checkpoint_ttl_from_tinker_path(path, seconds).result()
        (found,) = (
            c for c in rest.list_user_checkpoints().result().checkpoints if c.tinker_path == path
        )
        assert (found.expires_at is None) == (seconds is None)
    runs = {run.training_run_id: run for run in rest.list_training_runs().result().training_runs}
    run = rest.get_training_run(training.model_id).result()
    assert (run.training_run_id, run.base_model, run.is_lora) == (
        training.model_id,
        str(api.model),
        False,
    )
    assert (
        runs[training.model_id].model_owner == run.model_owner
        and runs[training.model_id].base_model == run.base_model
    )
    (offered,) = rest.get_server_capabilities().result().supported_models
    assert offered.model_name == str(api.model)
    with pytest.raises(
        tinker.APIStatusError, match=r"POST /api/v1/training_runs/.*/publish is not supported"
    ):
        rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        client.create_training_client_from_state(path).result()


def test_log_probs_of_other_tokens_of_the_prompt(
    client: tinker.ServiceClient, api: ApiServer, work: Workspace
) -> None:
    """Of chosen tokens, dense and sparse, with the request's layout; of tokens drawn at each
    position; and of the last positions only."""
    row = [10, 20, 30, 40, 50]
    prompt = types.ModelInput.from_ints(row)
    expected = reference(work)(torch.tensor([row])).logits[0, :-1].log_softmax(-1).detach()
    sampler = client.create_sampling_client(base_model=str(api.model)).result()
    ids = torch.full((4, 24), -1)  # with fewer columns the SDK sends no sparse tensor
    for i, j, token in ((0, 0, 7), (0, 2, 9), (2, 1, 41), (3, 23, 5)):
        ids[i, j] = token
    cells = torch.where(ids >= 0, expected.gather(1, ids.clamp(min=0)), 0.0)
    params = types.SamplingParams(max_tokens=1, seed=4, temperature=0.5)
    for sparse in (False, True):
        targets = (
            types.TensorData.from_torch_sparse(ids, pad_value=-1)
            if sparse
            else types.TensorData.from_torch(ids)
        )
        answer = sampler.sample(
            prompt,
            2,
            params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            target_prompt_logprobs=targets,
            prompt_alt_tokens_k=300,
            prompt_logprobs_last_n=2,
        ).result()
        found = answer.target_prompt_logprobs
        assert (found.sparse_crow_indices is not None) == sparse
        torch.testing.assert_close(found.to_torch(), cells, atol=1e-5, rtol=1e-5)
        scored = answer.prompt_logprobs
        assert scored[:3] == [None] * 3
        assert scored[3:] == pytest.approx([float(expected[2, 40]), float(expected[3, 50])])
        assert answer.topk_prompt_logprobs[:3] == [None] * 3
        assert [len(each) for each in answer.topk_prompt_logprobs[3:]] == [2, 2]
    drawn = answer.prompt_alt_tokens.tokens.to_torch()
    assert drawn.shape == (4, 300)
    torch.testing.assert_close(
        answer.prompt_alt_tokens.logprobs.to_torch(),
        expected.gather(1, drawn),
        atol=1e-5,
        rtol=1e-5,
    )
    probabilities = (expected / 0.5).softmax(-1)
    for position in range(4):
        top = int(probabilities[position].argmax())
        share = float((drawn[position] == top).float().mean())
        assert abs(share - float(probabilities[position, top])) < 0.15
    again = sampler.sample(prompt, 1, params, prompt_alt_tokens_k=300).result()
    assert torch.equal(again.prompt_alt_tokens.tokens.to_torch(), drawn), "by the request's seed"
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    likely = sampler.sample(prompt, 1, greedy, prompt_alt_tokens_k=2).result().prompt_alt_tokens
    assert torch.equal(likely.tokens.to_torch(), expected.argmax(-1, keepdim=True).expand(-1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_logprobs_last_n": 3, "include_prompt_logprobs": True}, "last_n is 3, must be 1 to 2"),
        ({"target_prompt_logprobs": [[1], [2], [3]]}, r"has shape \[3, 1\], must be \[2, K\]"),
        ({"target_prompt_logprobs": [[1], [999]]}, "token 999 is outside the vocabulary"),
        ({"target_prompt_logprobs": [[-1], [-1]]}, "names no token"),
        ({"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k is 1025"),
    ],
)  # fmt: skip
def test_what_is_no_token_to_score(
    client: tinker.ServiceClient, api: ApiServer, settings: dict[str, Any], message: str
) -> None:
    sampler = client.create_sampling_client(base_model=str(api.model)).result()
    ids = settings.get("target_prompt_logprobs")
    if ids is not None:
        settings = {"target_prompt_logprobs": types.TensorData.from_torch(torch.tensor(ids))}
    prompt = types.ModelInput.from_ints([1, 2, 3])
    with pytest.raises(tinker.RequestFailedError, match=message):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), **settings).result()


def test_inflight_weights_follow_their_model(client: tinker.ServiceClient, api: ApiServer) -> None:
    """A later inflight save reaches earlier sessions; snapshots in between do not; the weights are
    on disk once, and stay while a session uses them."""
    training = policy(client, api)
    prompt = types.ModelInput.from_ints([10, 20, 30])
    params = types.SamplingParams(max_tokens=6, seed=3)

    def scores(sampler: tinker.SamplingClient) -> list[Any]:
        answer = sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result()
        return [list(answer.sequences[0].tokens), list(answer.prompt_logprobs or ())]

    def step() -> None:
        training.forward_backward(batch(4), "cross_entropy")
        training.optim_step(ADAM).result()

    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    start = scores(first)
    step()
    snapshot = training.save_weights_and_get_sampling_client().result()
    assert scores(first) == start != scores(snapshot)
    step()
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    end = scores(second)
    assert scores(first) == end and end[1] not in (start[1], scores(snapshot)[1])
    model = training.get_info().model_id
    assert len(list((api.folder / "server" / "snapshots").glob(f"{model}.*"))) == 2


def test_snapshots_stay_as_they_are(
    client: tinker.ServiceClient, api: ApiServer, work: Workspace
) -> None:
    """Log-probs belong to the sampled tokens, and to the weights of the snapshot, whatever is
    trained later."""
    training = policy(client, api)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([10, 20, 30])
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=0.7)
    before = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
    training.forward_backward(batch(4), "cross_entropy")
    training.optim_step(ADAM).result()
    again = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
    later = (
        training.save_weights_and_get_sampling_client()
        .result()
        .sample(prompt, 3, params, include_prompt_logprobs=True)
        .result()
    )
    tokenise_rows = [
        [list(s.tokens) for s in answer.sequences] for answer in (before, again, later)
    ]
    assert tokenise_rows[0] == tokenise_rows[1]
    assert list(before.sequences[0].logprobs) == list(again.sequences[0].logprobs)
    assert (
        before.prompt_logprobs[0] is None
        and before.prompt_logprobs[1:] != later.prompt_logprobs[1:]
    )
    assert len({tuple(t) for t in tokenise_rows[0]}) > 1, "samples of one request differ"
    model = reference(work)
    for sequence in before.sequences:
        ids = torch.tensor([[10, 20, 30, *sequence.tokens]])
        with torch.no_grad():
            logits = model(ids).logits[0, 2:-1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(list(sequence.tokens))[:, None])[
            :, 0
        ]
        torch.testing.assert_close(
            torch.tensor(list(sequence.logprobs)), expected, atol=2e-5, rtol=1e-5
        )
        assert sequence.sequence_id


def test_ends_of_responses(client: tinker.ServiceClient, api: ApiServer) -> None:
    """No stop keeps the model's own end, an empty list takes it away, tokens and texts are added."""
    training = policy(client, api)
    rows = [datum(4, i, targets=[0, 0, 0, 0]) for i in range(8)]  # token 0 ends a response
    for _ in range(30):
        training.forward_backward(rows, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens(4, 0))

    def sampled(**settings: Any) -> Any:
        params = types.SamplingParams(max_tokens=5, seed=1, temperature=0.0, **settings)
        return sampler.sample(prompt, 1, params).result().sequences[0]

    assert (list(sampled().tokens), sampled().stop_reason) == ([0], "stop")
    free = sampled(stop=[])
    assert len(free.tokens) == 5 and free.tokens[0] == 0 and free.stop_reason == "length"
    assert list(sampled(stop=[0]).tokens) == [0]
    base = client.create_sampling_client(base_model=str(api.model)).result()
    free = (
        base.sample(prompt, 1, types.SamplingParams(max_tokens=5, seed=1, stop=[]))
        .result()
        .sequences[0]
    )
    second = int(free.tokens[1])
    stopped = (
        base.sample(prompt, 1, types.SamplingParams(max_tokens=5, seed=1, stop=[second]))
        .result()
        .sequences[0]
    )
    cut = list(free.tokens).index(second) + 1
    assert list(stopped.tokens) == list(free.tokens)[:cut] and stopped.stop_reason == "stop"
    text = base.get_tokenizer().decode([second])
    assert (
        list(
            base.sample(prompt, 1, types.SamplingParams(max_tokens=5, seed=1, stop=text))
            .result()
            .sequences[0]
            .tokens
        )
        == list(free.tokens)[:cut]
    )


def test_a_custom_loss_of_the_client(client: tinker.ServiceClient, api: ApiServer) -> None:
    """forward_backward_custom needs cross-entropy with weights of any sign: a squared loss on
    log-probs goes down."""
    training = policy(client, api)
    data = [datum(8, seed) for seed in range(3)]

    def squares(
        data: list[types.Datum], scores: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([((s + 1.0) ** 2).sum() for s in scores]).sum()
        return loss, {"squares": float(loss.detach())}

    losses = []
    for _ in range(4):
        result = training.forward_backward_custom(data, squares).result()
        losses.append(result.metrics["loss:sum"])
        training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    assert losses[3] < 0.8 * losses[0]


@pytest.mark.parametrize("rank", [0, 32])
def test_a_critic_learns_its_returns(
    client: tinker.ServiceClient, api: ApiServer, rank: int
) -> None:
    """Declared with user_metadata; starts at values of 0; its loss is a sum; asked without values
    and returns it only reports. rank 32, the SDK's default: policy and critic are adapters on
    one base, and take turns on the device."""
    training = policy(client, api, rank=rank)
    judge = critic(client, api, rank=rank)
    info = judge.get_info()
    assert (info.is_lora, info.lora_rank) == (rank > 0, rank or None)
    returns = [np.linspace(-1, 1, 7), np.full(5, 0.5)]

    def data(values: list[np.ndarray[Any, Any]]) -> list[types.Datum]:
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens(len(v), i)),
                loss_fn_inputs={"values": v.astype(np.float32), "returns": r.astype(np.float32)},
            )
            for i, (v, r) in enumerate(zip(values, returns, strict=True))
        ]

    asked = [types.Datum(model_input=one.model_input, loss_fn_inputs={}) for one in data(returns)]
    values = [
        out["values"].to_numpy()
        for out in judge.forward(asked, "ppo_critic").result().loss_fn_outputs
    ]
    assert [v.tolist() for v in values] == [[0.0] * 7, [0.0] * 5]
    losses, norms = [], []
    for _ in range(12):
        passed = judge.forward_backward(data(values), "ppo_critic", {"value_clip": 10.0})
        training.forward_backward(batch(2), "cross_entropy")
        result = passed.result()
        new = [out["values"].to_numpy() for out in result.loss_fn_outputs]
        expected = sum(0.5 * float(((v - r) ** 2).sum()) for v, r in zip(new, returns, strict=True))
        assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
        assert {
            "critic_loss:sum",
            "values_mean:mean",
            "values_clipfrac:mean",
        } <= result.metrics.keys()
        judge.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        norms.append(
            training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        )
        losses.append(expected)
    assert losses[-1] < 0.3 * losses[0]
    assert set(norms) == {norms[0]} and norms[0] > 0, (
        "what the critic learns changes nothing of the policy, or of their base"
    )
    policy(client, api)
    again = client.create_training_client_from_state_with_optimizer(
        judge.save_state("values").result().path
    ).result()
    for actual, its in zip(
        judge.forward(asked, "ppo_critic").result().loss_fn_outputs,
        again.forward(asked, "ppo_critic").result().loss_fn_outputs,
    ):
        assert (
            actual["values"].to_numpy().tolist()
            == its["values"].to_numpy().tolist()
            != [0.0] * len(actual["values"].to_numpy())
        )
