"""Check that a user's mistake prints or raises its message of docs/troubleshooting.md."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from fixtures.data_files import edit_json
from transformers import AutoModel, AutoTokenizer, BertConfig, configuration_utils

from hf_attn_variants import AttnVariantBertModel, cli, convert

PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.M)


@pytest.fixture
def user(shelf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shelf.put("bert", Path("bert"))
    return User(shelf, monkeypatch, capsys)


class User:
    """A user that makes each mistake in the working directory and returns the message."""

    def __init__(self, shelf, monkeypatch, capsys):
        self.shelf, self.monkeypatch, self.capsys = shelf, monkeypatch, capsys

    def printed(self, *argv):
        try:
            status = cli.main([str(item) for item in argv])
        except SystemExit as stopped:  # argparse exits
            status = stopped.code
        assert status
        return self.capsys.readouterr().err

    def convert(self, *argv):
        return self.printed("convert", *argv, "--output_dir", "out")

    def raised(self, load, *args, **kwargs):
        with pytest.raises((ValueError, OSError)) as error:
            load(*args, **kwargs)
        return str(error.value)

    def missing_folder(self):
        return self.convert("brt", "--num_key_value_heads", 4)

    def missing_config(self):
        Path("models").mkdir()
        return self.convert("models", "--num_key_value_heads", 4)

    def other_architecture(self):
        Path("llama").mkdir()
        Path("llama/config.json").write_text(json.dumps({"model_type": "llama"}))
        return self.printed("inspect", "llama")

    def no_remote_code(self):
        self.shelf.put("bert-gqa4", Path("bert-gqa4"))
        # Transformers only asks for `trust_remote_code` if no installed package has registered the model type.
        edit_json(Path("bert-gqa4/config.json"), model_type="not_registered")
        return self.raised(AutoModel.from_pretrained, "bert-gqa4")

    def transformers_class(self):
        self.shelf.put("bert-gqa4", Path("bert-gqa4"))
        warnings = []
        self.monkeypatch.setattr(configuration_utils.logger, "warning", warnings.append)
        BertConfig.from_pretrained("bert-gqa4")  # `BertModel.from_pretrained` calls this function
        return warnings[0]

    def no_tokenizer(self):
        convert("bert", 4, method="mean").save_pretrained("saved")
        return self.raised(AutoTokenizer.from_pretrained, "saved")

    def not_converted(self):
        return self.raised(AttnVariantBertModel.from_pretrained, "bert", num_key_value_heads=4)

    def misspelled_field(self):
        return self.raised(AttnVariantBertModel.from_pretrained, "bert", num_kv_heads=4)

    def no_divisor(self):
        return self.convert("bert", "--num_key_value_heads", 5)

    def no_text(self):
        self.shelf.put("t5", Path("t5"))
        return self.convert("t5", "--num_key_value_heads", 2)

    def little_text(self):
        Path("lines.txt").write_text("a dog sees the cat\nthe cat sees a dog\n")
        return self.convert("bert", "--num_key_value_heads", 4, "--calibration_file", "lines.txt")

    def full_folder(self):
        Path("out").mkdir()
        Path("out/notes.txt").touch()
        return self.convert("bert", "--num_key_value_heads", 4)

    def wrong_flag(self):
        return self.convert("bert", "--kv_heads", 4)

    def missing_extra(self):
        find_spec = importlib.util.find_spec
        without = lambda name, package=None: None if name == "evaluate" else find_spec(name, package)  # noqa: E731
        self.monkeypatch.setattr(importlib.util, "find_spec", without)
        return self.printed("glue", "bert", "--task_name", "sst2", "--output_dir", "out")

    def wrong_column(self):
        Path("table.csv").write_text("a,b\n1,2\n")
        return self.convert("bert", "--num_key_value_heads", 4, "--calibration_file", "table.csv")

    def wrong_format(self):
        Path("table.parquet").touch()
        return self.printed("classify", "bert", "--train_file", "table.parquet", "--output_dir", "out")


MISTAKES = [User.missing_folder, User.missing_config, User.other_architecture, User.no_remote_code]
MISTAKES += [
    User.transformers_class,
    User.no_tokenizer,
    User.not_converted,
    User.misspelled_field,
    User.no_divisor,
    User.no_text,
    User.little_text,
]
MISTAKES += [User.full_folder, User.wrong_flag, User.missing_extra, User.wrong_column, User.wrong_format]


def remove_markup(text):
    return " ".join(text.replace("`", "").split())


@pytest.mark.parametrize(("heading", "mistake"), list(zip(HEADINGS, MISTAKES, strict=True)))
def test_mistake_gives_the_message_of_the_page(heading, mistake, user):
    pattern = ".*".join(map(re.escape, remove_markup(heading).split("...")))
    assert re.search(pattern, remove_markup(mistake(user)), re.I)
