"""The server's models on the workers. Every method is collective, with equal arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arguments.hf.model import HfModel
from slime_like.checkpoints.folders import checkpoint_folder
from slime_like.distributed.collectives import from_rank_zero, gather
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import ImageProblem
from slime_like.images.processor import ImageProcessor, LateImages
from slime_like.images.rows import image_rows
from slime_like.losses import policy_losses
from slime_like.losses.total import LossTerms
from slime_like.losses.value_loss import ValueLossConfig
from slime_like.megatron.checkpoint import CheckpointSaver, SavePolicy, load_checkpoint
from slime_like.megatron.forward_step import TokenComputation
from slime_like.megatron.lora import LoraNetwork, save_adapter
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.model.policy import LogProbHead
from slime_like.megatron.network import PassOutput, SelectionSeed
from slime_like.megatron.objectives import Objective
from slime_like.megatron.optimizer import AdamStep
from slime_like.megatron.packing import empty_sample
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.samples.sampling_mask import pad_sampling_mask
from slime_like.tinker.errors import Refused
from slime_like.tinker.loss_graph import LossGraph
from slime_like.tinker.losses import CRITIC_LOSS, CUSTOM_LOSS
from slime_like.tinker.model_pool import HostedModel, ModelPool
from slime_like.tinker.objectives import CustomLosses, CustomSum, PolicySum, ValueSum
from slime_like.tinker.sampler import PromptSamples, SampleCommand, SnapshotSampler
from slime_like.types import TrainSample
from slime_like.weights.quantized import QuantizedWeight
from slime_like.weights.safetensors_reader import stored_format, weights_digest

if TYPE_CHECKING:
    from slime_like.tinker.sglang_sampler import SglangSampler

PASS_TOKENS = 8192  # tokens per micro-batch without --max-tokens-per-gpu
SPACE_REMEDY = (
    "delete checkpoints of the server (delete_checkpoint, or save them with ttl_seconds), or use a "
    "--server-dir on a larger disk"
)
CHECKPOINT_STEP = 1  # every saved state has its own checkpoint folder
INTEGERS = ("tokens", "labels", "label_sets")
SETS = ("label_sets", "label_weights")  # fields with several numbers per token
UNCHANGED, GRADIENTS, WEIGHTS = range(3)  # what a command may have changed in its model


class ForwardBackwardResult(TypedDict):
    """Per-token results of all datums, as float32 bytes."""

    scores: bytes  # log-probs or values, [N] or [N, K]
    losses: bytes  # [N]
    metrics: dict[str, tuple[str, float]]  # {name: [kind, value]}, finite ones only


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a `ModelHost`."""

    base: str  # folder of the base model
    hf: HfModel  # its config.json
    shape: Mapping[str, object]  # of the network, as checkpoints record it
    seed: int
    max_tokens_per_gpu: int | None
    verify_checkpoints: bool
    serves_quantized: bool  # whether the sampler takes weights in the format of `base`


class ModelHost:
    """Executes commands. `ModelPool` decides which models are on the device."""

    def __init__(
        self,
        settings: HostSettings,
        layout: ParallelLayout,
        pool: ModelPool,
        sampler: SnapshotSampler | SglangSampler,
        head: LogProbHead,
        images: ImageProcessor | None = None,
    ) -> None:
        """images: Of the base model; None without a vision tower."""
        self.settings = settings
        self.layout = layout
        self.base = settings.base
        self.hf = settings.hf
        self.pool = pool
        self.stage = UNCHANGED
        self.sampler = sampler
        self._head = head
        self._images = images

    def execute(self, command: Mapping[str, object]) -> object:
        """Execute a command; the result, plain values, is valid on rank 0. Raises Refused,
        ValueError or OSError for errors that the client can fix."""
        self.stage = UNCHANGED
        arguments = {name: value for name, value in command.items() if name not in ("op", "id")}
        return getattr(self, f"do_{command['op']}")(**arguments)

    def describe(self) -> dict[str, object]:
        """What the API process needs to know about the workers."""
        return {"layout": self.layout.describe(), "models": sorted(self.models)}

    def recover(self, model: str, stage: int) -> bool:
        """Undo the partial effects of a failed command on its model. Collective. The API process
        has the next step refused if this was a forward_backward.

        Args:
            stage: The furthest stage that any rank reached.

        Returns:
            Whether the model is lost.
        """
        if stage == WEIGHTS:
            self.pool.unload(model)
            return True
        if stage == GRADIENTS and model in self.models:
            self.pool.network(model).abandon_gradients()
        return False

    # --- models ---

    def do_create(
        self, model: str, role: str, policy: str | None, lora: Mapping[str, object] | None
    ) -> None:
        self.stage = WEIGHTS
        self.pool.create(model, role, policy, lora)

    def do_unload(self, model: str) -> None:
        self.pool.unload(model)

    @property
    def models(self) -> Mapping[str, HostedModel]:
        return self.pool.models

    # --- training ---

    def do_forward_backward(
        self,
        model: str,
        loss: Mapping[str, object],
        forward_only: bool,
        lengths: list[int],
        tokens: bytes,
        fields: Mapping[str, bytes],
        sets: Mapping[str, bytes] | None = None,
        images: Sequence[Sequence[bytes]] = (),
    ) -> ForwardBackwardResult | None:
        """Forward pass, and backward pass unless forward_only; the result is on rank 0."""
        network = self.pool.network(model)
        hosted = self.models[model]
        samples = samples_of(lengths, tokens, fields)
        if sets is not None:
            samples = with_sampling_masks(samples, sets)
        if images:
            assert self._images is not None, "checked when the request was accepted"
            samples = with_images(samples, images, self._images)
        if loss["kind"] == CUSTOM_LOSS:
            samples = [
                dataclasses.replace(sample, datums=torch.full((sample.response_length,), i))
                for i, sample in enumerate(samples)
            ]
        local_indices = list(range(self.layout.dp_rank, len(samples), self.layout.dp_size))
        local = [samples[i] for i in local_indices] or [empty_sample(samples[0])]
        max_tokens = self.settings.max_tokens_per_gpu or PASS_TOKENS
        size = MicroBatchSize(1, max_tokens * self.layout.cp_size)
        selection = SelectionSeed(self.settings.seed, hosted.passes)
        hosted.passes += 1
        compute = self._computation(loss, lengths)
        if forward_only:
            output = network.forward(local, compute, size, selection=selection)
        else:
            output = network.forward_backward(
                local,
                compute,
                size,
                selection=selection,
                per_token=True,
                before_change=self._before_gradients,
            )
        return self._collect(local_indices, output, len(samples))

    def _before_gradients(self) -> None:
        """From here on an error may leave incomplete gradients."""
        self.stage = GRADIENTS

    def _computation(self, loss: Mapping[str, Any], lengths: list[int]) -> TokenComputation:
        if loss["kind"] == CRITIC_LOSS:
            return ValueSum(ValueLossConfig(**loss["settings"]))
        if loss["kind"] == CUSTOM_LOSS:
            custom = custom_losses(loss, lengths)
            custom.check()
            return CustomSum(self._head, custom)
        policy_loss = policy_losses.get(loss["kind"])
        config = policy_loss.config_type(**loss["settings"])
        terms = LossTerms(
            entropy_coef=loss["entropy_coef"], kl_loss_coef=loss["kl_coef"], kl_loss_type="k2"
        )
        return PolicySum(self._head, Objective(policy_loss, config, terms))

    def _collect(
        self, local_indices: list[int], output: PassOutput, count: int
    ) -> ForwardBackwardResult | None:
        """Gather the per-token results of all data-parallel ranks on rank 0, in the order of the
        samples."""
        layout = self.layout
        local = None
        if layout.is_last_stage:
            metrics = output.metrics.reduce(layout.dp_cp_group)
            typed = {name: (output.metrics.kind(name), value) for name, value in metrics.items()}
            if layout.tp_rank == 0 and layout.cp_rank == 0:
                local = (local_indices, _as_arrays(output.columns, len(local_indices)), typed)
        parts = [part for part in gather(local) if part is not None]
        if layout.rank != 0:
            return None
        by_sample: list[dict[int, NDArray[Any]]] = [{} for _ in output.columns]
        for indices, columns, _ in parts:
            for column, values in zip(by_sample, columns):
                column.update(zip(indices, values))
        *scores, losses = (_concatenate(column, count) for column in by_sample)
        typed = parts[0][2]
        return {
            "scores": np.stack(scores, -1).tobytes(),
            "losses": losses.tobytes(),
            "metrics": {name: each for name, each in typed.items() if math.isfinite(each[1])},
        }

    def do_optim_step(
        self, model: str, adam: Mapping[str, float], missing: str = ""
    ) -> dict[str, object]:
        """Update the weights. missing: why gradients are missing; then all others are discarded
        and the step is refused."""
        settings = AdamStep(
            adam["learning_rate"],
            adam["beta1"],
            adam["beta2"],
            adam["eps"],
            adam["weight_decay"],
            max_norm=adam["grad_clip_norm"],
        )
        network = self.pool.network(model)
        if missing:
            network.abandon_gradients()
            raise Refused(
                f"model {model}: optim_step rejected: gradients are missing ({missing}), so all "
                "gradients since the last step are discarded; weights and optimizer are unchanged: "
                "send the batches again"
            )
        self.stage = GRADIENTS
        stepped, grad_norm, _ = network.optim_step(settings, self._before_change)
        finite = math.isfinite(grad_norm)
        return {"stepped": stepped, "grad_norm": grad_norm if finite else str(grad_norm)}

    def _before_change(self) -> None:
        """From here on an error loses the model, since its weights may be partly updated."""
        self.stage = WEIGHTS

    # --- checkpoints ---

    def do_save(self, model: str, folder: str) -> None:
        """Save a checkpoint of weights and optimizer, without gradients accumulated since the last
        step."""
        network = self._finite_network(model)
        saver = CheckpointSaver(folder, SavePolicy(space_remedy=SPACE_REMEDY))
        networks = {self.models[model].role: network.saved(with_schedule=False)}
        saver.save(CHECKPOINT_STEP, networks, {"model": self._shape(model)}, with_rng=False)

    def do_load(self, model: str, folder: str, optimizer: bool) -> None:
        """Load the weights of a checkpoint, and its optimizer or a fresh one. If the checkpoint is
        rejected before anything was loaded, the model is unchanged."""
        network = self.pool.network(model)
        saved = network.saved(with_optimizer=optimizer, with_schedule=False)
        load_checkpoint(
            checkpoint_folder(folder, CHECKPOINT_STEP),
            {self.models[model].role: saved},
            load_rng=False,
            verify=self.settings.verify_checkpoints,
            seed=self.settings.seed,
            model=self._shape(model),
            before_change=self._before_change,
        )
        self._before_change()
        if optimizer:
            network.clear_gradients()
        else:
            network.reset_training_state()

    def do_export(self, model: str, folder: str) -> None:
        """Export all weights as a Hugging Face model, with an adapter merged."""
        network = self._finite_network(model)
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        network.save_hf(folder, self.hf, self.base, quantized=self._quantized)

    def do_export_adapter(self, model: str, folder: str) -> None:
        """Export an adapter alone, in PEFT's format."""
        network = self._finite_network(model)
        assert isinstance(network, LoraNetwork), "full weights are exported whole"
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        save_adapter(folder, network, self.base, base_digest=self._base_digest)

    @cached_property
    def _base_digest(self) -> str:
        return from_rank_zero(lambda: weights_digest(self.base))

    @cached_property
    def _quantized(self) -> Mapping[str, QuantizedWeight]:
        """Weights that are quantised on the SGLang servers, in the format of the base model's
        folder."""
        if not self.settings.serves_quantized:
            return {}
        return from_rank_zero(lambda: stored_format(self.base))

    def _finite_network(self, model: str) -> TrainedNetwork:
        """The network of a model, to be saved. Raises Refused if it has NaN or infinity."""
        network = self.pool.network(model)
        network.finish_updates()
        if network.has_non_finite():
            raise Refused(f"model {model} has non-finite weights or moments and is not saved")
        return network

    def _shape(self, model: str) -> dict[str, object]:
        adapter = self.models[model].adapter
        lora = {"lora_rank": 0} if adapter is None else adapter.spec.describe()
        return {**self.settings.shape, **lora}

    # --- sampling ---

    def do_sample(self, folder: str, **request: Any) -> list[PromptSamples]:
        return self.sampler.sample(folder, SampleCommand.from_plain(**request))

    def close(self) -> None:
        """Stop the sampler."""
        self.sampler.close()


def _concatenate(column: Mapping[int, NDArray[Any]], count: int) -> NDArray[Any]:
    return np.concatenate([column[i] for i in range(count)]).astype("<f4")


def _as_arrays(columns: Sequence[Sequence[Tensor]], count: int) -> list[list[NDArray[Any]]]:
    """The first `count` entries of every column; a rank without samples has one placeholder."""
    return [[values.numpy() for values in column[:count]] for column in columns]


def with_images(
    samples: Sequence[TrainSample], images: Sequence[Sequence[bytes]], processor: ImageProcessor
) -> list[TrainSample]:
    """Add the images of every sample. images: their files. Every rank reads all of them, so that a
    damaged one is an error on all ranks. Raises ValueError."""
    seeing = []
    for index, (sample, files) in enumerate(zip(samples, images, strict=True)):
        if files:
            try:
                inputs = LateImages(processor, [EncodedImage(data) for data in files])
            except ImageProblem as error:
                raise Refused(f"datum {index}: image: {error}") from None
            rows = image_rows(sample.tokens, inputs, processor.rule)
            sample = dataclasses.replace(sample, images=rows)
        seeing.append(sample)
    return seeing


def with_sampling_masks(
    samples: Sequence[TrainSample], sets: Mapping[str, bytes]
) -> list[TrainSample]:
    """Add the sampling mask of every token. sets: of all samples, as `SamplingSets`."""
    counts = np.frombuffer(sets["counts"], dtype="<i4").tolist()
    of_tokens = torch.from_numpy(np.frombuffer(sets["tokens"], dtype="<i4").copy()).split(counts)
    masked = []
    start = 0
    for sample in samples:
        end = start + sample.response_length
        mask = pad_sampling_mask(of_tokens[start:end])
        masked.append(dataclasses.replace(sample, sampling_mask=mask))
        start = end
    return masked


def custom_losses(loss: Mapping[str, Any], lengths: list[int]) -> CustomLosses:
    """The custom loss of a command."""
    columns = []
    for column in loss["inputs"]:
        values = torch.from_numpy(np.frombuffer(column["data"], dtype=column["dtype"]).copy())
        parts = values.split([math.prod(shape) for shape in column["shapes"]])
        columns.append([part.view(shape) for part, shape in zip(parts, column["shapes"])])
    inputs = [tuple(column[i] for column in columns) for i in range(len(lengths))]
    return CustomLosses(LossGraph.from_plain(loss["graph"]), inputs, lengths, loss["widths"])


def samples_of(lengths: list[int], tokens: bytes, fields: Mapping[str, bytes]) -> list[TrainSample]:
    """Convert datums to samples in which every token is a response token."""

    def split(name: str, data: bytes) -> tuple[Tensor, ...]:
        dtype = "<i8" if name in INTEGERS else "<f4"
        values = torch.from_numpy(np.frombuffer(data, dtype=dtype).copy())
        return (values.view(sum(lengths), -1) if name in SETS else values).split(lengths)

    columns = {name: split(name, data) for name, data in fields.items()}
    ones = [torch.ones(n) for n in lengths]
    samples = []
    for i, row in enumerate(split("tokens", tokens)):
        values: dict[str, Any] = {name: column[i] for name, column in columns.items()}
        if "keep_mask" in values:
            values["keep_mask"] = values["keep_mask"] > 0
        if "old_log_probs" in values:
            values.setdefault("rollout_log_probs", values["old_log_probs"])
        values = {"labels": row, "loss_weights": ones[i], **values}
        samples.append(
            TrainSample(
                tokens=row,
                response_length=len(row),
                loss_mask=torch.ones(len(row), dtype=torch.bool),
                **values,
            )
        )
    if not columns.keys() & {"returns", "labels", "label_sets"}:  # forward pass of a critic
        samples = [
            dataclasses.replace(s, values=s.loss_weights * 0, returns=s.loss_weights * 0)
            for s in samples
        ]
    return samples
