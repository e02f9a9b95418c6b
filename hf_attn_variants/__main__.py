"""Entry point of `python -m hf_attn_variants`, which runs the `attn-variants` command."""

import sys

from attn_variants import main

sys.exit(main())
