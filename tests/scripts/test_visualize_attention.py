"""Check `scripts/visualize_attention.py` like a user."""

import pytest
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.uptraining import make_t5

import hf_attn_variants
from hf_attn_variants.commands.visualize import main, parse_args
from hf_attn_variants.errors import run_script


def run(*argv):
    """Run the script with its error handling in this process."""
    return run_script(lambda: main(parse_args(list(map(str, argv)))))


@pytest.fixture
def bert(tmp_path):
    return make_tiny_bert(tmp_path / "bert")


def test_talking_heads_checkpoint_is_visualized(bert, tmp_path, capsys):
    import transformers

    hf_attn_variants.convert(bert, talking_heads="both").save_pretrained(tmp_path / "talking")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "talking")
    arguments = ("--model_name_or_path", tmp_path / "talking", "--output_dir", tmp_path / "out")
    assert run(*arguments, "--text", "The cats were fine.") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["attention_maps.html"]
    assert str(tmp_path / "out" / "attention_maps.html") in capsys.readouterr().out


def test_plain_t5_is_visualized_with_its_generated_output(tmp_path, capsys):
    arguments = ("--model_name_or_path", make_t5(tmp_path / "t5"), "--output_dir", tmp_path / "out")
    assert run(*arguments, "--text", "the dog sees a cat", "--layers", 1, "--max_length", 8) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["attention_maps.html"]
    assert "Plotted 3 attention modules" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--text", "The cats.", "--layers", "2"], "--layers must be between 0 and 1, got 2"),
        (["--text", "The cats.", "--target_text", "x"], "`target_text`"),
        (["--text", " "], "`text`"),
    ],
)
def test_visualize_user_error_is_one_line_without_files(bert, tmp_path, capsys, options, message):
    assert run("--model_name_or_path", bert, "--output_dir", tmp_path / "out", *options) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]


def test_too_many_tokens_for_labels_raise_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(["--model_name_or_path", "m", "--output_dir", "o", "--text", "a", "--max_length", "65"])
    assert ended.value.code == 2 and "64" in capsys.readouterr().err
