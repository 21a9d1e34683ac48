"""Hook of MkDocs: links that leave docs/ become the path of the file they name.

The site is a folder of its own, without the repository around it. On a page of docs/ such links are
checked by tests/project/test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def repository_path(page: str, target: str) -> PurePosixPath | None:
    """Return the path from the repository's root of a link's target; None within docs/."""
    parts = list(PurePosixPath("docs", page).parent.parts)
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return None if parts[0] == "docs" else PurePosixPath(*parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text with links out of docs/ replaced; called by MkDocs for each page."""

    def replaced(match: re.Match[str]) -> str:
        path = repository_path(page.file.src_uri, match[2])
        if path is None:
            return match[0]
        text = match[1].strip("`")
        return f"`{path}`" if text in (str(path), path.name) else f"{match[1]} (`{path}`)"

    return LINK.sub(replaced, markdown)
