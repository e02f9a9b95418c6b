"""One HTML file that shows every attention map of a text: no network, no other file; any head enlarged on a click."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from .drawings import KV_COLOURS, colour_limit, is_signed, with_changes
from .maps import AttentionMaps, Stage, TextMaps

__all__ = ["attention_page"]

# The values of a map are stored as 16-bit numbers: 0 for NaN, 1 to 65535 from the lowest to the highest.
LEVELS = 65534


def attention_page(maps: TextMaps, model_name: str) -> str:
    """Return the HTML page.

    Args:
        maps: of `attention_maps`.
        model_name: for the title.
    """
    content = {
        "model": model_name,
        "text": maps.text,
        "target": maps.target_text,
        "targetIsOutput": maps.target_is_output,
        "isCut": maps.is_cut,
        "kvColours": KV_COLOURS,
        "attentions": [_attention(attention) for attention in maps.attentions],
    }
    # Inside a script element only "<" could end it.
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
    return PAGE.replace("@DATA@", data)


def _attention(maps: AttentionMaps) -> dict[str, Any]:
    return {
        "name": maps.name,
        "rows": maps.query_tokens,
        "columns": maps.key_tokens,
        "kvHeads": maps.kv_heads,
        "dynamic": maps.dynamic,
        "stages": [_stage(stage) for stage in maps.stages],
        "projections": [
            {"name": one.name, "rows": one.rows, "columns": one.columns, "matrix": _rounded(one.matrix)}
            for one in with_changes(maps.projections)
        ],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    known = stage.maps[~stage.maps.isnan()]
    lowest, highest = float(known.min()), float(known.max())
    step = max(highest - lowest, 1e-12) / LEVELS
    levels = (((stage.maps - lowest) / step).round() + 1).nan_to_num(0).clamp(0, LEVELS + 1).to(torch.int32)
    return {
        "title": stage.title,
        "head": stage.head,
        "kv": stage.kv_heads,
        "isLogits": stage.is_logits,
        "signed": is_signed(stage),
        "limit": colour_limit(stage),
        "heads": len(stage.maps),
        "lowest": lowest,
        "step": step,
        "values": base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode(),
    }


def _rounded(matrix: torch.Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in matrix.tolist()]


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Attention maps</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 0; color: #222; background: #fff; }
header { padding: 12px 20px; border-bottom: 1px solid #ccc; }
h1 { font-size: 20px; margin: 0 0 4px; }
h2 { font-size: 15px; margin: 14px 0 4px; }
small { font-weight: normal; color: #666; margin-left: 6px; }
p { margin: 2px 0; }
.quiet { color: #666; }
main { display: flex; align-items: flex-start; }
#maps { flex: 1; padding: 0 20px 20px; min-width: 0; }
#detail { flex: none; position: sticky; top: 0; padding: 10px 20px; max-width: 62vw; max-height: 100vh; overflow: auto;
  box-sizing: border-box; }
.grid { display: flex; flex-wrap: wrap; gap: 8px; }
.head { border: 0; background: none; font: 12px/1.3 system-ui, sans-serif; padding: 0; cursor: pointer;
  text-align: left; }
.head canvas { display: block; border: 3px solid #fff; outline: 1px solid #bbb; image-rendering: pixelated; }
.head[aria-pressed="true"] canvas { outline: 3px solid #000; }
#value { min-height: 3em; }
select { font: inherit; }
header, h2 { overflow-wrap: anywhere; }
@media (max-width: 900px) {
  main { flex-direction: column-reverse; align-items: stretch; }
  #detail { position: static; max-width: 100%; max-height: none; }
}
</style>
</head>
<body>
<header>
<h1 id="model"></h1>
<p id="text"></p>
<p id="target"></p>
<p><label>Attention: <select id="which"></select></label>
<span class="quiet">arrow keys change it; a click on a head enlarges it</span></p>
<p id="note" class="quiet"></p>
</header>
<main>
<div id="maps"></div>
<div id="detail"><h2 id="title"></h2><canvas id="large"></canvas><p id="value"></p></div>
</main>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = name => document.getElementById(name);
const VIRIDIS = [[68,1,84],[71,44,122],[59,81,139],[44,113,142],[33,144,141],[39,173,129],[92,200,99],[170,220,50],
  [253,231,37]];
const RED_BLUE = [[5,48,97],[67,147,195],[209,229,240],[247,247,247],[253,219,199],[214,96,77],[103,0,31]];
const FORBIDDEN = [208, 208, 208];

function colour(value, limit, signed) {
  if (Number.isNaN(value)) return FORBIDDEN;
  const root = Math.sign(value) * Math.sqrt(Math.min(1, Math.abs(value) / limit));
  const scale = signed ? RED_BLUE : VIRIDIS;
  const at = (signed ? (root + 1) / 2 : Math.max(0, root)) * (scale.length - 1);
  const low = Math.min(scale.length - 2, Math.floor(at)), part = at - low;
  return scale[low].map((from, i) => Math.round(from + part * (scale[low + 1][i] - from)));
}

function decode(stage) {
  if (!stage.decoded) {
    const bytes = Uint8Array.from(atob(stage.values), letter => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    stage.decoded = Array.from({ length: bytes.length / 2 }, (_, i) => {
      const level = view.getUint16(2 * i, true);
      return level === 0 ? NaN : stage.lowest + (level - 1) * stage.step;
    });
  }
  return stage.decoded;
}

function paint(canvas, values, rows, columns, limit, signed) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) image.data.set([...colour(values[i], limit, signed), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

function frame(canvas, kv) {
  if (kv === undefined) return "";
  canvas.style.borderColor = data.kvColours[kv % data.kvColours.length];
  return " \\u00b7 KV " + (kv + 1);
}

// One enlarged map: its values, labels and name.
let shown = null;
const large = byId("large");
const LABEL = 13, LEAST = 8;

// What the enlarged map may take of the window's width: beside the heads, or in a narrow window above them.
function room() {
  const width = document.documentElement.clientWidth, narrow = window.matchMedia("(max-width: 900px)").matches;
  return (narrow ? width : 0.62 * width) - 40;
}

function enlarge(map, button) {
  for (const other of document.querySelectorAll(".head")) other.setAttribute("aria-pressed", String(other === button));
  const context = large.getContext("2d"), font = size => size + "px system-ui, sans-serif";
  context.font = font(LABEL - 1);
  const widest = labels => Math.ceil(Math.max(...labels.map(label => context.measureText(label).width))) + 8;
  const longest = Math.max(map.rows.length, map.columns.length);
  map.left = Math.min(160, room() / 3, widest(map.rows));
  const fits = Math.floor((room() - map.left - 4) / map.columns.length);
  const cell = Math.max(LEAST, Math.min(fits, Math.max(17, Math.min(34, Math.floor(520 / longest)))));
  map.cell = cell;
  map.top = Math.min(160, widest(map.columns));
  const width = map.left + cell * map.columns.length + 4, height = map.top + cell * map.rows.length + 4;
  const sharp = window.devicePixelRatio || 1;
  large.width = width * sharp;
  large.height = height * sharp;
  large.style.width = width + "px";
  large.style.height = height + "px";
  context.scale(sharp, sharp);
  context.font = font(Math.min(LABEL - 1, cell));
  context.textBaseline = "middle";
  map.columns.forEach((label, j) => {
    context.save();
    context.translate(map.left + (j + 0.5) * cell, map.top - 5);
    context.rotate(-Math.PI / 2);
    context.fillText(label, 0, 0, 155);
    context.restore();
  });
  context.textAlign = "right";
  map.rows.forEach((label, i) => context.fillText(label, map.left - 5, map.top + (i + 0.5) * cell, map.left - 5));
  context.textAlign = "center";
  map.rows.forEach((_, i) => map.columns.forEach((_, j) => {
    const value = map.values[i * map.columns.length + j];
    const [red, green, blue] = colour(value, map.limit, map.signed);
    context.fillStyle = `rgb(${red},${green},${blue})`;
    context.fillRect(map.left + j * cell, map.top + i * cell, cell - 1, cell - 1);
    if (cell >= 30 && map.numbers) {
      context.fillStyle = red * 0.3 + green * 0.6 + blue * 0.1 < 120 ? "#fff" : "#222";
      context.font = "10px system-ui, sans-serif";
      context.fillText(value.toFixed(2), map.left + (j + 0.5) * cell, map.top + (i + 0.5) * cell);
    }
  }));
  byId("title").textContent = map.title;
  byId("value").textContent = map.numbers ? "Row: head in, column: head out." : "Row: attends to columns.";
  shown = map;
}

window.addEventListener("resize", () => document.querySelector(".head[aria-pressed='true']").click());
large.addEventListener("mousemove", event => {
  const box = large.getBoundingClientRect();
  const j = Math.floor((event.clientX - box.left - shown.left) / shown.cell);
  const i = Math.floor((event.clientY - box.top - shown.top) / shown.cell);
  if (i < 0 || j < 0 || i >= shown.rows.length || j >= shown.columns.length) return;
  const value = shown.values[i * shown.columns.length + j];
  const text = Number.isNaN(value) ? "may not be attended to" : value.toPrecision(3);
  byId("value").textContent = `${shown.rows[i]} \\u2192 ${shown.columns[j]}: ${text}`;
});

function headButton(map, kv, size) {
  const button = document.createElement("button"), canvas = document.createElement("canvas");
  button.className = "head";
  paint(canvas, map.values, map.rows.length, map.columns.length, map.limit, map.signed);
  const cell = Math.max(4, Math.min(size, 130 / map.columns.length));
  canvas.style.width = cell * map.columns.length + "px";
  canvas.style.height = cell * map.rows.length + "px";
  const more = frame(canvas, kv);
  map.title += more;
  button.append(map.name + more, canvas);
  button.addEventListener("click", () => enlarge(map, button));
  return button;
}

function section(title, remark) {
  const heading = document.createElement("h2"), small = document.createElement("small");
  const grid = document.createElement("div");
  small.textContent = remark;
  heading.append(title + " ", small);
  grid.className = "grid";
  byId("maps").append(heading, grid);
  return grid;
}

function show(index) {
  const attention = data.attentions[index];
  // The head that was enlarged stays so in the next layer; at first it is the first one's weights.
  const isPressed = one => one.getAttribute("aria-pressed") === "true";
  const pressed = [...document.querySelectorAll(".head")].findIndex(isPressed);
  const logits = attention.stages.filter(stage => stage.isLogits).reduce((sum, stage) => sum + stage.heads, 0);
  byId("maps").replaceChildren();
  for (const stage of attention.stages) {
    const strongest = (stage.signed ? "\\u00b1" : "") + stage.limit.toPrecision(2);
    const grid = section(stage.title,
      `${stage.isLogits ? "each row's mean taken off; " : ""}strongest colour: ${strongest}`);
    const values = decode(stage), size = values.length / stage.heads;
    for (let head = 0; head < stage.heads; head++) {
      const name = stage.head + " " + (head + 1);
      grid.append(headButton({
        name, title: `${attention.name}, ${stage.title}: ${name}`, rows: attention.rows, columns: attention.columns,
        values: values.slice(head * size, (head + 1) * size), limit: stage.limit, signed: stage.signed,
      }, stage.kv[head], 14));
    }
  }
  if (attention.projections.length) {
    const grid = section("projections across heads", "rows: heads in, columns: heads out");
    for (const one of attention.projections) {
      const numbered = (name, count) => Array.from({ length: count }, (_, i) => `${name} ${i + 1}`);
      grid.append(headButton({
        name: one.name, title: `${attention.name}: ${one.name}`, rows: numbered(one.rows, one.matrix.length),
        columns: numbered(one.columns, one.matrix[0].length), values: one.matrix.flat(),
        limit: Math.max(1e-6, ...one.matrix.flat().map(Math.abs)), signed: true, numbers: true,
      }, undefined, 11));
    }
  }
  const notes = [];
  if (attention.stages.some(stage => stage.kv.length))
    notes.push(`Frames of one colour: heads that share one of the ${attention.kvHeads} key/value heads.`);
  if (attention.dynamic.length) notes.push(`The mixes include the terms ${attention.dynamic.join(", ")}.`);
  if (data.isCut) notes.push("The text was longer than what is shown.");
  notes.push("Colours grow with the square root of the value.");
  byId("note").textContent = notes.join(" ");
  const heads = document.querySelectorAll(".head");
  (heads[pressed < 0 ? logits : pressed] || heads[0]).click();
}

byId("model").textContent = data.model;
byId("text").textContent = "Text: " + data.text;
if (data.target !== null)
  byId("target").textContent = (data.targetIsOutput ? "Its output: " : "Target: ") + data.target;
data.attentions.forEach((attention, i) => byId("which").append(new Option(attention.name, i)));
byId("which").addEventListener("change", event => show(Number(event.target.value)));
document.addEventListener("keydown", event => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], next = Number(byId("which").value) + by;
  if (by === undefined || document.activeElement === byId("which") || !data.attentions[next]) return;
  byId("which").value = next;
  show(next);
});
show(0);
</script>
</body>
</html>
"""
