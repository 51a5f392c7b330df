"""Mistral 7B v0.2 and later: Llama's layers, with sliding windows only where config.json sets one."""

from slime_like.weights.families import ModelFamily, llama, register_model_family

register_model_family(
    ModelFamily(
        architecture="MistralForCausalLM",
        model_type="mistral",
        parameters=llama.PARAMETERS,  # megatron-core's parameter -> the Hugging Face tensors it is made of
        required=("num_key_value_heads",),
        windows_by_size=True,
    )
)
