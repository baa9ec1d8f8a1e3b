"""The families of checkpoints that are read, by format and by what a file calls its architecture.

A family is a module that has, for each format it is read from, a function that makes the configuration and one that
makes the name map:

    GGUF           config_from_gguf(file) -> TransformerConfig             gguf_map(file, config) -> list[Entry]
    safetensors    config_from_json(file, settings) -> TransformerConfig   safetensors_map(file, config) -> list[Entry]

and `BUFFERS`, patterns of the tensors that its files may hold and no parameter takes.
"""

from types import ModuleType

from attn_jax.models import bert, gemma, gpt2, llama

GGUF: dict[str, ModuleType] = {"gemma3": gemma, "llama": llama}  # by general.architecture
SAFETENSORS: dict[str, ModuleType] = {  # by model_type of the config.json
    "bert": bert,
    "gemma3_text": gemma,
    "gpt2": gpt2,
    "llama": llama,
}
