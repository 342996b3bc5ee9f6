"""Check what `make dist` made: versions that agree, complete packages, and nothing that does not belong in them.

Run: python scripts/check_packages.py dist [v0.2.0]   (the tag that is released)
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a wheel has besides modules, and what a source package needs so that its tests and its documentation run.
IN_WHEEL = (
    *("hasten/py.typed", "hasten_lightning/homes.txt", "hasten_lightning/entry_points.txt"),
    *("hasten_tools/py.typed", "hasten_tools/entry_points.txt"),
    *("hasten_deepspeed/entry_points.txt", "hasten_xla/entry_points.txt"),
)
IN_SOURCES = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md"),
    *("constraints.txt", "docs/architecture.md", "docs/images/ladder.png", "examples/README.md", "mkdocs.yml"),
    *("pyproject.toml", "requirements-dev.txt", "scripts/structure.py", "src/hasten/__init__.py", "tests/conftest.py"),
)


def problems(dist: Path, tag: str | None) -> list[str]:
    """Return a line for everything that is wrong with the packages in a folder."""
    wheels, sources = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [f"{dist} has {len(wheels)} wheels and {len(sources)} source packages: one of each is needed."]
    with zipfile.ZipFile(wheels[0]) as wheel:
        in_wheel = set(wheel.namelist())
        metadata = next(name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        built = re.search(r"^Version: (.+)$", wheel.read(metadata).decode(), re.MULTILINE)
    with tarfile.open(sources[0]) as archive:
        in_sources = {name.partition("/")[2] for name in archive.getnames()}

    version = built[1] if built else "?"
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    found = []
    if tag and tag != f"v{version}":
        found.append(
            f"the tag is {tag}, and the wheel has version {version}: change VERSION in src/hasten/_lib/__init__.py."
        )
    if cited is None or cited[1] != version:
        found.append(f"CITATION.cff has another version than {version}.")
    if tag and f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"CHANGELOG.md has no section for {version}.")
    # Files of the package that are not Python, such as templates, are the ones that get lost.
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found += [f"the wheel has no {name}." for name in sorted({*IN_WHEEL, *package} - in_wheel)]
    strange = [name for name in sorted(in_wheel - package) if ".dist-info/" not in name]
    found += [f"the wheel has {name}, which is not a file of the package." for name in strange]
    found += [f"the source package has no {name}." for name in sorted({*IN_SOURCES} - in_sources)]
    found += [
        f"the source package has {name}."
        for name in sorted(in_sources)
        if "__pycache__" in name or name.endswith(".ckpt")
    ]
    return found


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    print("\n".join(wrong) or "The packages are complete.")
    sys.exit(bool(wrong))
