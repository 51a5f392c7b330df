"""Save and restore the networks of a run. Every function is collective."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.distributed.collectives import from_rank_zero
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.checkpoint import (
    CheckpointSaver,
    SavedNetwork,
    SaveReport,
    load_checkpoint,
)
from slime_like.megatron.factory import FrozenModel, load_network, start_from_policy
from slime_like.megatron.model.gpt import model_shape
from slime_like.megatron.optimizer import keep_own_settings, resume_schedule

if TYPE_CHECKING:
    from slime_like.checkpoints.state import TrainerState


def save_state(
    backend: MegatronBackend,
    saver: CheckpointSaver,
    step: int,
    trainer_state: Mapping[str, object],
    *,
    with_optimizer: bool,
    with_rng: bool,
) -> SaveReport | None:
    """Write a checkpoint; see `CheckpointSaver.save`. The shape of the model joins
    `trainer_state`."""
    for network in backend.trained_networks.values():
        network.finish_updates()
    networks = {
        name: network.saved(with_optimizer=with_optimizer)
        for name, network in backend.trained_networks.items()
    }
    networks |= _saved_frozen(backend)
    with _in_full_precision(backend):
        return saver.save(
            step,
            networks,
            {**trainer_state, "model": _model_shape(backend, networks)},
            with_rng=with_rng,
        )


def load_state(
    backend: MegatronBackend,
    folder: Path,
    *,
    with_optimizer: bool,
    with_rng: bool,
    verify: bool,
    with_critic: bool = True,
    with_frozen: bool = False,
) -> tuple[TrainerState, list[str]]:
    """Restore a checkpoint. Without the optimizer, its fp32 copies start from the loaded weights
    and the schedule at step 0.

    Args:
        with_critic: False: do not load the critic.
        with_frozen: Load the reference model and self-distillation teacher, if the checkpoint has
            them.

    Returns:
        The trainer state, and a description of each setting of optimizer and schedule that differs.
    """
    trained = dict(backend.trained_networks)
    if not with_critic:
        trained.pop("critic", None)
    networks = {
        name: network.saved(with_optimizer=with_optimizer) for name, network in trained.items()
    }
    if not trained:  # --debug-rollout-only
        networks = {"policy": SavedNetwork(backend.policy.chunks, None, None, backend.layout)}
    for name, frozen in _saved_frozen(backend).items():
        if with_frozen and from_rank_zero((folder / name).is_dir):
            networks[name] = frozen
    changed: dict[str, list[str]] = {}  # settings of the optimizers
    with ExitStack() as loading:
        loading.enter_context(_in_full_precision(backend))
        for name, saved in networks.items():
            if saved.optimizer is not None:
                changed[name] = loading.enter_context(keep_own_settings(saved.optimizer))
        state = load_checkpoint(
            folder,
            networks,
            load_rng=with_rng,
            verify=verify,
            seed=backend.seed,
            model=_model_shape(backend, networks),
        )
    different = []
    for name, network in trained.items():
        if with_optimizer:
            saved_schedule = state["networks"][name]["scheduler"]
            assert saved_schedule is not None, "every network that is trained has one"
            prefix = "" if name == "policy" else f"{name}: "
            changes = [*dict.fromkeys(changed[name])]
            changes += resume_schedule(network.scheduler, saved_schedule)
            different += [prefix + change for change in changes]
        else:
            network.weights_changed()
    if "teacher" not in networks:
        start_self_teacher(backend)
    return state, different


def start_self_teacher(backend: MegatronBackend) -> None:
    """Initialise the self-distillation teacher, if it has its own weights, from the policy."""
    if backend.averaged_policy is not None:
        backend.policy.finish_updates()
        backend.averaged_policy.start(backend.policy)


def start_critic(backend: MegatronBackend, source: str | None, *, verify: bool) -> None:
    """Initialise the critic of a run that does not resume one. source: --critic-load; None: see
    `start_from_policy`."""
    assert backend.critic is not None
    if source is None:
        start_from_policy(backend.critic, backend.policy)
    else:
        flag = "--critic-load"
        load_network(backend.critic, source, flag=flag, step=None, verify=verify, name="critic")
        backend.critic.weights_changed()


def _saved_frozen(backend: MegatronBackend) -> dict[str, SavedNetwork]:
    """Untrained networks that change during the run: a reference model that was reset to the
    policy, and the self-distillation teacher."""
    networks: dict[str, FrozenModel] = {}
    if backend.resets_reference and backend.reference is not None:
        networks["reference"] = backend.reference
    if backend.averaged_policy is not None:
        networks["teacher"] = backend.averaged_policy.network
    return {
        name: SavedNetwork(network.chunks, None, None, backend.layout)
        for name, network in networks.items()
    }


def _in_full_precision(backend: MegatronBackend) -> AbstractContextManager[None]:
    return (
        nullcontext()
        if backend.averaged_policy is None
        else backend.averaged_policy.in_full_precision()
    )


def _model_shape(backend: MegatronBackend, networks: Collection[str]) -> dict[str, object]:
    """Settings that identify the model in a checkpoint. networks: names of the networks in it."""
    shape = {**model_shape(backend.transformer, backend.gpt), **backend.adapter_shape}
    if "critic" in networks:
        shape["critic_lora_rank"] = backend.critic_rank
    return shape
