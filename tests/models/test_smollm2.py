"""SmolLM2-135M-Instruct against the logits that `transformers` computes in float32 from the same file."""

import jax
import numpy as np
import pytest

SHORT = 24  # tokens, where the whole excerpt is not needed


@pytest.fixture(scope="module")
def logits(smollm2, golden):
    """Of the excerpt's 512 tokens, under jit."""
    return np.asarray(jax.jit(lambda model, token_ids: model(token_ids))(smollm2.model, golden["token_ids"]))


def test_configuration(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.model_width, config.mlp_width) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_width) == (9, 3, 64)
    assert (config.rotary_base, config.norm_epsilon) == (100000.0, pytest.approx(1e-5))
    assert config.head == "tied"
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.model)) == 134_515_008


def test_logits(logits, golden):
    assert logits.shape == (512, 49152)
    assert np.abs(logits[golden["positions"]] - golden["logits"]).max() <= 2e-3


def test_most_likely_token_at_every_position(logits, golden):
    """Two logits that are each off by up to 2e-3 can swap where they lie within 4e-3: there no order is promised."""
    clear = golden["gap"] >= 4e-3
    assert clear.sum() >= 500
    np.testing.assert_array_equal(logits.argmax(-1)[clear], golden["arg_max"][clear])
    ordered = np.sort(logits, axis=-1)
    np.testing.assert_allclose(ordered[:, -1] - ordered[:, -2], golden["gap"], atol=4e-3)


def test_rows_of_different_lengths(smollm2, golden, logits):
    """A padded batch gives each row what it gives alone, whatever the padding holds."""
    batch = np.stack([golden["token_ids"][:SHORT], golden["token_ids"][:SHORT]])
    batch[1, 10:] = 49151
    batched = smollm2.model(batch, np.array([SHORT, 10]))
    assert batched.shape == (2, SHORT, 49152)
    np.testing.assert_allclose(batched[0], logits[:SHORT], atol=2e-3)
    np.testing.assert_allclose(batched[1, :10], logits[:10], atol=2e-3)


def test_statistics_of_every_layer(smollm2, golden, logits):
    result, statistics = smollm2.model(golden["token_ids"][:SHORT], return_statistics=True)
    np.testing.assert_allclose(result, logits[:SHORT], atol=2e-3)
    assert len(statistics) == 30
    for layer in statistics:
        assert layer.entropy.shape == layer.max_weight.shape == (SHORT, 9)
        np.testing.assert_array_equal(layer.visible_keys, np.arange(1, SHORT + 1)[:, None] * np.ones((1, 9)))
        assert (layer.entropy <= np.log(layer.visible_keys) + 1e-5).all()


def test_it_speaks(smollm2):
    token_ids = smollm2.tokenizer.encode("The capital of France is").ids
    following = smollm2.model(np.array(token_ids))[-1].argmax()
    assert smollm2.tokenizer.decode([int(following)]) == " Paris"
