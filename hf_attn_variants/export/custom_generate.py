"""Writes `share_memory` as a custom generation method of Transformers, which runs without this package."""

import os
from pathlib import Path

from ..files import check_output_dir, staged_folder
from ..modeling.code_builder import build_single_file

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# The modules outside `modeling/` from which definitions are taken.
MODULES = (
    PACKAGE_FOLDER / "shared_memory" / "custom_generate.py",
    PACKAGE_FOLDER / "shared_memory" / "installation.py",
    PACKAGE_FOLDER / "shared_memory" / "attention.py",
    PACKAGE_FOLDER / "model_properties.py",
)
CARD = """\
---
library_name: transformers
tags:
- custom_generate
---

# Beam search with shared memory

This generation method lets the beams of a sentence share one cross-attention cache, which does not change the tokens.
With four beams, the cross-attention cache is a quarter as large. T5, BART, Marian, Whisper and related models of
Transformers are supported.

```python
outputs = model.generate(**inputs, num_beams=4, custom_generate="{name}", trust_remote_code=True)
```

Set `cross_cache="encoder_outputs"` to cache the encoder outputs instead of the keys and values of each layer.
"""


def export_custom_generate(output_dir: str | os.PathLike) -> str:
    """Write a folder with `custom_generate/generate.py`, for `generate(custom_generate=output_dir)`.

    The folder can be pushed to the Hub, or its subfolder can be copied into the folder of a model.

    Args:
        output_dir: A new or empty folder.

    Returns:
        A printable summary.

    Raises:
        OSError: If the folder cannot be written.

    Example:
        >>> export_custom_generate("share-memory")
    """
    output = check_output_dir(output_dir)
    code = build_single_file("custom_generate", "generate", MODULES, frozenset({"latents"}))
    with staged_folder(output) as stage:
        (stage / "custom_generate").mkdir()
        (stage / "custom_generate" / "generate.py").write_text(code, encoding="utf-8")
        (stage / "README.md").write_text(CARD.format(name=output.name), encoding="utf-8")
    return (
        f"Wrote {output_dir}/custom_generate/generate.py ({len(code.splitlines()):,} lines). Run\n"
        f'  model.generate(..., num_beams=4, custom_generate="{output_dir}", trust_remote_code=True)'
    )
