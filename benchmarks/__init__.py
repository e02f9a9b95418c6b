"""Measurements, each side by side: run from the repository's folder, as in `python -m benchmarks.speed.decode --help`.

`convert`: what conversions keep; `speed`: passes, decoding, calls of attention; `long`: long inputs; `train`:
pretraining and fine-tuning; `gpu`: all that a GPU is to be asked; `versions`: what loads under which transformers.
Each has its JSON and plots in its `results/`. What stands here serves several.
"""
