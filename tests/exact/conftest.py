"""Fixtures of the tests of exact attention."""

import functools

import pytest

from tests.exact.calls import call
from tests.exact.conformance import GENERAL


@pytest.fixture(params=[implementation.name for implementation in GENERAL])
def attend(request):
    """`dot_product_attention` by one implementation, jitted: compiling a call whole is cheaper than its parts."""
    return functools.partial(call, request.param)
