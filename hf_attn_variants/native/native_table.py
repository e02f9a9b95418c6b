"""The table of architectures whose converted checkpoints need no remote code."""

from .eurobert import NativeEuroBertConfig
from .native_config import NativeConfigMixin
from .t5gemma import NativeT5GemmaConfig

# Each new architecture requires a class and a row in this table.
NATIVE_CONFIGS: tuple[type[NativeConfigMixin], ...] = (NativeEuroBertConfig, NativeT5GemmaConfig)
