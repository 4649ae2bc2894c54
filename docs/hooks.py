"""Let the site show files of the repository where they are, instead of copies."""

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
