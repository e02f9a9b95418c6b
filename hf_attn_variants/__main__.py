"""`python -m hf_attn_variants`: the `attn-variants` command, after the imports of the package."""

import sys

from attn_variants import main

sys.exit(main())
