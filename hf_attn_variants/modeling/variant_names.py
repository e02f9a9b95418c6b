"""The version of this code, the names that it registers with transformers, and the transformers it was run with."""

__all__ = [
    "ATTN_VARIANTS_VERSION",
    "CONFIG_FORMAT",
    "COUNTS_TOKENS",
    "EAGER",
    "NEWEST_RUN",
    "OLDEST_RUN",
    "RECORDING",
    "SCORES_BY_PLACE",
    "SDPA",
    "SIZES_VALUES",
    "TALKS_BY_PLACE",
]

ATTN_VARIANTS_VERSION = "0.2.0"
# The range of transformers that this code was run with (docs/compatibility.md).
OLDEST_RUN, NEWEST_RUN = "5.15", "5.24"

# The newest format of a configuration's fields: by its number a later release reads what they meant when they were
# saved, and an earlier one refuses what it does not know. Files without a number have the first.
CONFIG_FORMAT = 4
# From which on what counts tokens counts from a row's first one, and not from the padded row's beginning.
COUNTS_TOKENS = 2
# From which on heads may talk otherwise in each place and layer. What has none of that says the number before.
TALKS_BY_PLACE = 3
# From which on values may have another size than queries and keys, and scores be others in each place; likewise.
SIZES_VALUES = SCORES_BY_PLACE = 4

# Registered names carry the version: the installed package and a Hub repository of another version share one process.
_VERSION = ATTN_VARIANTS_VERSION.replace(".", "_")
EAGER = f"attn_variants_eager_{_VERSION}"
SDPA = f"attn_variants_sdpa_{_VERSION}"
# Of a conversion that looks what attentions are called with: it answers as they do.
RECORDING = f"attn_variants_recording_{_VERSION}"
