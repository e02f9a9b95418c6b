"""Reads calibration examples from lists, text files, tables, and folders of audio files."""

import os
import random
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import FeatureExtractionMixin, PreTrainedModel

from ...model_properties import ignore_saved_length_limits
from ...progress import progress_bar
from ...text_files import read_columns, read_lines, read_pairs, resolve_text_columns
from ..calibration_settings import AUDIO_CALIBRATION_SIZE, CALIBRATION_SIZE, MIN_TEXTS, Calibration, CalibrationLike
from .batches import (
    ENCODER_OUTPUTS,
    MIN_TOKENS,
    Batch,
    check_audio,
    get_generated_tokens,
    group_by_length,
    make_decoder_arguments,
    split_examples,
)

# Suffixes of audio files. Files other than .wav require the soundfile package.
AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg")


def read_audio_calibration(
    folder: str | os.PathLike, *, size: int | None = None, seed: int = 0, **settings: Any
) -> Calibration:
    """Find the audio files in a folder and its subfolders, and select some of them at random.

    Args:
        folder: Folder with audio files (`AUDIO_FILES` lists their suffixes).
        size: Maximum number of files (at least 2). Defaults to 64.
        seed: Random seed for the selection.
        settings: Further arguments of `Calibration`.

    Returns:
        The calibration settings with the selected files.

    Raises:
        ValueError: if the folder contains too few files.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert, read_audio_calibration
    >>> calibration = read_audio_calibration("recordings", size=32)
    >>> model = convert("openai/whisper-tiny", num_key_value_heads=2, calibration=calibration)
    ```
    """
    paths = Path(folder).expanduser().rglob("*")
    recordings = sorted(path for path in paths if path.suffix.lower() in AUDIO_FILES and path.is_file())
    if len(recordings) < MIN_TEXTS:
        raise ValueError(
            f"`folder` (--calibration_audio_dir) must contain at least {MIN_TEXTS} audio files "
            f"({', '.join(AUDIO_FILES)}), got {len(recordings)} in {os.fspath(folder)!r:.200}. Check the path."
        )
    rows = _sample_indices(len(recordings), AUDIO_CALIBRATION_SIZE if size is None else size, seed)
    return Calibration(audio=[recordings[i] for i in rows], **settings)


def _sample_indices(count: int, size: int, seed: int) -> Sequence[int]:
    """Return the sorted indices of at most `size` examples out of `count`, sampled at random."""
    return range(count) if count <= size else sorted(random.Random(seed).sample(range(count), size))


def load_audio(path: str | os.PathLike) -> tuple[np.ndarray, int]:
    """Load an audio file and average its channels.

    Args:
        path: Path of the file.

    Returns:
        The samples [n], float32 in [-1, 1], and the sampling rate in Hz.

    Raises:
        OSError: if the file does not exist.
        ValueError: if the file is not audio, or if it requires the soundfile package and this is not installed.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() == ".wav":
        try:
            return _read_wav(path)
        except (wave.Error, EOFError) as error:
            reason = f"is not a PCM WAV file ({str(error) or 'it is truncated'})"
    else:
        reason = f"is a {path.suffix} file" if path.suffix else "has no suffix"
    try:
        import soundfile
    except ImportError:
        raise ValueError(
            f"{path} {reason}. Convert it to a PCM WAV file, or install soundfile (`pip install soundfile`)."
        ) from None
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return samples.mean(1), rate


def _read_wav(path: Path) -> tuple[np.ndarray, int]:
    """Read a PCM WAV file without additional packages."""
    with wave.open(os.fspath(path)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        data = np.frombuffer(file.readframes(file.getnframes()), dtype=np.uint8)
    data = data[: len(data) // (width * channels) * width * channels].reshape(-1, width)
    if width == 1:  # 8-bit samples are unsigned
        samples = data[:, 0].astype(np.float32) / 128 - 1
    else:
        padded = np.zeros((len(data), 4), np.uint8)  # little-endian 32-bit integers
        padded[:, 4 - width :] = data
        samples = padded.view("<i4")[:, 0].astype(np.float32) / 2**31
    return samples.reshape(-1, channels).mean(1), rate


@torch.no_grad()
def make_audio_batches(
    model: PreTrainedModel,
    feature_extractor: FeatureExtractionMixin,
    calibration: Calibration,
    generator: torch.Generator,
) -> tuple[list[Batch], list[Batch]]:
    """Make the fitting and held-out batches from audio files.

    The model's greedy output without timestamps is used as decoder input, with the language and task from its
    generation configuration.

    Args:
        model: The original model.
        feature_extractor: The model's feature extractor.
        calibration: The calibration settings.
        generator: Random number generator that selects the held-out files.

    Returns:
        The fitting batches and the held-out batches.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file has the wrong sampling rate, or if there is too little speech.
    """
    decodes = hasattr(model.base_model, "decoder")
    if decodes and not model.can_generate():
        raise ValueError(
            f"Calibration on audio requires a model that generates text, got {type(model).__name__}. Set "
            "`architectures` in config.json to a class with a language modeling head."
        )
    features, loudness = zip(*(read_features(feature_extractor, path) for path in calibration.examples), strict=True)
    chunks: Any = group_by_length(calibration, [0] * len(features), split_examples(calibration, generator))
    chunks = progress_bar(chunks, desc="transcribing", unit="batch", leave=False) if decodes else chunks
    batches: tuple[list[Batch], list[Batch]] = ([], [])
    for part, rows in chunks:
        batches[part].append(make_audio_batch(model, [features[i] for i in rows], calibration.length, decodes))
    decoder_batches = [batch for part in batches for batch in part if decodes]
    tokens = sum(int(batch["decoder_attention_mask"].sum()) for batch in decoder_batches)
    if decodes and tokens < MIN_TOKENS:
        raise ValueError(
            f"The calibration audio must contain at least {MIN_TOKENS} tokens of speech, got {tokens} tokens in "
            f"{len(features)} files. Provide more speech."
        )
    transcripts = [row for batch in decoder_batches for row in get_generated_tokens(batch, model.generation_config)]
    check_audio(loudness, transcripts)
    return batches


def read_features(feature_extractor: Any, path: str | os.PathLike) -> tuple[torch.Tensor, float]:
    """Read an audio file, and return its input features [bins, frames] and the root mean square of its samples.

    Args:
        feature_extractor: The model's feature extractor.
        path: Path of the file.

    Raises:
        OSError: if the file does not exist.
        ValueError: if the file cannot be read or has the wrong sampling rate.
    """
    samples, rate = load_audio(path)
    expected_rate = feature_extractor.sampling_rate
    if rate != expected_rate:
        raise ValueError(
            f"{os.fspath(path)} must have a sampling rate of {expected_rate} Hz, got {rate} Hz. Resample it, for "
            f"example with `ffmpeg -i FILE -ar {expected_rate} -ac 1 RESAMPLED.wav`."
        )
    loudness = float(np.sqrt(np.square(samples, dtype=np.float64).mean())) if len(samples) else 0.0
    return feature_extractor(samples, sampling_rate=rate, return_tensors="pt").input_features[0], loudness


def make_audio_batch(
    model: PreTrainedModel, features: Sequence[torch.Tensor], max_length: int, decodes: bool = True
) -> Batch:
    """Return the model inputs for recordings, including greedily generated decoder inputs and the encoder outputs.

    Whisper's encoder takes most of the time, so its outputs are stored and reused whenever the batch is used.

    Args:
        model: The original model.
        features: Input features [bins, frames] of each recording.
        max_length: Maximum number of tokens in the output.
        decodes: Whether the model has a decoder whose output is generated.
    """
    batch = {"input_features": torch.stack(list(features))}
    if decodes:
        outputs: list[torch.Tensor] = []
        encoder: Any = model.get_encoder()
        hook = encoder.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
        try:
            batch |= generate_audio_decoder_inputs(model, batch, max_length)
        finally:
            hook.remove()
        # The first call may only be used to detect the language. If a call processed only part of the batch, it is not
        # known which rows its outputs belong to.
        if outputs and all(len(states) == len(features) for states in outputs):
            batch[ENCODER_OUTPUTS] = outputs[-1].cpu()
    return batch


@torch.no_grad()
def generate_audio_decoder_inputs(model: Any, batch: Batch, max_length: int) -> Batch:
    """Generate greedily from a batch of audio, and return the output as decoder inputs (`make_decoder_arguments`)."""
    # Whisper's own code reserves half of the positions for a prompt.
    limit = min(max_length, model.config.max_target_positions // 2)
    # Whisper's code adds the prompt to `max_length`. With `max_new_tokens`, it would warn that both are set.
    options = {"do_sample": False, "num_beams": 1, "return_timestamps": False, "max_length": limit}
    # With a single call to `generate`, the output includes the prompt and windows are not processed in parts.
    options |= {"force_unique_generate_call": True, "return_dict_in_generate": True}
    features = batch["input_features"].to(model.device)
    mask = torch.ones_like(features[:, 0], dtype=torch.long)  # [b, frames], without padding
    with ignore_saved_length_limits(model):
        generated = model.generate(features, attention_mask=mask, **options)
    return make_decoder_arguments(generated.sequences, model.generation_config.pad_token_id)


def as_calibration(calibration: CalibrationLike | None, seed: int = 0) -> Calibration | None:
    """Convert any supported type of calibration data to a `Calibration`. None is returned unchanged.

    Args:
        calibration: A `Calibration`, a list of texts or pairs of texts, or None. It can also be the path of a text
            file, of a table, or of a folder with audio files.
        seed: Random seed for selecting examples from a file or folder.

    Raises:
        TypeError, ValueError, OSError: See `Calibration`, `read_calibration` and `read_audio_calibration`.
    """
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    if isinstance(calibration, str | os.PathLike):
        is_folder = Path(calibration).expanduser().is_dir()
        return (read_audio_calibration if is_folder else read_calibration)(calibration, seed=seed)
    return Calibration(calibration)


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
    """Read calibration text from a file and select examples at random.

    Args:
        path: A UTF-8 text file with one example per line, or a table (.csv, .tsv, .json, .jsonl). Both can be
            compressed (.gz).
        columns: For a table, the text column, or two columns that the model reads as pairs. Defaults to "text".
        target_file: For encoder-decoders, a file with the target for each line.
        target_column: For encoder-decoders, the target column in a table.
        size: Maximum number of examples (at least 2). Defaults to 2048.
        seed: Random seed for the selection.
        settings: Further arguments of `Calibration`.

    Returns:
        The calibration settings with the selected examples.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the contents of a file are invalid, or if an argument does not apply to the file format.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert, read_calibration
    >>> calibration = read_calibration("texts.txt", size=1000)
    >>> model = convert("google-t5/t5-small", num_key_value_heads=2, calibration=calibration)
    ```
    """
    columns = [columns] if isinstance(columns, str) else columns
    texts, targets = _read_examples(path, columns, target_file, target_column)
    rows = _sample_indices(len(texts), CALIBRATION_SIZE if size is None else size, seed)
    return Calibration([texts[i] for i in rows], targets and [targets[i] for i in rows], **settings)


def _read_examples(
    path: str | os.PathLike,
    columns: Sequence[str] | None,
    target_file: str | os.PathLike | None,
    target_column: str | None,
) -> tuple[list[Any], list[str] | None]:
    """Read texts or pairs of texts, and their targets if there are any (see `read_calibration`)."""
    columns_name = "`columns` of `read_calibration` (--calibration_columns)"
    target_name = "`target_column` of `read_calibration` (--calibration_target_column)"
    text_names = resolve_text_columns([path], columns, columns_name)
    if (target_file if text_names else target_column) is not None:
        used, unused = ("target_column", "target_file") if text_names else ("target_file", "target_column")
        raise ValueError(
            f"`{unused}` (--calibration_{unused}) is not supported for {path}. Use `{used}` (--calibration_{used})."
        )
    if text_names:
        argument_names = columns_name + (f" and {target_name}" if target_column else "")
        rows = read_columns([path], [*text_names, *([target_column] if target_column else [])], argument_names).texts
        texts = [row[: len(text_names)] if len(text_names) == 2 else row[0] for row in rows]
        return texts, [row[-1] for row in rows] if target_column else None
    if target_file is None:
        return read_lines([path]), None
    sources, targets = zip(*read_pairs(path, target_file).texts, strict=True)
    return list(sources), list(targets)
