"""Hooks of mkdocs: the README as the first page, notebooks as pages, and links to files outside docs/.

The Markdown files are written for the repository. A file outside docs/ that they link to goes into the site's folder
`repository`, under its own path; a link to a folder becomes its text.
"""

import base64
import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hf_attn_variants.command_parser import get_package_version

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out pages of the navigation that are not written yet; name the version at the foot of each page."""
    config.nav = _there(config.nav)
    config.copyright = f"hf_attn_variants {get_package_version()}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, the notebooks' pages, and what pages link to outside docs/."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs/notebook").glob("*.ipynb")):
        for name, content in _notebook_files(notebook).items():
            files.append(File.generated(config, f"notebook/{name}", content=content))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for target in _linked(page.content_string, _repository_path(page.src_uri)):
            path = _site_path(target)
            if path.startswith("repository/") and files.get_file_from_path(path) is None:
                added = File.generated(config, path, abs_src_path=str(ROOT / target))
                files.append(added)
                pages += [added] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let a page's links lead to where the files are in the site."""
    source = _repository_path(page.file.src_uri)

    def replaced(match: re.Match) -> str:
        target = _target(match, source)
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():
            return match["text"]
        link = os.path.relpath(_site_path(target), os.path.dirname(page.file.src_uri) or ".")
        return f"{match['image']}[{match['text']}]({link}{match['anchor'] or ''})"

    return LINK.sub(replaced, markdown)


def _there(entry: list | dict | str) -> list | dict | str | None:
    if isinstance(entry, list):
        return [kept for kept in map(_there, entry) if kept]
    if isinstance(entry, dict):
        return {title: kept for title, value in entry.items() if (kept := _there(value))}
    made = entry == "index.md" or (ROOT / "docs" / entry).with_suffix(".ipynb").is_file()
    return entry if made or (ROOT / _repository_path(entry)).is_file() else None


def _linked(markdown: str, source: str) -> list[str]:
    targets = [_target(match, source) for match in LINK.finditer(markdown)]
    return [target for target in targets if target is not None and (ROOT / target).is_file()]


def _target(match: re.Match, source: str) -> str | None:
    """Return the file or folder of a link relative to the root of the repository, or None if it does not exist."""
    target = os.path.normpath(os.path.join(os.path.dirname(source), match["target"]))
    return target if (ROOT / target).exists() else None


def _site_path(path: str) -> str:
    if path == "README.md":
        return "index.md"
    path = re.sub(r"^(docs/.*)\.ipynb$", r"\1.md", path)
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _repository_path(path: str) -> str:
    if path == "index.md":
        return "README.md"
    return path.removeprefix("repository/") if path.startswith("repository/") else f"docs/{path}"


def _notebook_files(notebook: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook and its pictures as {file name: content}."""
    files: dict[str, str | bytes] = {}
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(files)}.png"
                files[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![the picture that this cell draws]({name})")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return {f"{notebook.stem}.md": "\n\n".join(parts) + "\n", **files}
