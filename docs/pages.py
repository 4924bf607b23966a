"""Writes the pages of docs/ that are made from the code: `python -m docs.pages`. MkDocs loads this file as a hook (mkdocs.yml).

On the site, the README is the first page, config fields have a page, and links to files outside docs/ lead into the repository.
"""

import pathlib
import posixpath
import re

from rl.experiment import base_fields

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = """# Config fields

A line has the name of a field, its default in [configs/base.py](../configs/base.py), and its comment. Comments above a line are about the
fields that follow. Change a field on the command line with `--config.NAME=VALUE`.

```python
{}
```
"""


def main() -> None:
    """Writes the pages that are kept in docs/."""
    for name, text in pages().items():
        (DOCS / name).write_text(text)
        print(DOCS / name)


def pages() -> dict[str, str]:
    """Returns the text of the pages that are kept in docs/, by name."""
    from docs import catalog  # here, not where MkDocs loads this file: its path lacks the checkout

    return {"metrics.md": catalog.markdown()}


def site_pages() -> dict[str, str]:
    """Returns the text of the pages that only the site has, by name."""
    fields = "\n".join(line.removeprefix("  ") for line in base_fields.listing().splitlines())
    readme = (ROOT / "README.md").read_text()
    readme = re.sub(r"\]\((?![a-z]+:)(docs/)?", lambda link: "](" if link[1] else "](../", readme)
    return {
        "config.md": CONFIG.format(fields.strip()),
        "index.md": readme,
    }


def for_site(text: str, page: str, repository: str) -> str:
    """Returns the Markdown of a page of docs/ with its links out of docs/ changed, for the site of a repository ("": unknown)."""

    def link(found: re.Match) -> str:
        words, target = found.groups()
        path, hash_mark, anchor = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target)).partition(
            "#"
        )
        if re.match(r"[a-z]+:|#", target) or path.startswith("docs/"):
            return found[0]
        return f"[{words}]({repository}/blob/main/{path}{hash_mark}{anchor})" if repository else f"{words} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def on_files(files, config):
    """Adds the pages that only the site has. MkDocs calls it."""
    from mkdocs.structure import files as files_lib  # pyright: ignore[reportMissingImports]

    for name, text in site_pages().items():
        files.append(files_lib.File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, **_):
    """Returns the Markdown of a page for the site. MkDocs calls it."""
    return for_site(markdown, page.file.src_uri, (config.repo_url or "").rstrip("/"))


if __name__ == "__main__":
    main()
