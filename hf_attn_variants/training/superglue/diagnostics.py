"""SuperGLUE's two diagnostic sets, which a model of RTE predicts (arXiv:1905.00537, section 3.2): AX-b and AX-g.

AX-b is GLUE's broad-coverage set with two labels, and is scored by Matthews correlation. AX-g, Winogender, comes in
pairs of rows that follow each other and differ in the gender of a pronoun: accuracy, and gender parity, the share of
pairs whose two rows are given the same label.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_dataset
from sklearn.metrics import accuracy_score, matthews_corrcoef

from ...superglue_tasks import SUPERGLUE_DATASET, SuperGlueTask, get_superglue_task
from ...table_files import read_records
from .examples import Example, make_example
from .settings import SuperGlueSettings

__all__ = ["DIAGNOSTICS", "load_diagnostics", "score_diagnostic"]

logger = logging.getLogger(__name__)
RTE, AXB, AXG = "rte", "axb", "axg"
# By the Hub's names, those of the official folders and files.
DIAGNOSTICS = {AXB: "AX-b", AXG: "AX-g"}


def load_diagnostics(settings: SuperGlueSettings, task: SuperGlueTask) -> dict[str, list[Example]]:
    """Read the sets that there are, as rows of RTE: in the task's folder or beside it, or from the Hub.

    None is read for another task than RTE, where files are named one by one, or where nothing is to be predicted.

    Raises:
        OSError: if the Hub cannot be reached.
        ValueError: if a file is wrong; the message names it, the line and the row.
    """
    if task.name != RTE or settings.skip_predict:
        return {}
    if settings.data_dir is None:
        named = any((settings.train_file, settings.validation_file, settings.test_file))
        return {} if named else {name: _hub_rows(name) for name in DIAGNOSTICS}
    given = Path(settings.data_dir)
    found = {}
    for name, folder in DIAGNOSTICS.items():
        places = [given, given / folder, given.parent / folder]
        files = [place / f"{folder}.jsonl{end}" for place in places for end in ("", ".gz")]
        if (path := next((path for path in files if path.is_file()), None)) is not None:
            rows = [(record.place, record.values) for record in read_records(path)]
            if not rows:
                raise ValueError(f"{path} is empty: it has no row")
            found[name] = _examples(name, rows)
    return found


def _hub_rows(name: str) -> list[Example]:
    try:
        rows: list[Any] = list(load_dataset(SUPERGLUE_DATASET, name, split="test"))
    except Exception as error:  # the Hub's many ways to fail are one thing to the user
        raise OSError(
            f"cannot load {name} of {SUPERGLUE_DATASET} from the Hub ({type(error).__name__}: {error}); "
            "--skip_predict leaves it out, with the test split"
        ) from error
    return _examples(name, [(f"{SUPERGLUE_DATASET}, {name}, row {i}", row) for i, row in enumerate(rows, start=1)])


def _examples(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Example]:
    """Return rows as those of RTE, with their labels where all have one."""
    task = get_superglue_task(RTE)
    has_labels = all(row.get("label", -1) != -1 for _, row in rows)
    if name == AXB and "sentence1" in rows[0][1]:
        names = {"sentence1": "premise", "sentence2": "hypothesis"}
        rows = [(place, {names.get(key, key): value for key, value in row.items()}) for place, row in rows]
    return [make_example(task, row, place, has_labels) for place, row in rows]


def score_diagnostic(name: str, examples: Sequence[Example], predicted: np.ndarray) -> dict[str, float]:
    """Return a set's scores, by "axb_..." or "axg_..."; none where its labels are not known.

    Args:
        name: one of `DIAGNOSTICS`.
        examples: the set's.
        predicted: class ids of RTE [examples].
    """
    scores: dict[str, float] = {}
    labels = np.array([label for example in examples for label in example.labels or ()])
    if len(labels) and name == AXB:
        scores["matthews_correlation"] = float(matthews_corrcoef(labels, predicted))
    elif len(labels):
        scores["accuracy"] = float(accuracy_score(labels, predicted))
    if name == AXG:
        hypotheses = [example.texts[0][1] for example in examples]
        if len(examples) % 2 == 0 and hypotheses[::2] == hypotheses[1::2]:
            scores["gender_parity"] = float((predicted[::2] == predicted[1::2]).mean())
        else:
            logger.warning("AX-g: its rows are no pairs with the same hypothesis: there is no gender parity")
    return {f"{name}_{metric}": value for metric, value in scores.items()}
