"""The local engine against transformers itself: tokens, log-probs, distributions, stops, seeds and
weights."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slime_like.engines.base import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams
from slime_like.engines.local.decoder import draw_uniforms, sample_tokens
from slime_like.engines.local.engine import (
    CACHE_BYTES,
    FEWEST,
    MOST,
    LocalEngine,
    cache_bytes_per_token,
)

VOCAB = 64
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.3,  # far from uniform, so that a wrong position or mask changes tokens
    eos_token_id=1,
    pad_token_id=0,
)
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
}


class Built:
    """A saved random model, transformers' own copy of it, and the engine that was given its
    weights."""

    def __init__(self, config: PretrainedConfig, folder: Path, **engine_options: int) -> None:
        torch.manual_seed(0)
        self.reference: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        ).eval()
        self.reference.save_pretrained(folder)
        self.folder = str(folder)
        self.engine = LocalEngine(self.folder, None, **engine_options)
        self.engine.update_weights(self.weights(), version=3)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As the checkpoint on disk names them."""
        from safetensors.torch import load_file

        return iter(load_file(f"{self.folder}/model.safetensors").items())

    def another(self, **options: int) -> LocalEngine:
        engine = LocalEngine(self.folder, None, **options)
        engine.update_weights(self.weights(), version=3)
        return engine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(FAMILIES["qwen3_tied"], tmp_path_factory.mktemp("model"))


def _requests(count: int, n_samples: int = 1, longest: int = 20) -> list[GenerateRequest]:
    """Prompts of lengths 1..longest, each n_samples times."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        tuple(torch.randint(2, VOCAB, (1 + i * 7 % longest,), generator=generator).tolist())
        for i in range(count)
    ]
    return [
        GenerateRequest(i * n_samples + j, prompt, seed=1000 + i * n_samples + j)
        for i, prompt in enumerate(prompts)
        for j in range(n_samples)
    ]


@torch.no_grad()
def _full_pass(model: PreTrainedModel, request: GenerateRequest, output: GenerateOutput) -> Tensor:
    """Logits [R, V] that predict each response token, from one forward pass without cache or
    padding."""
    ids = torch.tensor([request.prompt_tokens + output.tokens])
    return model(ids).logits[0, len(request.prompt_tokens) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_greedy(family: str, tmp_path: Path) -> None:
    built = Built(FAMILIES[family], tmp_path)
    requests = _requests(6, n_samples=2)
    outputs = built.engine.generate(requests, SamplingParams(temperature=0, max_new_tokens=12))
    assert [output.sample_id for output in outputs] == [request.sample_id for request in requests]
    for request, output in zip(requests, outputs, strict=True):
        ids = torch.tensor([request.prompt_tokens])
        expected = built.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert list(output.tokens) == expected[0, ids.size(1) :].tolist()
        # greedy reports log-probs at temperature 1
        expected_log_probs = (
            _full_pass(built.reference, request, output)
            .log_softmax(-1)
            .gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        )
        torch.testing.assert_close(
            torch.tensor(output.log_probs), expected_log_probs, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=16),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=9, max_new_tokens=16),
    ],
)
def test_log_probs_are_of_the_scaled_distribution_before_truncation(
    built: Built, sampling: SamplingParams
) -> None:
    requests = _requests(8, n_samples=2)
    for request, output in zip(requests, built.engine.generate(requests, sampling), strict=True):
        logits = _full_pass(built.reference, request, output) / sampling.temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)
        assert output.weight_versions == (3,) * len(output.tokens)


@pytest.mark.parametrize(("top_k", "top_p"), [(9, 1.0), (-1, 0.8), (9, 0.8)])
def test_reported_sets_are_those_of_transformers_and_log_probs_are_over_them(
    built: Built, top_k: int, top_p: float
) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k, max_new_tokens=16)
    requests = _requests(8, n_samples=2)
    plain = built.engine.generate(requests, sampling)
    outputs = built.engine.generate(requests, replace(sampling, report_sampling_mask=True))
    for request, output, as_before in zip(requests, outputs, plain, strict=True):
        assert output.tokens == as_before.tokens and as_before.sampling_mask is None
        kept = _full_pass(built.reference, request, output) / sampling.temperature
        if top_k != -1:
            kept = TopKLogitsWarper(top_k)(None, kept)
        if top_p < 1:
            kept = TopPLogitsWarper(top_p)(None, kept)
        expected = kept.log_softmax(-1).gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)
        assert output.sampling_mask is not None
        for members, row in zip(output.sampling_mask, kept, strict=True):
            assert members.tolist() == row.isfinite().nonzero()[:, 0].tolist()


def test_greedy_responses_report_no_sets(built: Built) -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=4, top_k=3)
    requests = _requests(2)
    assert built.engine.generate(
        requests, replace(sampling, report_sampling_mask=True)
    ) == built.engine.generate(requests, sampling)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_reported_routes_are_those_of_a_pass_over_the_whole_text(
    family: str, tmp_path: Path
) -> None:
    """Prompts of several lengths, some shared, and responses that end at different steps: each has
    the routed experts of its own tokens."""
    built = Built(FAMILIES[family], tmp_path, local_batch_size=5)
    sampling = SamplingParams(
        max_new_tokens=9, stop_token_ids=tuple(range(20, 30)), report_routed_experts=True
    )
    requests = _requests(4, n_samples=2)
    outputs = built.engine.generate(requests, sampling)
    assert len({len(output.tokens) for output in outputs}) > 2
    seen: list[Tensor] = []
    for name, router in built.reference.named_modules():
        if name.endswith(".gate"):
            router.register_forward_hook(
                lambda module, given, out: seen.append(out[0].topk(2).indices)
            )
    for request, output in zip(requests, outputs, strict=True):
        seen.clear()
        built.reference(torch.tensor([[*request.prompt_tokens, *output.tokens]]))
        want = torch.stack(seen, dim=1).sort(dim=-1).values  # (L, layers, 2)
        assert output.routed_experts is not None and output.routed_experts.shape == want.shape
        assert torch.equal(output.routed_experts[:-1].long().sort(dim=-1).values, want[:-1])
        assert bool((output.routed_experts[-1] == -1).all()), (
            "the last token is not fed to the model"
        )
    plain = built.engine.generate(requests, replace(sampling, report_routed_experts=False))
    assert [o.tokens for o in plain] == [o.tokens for o in outputs] and all(
        o.routed_experts is None for o in plain
    )


def test_a_model_without_experts_has_no_routes(built: Built) -> None:
    with pytest.raises(ValueError, match="--use-rollout-routing-replay"):
        built.engine.generate(_requests(1), SamplingParams(report_routed_experts=True))


def test_tokens_depend_on_the_seed_alone(built: Built) -> None:
    """Chunk size, order and company of requests change nothing; another seed does; nor is torch's
    global generator read or moved."""
    requests = _requests(12, n_samples=3)
    sampling = SamplingParams(max_new_tokens=16)
    state = torch.random.get_rng_state()
    expected = {o.sample_id: o for o in built.engine.generate(requests, sampling)}
    assert torch.equal(state, torch.random.get_rng_state())
    for chosen, size in ((requests, 1), (requests, 7), (requests[::-1], 64), (requests[5:9], 64)):
        for output in built.another(local_batch_size=size).generate(chosen, sampling):
            assert output.tokens == expected[output.sample_id].tokens
            torch.testing.assert_close(
                output.log_probs, expected[output.sample_id].log_probs, atol=1e-5, rtol=0
            )
    assert len({expected[i].tokens for i in range(3)}) == 3  # three samples of one prompt
    other = built.engine.generate([replace(requests[0], seed=77)], sampling)[0]
    assert other.tokens != expected[0].tokens


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3", "gemma4"])
def test_bytes_of_a_token_in_the_cache(family: str) -> None:
    """Against transformers' own cache."""
    latent = DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4, "num_hidden_layers": 1, "head_dim": 4},
        **dict(kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4),
        v_head_dim=6,
        first_k_dense_replace=1,
    )
    by_layer = Gemma4TextConfig(
        **SHAPE,
        **dict(global_head_dim=12, num_global_key_value_heads=1, attention_k_eq_v=True),
        **dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9),
        hidden_size_per_layer_input=0,
    )
    config = {**FAMILIES, "deepseek_v3": latent, "gemma4": by_layer}[family]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.ones(2, 5, dtype=torch.long), past_key_values=cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes_per_token(config.get_text_config(), torch.float32) == kept / 10


def test_more_responses_at_once_where_they_are_short(built: Built) -> None:
    token = cache_bytes_per_token(built.reference.config, torch.float32)
    requests = _requests(3)
    longest = max(len(r.prompt_tokens) for r in requests)
    for wanted, size in ((1, FEWEST), (100, 100), (10_000, MOST)):
        new = CACHE_BYTES // (token * wanted) - longest
        assert built.engine._batch_size(requests, SamplingParams(max_new_tokens=new)) == size


def test_a_shorter_limit_gives_a_prefix(built: Built) -> None:
    requests = _requests(6)
    long, short = (
        built.engine.generate(requests, SamplingParams(max_new_tokens=n)) for n in (20, 6)
    )
    for a, b in zip(long, short, strict=True):
        assert b.tokens == a.tokens[:6]
        assert b.finish_reason == ("length" if len(a.tokens) > 6 else "stop")


def test_an_end_with_the_last_allowed_token_is_an_end(built: Built) -> None:
    """By the model's own end token, a stop token or a stop text; one token earlier it is the limit
    that ends the response."""
    engine = LocalEngine(built.folder, _tokenizer())
    engine.update_weights(built.weights(), version=0)
    requests, ends = _requests(16, n_samples=2), set()
    for stops in ({"stop_token_ids": (7,)}, {"stop": ("C",)}):
        for request, full_one in zip(
            requests,
            engine.generate(requests, SamplingParams(max_new_tokens=24, **stops)),
            strict=True,
        ):
            limit = len(full_one.tokens)
            if full_one.finish_reason == "stop" and 1 < limit < 24:
                (same,) = engine.generate([request], SamplingParams(max_new_tokens=limit, **stops))
                (less,) = engine.generate(
                    [request], SamplingParams(max_new_tokens=limit - 1, **stops)
                )
                assert (same.tokens, same.finish_reason) == (full_one.tokens, "stop")
                assert (less.tokens, less.finish_reason) == (full_one.tokens[:-1], "length")
                ends.add(full_one.tokens[-1])
    assert ends >= {1, 7, _tokenizer().convert_tokens_to_ids("C")}


def test_seeds_use_all_their_bits() -> None:
    rows = draw_uniforms([1, 1 + (1 << 32), 1 + (1 << 63), -1], 8)
    assert rows.unique(dim=0).size(0) == 4
    assert torch.equal(draw_uniforms([1], 3), rows[:1, :3])
    assert rows.dtype == torch.float64


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.7),
    ],
)
def test_sampled_distribution(sampling: SamplingParams) -> None:
    """Frequencies over an even grid of uniforms are the probabilities, worked out here token by
    token."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0, 1.1, float("-inf"), 1.6, -0.4])
    p = (logits.double() / sampling.temperature).softmax(0)
    ranked = sorted(range(8), key=lambda i: -p[i])
    kept = ranked[: sampling.top_k] if sampling.top_k > 0 else ranked
    mass = sum(float(p[i]) for i in kept)
    nucleus, covered = [], 0.0
    for i in kept:  # smallest set, by probability after top-k, that reaches top_p
        if covered < sampling.top_p:
            nucleus.append(i)
        covered += float(p[i]) / mass
    expected = torch.zeros(8, dtype=torch.float64)
    expected[nucleus] = p[nucleus] / p[nucleus].sum()

    n = 20_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, log_probs = sample_tokens(logits.expand(n, 8), uniforms, sampling)
    torch.testing.assert_close(
        torch.bincount(tokens, minlength=8) / n, expected.float(), atol=2 / n, rtol=0
    )
    torch.testing.assert_close(log_probs, p.log()[tokens].float(), atol=1e-6, rtol=0)


def test_extreme_uniforms_pick_possible_tokens() -> None:
    """Also where the sum of the probabilities rounds to something else than 1."""
    logits = torch.randn(500, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, -2:] = float("-inf")
    for uniform, token in ((0.0, 1), (1 - 2**-53, 6)):
        tokens, _ = sample_tokens(
            logits, torch.full((500,), uniform, dtype=torch.float64), SamplingParams()
        )
        assert set(tokens.tolist()) == {token}


def test_stop_tokens_end_a_response_and_belong_to_it(built: Built) -> None:
    requests = _requests(16, n_samples=2)
    free = built.engine.generate(requests, SamplingParams(max_new_tokens=24, temperature=2.0))
    extra = (7, 30)
    stopped = built.engine.generate(
        requests, SamplingParams(max_new_tokens=24, temperature=2.0, stop_token_ids=extra)
    )
    reasons = set()
    for a, b in zip(free, stopped, strict=True):
        cut = next((i for i, token in enumerate(a.tokens) if token in extra), None)
        expected = a.tokens if cut is None else a.tokens[: cut + 1]
        assert b.tokens == expected
        assert len(b.log_probs) == len(b.tokens)
        assert b.finish_reason == ("stop" if expected[-1] in (*extra, 1) else "length")
        assert 1 not in b.tokens[:-1]  # the model's own end of sequence
        reasons.add(b.finish_reason)
    assert reasons == {"stop", "length"}


def test_end_tokens_come_from_every_source(built: Built, tmp_path: Path) -> None:
    reference = built.reference
    reference.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert LocalEngine(str(tmp_path), _tokenizer())._end_ids == {1, 5, 6, 2}
    (tmp_path / "generation_config.json").unlink()
    assert LocalEngine(str(tmp_path), None)._end_ids == {1}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokens of one letter each: ids 2 is the end of sequence, 3.. are the letters."""
    vocab = {"<pad>": 0, "<unused>": 1, "<eos>": 2} | {
        chr(ord("A") + i): 3 + i for i in range(VOCAB - 3)
    }
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def test_stop_strings(built: Built) -> None:
    """A response ends with the token that completes a stop string, also where the string spans
    tokens."""
    tokenizer = _tokenizer()
    engine = LocalEngine(built.folder, tokenizer)
    engine.update_weights(built.weights(), version=0)
    requests = _requests(4, n_samples=4)
    free = engine.generate(requests, SamplingParams(max_new_tokens=24))
    texts = [tokenizer.decode(output.tokens) for output in free]
    stop = next(
        text[5:8] for text in texts if len(text) > 12
    )  # three letters in the middle of one response
    stopped = engine.generate(requests, SamplingParams(max_new_tokens=24, stop=("\n", stop)))
    assert any(stop in text for text in texts)
    for output, text, full_one in zip(stopped, texts, free, strict=True):
        if stop in text:
            assert tokenizer.decode(output.tokens) == text[: text.index(stop) + len(stop)]
            assert output.finish_reason == "stop"
        else:
            assert (output.tokens, output.finish_reason) == (
                full_one.tokens,
                full_one.finish_reason,
            )
            # responses that end leave the batch, whose size decides how products of matrices are
            # rounded
            torch.testing.assert_close(
                torch.tensor(output.log_probs),
                torch.tensor(full_one.log_probs),
                rtol=1e-5,
                atol=1e-5,
            )


def test_stop_strings_need_a_tokenizer(built: Built) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        built.engine.generate(_requests(1), SamplingParams(stop=("x",)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest(9, (), 0), "sample 9: the prompt is empty"),
        (GenerateRequest(9, (3, VOCAB), 0), "outside the vocabulary"),
        (GenerateRequest(9, (3,) * 120, 0), "exceed the model's 128 positions"),
    ],
)
def test_impossible_requests_are_named(
    built: Built, request_: GenerateRequest, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        built.engine.generate([request_], SamplingParams(max_new_tokens=9))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (dict(temperature=-0.1), ["temperature"]),
        (dict(temperature=float("nan")), ["temperature"]),
        (dict(top_p=0.0, top_k=0), ["top_p", "top_k"]),
        (dict(top_p=1.5), ["top_p"]),
        (dict(max_new_tokens=0), ["max_new_tokens"]),
        (dict(stop=("",)), ["stop"]),
    ],
)
def test_bad_sampling_parameters(values: dict, names: list[str]) -> None:
    with pytest.raises(ValueError, match="sampling parameters") as caught:
        SamplingParams(**values)
    for name in names:
        assert f"{name} is {values[name]!r}" in str(caught.value)


def test_no_requests(built: Built) -> None:
    assert built.engine.generate([], SamplingParams()) == []


def test_single_requests_from_an_event_loop_give_the_same_responses(built: Built) -> None:
    requests = _requests(6, n_samples=2)
    sampling, greedy = (
        SamplingParams(max_new_tokens=12),
        SamplingParams(temperature=0, max_new_tokens=12),
    )
    engine = built.another(local_batch_size=5)

    async def all_of_them(sampling: SamplingParams) -> list[GenerateOutput]:
        return await asyncio.gather(*(engine.generate_one(r, sampling) for r in requests))

    async def both() -> list[list[GenerateOutput]]:
        return await asyncio.gather(all_of_them(sampling), all_of_them(greedy))

    for _ in range(2):  # each time in an event loop of its own
        for outputs, params in zip(asyncio.run(both()), (sampling, greedy), strict=True):
            for output, expected in zip(
                outputs, built.engine.generate(requests, params), strict=True
            ):
                assert (output.sample_id, output.tokens, output.finish_reason) == (
                    expected.sample_id,
                    expected.tokens,
                    expected.finish_reason,
                )
                torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)


def test_an_aborted_request_returns_what_it_has(built: Built) -> None:
    requests = _requests(4)
    sampling = SamplingParams(max_new_tokens=60, temperature=2.0)
    engine = built.another(local_batch_size=3)
    full_one = built.engine.generate(requests, sampling)

    async def scenario() -> list[GenerateOutput]:
        tasks = [asyncio.create_task(engine.generate_one(r, sampling)) for r in requests]
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.abort([0, 3, 99])  # 3 has not begun
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(scenario())
    assert [o.finish_reason for o in outputs] == [
        "abort",
        full_one[1].finish_reason,
        full_one[2].finish_reason,
        "abort",
    ]
    assert (
        0 < len(outputs[0].tokens) < len(full_one[0].tokens)
        and outputs[0].tokens == full_one[0].tokens[: len(outputs[0].tokens)]
    )
    assert len(outputs[0].log_probs) == len(outputs[0].tokens) and outputs[0].failure is None
    assert outputs[3].tokens == () and outputs[1].tokens == full_one[1].tokens


def test_weights_replaced_in_a_pause_show_in_the_versions(built: Built) -> None:
    request, sampling = (
        _requests(1)[0],
        SamplingParams(max_new_tokens=40, temperature=2.0, stop_token_ids=()),
    )
    engine = built.another()
    before = built.engine.generate([request], sampling)[0]

    async def scenario() -> GenerateOutput:
        task = asyncio.create_task(engine.generate_one(request, sampling))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.pause()
        await asyncio.sleep(0.02)
        assert not task.done()
        engine.update_weights(built.weights(), 4)
        engine.resume()
        return await task

    output = asyncio.run(scenario())
    assert output.tokens == before.tokens  # the weights are the same ones
    assert set(output.weight_versions) == {3, 4} and list(output.weight_versions) == sorted(
        output.weight_versions
    )


def test_a_request_that_comes_while_weights_are_replaced_waits(built: Built) -> None:
    request, sampling = _requests(1)[0], SamplingParams(max_new_tokens=3)
    engine = built.another()
    begun = threading.Event()

    def slow() -> Iterator[tuple[str, Tensor]]:
        begun.set()
        time.sleep(0.2)
        yield from built.weights()

    update = threading.Thread(target=engine.update_weights, args=(slow(), 4))
    update.start()
    begun.wait()
    output = asyncio.run(engine.generate_one(request, sampling))
    update.join()
    assert set(output.weight_versions) == {4}


def test_engine_without_weights_refuses(built: Built) -> None:
    engine: RolloutEngine = LocalEngine(built.folder, None)
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(_requests(1), SamplingParams())


def _without(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    del weights["model.layers.1.mlp.up_proj.weight"]
    return list(weights.items())


def _unknown(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [*weights.items(), ("model.layers.9.mlp.up_proj.weight", torch.zeros(2))]


def _twice(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [*weights.items(), ("model.norm.weight", weights["model.norm.weight"])]


def _misshapen(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    return list(weights.items())


def _untied(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [*weights.items(), ("lm_head.weight", weights["model.embed_tokens.weight"] + 1)]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (_unknown, r"unknown: model\.layers\.9\.mlp\.up_proj\.weight"),
        (_twice, r"received twice: model\.norm\.weight"),
        (_misshapen, r"another shape: model\.norm\.weight \[31\] \(the model's: \[32\]\)"),
        (_untied, r"tied to: lm_head\.weight"),
    ],
)
def test_a_bad_update_is_named_and_leaves_the_engine_unusable(
    built: Built, spoil: object, message: str
) -> None:
    engine = built.another()
    sampling = SamplingParams(max_new_tokens=6)
    before = engine.generate(_requests(2), sampling)
    with pytest.raises(ValueError, match=message):
        engine.update_weights(iter(spoil(dict(built.weights()))), version=4)
    assert engine.weight_version == 3
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(_requests(2), sampling)
    engine.update_weights(built.weights(), version=5)
    after = engine.generate(_requests(2), sampling)
    assert [output.tokens for output in after] == [output.tokens for output in before]
    assert after[0].weight_versions == (5,) * len(after[0].tokens)


def test_a_broken_stream_leaves_the_engine_unusable(built: Built) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield next(built.weights())
        raise OSError("connection lost")

    engine = built.another()
    with pytest.raises(OSError, match="connection lost"):
        engine.update_weights(stream(), version=4)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(_requests(1), SamplingParams())


def test_tied_weights_come_under_either_name_or_both(built: Built) -> None:
    weights = dict(built.weights())
    embedding = weights.pop("model.embed_tokens.weight")
    sampling = SamplingParams(max_new_tokens=6)
    expected = built.engine.generate(_requests(2), sampling)
    for extra in (["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        engine = LocalEngine(built.folder, None)
        engine.update_weights(
            iter([*weights.items(), *((name, embedding) for name in extra)]), version=3
        )
        assert engine.generate(_requests(2), sampling) == expected


def test_an_update_changes_what_is_generated(built: Built) -> None:
    engine = built.another()
    noisy = [
        (name, weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        for name, weight in built.weights()
    ]
    request = _requests(1)
    before = engine.generate(request, SamplingParams(temperature=0, max_new_tokens=4))[0]
    engine.update_weights(iter(noisy), version=4)
    after = engine.generate(request, SamplingParams(temperature=0, max_new_tokens=4))[0]
    assert after.log_probs != before.log_probs
    assert after.weight_versions[0] == 4


def test_expert_weights_are_checked_one_by_one(tmp_path: Path) -> None:
    """transformers holds all experts of a layer in one tensor; a missing expert is still found."""
    built = Built(FAMILIES["qwen3_moe"], tmp_path)
    weights = dict(built.weights())
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    del weights[gone]
    with pytest.raises(ValueError, match=rf"missing: {gone}$"):
        built.engine.update_weights(iter(weights.items()), version=4)


def test_non_finite_weights_abort_the_response(built: Built) -> None:
    engine = built.another()
    broken = {
        name: weight * float("nan") if name == "model.norm.weight" else weight
        for name, weight in built.weights()
    }
    engine.update_weights(iter(broken.items()), version=4)
    for sampling in (
        SamplingParams(max_new_tokens=4),
        SamplingParams(temperature=0, max_new_tokens=4),
    ):
        output = engine.generate(_requests(1), sampling)[0]
        assert output.finish_reason == "abort"
        assert output.tokens == output.log_probs == output.weight_versions == ()


def test_close_ends_the_engine(built: Built) -> None:
    engine = built.another()
    engine.close()
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(_requests(1), SamplingParams())
