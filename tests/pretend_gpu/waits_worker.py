"""Work of the processes that count waits: a second optimizer step, after what is done once; a
training pass with each loss; and tokens of the local engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, settings, share, train_samples
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.adapter import LocalAdapters
from slime_like.engines.local.decoder import Decoder
from slime_like.losses.registry import PolicyLoss, policy_losses
from slime_like.losses.total import LossTerms
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.objectives import Objective
from slime_like.token_columns import TokenColumns
from slime_like.types import TrainBatch, TrainSample
from tests.pretend_gpu.waits import WAITS, Wait
from tests.pretend_gpu.waits_budget import FORWARD, STEP, TRAINING


def count(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """By cell: [phase, kind, operator, where, caller, count] of this rank, of passes over the
    samples of `train_samples` and one step."""
    found = {}
    for name, (folder, flags) in arguments["cells"].items():
        with parallel(**sizes_of(flags)) as layout:
            config = settings(folder, f"--bf16 --use-distributed-optimizer {flags}")
            built = MegatronBackend(config, layout, total_steps=4)
            samples = share(train_samples(1), layout)
            built.forward(samples.samples)
            built.update(samples)
            samples = share(train_samples(2), layout)
            WAITS.start()
            with WAITS.phase(FORWARD):
                scored = built.forward(samples.samples)
            if scored[0].routed_experts is not None:  # to be replayed
                pairs = zip(samples.samples, scored, strict=True)
                samples = TrainBatch(
                    tuple(replace(s, routed_experts=o.routed_experts) for s, o in pairs)
                )
            with WAITS.phase(TRAINING):
                pending = built.forward_backward(samples)
            with WAITS.phase(STEP):
                built.optim_step(pending)
            found[name] = _rows(WAITS.stop())
            del built, pending
    dist.barrier()
    return found


def losses(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """By policy loss: the waits of a training pass with it and with all terms of the loss; under
    "critic" those of a critic's passes. Rows as those of `count`."""
    found = {}
    with parallel() as layout:
        flags = "--bf16 --use-distributed-optimizer --micro-batch-size 2"
        config = settings(arguments["folder"], f"{flags} --advantage-estimator ppo")
        built = MegatronBackend(config, layout, total_steps=100)
        samples = share(train_samples(1), layout)
        for name, loss in policy_losses.items():
            loss_config = loss.config_type(**NEEDED.get(name, {}))
            terms = replace(TERMS, opsm_delta=None if loss.correction == "forbidden" else 0.1)
            built.objective = Objective(loss, loss_config, terms)
            batch = TrainBatch(tuple(_with_columns(s, loss) for s in samples.samples))
            built.update(batch)
            WAITS.start()
            with WAITS.phase(TRAINING):
                built.forward_backward(batch)
            found[name] = _rows(WAITS.stop())
        batch = TrainBatch(tuple(_with_columns(s) for s in samples.samples))
        built.update_critic(batch)
        WAITS.start()
        with WAITS.phase(FORWARD):
            built.forward_critic(batch.samples)
        with WAITS.phase(TRAINING):
            built.forward_backward_critic(batch)
        found["critic"] = _rows(WAITS.stop())
    return found


NEEDED: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}
TERMS = LossTerms(
    kl_loss_coef=0.1,
    use_unbiased_kl=True,
    entropy_coef=0.01,
    positive_nll_coef=0.1,
    observation_loss_coef=0.1,
)


def _with_columns(sample: TrainSample, loss: PolicyLoss | None = None) -> TrainSample:
    """With a value in each column that the loss takes; loss: None for a critic's."""
    unwanted = {"policy_weights"}
    if loss is not None and loss.correction == "forbidden":
        unwanted |= {"keep_mask", "importance_weights"}
    if loss is not None and loss.correction == "masks":
        unwanted |= {"importance_weights"}
    values: dict[str, Any] = {}
    for field in fields(TokenColumns):
        value = getattr(sample, field.name)
        if value is None:
            value = torch.ones(sample.response_length)
        values[field.name] = None if field.name in unwanted else value
    return replace(sample, **values)


def decoding(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """By case of `arguments["cases"]`, (model, fields of `SamplingParams`): the waits of one token
    of the local engine, in hundredths."""
    found = {}
    device = torch.device("cuda", 0)
    for name, (folder, fields_of_sampling) in arguments["cases"].items():
        model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
        decoder = Decoder(model, None, device, frozenset(), lambda: 0, LocalAdapters(model))
        prompts = (
            ((3, 4, 5), (3, 4), (3, 4, 6), (7, 7, 7)) if "padded" in name else ((3, 4, 5),) * 4
        )
        requests = [GenerateRequest(i, prompt, seed=i) for i, prompt in enumerate(prompts)]
        counts: dict[int, Counter[tuple[str, ...]]] = {}
        for tokens in (5, 5, 15):  # what is done once per batch is left out
            sampling = SamplingParams(max_new_tokens=tokens, **fields_of_sampling)
            WAITS.start()
            outputs = list(decoder.decode(requests, sampling, ()))
            counts[tokens] = Counter({tuple(row[:5]): row[5] for row in _rows(WAITS.stop())})
            assert len(outputs[-1]) == len(requests)
        more = counts[15] - counts[5]
        found[name] = [[*wait, 10 * number] for wait, number in sorted(more.items())]
    return found


def _rows(counts: dict[Wait, int]) -> list[list[Any]]:
    """Without line numbers, which every edit above moves."""
    merged: Counter[tuple[str, ...]] = Counter()
    for wait, number in counts.items():
        place = (_place(wait.ours), _place(wait.caller))
        merged[wait.phase, wait.kind, wait.op, *place] += number
    return [[*wait, number] for wait, number in sorted(merged.items())]


def _place(where: str) -> str:
    """`file.py:12 function` as `file.py function`."""
    file, _, rest = where.partition(":")
    return f"{file} {rest.partition(' ')[2]}".strip()
