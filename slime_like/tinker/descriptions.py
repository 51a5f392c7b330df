"""Descriptions of the routes, for docs/http_api.md (scripts/generate_http_api.py)."""

from __future__ import annotations

from slime_like.tinker import schemas

# descriptions of routes with a JSON body, by path below /api/v1
POSTS = {
    "client/config": "Client configuration of the SDK: feature switches by name.",
    "client/dynamic_config": "Feature switches that may change while a client is running.",
    "create_session": "Open a session, which owns models and samplers. Returns `session_id`.",
    "session_heartbeat": "Keep a session alive. Without heartbeats it ends after "
    "`--session-timeout-s`, with its models and samplers.",
    "create_model": "Future: create a model to train, with a LoRA adapter (`rank` above 0) or with "
    "all weights. Result: `model_id`.",
    "get_info": "Describe a model: base model, tokenizer, and rank of its adapter.",
    "unload_model": "Future: unload a model and free its memory.",
    "create_custom_loss": "Future: check and keep a loss that torch.fx has traced. Result: "
    "`loss_id`, for `loss_fn` custom in the same session.",
    "optim_step": "Future: one AdamW step with the accumulated gradients. Result: `metrics`.",
    "save_weights": "Future: save a checkpoint with optimizer state. Result: `path`, as "
    "`tinker://RUN/weights/NAME`.",
    "save_weights_for_sampler": "Future: save a snapshot to sample from, with a name (`path`) or "
    "for a sampling session (`sampling_session_seq_id`).",
    "save_weights_external": "Future: export a Hugging Face folder, for download through signed "
    "links.",
    "load_weights": "Future: load a checkpoint, with or without optimizer state, into a model "
    "(`model_id`) or a new one (`session_id`).",
    "create_sampling_session": "Create a sampler of the base model or of a checkpoint. Returns "
    "`sampling_session_id`.",
    "join_sampling_session": "Use an existing sampler from another process.",
    "asample": "Future: sample responses to a prompt, with log-probs.",
    "cancel_future": "Give up a request for samples that still waits, as the SDK does when its "
    "future is cancelled. No effect on others.",
    "weights_info": "Describe a checkpoint: base model, and rank if it is an adapter.",
}


def body_schema(kind: type[schemas.Body]) -> dict[str, object]:
    """Schema of a route's body, for FastAPI's openapi_extra."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"content": content}}
