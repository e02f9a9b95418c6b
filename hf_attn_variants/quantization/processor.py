"""What this machine's processor multiplies."""

from typing import Any

import torch

__all__ = ["processor_has"]


def processor_has(*names: str) -> bool:
    """Say whether this processor has one of some instructions.

    Args:
        names: as torch calls them ("avx512_vnni"). A torch that tells of none has none.
    """
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name, False) for name in names)
