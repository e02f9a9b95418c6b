"""The version of this code, the names that it registers in Transformers, and the tested Transformers versions."""

from typing import Any

__all__ = [
    "ATTN_VARIANTS_VERSION",
    "CODE_DIGEST",
    "CONFIG_FORMAT",
    "EAGER",
    "INCLUDED_MECHANISMS",
    "MODEL_FOLDERS",
    "NAME_SUFFIX",
    "NEWEST_TESTED",
    "OLDEST_TESTED",
    "RECORDING_IMPLEMENTATION",
    "SDPA",
    "MissingDefinition",
    "get_plain_implementation",
    "includes",
]

ATTN_VARIANTS_VERSION = "0.2.0"
# The range of Transformers releases with which this code was tested (docs/compatibility.md).
OLDEST_TESTED, NEWEST_TESTED = "5.15", "5.24"
# The folders in transformers.models with the attention classes that this code supports.
MODEL_FOLDERS = (
    *("albert", "bart", "bert", "distilbert", "electra", "m2m_100", "marian", "mbart", "modernbert"),
    *("nomic_bert", "pegasus", "roberta", "t5", "umt5", "whisper"),
)

# The format of the configuration fields. Configurations from before the first release have another number or none, and
# they handle padded rows differently.
CONFIG_FORMAT = 5

# In a repository, `code_builder` replaces these two values by the mechanisms that the code includes and by its digest.
INCLUDED_MECHANISMS: tuple[str, ...] | None = None
CODE_DIGEST = ""

# Transformers and torch register names once per process. The version and the digest distinguish the installed package
# from the code in repositories.
NAME_SUFFIX = ATTN_VARIANTS_VERSION.replace(".", "_") + (f"_{CODE_DIGEST}" if CODE_DIGEST else "")
EAGER = f"attn_variants_eager_{NAME_SUFFIX}"
SDPA = f"attn_variants_sdpa_{NAME_SUFFIX}"
# The attention function that records the inputs of attention modules during conversion.
RECORDING_IMPLEMENTATION = f"attn_variants_recording_{NAME_SUFFIX}"


def includes(*mechanisms: str) -> bool:
    """Return True if this code includes any of these mechanisms. The installed package includes all mechanisms."""
    return INCLUDED_MECHANISMS is None or not {*mechanisms}.isdisjoint(INCLUDED_MECHANISMS)


def get_plain_implementation(name: Any) -> Any:
    """Return "eager" or "sdpa" for a name registered by this package or a repository, and other names unchanged."""
    if isinstance(name, str) and name.startswith(("attn_variants_eager_", "attn_variants_sdpa_")):
        return name.split("_")[2]
    return name


class MissingDefinition:
    """A placeholder for a definition that a repository does not include, because its model does not use the mechanism.

    Raises:
        ImportError: if the placeholder is called.
    """

    mechanisms: tuple[str, ...] = ()
    name = stage = ""  # no configuration field has this value

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise an error that names the missing definition."""
        raise ImportError(
            f"This repository does not include `{cls.__name__}` ({', '.join(cls.mechanisms)}), because its model does "
            "not use it. Install hf_attn_variants and import it before you load the model."
        )

    @classmethod
    def find_requesting_field(cls, config: Any, prefix: str) -> None:
        """Return None, because no attention module in this repository uses the mechanism."""
        return None
