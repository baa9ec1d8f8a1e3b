"""The flags of the saturation sweep: which sweeps can be measured."""

import pytest

from experiments.softmax_saturation.config import SaturationConfig


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gradient_length": 100}, "gradient_length must be one of lengths"),
        ({"lengths": (256,)}, "lengths must hold at least two"),
        ({"head_dims": (4,)}, "head_dims must hold at least two"),
        ({"model_width": 8, "head_dims": (16, 32)}, "head_dims must hold a width of at most model_width"),
    ],
)
def test_a_configuration_that_cannot_be_measured_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        SaturationConfig(**fields)
