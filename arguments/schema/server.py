"""The Tinker-compatible API: `python -m slime_like.tinker`."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, Range, arg

PORT = Range("between 1 and 65535", lambda x: 1 <= x <= 65535)


@dataclass(frozen=True, slots=True)
class ServerConfig(CheckedSettings):
    host: str = arg(
        "127.0.0.1",
        "Address that the API listens on; any but a loopback address needs --api-key-file.",
    )
    port: int = arg(8000, "Port that the API listens on.", legal=PORT)
    api_key_file: str | None = arg(
        None,
        "File with one API key a line, each beginning with tml-; others are refused. A session belongs to the key that created it.",
    )
    operator_key_file: str | None = arg(
        None,
        "File with keys, one a line, that may see who holds what and end sessions of all keys "
        "(GET /api/v1/operator/sessions). Without any key file everybody may.",
    )
    allowed_hosts: list[str] | None = arg(
        None,
        "Without --api-key-file: further names that requests may have in their Host and Origin "
        "headers; loopback names and --host are always taken.",
        nargs="+",
    )
    server_dir: str = arg(
        "outputs/server", "Folder of the server's journal, checkpoints and sampling snapshots."
    )
    served_model_name: str | None = arg(
        None,
        "Name of the base model for clients; default: --hf-checkpoint as it is given, which works too.",
    )
    max_models: int = arg(
        8, "Most models that clients may have in training at a time.", legal=AT_LEAST_ONE
    )
    max_models_per_key: int | None = arg(
        None,
        "Most models of one API key. Default: with several keys, as many as it leaves free for others.",
        legal=AT_LEAST_ONE,
    )
    max_sessions_per_key: int | None = arg(
        None,
        "Most sessions of one API key. Default: with several keys, as many as it leaves free for others.",
        legal=AT_LEAST_ONE,
    )
    max_sessions: int = arg(
        64,
        "Most sessions at a time; one that has not been heard of for --session-timeout-s makes room.",
        legal=AT_LEAST_ONE,
    )
    max_resident_models: int | None = arg(
        None,
        "Models with all their parameters that are kept on the device; others wait in host memory and are exchanged when they are asked for. "
        "Default: all.",
        legal=AT_LEAST_ONE,
    )
    max_resident_adapters: int | None = arg(
        None,
        "Adapters whose numbers, gradients and optimizer state are kept on the device; others wait in host memory and come back when they are "
        "asked for. Default: all.",
        legal=AT_LEAST_ONE,
    )
    max_snapshots: int = arg(
        8,
        "Sampling snapshots without a name that are kept of each API key; the one that was least recently used goes first.",
        legal=AT_LEAST_ONE,
    )
    max_sampler_engines: int = arg(
        2, "Snapshots that are in memory for sampling at a time.", legal=AT_LEAST_ONE
    )
    max_sequence_length: int | None = arg(
        None,
        "Longest sequence of a request, in tokens; default: the model's positions.",
        legal=AT_LEAST_ONE,
    )
    max_request_tokens: int = arg(
        4_000_000, "Most tokens of one request, over its sequences or samples.", legal=AT_LEAST_ONE
    )
    max_body_mb: float = arg(64.0, "Largest body of a request, in MB, unpacked.", legal=POSITIVE)
    max_queued_requests: int = arg(
        4096,
        "Most requests that wait to be executed, of all clients; those of one model or sampler are at most as many as they leave room for.",
        legal=AT_LEAST_ONE,
    )
    session_timeout_s: float = arg(
        600.0,
        "A session that has not been heard of for so long is finished, and its models are unloaded; after a minute, where another needs the room.",
        legal=POSITIVE,
    )
    seq_gap_s: float = arg(
        330.0,
        "How long requests wait for one before them that is missing; then they fail. Clients retry for 300 s.",
        legal=POSITIVE,
    )
    future_hold_s: float = arg(
        30.0,
        "How long a question for a result that is not there yet is held; clients hang up after 45 s.",
        legal=POSITIVE,
    )
    worker_restart_s: float = arg(
        60.0,
        "How long the API waits for new workers after they have ended, before it ends too.",
        legal=POSITIVE,
    )
