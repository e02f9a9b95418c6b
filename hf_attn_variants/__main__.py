"""`python -m hf_attn_variants`: the `attn-variants` command."""

import sys

from .cli import main

sys.exit(main())
