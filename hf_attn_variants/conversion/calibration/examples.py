"""Calibration examples as users have them: lists, files of lines, tables, and folders of audio."""

import os
import random
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import FeatureExtractionMixin, PreTrainedModel

from ...model_properties import ignore_saved_length_limits
from ...progress import progress_bar
from ...text_files import read_columns, read_lines, read_pairs, text_columns
from ..calibration_settings import AUDIO_CALIBRATION_SIZE, CALIBRATION_SIZE, MIN_TEXTS, Calibration, CalibrationLike
from .batches import (
    ENCODER_OUTPUTS,
    MIN_TOKENS,
    Batch,
    check_audio,
    chunks_of,
    drawn_parts,
    from_generated,
    written_tokens,
)

__all__ = [
    "AUDIO_FILES",
    "as_calibration",
    "audio_batches",
    "heard",
    "load_audio",
    "read_audio_calibration",
    "read_calibration",
    "read_features",
    "transcribed",
]

# How the names of files end that are taken for audio; all but the first are read by the package soundfile.
AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg")
# What a wav file begins with.
CONTAINERS = (b"RIFF", b"RIFX", b"RF64")


def read_audio_calibration(
    folder: str | os.PathLike, *, size: int | None = None, seed: int = 0, **settings: Any
) -> Calibration:
    """Find audio files in a folder and those below it, and draw some of them.

    Args:
        folder: where they are; `AUDIO_FILES` says how their names end.
        size: how many are drawn, two at least; None = 64.
        seed: which ones.
        settings: further fields of `Calibration`.

    Raises:
        OSError: if there is no such folder.
        ValueError: if it has too few files.
    """
    size = AUDIO_CALIBRATION_SIZE if size is None else size
    if size < MIN_TEXTS:
        raise ValueError(f"`size` (--calibration_size) must be at least {MIN_TEXTS}; got {size}.")
    root = Path(folder).expanduser()
    if root.is_file():
        raise NotADirectoryError(
            f"{os.fspath(folder)!r:.200} is a file: give the folder of audio that it is in (--calibration_audio_dir)."
        )
    if not root.is_dir():
        raise NotADirectoryError(f"there is no folder {os.fspath(folder)!r:.200} of audio (--calibration_audio_dir).")
    recordings = sorted(path for path in root.rglob("*") if path.suffix.lower() in AUDIO_FILES and path.is_file())
    if len(recordings) < MIN_TEXTS:
        raise ValueError(
            f"a calibration needs {MIN_TEXTS} audio files at least ({', '.join(AUDIO_FILES)}); {os.fspath(folder)} "
            f"has {len(recordings)}."
        )
    if len(recordings) > size:
        recordings = sorted(random.Random(seed).sample(recordings, size))
    return Calibration(audio=recordings, **settings)


def load_audio(path: str | os.PathLike) -> tuple[np.ndarray, int]:
    """Read a file of audio: its samples [n], float32 in [-1, 1], the mean of its channels, and how many a second.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is no audio, or none that Python reads by itself and the package soundfile is not there.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no audio file {os.fspath(path)!r:.200}.")
    if path.suffix.lower() == ".wav":
        try:
            return _read_wav(path)
        except (wave.Error, EOFError) as error:
            with path.open("rb") as file:
                if file.read(4) not in CONTAINERS:
                    raise ValueError(f"{path} is no audio: a wav file begins with RIFF.") from None
            reason = f"no plain PCM ({str(error) or 'it ends too soon'})"
    else:
        reason = f"a {path.suffix or 'nameless'} file"
    try:
        import soundfile
    except ImportError:
        raise ValueError(
            f"{path} is {reason}: `pip install soundfile` to have it read, or make it a PCM wav."
        ) from None
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return samples.mean(1), rate


def _read_wav(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(os.fspath(path)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        data = np.frombuffer(file.readframes(file.getnframes()), dtype=np.uint8)
    data = data[: len(data) // (width * channels) * width * channels].reshape(-1, width)
    if width == 1:  # of a byte a sample, the middle is 128
        samples = data[:, 0].astype(np.float32) / 128 - 1
    else:
        whole = np.zeros((len(data), 4), np.uint8)  # the least of four bytes stand first
        whole[:, 4 - width :] = data
        samples = whole.view("<i4")[:, 0].astype(np.float32) / 2**31
    return samples.reshape(-1, channels).mean(1), rate


@torch.no_grad()
def audio_batches(
    model: PreTrainedModel,
    feature_extractor: FeatureExtractionMixin,
    calibration: Calibration,
    generator: torch.Generator,
) -> tuple[list[Batch], list[Batch]]:
    """Make batches of files: of those to fit to, and of those that are held out.

    A decoder's text is the model's own greedy output, by the languages and tasks of its generation configuration,
    without timestamps.

    Args:
        generator: draws the files that are held out.

    Raises:
        OSError, ValueError: for a file that cannot be read or has another sampling rate, or too little speech.
    """
    decodes = hasattr(model.base_model, "decoder")
    if decodes and not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} cannot generate what a decoder reads: convert the checkpoint as one that can, "
            "with `architectures` of its config.json."
        )
    features, loudness = zip(*(read_features(feature_extractor, path) for path in calibration.examples), strict=True)
    chunks: Any = chunks_of(calibration, [0] * len(features), drawn_parts(calibration, generator))
    chunks = progress_bar(chunks, desc="transcribing", unit="batch", leave=False) if decodes else chunks
    batches: tuple[list[Batch], list[Batch]] = ([], [])
    for part, rows in chunks:
        batches[part].append(heard(model, [features[i] for i in rows], calibration.length, decodes))
    _check_enough(batches, decodes)
    every = [batch for part in batches for batch in part if decodes]
    check_audio(loudness, [row for batch in every for row in written_tokens(batch, model.generation_config)])
    return batches


def read_features(feature_extractor: Any, path: str | os.PathLike) -> tuple[torch.Tensor, float]:
    """Return what the model reads of a file, [bins, frames], and how loud it is (root mean square).

    Raises:
        OSError, ValueError: if it cannot be read, or has another sampling rate.
    """
    samples, rate = load_audio(path)
    wanted = feature_extractor.sampling_rate
    if rate != wanted:
        raise ValueError(
            f"{os.fspath(path)} has {rate} samples a second and the model reads {wanted}: resample it, by "
            f"`ffmpeg -i FILE -ar {wanted} -ac 1 RESAMPLED.wav` for example."
        )
    loudness = float(np.sqrt(np.square(samples, dtype=np.float64).mean())) if len(samples) else 0.0
    return feature_extractor(samples, sampling_rate=rate, return_tensors="pt").input_features[0], loudness


def heard(model: PreTrainedModel, features: Sequence[torch.Tensor], max_length: int, decodes: bool = True) -> Batch:
    """Return a batch of recordings with what the model writes of them, and what its encoder made of them.

    The encoder of a Whisper does most of the work here: what it made is kept, for what reads the batch next.

    Args:
        model: the source.
        features: of each recording, [bins, frames].
        max_length: tokens at which the output is cut.
        decodes: whether the model has a decoder.
    """
    batch = {"input_features": torch.stack(list(features))}
    if decodes:
        with _encoder_outputs(model) as outputs:
            batch |= transcribed(model, batch, max_length)
        # A call that finds the language may come first. Of a part of the batch nobody knows which rows it is.
        if outputs and all(len(each) == len(features) for each in outputs):
            batch[ENCODER_OUTPUTS] = outputs[-1].cpu()
    return batch


@contextmanager
def _encoder_outputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Keep what the encoder returns while the block runs."""
    outputs: list[torch.Tensor] = []
    encoder: Any = model.get_encoder()
    hook = encoder.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    try:
        yield outputs
    finally:
        hook.remove()


@torch.no_grad()
def transcribed(model: PreTrainedModel, batch: Batch, max_length: int) -> Batch:
    """Return a decoder's arguments that lead to what the model itself writes, greedily, of a batch of audio."""
    # Half of its positions are a prompt's, in Whisper's own code.
    limit = min(max_length, model.config.max_target_positions // 2)
    # To `max_length` Whisper's code adds the prompt; with `max_new_tokens` it would warn that both are set.
    options = {"do_sample": False, "num_beams": 1, "return_timestamps": False, "max_length": limit}
    # One call, whose output has the prompt too: else a window in which a time comes up is heard in parts.
    options |= {"force_unique_generate_call": True, "return_dict_in_generate": True}
    features = batch["input_features"].to(model.device)
    mask = torch.ones_like(features[:, 0], dtype=torch.long)  # [b, frames]: all of a window is heard
    with ignore_saved_length_limits(model):
        generate: Any = model.generate
        generated = generate(features, attention_mask=mask, **options)
    return from_generated(generated.sequences, model.generation_config.pad_token_id)


def _check_enough(batches: Sequence[Sequence[Batch]], decodes: bool) -> None:
    every = [batch for part in batches for batch in part]
    if decodes and (tokens := sum(int(batch["decoder_attention_mask"].sum()) for batch in every)) < MIN_TOKENS:
        files = sum(len(batch["input_features"]) for batch in every)
        raise ValueError(
            f"the model makes {tokens} tokens of {files} files of audio: {MIN_TOKENS} are the least; give more speech."
        )


def as_calibration(calibration: CalibrationLike | None, seed: int = 0) -> Calibration | None:
    """Return a calibration of what a user gave: one, texts or pairs of texts, a path, or None.

    The path is of a file of texts, or of a folder of audio.

    Raises:
        TypeError: if it is anything else.
        ValueError, OSError: as for `Calibration` and `read_calibration`, which draws examples by the seed.
    """
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    if isinstance(calibration, str | os.PathLike):
        if not Path(calibration).expanduser().exists():
            raise FileNotFoundError(
                f"there is no calibration file {os.fspath(calibration)!r:.200}; texts themselves are given as a list."
            )
        is_folder = Path(calibration).expanduser().is_dir()
        return (read_audio_calibration if is_folder else read_calibration)(calibration, seed=seed)
    if isinstance(calibration, Sequence) and not isinstance(calibration, bytes | bytearray):
        return Calibration(calibration)
    raise TypeError(
        "`calibration` takes a list of texts, a list of pairs of texts, the path of a text file, of a table or of a "
        f"folder of audio, or a `Calibration`; got {type(calibration).__name__}."
    )


def read_calibration(
    path: str | os.PathLike,
    *,
    columns: Sequence[str] | str | None = None,
    target_file: str | os.PathLike | None = None,
    target_column: str | None = None,
    size: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Calibration:
    """Read calibration text from a file and draw examples of it.

    Args:
        path: UTF-8 text, an example a line, or a table (.csv, .tsv, .json, .jsonl); .gz too.
        columns: of a table: its column of texts, or two columns of texts that the model reads as pairs; None = "text".
        target_file: encoder-decoders: the target of each line.
        target_column: the same in a table.
        size: how many examples are drawn, two at least; None = 2048.
        seed: which ones.
        settings: further fields of `Calibration`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if it holds something else, or an argument does not go with it.
    """
    size = CALIBRATION_SIZE if size is None else size
    if size < MIN_TEXTS:
        raise ValueError(f"`size` (--calibration_size) must be at least {MIN_TEXTS}; got {size}.")
    if isinstance(columns, str):
        columns = [columns]
    texts, targets = _read_examples(path, columns, target_file, target_column)
    if len(texts) > size:
        chosen = sorted(random.Random(seed).sample(range(len(texts)), size))
        texts, targets = [texts[i] for i in chosen], targets and [targets[i] for i in chosen]
    return Calibration(texts, targets, **settings)


def _read_examples(
    path: str | os.PathLike,
    columns: Sequence[str] | None,
    target_file: str | os.PathLike | None,
    target_column: str | None,
) -> tuple[list[Any], list[str] | None]:
    """Read texts, or pairs of them, and the targets, if any."""
    of_texts = "`columns` of `read_calibration` (--calibration_columns)"
    of_targets = "`target_column` of `read_calibration` (--calibration_target_column)"
    text_names = text_columns([path], columns, of_texts)
    if text_names:
        if target_file is not None:
            raise ValueError(
                f"`target_file` (--calibration_target_file) is for lines of text; a table takes {of_targets}."
            )
        named = of_texts + (f" and {of_targets}" if target_column else "")
        rows = read_columns([path], [*text_names, *([target_column] if target_column else [])], named)
        texts = [row[: len(text_names)] if len(text_names) == 2 else row[0] for row in rows]
        return texts, [row[-1] for row in rows] if target_column else None
    if target_column is not None:
        raise ValueError(f"{of_targets} is for a table; {path} is none.")
    if target_file is None:
        return read_lines([path]), None
    sources, targets = zip(*read_pairs(path, target_file), strict=True)
    return list(sources), list(targets)
