"""Check BLEU and ROUGE of scripts without spaces or with other letters than a to z."""

import importlib.util

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from hf_attn_variants.commands.training import seq2seq, uptrain
from hf_attn_variants.training.seq2seq.metrics import choose_bleu_tokenizer, score_texts
from hf_attn_variants.training.seq2seq.task import load_seq2seq_data

JAPANESE = "ja-mecab" if all(map(importlib.util.find_spec, ("MeCab", "ipadic"))) else "char"
TEXTS = {
    "zh": ("今天天气很好我们去公园散步", "今天天气很好我们去公园跑步"),
    "ja": ("今日は天気がいいので公園を散歩します", "今日は天気がいいので公園を走ります"),
    "th": ("วันนี้อากาศดีมากเราไปเดินเล่นที่สวน", "วันนี้อากาศดีมากเราไปวิ่งเล่นที่สวน"),
    "ru": ("сегодня хорошая погода и мы идём гулять в парк", "сегодня хорошая погода и мы идём бегать в парк"),
    "el": ("σήμερα ο καιρός είναι καλός και πάμε στο πάρκο", "σήμερα ο καιρός είναι κακός και πάμε στο πάρκο"),  # noqa: RUF001
    "ar": ("الطقس جميل اليوم وسنذهب إلى الحديقة معا", "الطقس جميل اليوم وسنذهب إلى البيت معا"),
    "hi": ("आज मौसम अच्छा है और हम पार्क में घूमने जा रहे हैं", "आज मौसम अच्छा है और हम पार्क में दौड़ने जा रहे हैं"),
    "ko": ("오늘 날씨가 좋아서 우리는 공원에 산책하러 갑니다", "오늘 날씨가 좋아서 우리는 공원에 운동하러 갑니다"),
    "vi": (
        "hôm nay thời tiết đẹp và chúng tôi đi dạo công viên",
        "hôm nay thời tiết đẹp và chúng tôi đi bộ công viên",
    ),
}


@pytest.mark.parametrize("script", TEXTS)
def test_scripts_without_spaces_have_scores(script):
    reference, prediction = TEXTS[script]
    tokenize = {"zh": "zh", "ja": JAPANESE, "th": "char"}.get(script, "13a")
    assert choose_bleu_tokenizer([reference]) == tokenize
    result = score_texts(["bleu", "rouge"], [prediction], [(reference,)])
    assert result["bleu"] == sacrebleu.corpus_bleu([prediction], [[reference]], tokenize=tokenize).score > 40
    assert 70 < result["rougeL"] < 100 and result["rouge1"] < 100
    assert score_texts(["rouge"], [reference], [(reference,)])["rouge2"] == pytest.approx(100)


def test_rouge_treats_sentences_as_lines():
    text, reordered = "今天很好。我们走。", "我们走。今天很好。"
    assert score_texts(["rouge"], [text], [(reordered,)])["rougeLsum"] == pytest.approx(100)


def test_english_and_german_scores_do_not_change():
    predictions = ["A dog runs. Für zwei!", "cats sleeping"]
    references = [("The dog runs. Für drei!",), ("cats slept",)]
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    scores = [scorer.score(row[0], text)["rouge1"] for text, row in zip(predictions, references, strict=True)]
    result = score_texts(["bleu", "rouge"], predictions, references)
    assert result["rouge1"] == pytest.approx(50 * sum(score.fmeasure for score in scores))
    streams = [[row[0] for row in references]]
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, streams).score


@pytest.mark.parametrize(
    ("references", "language", "expected"),
    [
        (["the 中 sign of a long English sentence"], None, "13a"),
        (["我用 PyTorch 训练模型"], None, "zh"),
        (["東京大学"], "ja_XX", JAPANESE),
        (["1 2 3"], "zho_Hans", "zh"),
        (["a"], "th", "char"),
        (["a"], "de_DE", "13a"),
        ([], None, "13a"),
    ],
)
def test_tokenizer_is_selected_by_language(references, language, expected):
    assert choose_bleu_tokenizer(references, language) == expected


@pytest.mark.parametrize("flags", [[], ["--tokenize", "char"]])
def test_results_name_the_text_tokenizer(tmp_path, flags):
    for name, side in (("s", 0), ("t", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in [("one", "今天天气很好")] * 2))
    paths = ["--source_file", str(tmp_path / "s"), "--target_file", str(tmp_path / "t")]
    data = load_seq2seq_data(seq2seq.parse_args(["m", "--output_dir", "o", *paths, *flags]))
    assert data.results["bleu_tokenizer"] == (flags or ["zh"])[-1]
    score = data.score(["今天天气很坏"], [("今天天气很好",)])["bleu"]
    assert (
        score
        == sacrebleu.corpus_bleu(["今天天气很坏"], [["今天天气很好"]], tokenize=data.results["bleu_tokenizer"]).score
    )


def test_uptrain_supports_the_tokenizer_flag():
    argv = ["m", "--output_dir", "o", "--objective", "seq2seq", "--source_file", "a", "--target_file", "b"]
    assert uptrain.parse_args([*argv, "--tokenize", "zh"]).tokenize == "zh"
