"""`python -m hf_attn_variants`: the `attn-variants` command."""

import sys

from hf_attn_variants.cli import main

sys.exit(main())
