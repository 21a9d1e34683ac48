"""List sentences of docs, docstrings and comments that a reader may stumble over.

    python tools/prose.py                 a count per rule and per file
    python tools/prose.py --rule long     the sentences themselves
    python tools/prose.py docs flux/ops   of these paths only

It reports, and its exit status is always 0: some of these sentences are the plainest there are.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 30
PATHS = ("README.md", "CONTRIBUTING.md", "docs", "flux", "benchmarks", "tools", "tests")

RULES = {
    "what is": r"\b[Ww]hat (?:is|are|was|does|has|they|it)\b",
    "person": r"\b(?:[Ww]hoever|[Ww]ho|[Ss]omebody|[Nn]obody)\b",
    "beside": r"\b(?:[Bb]eside|[Bb]ehind)\b",
    "double negative": r"\b(?:not|no|never|nothing)\b[^,;:.]*\b(?:not|un\w+less|without|no)\b",
    "inversion": r"^(?:So|Nor|Neither|Not only|Only then) (?:is|are|does|do|has|have|can|will)\b",
    "of those": r"\b(?:of those|of these|of them|the one that|the ones that)\b",
}
VAGUE_NAMES = ("found", "one", "told", "tried", "given", "usual", "believed")
"""Variables that say nothing about what they hold."""


@dataclass(frozen=True)
class Sentence:
    """A sentence and the place where its paragraph begins."""

    path: str
    line: int
    text: str


def sentences(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown or Python file."""
    source = path.read_text(encoding="utf-8")
    paragraphs = _markdown(source) if path.suffix == ".md" else _python(source)
    name = str(path.relative_to(ROOT))
    for line, paragraph in paragraphs:
        for text in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", " ".join(paragraph.split())):
            if len(text.split()) > 2:
                yield Sentence(name, line, text)


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items; code, tables and generated parts are left out."""
    fenced, start, lines = False, 1, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip() and not re.match(r"\s*(?:[|#<]|[-*] |\d+\. )", line):
            start = start if lines else number
            lines.append(line)
            continue
        if lines:
            yield start, "\n".join(lines)
            lines = []
        item = re.match(r"\s*(?:[-*]|\d+\.) (.*)", line)
        if item and not fenced:
            start, lines = number, [item[1]]


def _python(source: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of docstrings, and blocks of comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                for paragraph in docstring.split("\n\n"):
                    if not paragraph.startswith(" "):  # not an indented example
                        yield node.body[0].lineno, paragraph
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield last - len(block) + 1, "\n".join(block)
            block = []
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield last - len(block) + 1, "\n".join(block)


def rules_broken(text: str) -> list[str]:
    """Return the names of the rules that a sentence meets."""
    broken = [name for name, pattern in RULES.items() if re.search(pattern, text)]
    return [*broken, "long"] if len(text.split()) > MOST_WORDS else broken


def vague_names(path: Path) -> Counter[str]:
    """Return how often a Python file binds each of VAGUE_NAMES."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = (n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and _binds(n))
    return Counter(name for name in names if name in VAGUE_NAMES)


def _binds(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def files_of(paths: list[str]) -> Iterator[Path]:
    """Yield the Markdown and Python files under paths."""
    for given in paths:
        path = (ROOT / given).resolve()
        if path.is_file():
            yield path
        for kind in ("*.md", "*.py"):
            yield from sorted(p for p in path.rglob(kind) if "results" not in p.parts)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=list(PATHS))
    parser.add_argument("--rule", choices=[*RULES, "long"], help="show these sentences")
    arguments = parser.parse_args()
    rules, files, names, total = Counter[str](), Counter[str](), Counter[str](), 0
    for path in files_of(arguments.paths):
        if path.suffix == ".py":
            names += vague_names(path)
        for sentence in sentences(path):
            total += 1
            broken = rules_broken(sentence.text)
            rules.update(broken)
            files[sentence.path] += bool(broken)
            if arguments.rule in broken:
                print(f"{sentence.path}:{sentence.line}: {sentence.text}")
    if arguments.rule is None:
        print(f"{total} sentences")
        for title, counts in (("rule", rules), ("variable", names), ("file", files)):
            for name, count in counts.most_common(20):
                print(f"  {title:8} {name:32} {count}")


if __name__ == "__main__":
    main()
