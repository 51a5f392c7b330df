"""Checkpoints of a run: resolve --load, save when due, and handle failed saves."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.schema import CheckpointConfig, CriticConfig
from slime_like import __version__
from slime_like.checkpoints.files import hash_file
from slime_like.checkpoints.folders import checkpoint_folder, is_checkpoint_root, newest_step
from slime_like.checkpoints.lock import confirm_held
from slime_like.checkpoints.manifest import MANIFEST, identity_differences
from slime_like.data.tokenizer import CHAT_TEMPLATE, tokenizer_identity
from slime_like.distributed.collectives import from_rank_zero
from slime_like.logs import warn_rank_0
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.checkpoint import (
    CheckpointSaver,
    SaveError,
    SavePolicy,
    SaveReport,
    is_converted,
    saved_networks,
)
from slime_like.megatron.checkpoint.load import saved_identity
from slime_like.megatron.factory import load_network
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.run_state import load_state, save_state, start_critic, start_self_teacher
from slime_like.trainer.saved_settings import changes
from slime_like.weights.safetensors_reader import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.checkpoints.state import TrainerState
    from slime_like.megatron.checkpoint.replicate import ReplicaSaver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts."""

    state: TrainerState | None  # trainer state of a resumed run; None: a fresh run
    initial_policy: str | None  # the Hugging Face model that the policy equals now, or None
    has_critic: bool = False  # the critic was loaded from the checkpoint


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a checkpoint records of its run, and a resumed run compares."""

    settings: Mapping[str, object]  # by flag
    argv: Sequence[str]  # without secrets
    hf_checkpoint: str | None
    starts_from: str | None  # see `ConfigGroups.starts_from`
    with_adapter: bool  # whether the policy starts from --lora-adapter-path
    reference: str | None  # folder of the reference model; None without one
    reference_step: int | None  # the checkpoint's step in it; None: the newest


class RunCheckpoints:
    """Loads and saves the checkpoints of a run. Every method is collective. tokenizer: None if the
    run reads recorded tokens."""

    def __init__(
        self,
        config: CheckpointConfig,
        critic: CriticConfig,
        identity: RunIdentity,
        layout: ParallelLayout,
        backend: MegatronBackend,
        tokenizer: PreTrainedTokenizerBase = None,
    ) -> None:
        self.tokenizer = None if tokenizer is None else tokenizer_identity(tokenizer)
        self.config = config
        self.critic = critic
        self.identity = identity
        self.layout = layout
        self.backend = backend
        self.failed = 0
        self._metrics: dict[str, float] = {}
        self.reference: str | None = None
        self.saver: CheckpointSaver | None = None
        if self.config.save is not None:
            policy = SavePolicy(
                self.config.save_retain_last,
                self.config.save_retain_interval,
                self.config.async_save,
            )
            self.saver = CheckpointSaver(self.config.save, policy)
            for note in self.saver.notes:
                logger.info(f"--save {self.config.save}: {note}, left by an interrupted save")
        self.replicas: ReplicaSaver | None = None
        if self.config.save is not None and self.config.checkpoint_replicas:
            from slime_like.megatron.checkpoint.replicate import ReplicaSaver

            self.replicas = ReplicaSaver(self.config.save, self.config.checkpoint_replica_dir)

    def load(self) -> Start:
        """Load what --load and --critic-load name."""
        config = self.config
        replicas = self.replicas
        if replicas is not None and config.load_is_save and config.ckpt_step is None:
            logger.info(replicas.restore())
        start = self._load_run()
        if replicas is not None:
            replicas.drop()
        self.reference = from_rank_zero(lambda: reference_digest(self.identity))
        saved = None if start.state is None else start.state.get("reference")
        if None not in (saved, self.reference) and saved != self.reference:
            warn_rank_0(
                logger,
                "the reference model differs from that of the checkpoint's run: from here on the "
                "KL is to another model",
            )
        if self.backend.critic is not None and not start.has_critic:
            start_critic(
                self.backend,
                self.critic.critic_load,
                verify=not self.config.no_verify_checkpoint,
            )
        return start

    def _load_run(self) -> Start:
        """Resume from a checkpoint (--finetune: weights only), or start from a Hugging Face model.
        If the folder is also --save and has no checkpoint yet, this is the first start of a run."""
        root = self.config.load
        config = self.config
        if root is None:
            return self._start_anew()
        if config.ckpt_step is not None or is_checkpoint_root(root):
            return self._resume(root)
        if (Path(root) / "config.json").is_file():
            self.backend.policy.load_hf(root)
            start_self_teacher(self.backend)
            return Start(None, root)
        if not config.load_is_save:
            raise ValueError(
                f"--load {root}: holds neither checkpoints nor a Hugging Face model (config.json)"
            )
        if config.exit_on_missing_checkpoint:
            raise ValueError(
                f"--load {root}: no checkpoint, and --exit-on-missing-checkpoint requires one"
            )
        logger.info(f"no checkpoint in {root} yet: starting at rollout 1")
        return self._start_anew()

    def _start_anew(self) -> Start:
        """The policy has the weights of --hf-checkpoint; replace them if the run starts from other
        ones."""
        identity = self.identity
        root = identity.starts_from
        hf = identity.hf_checkpoint
        if root is None or (hf is not None and Path(root).resolve() == Path(hf).resolve()):
            return Start(None, None if identity.with_adapter else hf)
        logger.info(f"the policy starts from --ref-load {root}, as in slime")
        load_network(
            self.backend.policy,
            root,
            flag="--ref-load",
            step=identity.reference_step,
            verify=not self.config.no_verify_checkpoint,
        )
        self.backend.policy.weights_changed()
        start_self_teacher(self.backend)
        return Start(None, None if is_checkpoint_root(root) else root)

    def _resume(self, root: str) -> Start:
        config = self.config
        step = self.config.ckpt_step
        if step is None:
            step, warning = newest_step(root)
            warn_rank_0(logger, warning)
        folder = checkpoint_folder(root, step)
        from_rank_zero(lambda: self._check_tokenizer(folder))
        with_critic = self._loads_critic(folder)
        weights_only = config.finetune or is_converted(folder)
        if weights_only and not config.finetune:
            logger.info(
                f"checkpoint {folder} was converted and holds weights only: starting at rollout 1"
            )
        state, changed = load_state(
            self.backend,
            folder,
            with_critic=with_critic,
            with_optimizer=not (config.no_load_optim or weights_only),
            with_rng=not (config.no_load_rng or weights_only),
            verify=not config.no_verify_checkpoint,
            with_frozen=not weights_only,
        )
        if changed:
            warn_rank_0(
                logger,
                f"--load {root}: this run's optimizer or schedule is not the checkpoint's: "
                f"{'; '.join(changed)}",
            )
        if weights_only:
            return Start(None, None, with_critic)
        self._warn_of_changes(folder, state)
        if (message := world_size_change(state, self.layout)) is not None:
            logger.info(message)
        if int(state["step"]) != step:
            raise ValueError(
                f"checkpoint {folder} is of step {state['step']} by its own record: the folder was "
                "renamed"
            )
        return Start(state, None, with_critic)

    def _check_tokenizer(self, folder: Path) -> None:
        """Raise ValueError if the checkpoint was trained with another vocabulary."""
        current = {k: v for k, v in (self.tokenizer or {}).items() if k != CHAT_TEMPLATE}
        different = identity_differences(saved_identity(folder).get("tokenizer", {}), current)
        if different:
            raise ValueError(
                f"checkpoint {folder} was trained with another tokenizer than that of "
                f"--hf-checkpoint {self.identity.hf_checkpoint}: {', '.join(different)}; give "
                "the model of that run"
            )

    def _warn_of_changes(self, folder: Path, state: TrainerState) -> None:
        different = changes(state.get("settings", {}), self.identity.settings)
        tokenizer = self.tokenizer or {}
        if CHAT_TEMPLATE in tokenizer:
            template = {CHAT_TEMPLATE: tokenizer[CHAT_TEMPLATE]}
            different += changes(state.get("tokenizer", {}), template)
        if different:
            warn_rank_0(
                logger, f"changed since checkpoint {folder} was saved: {'; '.join(different)}"
            )

    def _loads_critic(self, folder: Path) -> bool:
        """Whether to load the critic that was saved with the policy. --critic-load takes precedence
        with --finetune."""
        is_needed = self.backend.critic is not None
        is_saved = "critic" in saved_networks(folder)
        if is_saved and not is_needed:
            warn_rank_0(
                logger,
                f"checkpoint {folder} has a critic, which this --advantage-estimator does not use: "
                "it is not loaded",
            )
        if is_needed and not is_saved:
            source = "new adapters" if self.critic.critic_lora_rank else "the policy's weights"
            if self.critic.critic_load is not None:
                source = "--critic-load"
            warn_rank_0(logger, f"checkpoint {folder} has no critic: it starts from {source}")
        is_replaced = self.config.finetune and self.critic.critic_load is not None
        return is_needed and is_saved and not is_replaced

    def wants(self, rollouts: int, *, last: bool) -> bool:
        """Whether `after_rollout` has anything to do."""
        return self.saver is not None and (
            self.saver.pending or self.replicas is not None or self._is_due(rollouts, last=last)
        )

    def _is_due(self, rollouts: int, *, last: bool) -> bool:
        interval = self.config.save_interval
        return last or (interval is not None and rollouts % interval == 0)

    def after_rollout(
        self, rollouts: int, state: dict[str, object], *, last: bool
    ) -> dict[str, float]:
        """Publish finished asynchronous saves, then save if due. After the last rollout it always
        saves, and waits for the save.

        Returns:
            Metrics of the save.

        Raises:
            SaveError: The save failed, unless --on-save-failure continue applies.
        """
        assert self.saver is not None
        saver = self.saver
        from_rank_zero(lambda: confirm_held(saver.root))
        state = {
            **state,
            "version": __version__,
            "argv": self.identity.argv,
            "reference": self.reference,
            "settings": self.identity.settings,
            "tokenizer": self.tokenizer or {},
        }
        if self._is_due(rollouts, last=last):
            self._attempt(saver.finish, last=False)
            self._attempt(lambda: self._save(saver, rollouts, state), last=last)
            if last:
                self._attempt(saver.finish, last=True)
                if self.replicas is not None:
                    self.replicas.drop()
        else:
            self._attempt(saver.poll, last=False)
            self._replicate(rollouts, state)
        metrics = self._metrics
        self._metrics = {}
        if self.config.on_save_failure == "continue":
            metrics["perf/failed_saves"] = float(self.failed)
        return metrics

    def _replicate(self, rollouts: int, state: dict[str, object]) -> None:
        """Replicate the state into the memory of other nodes. A failure does not end the run."""
        if self.replicas is None:
            return
        try:
            report = self._save(self.replicas, rollouts, state)
        except SaveError as error:
            warn_rank_0(logger, str(error))
        else:
            assert report is not None
            self._metrics["perf/replica_s"] = report.seconds

    def _save(
        self, saver: CheckpointSaver | ReplicaSaver, rollouts: int, state: dict[str, object]
    ) -> SaveReport | None:
        config = self.config
        return save_state(
            self.backend,
            saver,
            rollouts,
            state,
            with_optimizer=not config.no_save_optim,
            with_rng=not config.no_save_rng,
        )

    def _attempt(self, action: Callable[[], SaveReport | None], *, last: bool) -> None:
        try:
            report = action()
        except SaveError as error:
            if last or self.config.on_save_failure == "stop":
                raise
            self.failed += 1
            warn_rank_0(logger, f"{error}; continuing without it (--on-save-failure continue)")
            return
        if report is not None:
            assert self.saver is not None
            logger.info(describe_save(report, self.saver.root))
            for note in report.notes:
                warn_rank_0(logger, note)
            self._metrics["perf/save_gb"] = report.bytes / 1e9
            self._metrics["perf/save_gb_per_s"] = report.bytes / 1e9 / report.seconds
            self._metrics["perf/save_free_gb"] = report.free_bytes / 1e9


def world_size_change(state: TrainerState, layout: ParallelLayout) -> str | None:
    """Message about a change of the number of ranks since the checkpoint; None if it is unchanged.

    Args:
        state: Trainer state of the checkpoint.
        layout: Parallel layout of this run.
    """
    saved = int(state["world_size"])
    current = layout.world_size
    if saved == current:
        return None
    dp = re.search(r"\bDP(\d+)", state["layout"])
    ranks = f"{current} of {saved} ranks" if current < saved else f"{current} ranks, {saved} before"
    return (
        f"resumed on {ranks}: data parallel {dp[1] if dp else '?'} -> {layout.dp_size}; an "
        "optimizer step keeps its samples"
    )


def reference_digest(run: RunIdentity) -> str | None:
    """Digest of the reference model, None without one. Its weights never change, so a checkpoint
    stores only this."""
    if run.reference is None:
        return None
    if not is_checkpoint_root(run.reference):
        return weights_digest(run.reference)
    step = run.reference_step
    if step is None:
        step, _ = newest_step(run.reference, "--ref-load")
    return hash_file(checkpoint_folder(run.reference, step) / MANIFEST).sha256[:24]


def describe_save(report: SaveReport, root: Path) -> str:
    """Log line about a save: size, time and what it replaced."""
    name = checkpoint_folder(root, report.step).name
    removed = ", ".join(checkpoint_folder(root, step).name for step in report.removed)
    return (
        f"{name} saved: {report.bytes / 1e9:.3f} GB in {report.seconds:.2f} s, training blocked "
        f"for {report.blocked_s:.2f} s; "
        f"{f'removed {removed}; ' if removed else ''}{report.free_bytes / 1e9:.3f} GB free"
    )
