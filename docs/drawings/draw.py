"""Draws the pictures of docs/tour.md as SVG files in this folder: `python docs/drawings/draw.py`.

Their colours are readable on light and on dark pages: dark letters in light boxes, middle grey for what is between.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_attn_variants.reference import patterns as formulas

QUERY, KEY, VALUE, WEIGHT, PLAIN = "#9ecbff", "#ffcf8a", "#9fe0b0", "#d9c2f5", "#d0d7de"
GREY, INK = "#77818c", "#14191f"


class Drawing:
    """An SVG that grows by boxes, lines and texts; coordinates in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">\n<title>{title}</title>\n'
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>\n'
        )
        self.under: list[str] = []
        self.over: list[str] = []

    def text(self, x: float, y: float, text: str, size: int = 14, colour: str = GREY, anchor: str = "middle") -> None:
        self.over.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{text}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "", size: int = 14) -> None:
        self.over.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + size * 0.35, text, size, INK)

    def line(self, x1: float, y1: float, x2: float, y2: float, tip: bool = False, width: float = 1.4) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        self.under.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GREY}" stroke-width="{width:g}"{end}/>'
        )

    def save(self, path: Path) -> None:
        path.write_text(self.head + "\n".join([*self.under, *self.over]) + "\n</svg>\n", encoding="utf-8")


def one_head() -> Drawing:
    """From inputs to output, with the shape of everything."""
    d = Drawing(760, 250, "One attention head: queries meet keys, the softmax of their products weighs the values")
    rows = [(20, "X", "[n, d]", QUERY, "Q", "[n, k]"), (98, "M", "[m, d]", KEY, "K", "[m, k]")]
    for y, source, source_shape, fill, name, shape in [*rows, (176, "M", "[m, d]", VALUE, "V", "[m, v]")]:
        d.box(10, y, 70, 44, PLAIN, source)
        d.text(45, y + 60, source_shape, 12)
        d.line(80, y + 22, 168, y + 22, tip=True)
        d.text(122, y + 15, f"P_{name.lower()}", 13)
        d.box(170, y, 70, 44, fill, name)
        d.text(205, y + 60, shape, 12)
    d.line(240, 42, 328, 72, tip=True)
    d.line(240, 120, 328, 92, tip=True)
    d.box(330, 60, 96, 44, WEIGHT, "logits")
    d.text(378, 120, "Q K^T  [n, m]", 12)
    d.line(426, 82, 508, 82, tip=True)
    d.text(466, 74, "softmax", 12)
    d.box(510, 60, 90, 44, WEIGHT, "weights")
    d.text(555, 50, "[n, m], rows sum to 1", 12)
    d.line(555, 104, 555, 174, tip=True)
    d.line(240, 198, 508, 198, tip=True)
    d.box(510, 176, 90, 44, VALUE, "weights V", 13)
    d.text(555, 236, "[n, v]", 12)
    d.line(600, 198, 678, 198, tip=True)
    d.text(638, 190, "P_o", 13)
    d.box(680, 176, 70, 44, PLAIN, "Y")
    d.text(715, 236, "[n, d]", 12)
    return d


def shared_heads() -> Drawing:
    """Eight query heads over eight, two and one key/value heads."""
    d = Drawing(760, 250, "Which key and value head each query head reads: multi-head, grouped-query and multi-query")
    panels = (("multi-head: G = h = 8", 8), ("grouped-query: G = 2", 2), ("multi-query: G = 1", 1))
    for panel, (title, groups) in enumerate(panels):
        left, step, size = 12 + panel * 252, 29, 25
        middle = left + 3.5 * step + size / 2
        d.text(middle, 18, title, 15)
        for g in range(groups):
            heads = range(g * 8 // groups, (g + 1) * 8 // groups)
            at = left + (heads[0] + heads[-1]) / 2 * step
            d.box(at, 40, size, 34, VALUE, f"v{g}", 12)
            d.box(at, 80, size, 34, KEY, f"k{g}", 12)
            for h in heads:
                d.line(at + size / 2, 114, left + h * step + size / 2, 164)
        for h in range(8):
            d.box(left + h * step, 164, size, 34, QUERY, f"q{h}", 12)
        d.text(middle, 232, f"cache: {groups} (k + v) a position", 13)
    return d


def talking_heads() -> Drawing:
    """Four heads whose logits and weights are mixed."""
    d = Drawing(760, 330, "Talking heads: P_l mixes the heads' logits before the softmax, P_w their weights after it")
    x0, step, w, h = 330, 96, 70, 32
    rows = [
        (14, QUERY, "q{0} k{0}", "logits of the query heads  [h_k, n, m]"),
        (110, WEIGHT, "softmax {0}", "softmax heads  [h, n, m]"),
        (206, VALUE, "weights {0}", "weights of the value heads  [h_v, n, m]"),
        (284, VALUE, "v{0}", "values  [h_v, m, v]"),
    ]
    for y, fill, name, label in rows:
        d.text(310, y + 21, label, 14, anchor="end")
        for i in range(4):
            d.box(x0 + i * step, y, w, h, fill, name.format(i), 13)
    for y, name, note in (
        (46, "P_l", "mask and position bias are added after it"),
        (142, "P_w", "rows need not sum to 1 after it"),
    ):
        d.text(310, y + 28, f"{name} mixes all with all", 14, anchor="end")
        d.text(310, y + 48, note, 12, anchor="end")
        for i in range(4):
            for j in range(4):
                d.line(x0 + i * step + w / 2, y, x0 + j * step + w / 2, y + 64, width=2.6 if i == j else 0.7)
    d.text(310, 262, "times", 14, anchor="end")
    for i in range(4):
        d.line(x0 + i * step + w / 2, 238, x0 + i * step + w / 2, 284)
    return d


def patterns() -> Drawing:
    """Draw which of 16 tokens each pattern attends to. Summaries and split heads have another color."""
    n, cell, across = 16, 11, 5
    window = partial(formulas.keys_in_window, window=4)
    stride = partial(formulas.keys_in_strided_pattern, stride=4)
    fixed = partial(formulas.keys_in_fixed_pattern, block=4, summary=1)
    drawn = partial(formulas.keys_in_random_blocks, block=2, num_random=1, seed=1)
    block = partial(formulas.keys_in_local_block, block=4)
    panels: list[tuple[str, list[Callable[[int, int], list[int]]], int, int]] = [
        ("sliding_window, 1 global", [window], 1, 0),
        ("sliding_window, causal", [partial(window, causal=True)], 0, 0),
        ("... dilated by 2", [partial(window, dilation=2, causal=True)], 0, 0),
        ("strided, causal", [partial(stride, part=part, causal=True) for part in (1, 2)], 0, 0),
        ("fixed, causal", [partial(fixed, part=part, causal=True) for part in (1, 2)], 0, 0),
        ("random_blocks, 1 global", [drawn], 1, 0),
        ("local_blocks", [block], 0, 0),
        ("local_blocks, causal", [partial(block, causal=True)], 0, 0),
        ("transient_global", [window], 0, 4),
        ("memory_compressed", [], 0, 4),
    ]
    size = n * cell
    d = Drawing(across * (size + 14) + 4, -(-len(panels) // across) * (size + 36) + 4, "Tokens attended to")
    for panel, (title, parts, global_tokens, summaries) in enumerate(panels):
        left, top = 4 + panel % across * (size + 14), 26 + panel // across * (size + 36)
        d.text(left + size / 2, top - 8, title, 13)
        d.box(left, top, size, size, "#eef1f4")
        masks = [formulas.pattern_mask(n, keys, global_tokens=global_tokens) for keys in parts]
        step = size / (summaries + n * bool(masks))  # a column
        for i in range(n):
            fills = [KEY] * summaries
            for j in range(n if masks else 0):
                fills.append(QUERY if masks[0][i, j] else KEY if masks[-1][i, j] else "")
            for column, fill in enumerate(fills):
                if fill:
                    d.box(left + column * step, top + i * cell, step - 1, cell - 1, fill)
    return d


if __name__ == "__main__":
    for draw in (one_head, shared_heads, talking_heads, patterns):
        draw().save(Path(__file__).with_name(f"{draw.__name__}.svg"))
