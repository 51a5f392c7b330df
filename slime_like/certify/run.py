"""Certifies the trainer and the engine of a run."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoConfig

from arguments.hf.quantization import folder_quantization
from slime_like.certify.causes import Cause, SearchTime
from slime_like.certify.certificate import Certificate, write
from slime_like.certify.compare import Examination, Finding, Reference
from slime_like.certify.global_causes import ModelCauses
from slime_like.certify.layered import LayeredModel
from slime_like.certify.log_probs import LogProbGaps, compare_log_probs, is_answer, sampled_tokens
from slime_like.certify.weights import Fingerprints, fingerprints
from slime_like.conversion.verify import dequantized_model
from slime_like.distributed.collectives import from_rank_zero_within
from slime_like.engines.base import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams
from slime_like.engines.local.engine import LocalEngine, remove_tower
from slime_like.engines.local.weight_loader import WeightSlots
from slime_like.errors import RunError
from slime_like.hf_class import class_for_text, uninitialised_weights
from slime_like.logs import warn_rank_0
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.tracing import StateRecorder
from slime_like.types import TrainSample
from slime_like.weights.safetensors_reader import WeightFiles

SEQUENCES = 4
LENGTH = 64  # of each, or more if the model has windows
LONGEST = 512
PROMPT_LENGTH = 24
RESPONSE_LENGTH = 24
TIMEOUT_S = 6 * 3600.0  # of rank 0's work alone, while the other ranks wait
PACKAGES = ("torch", "transformers", "megatron-core")

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertifierSettings:
    """Settings of a run that certificates need."""

    folder: str  # --hf-checkpoint
    engine: str  # its name
    outputs: tuple[Path, ...]  # folders of the certificates
    seed: int
    sampling: SamplingParams
    trust_remote_code: bool = False
    # for the causes of all layers together, and for settings of the whole model of all servers
    search_s: float = 600.0


class Certifier:
    """Compares trainer, transformers and engine; every method is collective over all ranks."""

    def __init__(
        self, backend: MegatronBackend, engine: RolloutEngine | None, settings: CertifierSettings
    ) -> None:
        self._backend = backend
        self._engine = engine
        self._settings = settings
        self._earlier: dict[str, Fingerprints] = {}  # of the versions that were certified
        self._sequences = self._draw_sequences()

    def _draw_sequences(self) -> list[Tensor]:
        config = AutoConfig.from_pretrained(
            self._settings.folder, trust_remote_code=self._settings.trust_remote_code
        ).get_text_config()
        window = getattr(config, "sliding_window", None) or 0
        length = min(LONGEST, max(LENGTH, window + LENGTH // 4 if window < LONGEST else 0))
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
        generator = torch.Generator().manual_seed(self._settings.seed)
        vocabulary = self._backend.gpt.vocab_size or 2
        return list(torch.randint(vocabulary, (SEQUENCES, length), generator=generator))

    def run(self, rollout: int, weight_version: int, source: str | None) -> Certificate:
        """Compare, write the certificate and warn of what is found. Returns it on all ranks,
        without the digests of weights.

        Args:
            rollout: Finished rollouts.
            source: The Hugging Face model that the trainer has loaded and not trained, from which
                the reference takes its weights; None: it takes the trainer's.
        """
        states = self._trainer_states()
        weights = self._trainer_weights()
        traces = self._engine_traces()
        outputs = self._engine_outputs()

        def examine() -> Certificate:
            found = self._examine(states, weights, traces, outputs, source)
            certificate = self._certificate(rollout, weight_version, weights, source, *found)
            path = write(certificate, self._settings.outputs)
            for finding in certificate.findings:
                warn_rank_0(logger, f"certificate {path}: {finding.text}")
            if certificate.holds:
                names = list(dict.fromkeys(["trainer", "transformers", *found[0], *found[1]]))
                agreed = f"{', '.join(names[:-1])} and {names[-1]}"
                skipped = len(certificate.skipped)
                rest = f"; states not compared: {skipped}" if skipped else ""
                logger.info(f"certificate {path}: {agreed} agree{rest}")
            return replace(certificate, weights={})

        return self._on_rank_zero(examine)

    def _on_rank_zero(self, work: Callable[[], T]) -> T:
        """The result on all ranks, which may wait longer than --distributed-timeout-minutes."""
        late = (
            f"the certificate took longer than {TIMEOUT_S / 3600:g} hours: certify a smaller model"
        )
        return from_rank_zero_within(work, None, timeout_s=TIMEOUT_S, late=late)

    def _trainer_states(self) -> dict[str, Tensor]:
        """On rank 0, the trainer's states of all sequences."""
        backend = self._backend
        layout = backend.policy.layout
        samples = []
        for tokens in self._sequences:
            ones = torch.ones(tokens.numel() - 1)
            samples.append(TrainSample(tokens, tokens.numel() - 1, ones.bool(), ones))
        repeats = layout.pp_size * layout.vp_size  # the interleaved schedule takes multiples of it
        recorder = StateRecorder(replace(backend.head, temperature=1.0))
        out = backend.policy.trace(samples * repeats, recorder, MicroBatchSize(1, None))
        own = {}
        if (layout.dp_rank, layout.tp_rank, layout.cp_rank) == (0, 0, 0):
            own = {site: torch.cat(rows[: len(samples)]) for site, rows in out.states.items()}
        everything: list[dict[str, Tensor]] | None = None
        if dist.get_rank() == 0:
            everything = [{} for _ in range(dist.get_world_size())]
        dist.gather_object(own, everything)
        merged: dict[str, Tensor] = {}
        for part in everything or ():
            merged |= part
        return merged

    def _trainer_weights(self) -> dict[str, Tensor]:
        """On rank 0, the trainer's weights on the host."""
        weights = {}
        for name, tensor in self._backend.export_weights():
            if dist.get_rank() == 0:
                weights[name] = tensor.detach().to("cpu", copy=True)
        return weights

    def _engine_traces(self) -> list[tuple[str, Mapping[str, Tensor]]]:
        """On rank 0, the states of all sequences of every server that dumps them. Before anything
        else is asked, so that no server has a part of a sequence in its cache."""
        engine = self._engine
        if engine is None or not engine.is_remote:
            return []
        return self._on_rank_zero(lambda: engine.trace(self._sequences))

    def _engine_outputs(self) -> list[tuple[str, list[GenerateRequest], list[GenerateOutput]]]:
        """On rank 0, what the engine, or each server, samples for a few prompts."""
        if self._engine is None:
            return []
        requests = [
            GenerateRequest(-1 - i, tuple(tokens[:PROMPT_LENGTH].tolist()), seed=i)
            for i, tokens in enumerate(self._sequences)
        ]
        engine = self._engine
        sampling = replace(self._settings.sampling, max_new_tokens=RESPONSE_LENGTH)

        def ask() -> list[tuple[str, list[GenerateRequest], list[GenerateOutput]]]:
            if not engine.is_remote:
                return [("engine", requests, engine.generate(requests, sampling))]
            answers = [(url, requests, list(o)) for url, o in engine.probe(requests, sampling)]
            if not answers:
                raise RunError(f"the certificate of {self._settings.engine}: no server answered")
            return answers

        return self._on_rank_zero(ask)

    def _examine(
        self,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        traces: Sequence[tuple[str, Mapping[str, Tensor]]],
        outputs: Sequence[tuple[str, list[GenerateRequest], list[GenerateOutput]]],
        source: str | None,
    ) -> tuple[Mapping[str, Examination], Mapping[str, LogProbGaps]]:
        dtype = self._backend.transformer.params_dtype
        settings = self._settings
        base = None
        if source is not None:
            exact = file_model(source, torch.float64, settings.trust_remote_code)
            rounded = file_model(source, dtype, settings.trust_remote_code)
        else:
            exact = synced_model(settings, weights, torch.float64)
            rounded = synced_model(settings, weights, dtype)
            base = file_model(settings.folder, dtype, settings.trust_remote_code).weights()
        time_of_layers = SearchTime(settings.search_s)
        reference = Reference(
            exact, rounded, self._sequences, states, self._earlier, base, time_of_layers
        )
        found = {"trainer": reference.examine("trainer", states, as_slots(rounded, weights))}
        if isinstance(self._engine, LocalEngine):
            engine = LayeredModel(self._engine.model)
            own = engine.run(self._sequences, states)
            # with --lora-sync adapter it has the base model's, and its states have the adapter
            own_weights = {} if self._engine.takes_adapter else engine.weights()
            found["engine"] = reference.examine("engine", own, own_weights)
        for url, traced in traces:
            # a server computes all layers in a row: each is compared on what it got itself
            given = exact.without_scaled_embedding(self._sequences, traced)
            of_server = Reference(
                exact, rounded, self._sequences, given, search_time=time_of_layers
            )
            found[url] = of_server.examine(url, given, {})
        search = SettingSearch(exact, settings.sampling.temperature, settings.search_s)
        log_probs = {}
        for name, requests, answers in outputs:
            # what a layer's finding explains needs no search
            explained = name in found and bool(found[name].findings)
            log_probs[name] = compare_log_probs(
                name,
                sampled_tokens(exact, requests, answers),
                sampled_tokens(rounded, requests, answers),
                self._settings.sampling.temperature,
                None if explained else partial(search.find, name, requests, answers),
            )
        return found, log_probs

    def _certificate(
        self,
        rollout: int,
        weight_version: int,
        weights: Mapping[str, Tensor],
        source: str | None,
        found: Mapping[str, Examination],
        log_probs: Mapping[str, LogProbGaps],
    ) -> Certificate:
        sites: dict[str, dict[str, list[float]]] = {}
        skipped: dict[str, str] = {}
        findings: list[Finding] = []
        for name, examination in found.items():
            findings += examination.findings
            skipped |= {f"{site} of {name}": why for site, why in examination.skipped.items()}
            for site, gaps in examination.gaps.items():
                sites.setdefault(site, {})[name] = [gaps.largest, gaps.limit]
        rows = {}
        for name, gap in log_probs.items():
            rows[name] = {
                "largest": gap.largest,
                "limit": gap.limit,
                "by_depth": gap.by_depth,
                "by_position": gap.by_position,
            }
            # what a layer's finding explains is not told again
            if not any(finding.subject == name for finding in findings):
                findings += gap.findings
        self._earlier[f"weight version {weight_version}"] = fingerprints(weights)
        return Certificate(
            rollout,
            weight_version,
            {package: version(package) for package in PACKAGES},
            self._settings.folder,
            self._backend.policy.layout.describe(),
            str(self._backend.transformer.params_dtype).removeprefix("torch."),
            self._settings.engine,
            source or "the trainer's weights",
            sum(tokens.numel() for tokens in self._sequences),
            sites,
            rows,
            skipped,
            findings,
            {name: digest(tensor) for name, tensor in weights.items()},
        )


class SettingSearch:
    """Looks for the settings of whole models that explain the log-probs of one server after the
    other, all together in `seconds`."""

    def __init__(self, exact: LayeredModel, temperature: float, seconds: float = math.inf) -> None:
        """exact: The reference, in float64."""
        self._exact = exact
        self._temperature = temperature or 1.0
        self._time = SearchTime(seconds)
        self._done: list[tuple[Sequence[GenerateOutput], Cause | None]] = []

    def find(
        self,
        name: str,
        requests: Sequence[GenerateRequest],
        answers: Sequence[GenerateOutput],
        limit: float,
    ) -> Cause | None:
        """The cause of differences above the limit; that of another server with these answers."""
        for others, known in self._done:
            if alike(others, answers, limit):
                return known
        first = next(i for i, answer in enumerate(answers) if is_answer(answer))
        gap = partial(self._gap, requests, answers)
        short = partial(self._gap, requests[first : first + 1], answers[first : first + 1])
        try:
            cause = ModelCauses(self._exact, gap, short, limit, self._time).find()
        except TimeoutError:
            cause = None
            warn_rank_0(
                logger,
                f"the search for a setting that explains the log-probs of {name} was ended after "
                f"{self._time.text}; one may explain them all the same",
            )
        self._done.append((answers, cause))
        return cause

    def _gap(
        self, requests: Sequence[GenerateRequest], answers: Sequence[GenerateOutput]
    ) -> Tensor:
        sampled = sampled_tokens(self._exact, requests, answers)
        return (sampled.expected(self._temperature) - sampled.reported).abs()


def alike(first: Sequence[GenerateOutput], second: Sequence[GenerateOutput], limit: float) -> bool:
    """Whether two servers gave the same tokens, with log-probs within the limit."""
    return all(
        (a.tokens, a.failure) == (b.tokens, b.failure)
        and all(abs(x - y) <= limit for x, y in zip(a.log_probs, b.log_probs, strict=True))
        for a, b in zip(first, second, strict=True)
    )


def digest(tensor: Tensor) -> str:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()


def as_slots(model: LayeredModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of the model's."""
    known = WeightSlots(model.model).tensors
    short = {n: n.replace("model.language_model.", "model.", 1) for n in weights}
    return {n if n in known else short[n]: weight for n, weight in weights.items()}


def file_model(folder: str, dtype: torch.dtype, trust_remote_code: bool) -> LayeredModel:
    """transformers' model with the weights of a folder, as transformers reads it. Quantised ones
    are read as the trainer does: transformers dequantises differently, and only on some GPUs."""
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    plain: dict[str, Any] = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "trust_remote_code": trust_remote_code,
    }
    if folder_quantization(folder) is None:
        model = class_for_text(config).from_pretrained(folder, dtype=dtype, **plain)
    else:
        del plain["trust_remote_code"]  # the class is known
        with WeightFiles(folder) as files:
            model = dequantized_model(class_for_text(config), config, files, dtype=dtype, **plain)
    remove_tower(model)
    return LayeredModel(model.requires_grad_(False))


def synced_model(
    settings: CertifierSettings, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> LayeredModel:
    """transformers' model of the folder with these weights."""
    config = AutoConfig.from_pretrained(
        settings.folder, trust_remote_code=settings.trust_remote_code
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if "lm_head.weight" in weights:
        config.tie_word_embeddings = False
    with uninitialised_weights():
        model = class_for_text(config).from_config(
            config,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=settings.trust_remote_code,
        )
    remove_tower(model)
    model.tie_weights()
    model.requires_grad_(False)
    WeightSlots(model).load(weights.items())
    return LayeredModel(model)
