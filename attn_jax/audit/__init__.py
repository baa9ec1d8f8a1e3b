"""Is somebody's attention right, and if not, which link is broken?

print(audit_attention(fn))
assert_attention_ok(fn)             # in a test suite
python -m attn_jax.audit --target=package.module:function
"""

from attn_jax.audit.battery import assert_attention_ok, audit_attention
from attn_jax.audit.context import Expectation
from attn_jax.audit.modules import audit_module
from attn_jax.audit.report import LINKS, AuditReport, Finding, Outcome

__all__ = [
    "LINKS",
    "AuditReport",
    "Expectation",
    "Finding",
    "Outcome",
    "assert_attention_ok",
    "audit_attention",
    "audit_module",
]
