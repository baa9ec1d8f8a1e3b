"""AttentionConfig: the defaults that tell an idle option from one that was chosen."""

import dataclasses
import inspect

from attn_jax.nn import MultiHeadAttention, TransformerConfig
from attn_jax.nn.options import AttentionConfig, fill_sizes


def test_defaults_are_those_of_the_module_and_of_the_transformer():
    """A default that differed would be refused as a choice without effect."""
    module = inspect.signature(MultiHeadAttention.__init__).parameters
    transformer = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    for field in dataclasses.fields(AttentionConfig):
        if field.name == "sizes":
            continue
        assert module[field.name].default == field.default, field.name
        if field.name in transformer and field.name != "positions":
            assert transformer[field.name] == field.default, field.name


def test_it_is_a_value():
    first, second = (
        AttentionConfig(sizes=fill_sizes(12, 6), local_window_size=window, scale_rule="none") for window in (2, [2, 2])
    )
    assert first == second
    assert hash(first) == hash(second)
    assert first.scale == 1.0
