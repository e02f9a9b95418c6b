"""What every training script shares: arguments, data, metrics, one loop with exact resume, tracking.

Import from the submodules (`from hf_attn_variants.training.glue.task import main, parse_args`): they load datasets and
scikit-learn, which `import hf_attn_variants` alone should not have to do.
"""

__all__: list[str] = []
