"""Multiplies attention extensions into the projections of a checkpoint, for formats that cannot express them."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch

from ..conversion.attention_modules import find_stored_prefix
from ..conversion.checkpoint.tensor_files import CheckpointReader
from ..inspection.costs import resolve_source_model
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..modeling.fields.composition import ATTENTION_EXTENSIONS
from ..modeling.mechanisms.attention_extension import get_extensions
from ..modeling.mechanisms.mechanism import PREFIXES

# The fields of the extensions that a projection can express.
FOLDED_FIELDS = frozenset(
    prefix + extension.field for extension in ATTENTION_EXTENSIONS if hasattr(extension, "fold") for prefix in PREFIXES
)


class FoldedReader(CheckpointReader):
    """Reads a checkpoint whose foldable extensions are multiplied into the projections.

    Args:
        reader: The reader of the checkpoint.
        model: The model of the checkpoint, on the meta device.
    """

    def __init__(self, reader: CheckpointReader, model: AttnVariantModelMixin):
        super().__init__(reader.folder, reader.files, reader.index_metadata)
        self._reader, self.entries = reader, dict(reader.entries)
        # For each weight and bias of a projection: the extension, the role, and the rows with this role.
        self._foldings: dict[str, list[tuple[Any, str, slice]]] = {}
        for site, path, module in model.named_attention_modules():
            core: Any = module.get_submodule(site.core)
            prefix = find_stored_prefix(model, f"{path}.{site.query}.weight", reader.entries) + path
            for name, extension in get_extensions(core).items():
                if not hasattr(extension, "fold"):
                    continue
                extension_path = ".".join(filter(None, (prefix, site.core, name)))
                state = {part: reader.read(f"{extension_path}.{part}") for part in extension.state_dict()}
                extension.load_state_dict(state, assign=True)
                for part in state:
                    del self.entries[f"{extension_path}.{part}"]
                rows = dict.fromkeys(site.projections, slice(None))
                if site.is_fused:
                    ends = list(accumulate(core.heads.fused_rows, initial=0))
                    rows |= dict(zip(("query", "key", "value"), map(slice, ends, ends[1:]), strict=False))
                for role, linear in site.projections.items():
                    for part in ("weight", "bias"):
                        foldings = self._foldings.setdefault(f"{prefix}.{linear}.{part}", [])
                        foldings.append((extension, role, rows[role]))

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into newly allocated memory."""
        tensor = self._reader.read(name)
        for extension, role, rows in self._foldings.get(name, ()):
            tensor[rows] = extension.fold(role, tensor[rows])
        return tensor

    def iterate_chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        return super().iterate_chunks(name) if name in self._foldings else self._reader.iterate_chunks(name)


def fold_extensions(reader: CheckpointReader, config: Mapping[str, Any]) -> tuple[CheckpointReader, dict[str, Any]]:
    """Return a reader and a `config.json` without the extensions that a projection can express.

    Args:
        reader: The reader of the checkpoint.
        config: Its `config.json`.
    """
    remaining = {name: value for name, value in config.items() if name not in FOLDED_FIELDS}
    if all(config.get(name) is None for name in config.keys() - remaining.keys()):
        return reader, remaining
    model_class, model_config = resolve_source_model(config)
    with torch.device("meta"):
        model = model_class(model_config)
    return FoldedReader(reader, model), remaining
