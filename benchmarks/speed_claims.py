"""Compute the ratios in each speed report, and the claims that follow from them.

Reports of the same kind use the same labels for their ratios. Therefore the ratios of an old and a new report, and
those of both allocator settings, can be compared.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmarks.kept_memory import Claim, make_claim, split_by_setting

__all__ = ["KINDS", "Line", "Ratio", "is_of_speed", "iterate_claims", "iterate_ratios"]

MODES = ("forward", "training")
FULL, WINDOWED = "BERT layer", "BERT layer, window"
OURS, LONGFORMER = "self-attention, window", "Longformer's self-attention"
PEER = "x-transformers talking heads"
PASSES = {"everything": "T5", "windows": "LongT5, local", "transient global": "LongT5, transient global"}


class Ratio(NamedTuple):
    """The ratio of two figures.

    Args:
        label: the name of the ratio.
        value: the ratio.
        is_cost: whether it is a relative time (lower is better) instead of a relative speed.
        few_faults: whether both figures have few page faults, or None if that is not known.
    """

    label: str
    value: float
    is_cost: bool = False
    few_faults: bool | None = None


class Line(NamedTuple):
    """A ratio with both allocator settings, and its claim.

    `fixed` is None if the fixed setting was not measured or had too many page faults.
    """

    label: str
    glibc: float
    fixed: float | None
    claim: Claim

    def text(self) -> str:
        """Return the line to print."""
        fixed_text = "fixed: many page faults" if self.fixed is None else f"fixed {self.fixed:.2f}×"
        claim_text = "no claim" if self.claim.ratio is None else f"claimed: {self.claim.text}"
        return f"{self.label}: default {self.glibc:.2f}×, {fixed_text}; {claim_text}"


def iterate_claims(name: str, report: dict[str, Any]) -> Iterator[Line]:
    """Yield each ratio of a report with both allocator settings.

    Args:
        name: the name of the report, whose prefix determines its kind.
        report: the report in the format of `kept_memory.run`.
    """
    glibc, fixed_report = split_by_setting(report)
    fixed_ratios = {ratio.label: ratio for ratio in iterate_ratios(name, fixed_report)} if fixed_report else {}
    for ratio in iterate_ratios(name, glibc):
        fixed = fixed_ratios.get(ratio.label)
        fixed_ratio = fixed.value if fixed is not None and fixed.few_faults else None
        yield Line(ratio.label, ratio.value, fixed_ratio, make_claim(ratio.value, fixed_ratio, ratio.is_cost))


def iterate_ratios(name: str, report: dict[str, Any]) -> Iterator[Ratio]:
    """Yield the ratios of a report of one allocator setting."""
    (list_ratios,) = (kind for prefix, kind in KINDS.items() if name.startswith(prefix))
    return list_ratios(report)


def is_of_speed(name: str) -> bool:
    """Return whether the report with this name is a speed report."""
    return name.startswith(tuple(KINDS))


def _iterate_pair_ratios(
    row: dict[str, Any], part: str, base: str, compared: str, label: str, is_cost: bool = False
) -> Iterator[Ratio]:
    """Yield the ratio of two times in `row[part]`, if it contains both.

    This is the time of `base` divided by that of `compared`, or the inverse for a cost.
    """
    times = row.get(part) or {}
    if times.get(base) and times.get(compared):
        value = times[compared] / times[base] if is_cost else times[base] / times[compared]
        yield Ratio(label, value, is_cost, _has_few_faults(row.get("usage", {}).get(part, {}), base, compared))


def _has_few_faults(usage: dict[str, dict[str, Any]], *names: str) -> bool | None:
    """Return whether all these figures have few page faults, or None if that is not known."""
    few_faults = [usage.get(name, {}).get("few_faults") for name in names]
    return None if None in few_faults else all(few_faults)


def _iterate_decoding_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for row in report["rows"]:
        same = [r for r in report["rows"] if all(r[n] == row[n] for n in ("batch_size", "source_length"))]
        first = same[0]
        if row is first:
            continue
        usage = {"base": first.get("usage", {}), "ours": row.get("usage", {})}
        has_few = _has_few_faults(usage, "base", "ours")
        label = f"{row['model']}, batch {row['batch_size']}, source {row['source_length']}"
        yield Ratio(f"{label}: tokens/s", row["speedup"], few_faults=has_few)
        yield Ratio(f"{label}: a later token", row["step_speedup"], few_faults=has_few)
        yield Ratio(
            f"{label}: first token", first["first_token_seconds"] / row["first_token_seconds"], few_faults=has_few
        )


def _iterate_encoding_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    first, *others = report["rows"]
    for row in others:
        has_few = _has_few_faults({"base": first.get("usage") or {}, "ours": row.get("usage") or {}}, "base", "ours")
        yield Ratio(f"{row['name']}: a pass", row["speedup"], few_faults=has_few)


def _iterate_window_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for mode in MODES:
        for row in report["attention"]:
            yield from _iterate_pair_ratios(
                row, mode, "sdpa", "window", f"windows / full attention, {row['length']} tokens, {mode}"
            )
        for row in report["layers"]:
            label = f"{row['length']} tokens, {mode}"
            yield from _iterate_pair_ratios(row, mode, FULL, WINDOWED, f"BERT layer with windows / full, {label}")
            yield from _iterate_pair_ratios(row, mode, LONGFORMER, OURS, f"self-attention / Longformer's, {label}")


def _iterate_kernel_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for part in ("attention", "causal"):
        for row in report[part]:
            for mode in MODES:
                for peer in row[mode]:
                    if peer != "sdpa":
                        label = f"{peer} / fused softmax, {part}, {row['length']} tokens, {mode}"
                        yield from _iterate_pair_ratios(row, mode, "sdpa", peer, label)
    for part, base, in_part in (("steps", "sdpa", "step"), ("models", "upstream", "pass")):
        for row in report.get(part, ()):
            for peer in row[in_part]:
                if peer != base:
                    yield from _iterate_pair_ratios(
                        row, in_part, base, peer, f"{peer} / {base}, {part}, {row['length']} tokens"
                    )


def _iterate_state_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for row in report["steps"]:
        for name in row["step_ms"]:
            if name != "upstream":
                yield from _iterate_pair_ratios(
                    row, "step_ms", "upstream", name, f"{name} / upstream, after {row['length']} tokens"
                )


def _iterate_pass_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for row in report["runs"]:
        for encoder, upstream_encoder in PASSES.items():
            yield from _iterate_pair_ratios(
                row,
                "milliseconds",
                upstream_encoder,
                encoder,
                f"{encoder} / {upstream_encoder}, {row['tokens']} tokens",
            )


def _iterate_sharing_ratios(report: dict[str, Any], base: str = "upstream") -> Iterator[Ratio]:
    for row in report["runs"]:
        label = f"batch {row['batch_size']}, source {row['source_length']}, beams {row['num_beams']}"
        for name in row["milliseconds"]:
            if name != base:
                yield from _iterate_pair_ratios(row, "milliseconds", base, name, f"{name} / {base}, {label}")


def _iterate_serving_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for row in report["runs"]:
        yield from _iterate_sharing_ratios({"runs": [row]}, next(iter(row["milliseconds"])))


def _iterate_talking_heads_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for mode in MODES:
        for row in report["times"]:
            prefix = f"{', '.join(map(str, row['shape']))}, {row['option']}, {mode}"
            yield from _iterate_pair_ratios(
                row, mode, "sdpa", "blocked", f"blocked in times SDPA's time, {prefix}", is_cost=True
            )
            yield from _iterate_pair_ratios(row, mode, "naive", "blocked", f"blocked / plain formula, {prefix}")
        for row in report["layers"]:
            prefix = f"{', '.join(map(str, row['shape']))}, {mode}"
            yield from _iterate_pair_ratios(
                row, mode, "sdpa", "blocked", f"layer in times SDPA's time, {prefix}", is_cost=True
            )
            yield from _iterate_pair_ratios(row, mode, PEER, "blocked", f"layer / x-transformers', {prefix}")
    label = "training step in times multi-head's time"
    yield from _iterate_pair_ratios(
        report["training_steps"], "milliseconds", "MHA", "talking heads", label, is_cost=True
    )


def _iterate_onnx_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    first: dict[tuple, dict[str, Any]] = {}
    for row in report["rows"]:
        key = (row["part"], *row["size"], row["opset"])
        base = first.setdefault(key, row)
        if row is not base:
            label = f"{row['part']} of {row['num_key_value_heads']} heads / {base['num_key_value_heads']}"
            has_few = _has_few_faults({"base": base.get("usage", {}), "ours": row.get("usage", {})}, "base", "ours")
            prefix = f"{', '.join(map(str, row['size']))}, opset {row['opset']}"
            yield Ratio(f"{label}, {prefix}", base["milliseconds"] / row["milliseconds"], few_faults=has_few)


def _iterate_loop_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for row in report["rows"]:
        value = row["loop_cpu_seconds_per_step"] / row["bare_cpu_seconds_per_step"]
        has_few = _has_few_faults(row.get("usage", {}), "bare", "loop")
        yield Ratio(f"loop in times a bare loop's CPU time, {row['task']}", value, True, has_few)


def _iterate_engine_ratios(report: dict[str, Any]) -> Iterator[Ratio]:
    for row in report["sizes"]:
        # Other engines have their own allocators, so only the page faults of the baseline matter.
        has_few = row["usage"]["milliseconds"]["float32"]["few_faults"]
        for engine, milliseconds in row["milliseconds"].items():
            if engine != "float32":
                yield Ratio(
                    f"{row['size']}: {engine}", row["milliseconds"]["float32"] / milliseconds, few_faults=has_few
                )


# The prefix of a report's name, and the function that yields its ratios.
KINDS: dict[str, Callable[[dict[str, Any]], Iterator[Ratio]]] = {
    "decode_": _iterate_decoding_ratios,
    "encode_": _iterate_encoding_ratios,
    "sliding_window_": _iterate_window_ratios,
    "linear_attention_": _iterate_kernel_ratios,
    "hybrid_attention_": _iterate_kernel_ratios,
    "decoder_state_": _iterate_state_ratios,
    "long_t5_passes": _iterate_pass_ratios,
    "share_memory_": _iterate_sharing_ratios,
    "exact_step_": partial(_iterate_sharing_ratios, base="products"),
    "serving_": _iterate_serving_ratios,
    "transcription_": _iterate_serving_ratios,
    "talking_heads_c": _iterate_talking_heads_ratios,  # cpu or cuda, but not talking_heads_finetuning (quality)
    "onnx_latency": _iterate_onnx_ratios,
    "loop_overhead": _iterate_loop_ratios,
    "int8_encoder": _iterate_engine_ratios,
    "int8_decoder": _iterate_engine_ratios,
}
