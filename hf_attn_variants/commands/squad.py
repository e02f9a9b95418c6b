"""Command `attn-variants squad`, also run by `scripts/run_squad.py`."""

from ..training.squad.settings import SquadSettings
from .training import training_command

__all__ = ["main", "make_parser", "parse_args"]

DESCRIPTION = "Fine-tune and evaluate extractive question answering on SQuAD v1.1 or v2.0."
EPILOG = """example (SQuAD v1.1 from its JSON files, on the CPU):
  %(prog)s ./minilm-gqa4 --train_file squad/train-v1.1.json \\
      --validation_file squad/dev-v1.1.json --max_length 256 \\
      --num_train_epochs 1 --group_by_length --output_dir runs/squad --cpu

Without --train_file and --validation_file, SQuAD is read from the Hub: rajpurkar/squad, or rajpurkar/squad_v2 with
--version_2_with_negative. A context that is longer than --max_length is cut into windows, which share --doc_stride
tokens. "No answer" is the position of the first token, such as [CLS]. --output_dir contains the model,
all_results.json (exact match and F1, computed as in the official scripts), train_log.jsonl, training_curves.png,
predictions_dev.json (for the official scripts), predictions_nbest_dev.json and, for v2.0,
predictions_null_odds_dev.json. With --test_file, it also contains the predictions for the test split. For v2.0,
eval_best_f1 uses the threshold that is best on the dev set.

To continue an interrupted run, repeat the command with --resume_from_checkpoint latest."""

make_parser, parse_args, main = training_command(
    SquadSettings, "squad.task:SquadFineTuning", "run_squad.py", DESCRIPTION, EPILOG
)
