"""A hook of MkDocs: the site loads nothing from other servers, so that its search works without internet.

Material's plugin `offline` refers to a script on a public server; a copy of it is in docs/assets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REMOTE, LOCAL = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.min.js"
_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=[\"']?(https?:[^\"' >]+)|<link[^>]+stylesheet[^>]+href=[\"']?(https?:[^\"' >]+)"
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refer to the copy."""
    from mkdocs.utils import get_relative_url

    return output.replace(REMOTE, get_relative_url(LOCAL, page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Refer to the copy, in pages that are no Markdown files."""
    return output_content.replace(REMOTE, LOCAL)


def on_post_build(config: Any) -> None:
    """Fail if a page loads something from another server."""
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = _LOADED.search(page.read_text())
        if found:
            raise PluginError(f"{page} loads {found[1] or found[2]}; keep a copy in docs/assets")
