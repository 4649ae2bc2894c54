"""Let the site show files of the repository where they are, instead of copies."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = ("CHANGELOG.md", "CONTRIBUTING.md", "policies/README.md", "benchmarks/[MRS]*.md", "benchmarks/*.png")


def on_files(files: Files, config: Any) -> Files:
    """Add the files, each under its path in the repository, so that links between them work."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links from `docs/` to these files hold on the site too, where `docs/` is the root."""
    if not Path(page.file.abs_src_path).is_relative_to(ROOT / "docs"):
        return markdown
    return re.sub(r"\]\(\.\./((?:\.\./)*)(?=benchmarks/|policies/|CHANGELOG\.md|CONTRIBUTING\.md)", r"](\1", markdown)
