"""TransformerConfig: a checked value."""

import dataclasses
import json

import pytest

from attn_jax.nn import LayerOptions, TransformerConfig
from attn_jax.positions import NTK
from tests.nn.test_transformer import DECODER, SIZES


def test_config_is_a_value_and_goes_into_json():
    again = TransformerConfig(**SIZES, mlp_width=10, rotary_base=100.0)
    assert again == DECODER
    assert hash(again) == hash(DECODER)
    record = {key: x for key, x in dataclasses.asdict(DECODER).items() if key != "attention_fn"}
    assert TransformerConfig(**json.loads(json.dumps(record))) == DECODER
    assert TransformerConfig(17, 1, 12, 6).head_width == 2
    windows = {dataclasses.replace(DECODER, local_window_size=window) for window in (2, (2, 2), [2, 2])}
    assert len(windows) == 1
    patterns = {
        TransformerConfig(**SIZES, layer_pattern=[LayerOptions(local_window_size=window)]) for window in (2, (2, 2))
    }
    assert len(patterns) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be at least 1, got 0"),
        ({"num_layers": 1.5}, "num_layers must be an integer"),
        ({"head_width": None, "model_width": 13}, "model_width must be a multiple of num_heads .* got 13 and 6"),
        ({"num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        ({"mlp": "swiglu"}, "mlp must be one of 'gated', 'plain'; got 'swiglu'"),
        ({"activation": "swish"}, "activation must be one of"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'layer'"),
        ({"norm_position": "sandwich"}, "norm_position must be one of 'pre', 'post', 'both'"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be positive"),
        ({"head": "shared"}, "head must be one of 'tied', 'untied', None"),
        ({"positions": "rope"}, "positions must be one of 'rotary'"),
        ({"positions": "learned"}, "max_length must be an integer"),
        ({"max_length": 9}, "max_length sizes the table of positions='learned', got positions='rotary'"),
        ({"positions": "sinusoidal", "model_width": 13}, "model_width must be even for positions='sinusoidal'"),
        ({"dropout_rate": 1.0}, r"dropout_rate must lie in \[0, 1\)"),
        ({"dtype": "int8"}, "dtype must be a floating dtype, got 'int8'"),
        ({"local_window_size": -1}, "local_window_size must be at least 0, got -1"),
        ({"precision": "best"}, "precision must be one of"),
        ({"scale_rule": "sqrt"}, "rule must be one of"),
        ({"qk_norm": "layer"}, "qk_norm must be one of"),
        ({"causal": "yes"}, "causal must be True or False"),
        ({"logits_soft_cap": -1}, "logits_soft_cap must be positive and finite"),
        ({"logits_soft_cap": "a"}, "logits_soft_cap must be one number, got str 'a'"),
        ({"scale_rule": None}, "scale_rule must be one number, got NoneType"),
        ({"learned_temperature": 1}, "learned_temperature must be True or False"),
        ({"use_sinks": 0}, "use_sinks must be True or False"),
        ({"use_bias": "no"}, "use_bias must be one of True, False, 'attention', 'mlp'; got 'no'"),
        ({"embedding_norm": 1}, "embedding_norm must be True or False"),
        ({"num_token_types": 0}, "num_token_types must be at least 1, got 0"),
        ({"layer_pattern": ()}, "layer_pattern must be None or a tuple of LayerOptions, got"),
        ({"layer_pattern": (3,)}, "layer_pattern must be None or a tuple of LayerOptions, got"),
        ({"layer_pattern": (LayerOptions(),) * 4}, "layer_pattern must have at most num_layers = 3 entries, got 4"),
        ({"layer_pattern": (LayerOptions(),), "rotary_base": 5.0}, "rotary_base has no effect beside a layer_pattern"),
        ({"layer_pattern": (LayerOptions(local_window_size=-1),)}, "local_window_size must be at least 0, got -1"),
        ({"layer_pattern": (LayerOptions(rotary_base=0.5),)}, "rotary_base must be greater than 1, got 0.5"),
        ({"tie_query_key": True}, "num_kv_heads must be 6 where tie_query_key"),
        ({"attention_fn": 3}, "attention_fn must be callable, got int"),
        ({"rotary_base": "a"}, "rotary_base must be one number, got str 'a'"),
        ({"rotary_base": 0.5}, "rotary_base must be greater than 1, got 0.5"),
        ({"rotary_interleaved": 1}, "rotary_interleaved must be True or False"),
        ({"rotary_scaling": "foo"}, "rotary_scaling must be None or one of Linear, .* got str"),
        ({"rotary_scaling": NTK(2.0), "head_width": 2}, "width must be at least 4 for NTK scaling, got 2"),
        ({"head_width": 3}, "head_width must be even for positions='rotary', got 3"),
        ({"positions": None, "rotary_scaling": NTK(2.0)}, "rotary_scaling has no effect without positions='rotary'"),
        ({"positions": "learned", "max_length": 8, "rotary_base": 5.0}, "rotary_base has no effect without .* got 5.0"),
        ({"positions": "sinusoidal", "rotary_interleaved": True}, "rotary_interleaved has no effect without"),
        ({"relative_buckets": 8}, "relative_buckets has no effect without positions='relative', got 8"),
        ({"relative_max_distance": 8}, "relative_max_distance has no effect without positions='relative', got 8"),
        ({"positions": "relative", "relative_buckets": 1}, "relative_buckets must be at least 2 with is_causal=True"),
        ({"positions": "relative", "relative_max_distance": 16}, "relative_max_distance must exceed the 16 distances"),
    ],
)
def test_wrong_configuration(change, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        TransformerConfig(**{**SIZES, **change})
    assert "\n" not in str(raised.value)
