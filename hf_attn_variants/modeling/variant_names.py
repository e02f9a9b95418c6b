"""The version of this code, the names that it registers with transformers, and the transformers it was run with."""

__all__ = [
    "ATTN_VARIANTS_VERSION",
    "CONFIG_FORMAT",
    "EAGER",
    "NEWEST_RUN",
    "OLDEST_RUN",
    "RECORDING",
    "SDPA",
]

ATTN_VARIANTS_VERSION = "0.2.0"
# The range of transformers that this code was run with (docs/compatibility.md).
OLDEST_RUN, NEWEST_RUN = "5.15", "5.24"

# The format of a configuration's fields. Other numbers, and none, were used before the first release, with other
# meanings for padded rows.
CONFIG_FORMAT = 5

# Registered names carry the version: the installed package and a Hub repository of another version share one process.
_VERSION = ATTN_VARIANTS_VERSION.replace(".", "_")
EAGER = f"attn_variants_eager_{_VERSION}"
SDPA = f"attn_variants_sdpa_{_VERSION}"
# Of a conversion that looks what attentions are called with: it answers as they do.
RECORDING = f"attn_variants_recording_{_VERSION}"
