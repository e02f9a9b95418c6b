"""The version of this code, the names that it registers with Transformers, and the supported Transformers versions."""

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
    "RECORDING",
    "SDPA",
    "MissingDefinition",
    "get_plain_implementation",
]

ATTN_VARIANTS_VERSION = "0.2.0"
# The range of transformers that this code was run with (docs/compatibility.md).
OLDEST_TESTED, NEWEST_TESTED = "5.15", "5.24"
# The folders of transformers.models with the attention classes that this code was run with.
MODEL_FOLDERS = (
    *("albert", "bart", "bert", "distilbert", "electra", "m2m_100", "marian", "mbart", "pegasus", "roberta", "t5"),
    *("umt5", "whisper"),
)

# The format of the fields of a configuration. Configurations from before the first release have other numbers or none,
# and another treatment of padded rows.
CONFIG_FORMAT = 5

# `code_builder` replaces these two values in a repository: the mechanisms that its code includes, and its digest.
INCLUDED_MECHANISMS: tuple[str, ...] | None = None
CODE_DIGEST = ""

# Transformers and torch keep one table of names per process. The version and the digest keep the installed package and
# the code of repositories apart.
NAME_SUFFIX = ATTN_VARIANTS_VERSION.replace(".", "_") + (f"_{CODE_DIGEST}" if CODE_DIGEST else "")
EAGER = f"attn_variants_eager_{NAME_SUFFIX}"
SDPA = f"attn_variants_sdpa_{NAME_SUFFIX}"
# The attention function of a conversion that records the inputs of attention modules.
RECORDING = f"attn_variants_recording_{NAME_SUFFIX}"


def get_plain_implementation(name: Any) -> Any:
    """Return "eager" or "sdpa" for a registered name of this package or of a repository, and other names unchanged."""
    if isinstance(name, str) and name.startswith(("attn_variants_eager_", "attn_variants_sdpa_")):
        return name.split("_")[2]
    return name


class MissingDefinition:
    """A definition that a repository does not include, because its model does not use the mechanism.

    Raises:
        ImportError: if it is called.
    """

    mechanisms: tuple[str, ...] = ()
    name = ""  # no field of a configuration has this value

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise an error that names the missing code."""
        raise ImportError(
            f"This repository does not include `{cls.__name__}` ({', '.join(cls.mechanisms)}), because its model does "
            "not use it. Install hf_attn_variants and import it before you load the model."
        )

    @classmethod
    def requested_in(cls, config: Any, prefix: str) -> None:
        """Return None: no attention of this repository uses the mechanism."""
        return None
