"""What the routes do, for docs/http_api.md, which is made from them (scripts/generate_http_api.py)."""

from __future__ import annotations

from slime_like.tinker import schemas

# descriptions of routes with a JSON body, by path below /api/v1
POSTS = {
    "client/config": "What the SDK may use of this server: switches by name.",
    "client/dynamic_config": "The same for switches that may change while a client runs.",
    "create_session": "Open a session, which models and samplers belong to: `session_id`.",
    "session_heartbeat": "Keep a session: one that is silent for long ends with what it has.",
    "create_model": "A future: a model in training, with an adapter (`rank` above 0) or with all weights. Result: `model_id`.",
    "get_info": "A model: its base, tokenizer, and the rank of its adapter.",
    "unload_model": "A future: the model ends, and its memory is free.",
    "optim_step": "A future: one step of AdamW with the gradients so far. Result: `metrics`.",
    "save_weights": "A future: a checkpoint with the optimizer's state. Result: `path`, as `tinker://RUN/weights/NAME`.",
    "save_weights_for_sampler": "A future: a snapshot to sample from, with a name (`path`) or of a sampling session.",
    "save_weights_external": "A future: a Hugging Face folder, which signed links lead to.",
    "load_weights": "A future: the weights of a checkpoint, with or without the optimizer's state, into a model (`model_id`) or a new one (`session_id`).",
    "create_sampling_session": "A sampler of the base model or of a checkpoint: `sampling_session_id`.",
    "join_sampling_session": "Another process uses a sampler that is there.",
    "asample": "A future: samples of a prompt with their log-probs.",
    "weights_info": "A checkpoint: its base model, whether it is an adapter, and of which rank.",
}


def takes(kind: type[schemas.Body]) -> dict[str, object]:
    """Schema of a route's body, for FastAPI's openapi_extra."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"content": content}}
