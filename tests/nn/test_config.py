"""TransformerConfig: a checked value."""

import dataclasses
import json

import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
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
        ({"norm_position": "both"}, "norm_position must be one of 'pre', 'post'"),
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
    ],
)
def test_wrong_configuration(change, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        nnx.eval_shape(lambda: Transformer(TransformerConfig(**{**SIZES, **change}), rngs=nnx.Rngs(0)))
    assert "\n" not in str(raised.value)
