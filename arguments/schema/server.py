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
        "File with one API key per line, each beginning with tml-; requests with other keys are "
        "rejected. A session belongs to the key that created it.",
    )
    operator_key_file: str | None = arg(
        None,
        "File with operator keys, one per line, which may list and end the sessions of all keys "
        "(GET /api/v1/operator/sessions). Without any key file, every client may.",
    )
    allowed_hosts: list[str] | None = arg(
        None,
        "Without --api-key-file: additional names allowed in Host and Origin headers; loopback "
        "names and --host are always allowed.",
        nargs="+",
    )
    server_dir: str = arg(
        "outputs/server", "Folder of the server's journal, checkpoints and sampling snapshots."
    )
    served_model_name: str | None = arg(
        None,
        "Name of the base model for clients; default: the value of --hf-checkpoint, which is "
        "always accepted too.",
    )
    serve_images: bool = arg(
        False,
        "Prompts and datums may have images: the model's vision tower is loaded, and not trained.",
    )
    max_models: int = arg(8, "Maximum number of models in training.", legal=AT_LEAST_ONE)
    max_models_per_key: int | None = arg(
        None,
        "Maximum number of models per API key. Default: with several keys, as many as remain free "
        "for the others.",
        legal=AT_LEAST_ONE,
    )
    max_sessions_per_key: int | None = arg(
        None,
        "Maximum number of sessions per API key. Default: with several keys, as many as remain "
        "free for the others.",
        legal=AT_LEAST_ONE,
    )
    max_sessions: int = arg(
        64,
        "Maximum number of sessions; a session that is silent for --session-timeout-s is evicted "
        "if needed.",
        legal=AT_LEAST_ONE,
    )
    max_resident_models: int | None = arg(
        None,
        "Fully trained models kept on the device; others are offloaded to host memory and swapped "
        "in on request. Default: all.",
        legal=AT_LEAST_ONE,
    )
    max_resident_adapters: int | None = arg(
        None,
        "Adapters kept on the device with weights, gradients and optimizer state; others are "
        "offloaded to host memory and swapped in on request. Default: all.",
        legal=AT_LEAST_ONE,
    )
    max_snapshots: int = arg(
        8,
        "Unnamed sampling snapshots kept per API key; the least recently used one is removed "
        "first.",
        legal=AT_LEAST_ONE,
    )
    max_sampler_engines: int = arg(2, "Snapshots kept in memory for sampling.", legal=AT_LEAST_ONE)
    max_sampler_adapters: int = arg(
        64,
        "Adapters kept in memory for sampling beside the base model (--lora-sync adapter); the "
        "least recently used one makes room for the next.",
        legal=AT_LEAST_ONE,
    )
    max_adapter_rank: int = arg(
        32,
        "Largest rank of an adapter that SGLang servers hold beside the base model (--lora-sync "
        "adapter with --rollout-engine sglang); they reserve memory for it.",
        legal=AT_LEAST_ONE,
    )
    max_sequence_length: int | None = arg(
        None,
        "Longest sequence of a request, in tokens; default: the model's positions.",
        legal=AT_LEAST_ONE,
    )
    max_request_tokens: int = arg(
        4_000_000,
        "Maximum tokens of one request, over all its sequences or samples.",
        legal=AT_LEAST_ONE,
    )
    max_body_mb: float = arg(
        64.0, "Maximum size of a decompressed request body, in MB.", legal=POSITIVE
    )
    max_queued_requests: int = arg(
        4096,
        "Maximum length of the request queue over all clients; one model or sampler may fill at "
        "most the part that leaves room for others.",
        legal=AT_LEAST_ONE,
    )
    session_timeout_s: float = arg(
        600.0,
        "A session that is silent for this long is closed and its models are unloaded; after one "
        "minute if another session needs the room.",
        legal=POSITIVE,
    )
    seq_gap_s: float = arg(
        330.0,
        "How long requests wait for a missing earlier request before they fail. Clients retry for "
        "300 s.",
        legal=POSITIVE,
    )
    future_hold_s: float = arg(
        30.0,
        "Long-poll time of a request for a pending result; clients disconnect after 45 s.",
        legal=POSITIVE,
    )
    worker_restart_s: float = arg(
        60.0,
        "How long the API process waits for new workers after the workers have ended, before it "
        "exits too.",
        legal=POSITIVE,
    )
