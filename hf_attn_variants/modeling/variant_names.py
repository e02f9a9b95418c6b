"""The version of this code, and the names that it registers with transformers."""

__all__ = ["ATTN_VARIANTS_VERSION", "EAGER", "SDPA"]

ATTN_VARIANTS_VERSION = "0.1.0"

# Registered names carry the version: the installed package and a Hub repository of another version share one process.
EAGER = f"attn_variants_eager_{ATTN_VARIANTS_VERSION.replace('.', '_')}"
SDPA = f"attn_variants_sdpa_{ATTN_VARIANTS_VERSION.replace('.', '_')}"
