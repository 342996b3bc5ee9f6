"""Audit the development environment: known vulnerabilities, licences, and a list of its packages (SBOM).

Run: python scripts/audit.py advisories   (part of `make audit`; needs a connection to PyPI)
     python scripts/audit.py licences     (part of `make audit`)
     python scripts/audit.py sbom FILE [PACKAGE ...]   (`make sbom`: CycloneDX JSON; PACKAGE: files of a release)

Exit codes of `advisories`: 0 nothing is known, 1 something is, 2 the advisories could not be read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from lock import LOCK, plain  # noqa: E402

# Advisories that do not concern hasten, and why.
IGNORED: dict[str, str] = {}
# Licences under which the packages of the environment may be. None is part of what hasten publishes.
ALLOWED = {
    *("0BSD", "AFL-2.1", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0"),
    *(
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "Zlib",
    ),
}
# What packages write instead of these names.
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Packages whose metadata names no licence of the list: what their own files say.
EXAMINED = {
    "huey": "MIT: its LICENSE",
    "skops": "MIT: its LICENSE",
}
# Needed by torch of PyPI on Linux, installed from NVIDIA's own packages, and no part of what hasten publishes.
OF_CUDA = ("cuda-", "nvidia-")


def installed() -> dict[str, importlib.metadata.Distribution]:
    """Return the installed packages by name; copies that others carry in their folders are parts of these."""
    found: dict[str, importlib.metadata.Distribution] = {}
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    for each in importlib.metadata.distributions(path=folders):
        found.setdefault(plain(each.metadata["Name"]), each)
    return dict(sorted(found.items()))


# -- advisories


def advisories() -> int:
    """Print what is known about the locked packages; return the exit code."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--requirement", str(LOCK)]
    ignored = [word for name in IGNORED for word in ("--ignore-vuln", name)]
    done = subprocess.run(
        [*command, "--progress-spinner", "off", "--format", "json", *ignored],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        said = done.stderr.strip().splitlines() or ["pip-audit printed nothing"]
        print(f"The advisories could not be read, so nothing was checked: {said[-1]}")
        return 2
    known = [(one, vulnerability) for one in packages for vulnerability in one.get("vulns", ())]
    for one, vulnerability in known:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    passed_over = [one["name"] for one in packages if "skip_reason" in one]
    print(f"{len(packages) - len(passed_over)} packages checked, {len(known)} known vulnerabilities")
    if passed_over:
        more = f" and {len(passed_over) - 3} more" if len(passed_over) > 3 else ""
        print(f"Not checked, because their advisories could not be read: {', '.join(passed_over[:3])}{more}.")
    return 1 if known else 2 if passed_over else 0


# -- licences


def licence(package: importlib.metadata.Distribution) -> str:
    """Return the licence that a package states: an SPDX expression if it has one."""
    metadata = package.metadata
    of_classifiers = [
        found[1] for each in metadata.get_all("Classifier", []) if (found := re.match(r"License :: .*?([^:]+)$", each))
    ]
    named = [each.strip() for each in of_classifiers if each.strip() != "OSI Approved"]
    # The old field may hold the whole text.
    text = (metadata.get("License") or "").strip()
    return metadata.get("License-Expression") or " AND ".join(named) or (text if "\n" not in text else "")


def _named(expression: str) -> str:
    """Return an expression with the names of the list in the place of other spellings."""
    for spelling, name in SPELLINGS.items():
        expression = expression.replace(spelling, name)
    return expression


def is_allowed(expression: str) -> bool:
    """Return whether an expression of licences can be met with those of the list."""
    words = [word for each in re.split(r"([()]|\bAND\b|\bOR\b)", _named(expression)) if (word := each.strip())]

    def either() -> bool:
        found = both()
        while words and words[0] == "OR":
            words.pop(0)
            found |= both()
        return found

    def both() -> bool:
        found = one()
        while words and words[0] == "AND":
            words.pop(0)
            found &= one()
        return found

    def one() -> bool:
        word = words.pop(0) if words else ""
        if word != "(":
            return word in ALLOWED
        found = either()
        return bool(words) and words.pop(0) == ")" and found

    return either() and not words


def licences() -> int:
    """Print the packages whose licence is not allowed; return the exit code."""
    packages = {
        name: each for name, each in installed().items() if name not in EXAMINED and not name.startswith(OF_CUDA)
    }
    wrong = {name: stated for name, each in packages.items() if not is_allowed(stated := licence(each))}
    for name, stated in wrong.items():
        print(f"{name}: {stated or 'states no licence'}. Choose another package, or add it to scripts/audit.py.")
    print(f"{len(packages)} packages, {len(wrong)} with a licence that is not allowed")
    return int(bool(wrong))


# -- the list of packages


def needs(package: importlib.metadata.Distribution, extras: Iterable[str] = ()) -> set[str]:
    """Return the names of the packages that a package requires here, with some of its extras."""
    found = set()
    for requirement in map(Requirement, package.requires or ()):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in ("", *extras)):
            found.add(plain(requirement.name))
            if plain(requirement.name) == "hasten":
                found |= needs(package, requirement.extras)
    return found - {plain(package.metadata["Name"])}


def closure(names: set[str], packages: dict[str, importlib.metadata.Distribution]) -> set[str]:
    """Return these packages and all that they require."""
    reached: set[str] = set()
    while names:
        reached |= names
        names = {other for name in names for other in needs(packages[name])} & packages.keys() - reached
    return reached


def sbom(files: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the packages of the environment as a CycloneDX document: the same one for the same environment and commit.

    ``scope`` says what a package is for: "required" by hasten, "optional" for one of its extras, "excluded" for
    work on hasten alone.

    Args:
        files: packages of hasten, whose hashes it has.

    """
    packages = installed()
    hasten = packages.pop("hasten")
    for_work = {"test", "docs", "dev"}
    extras = [name for name in hasten.metadata.get_all("Provides-Extra", []) if name not in for_work]
    required = closure(needs(hasten) & packages.keys(), packages)
    optional = closure(needs(hasten, extras) & packages.keys(), packages)

    def component(name: str, each: importlib.metadata.Distribution) -> dict[str, Any]:
        reference = f"pkg:pypi/{name}@{each.version.replace('+', '%2B')}"
        described = {"type": "library", "bom-ref": reference, "name": name, "version": each.version, "purl": reference}
        stated = licence(each)
        key = "expression" if each.metadata.get("License-Expression") else "name"
        known = [{key: stated} if key == "expression" else {"license": {key: stated}}] if stated else []
        return described | ({"licenses": known} if known else {})

    components = {name: component(name, each) for name, each in packages.items()}
    for name, one in components.items():
        one["scope"] = "required" if name in required else "optional" if name in optional else "excluded"
    subject = component("hasten", hasten)
    hashed = [
        {
            "type": "distribution",
            "url": path.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        }
        for path in sorted(files)
    ]
    references = {name: one["bom-ref"] for name, one in components.items()}
    graph = {subject["bom-ref"]: needs(hasten), **{references[name]: needs(each) for name, each in packages.items()}}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", "0")))
            ),
            "component": subject | ({"externalReferences": hashed} if hashed else {}),
        },
        "components": list(components.values()),
        "dependencies": [
            {"ref": reference, "dependsOn": sorted(references[name] for name in names & references.keys())}
            for reference, names in graph.items()
        ],
    }
    return document | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document))}"}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["advisories"]:
            sys.exit(advisories())
        case ["licences"]:
            sys.exit(licences())
        case ["sbom", target, *names]:
            Path(target).write_text(json.dumps(sbom(map(Path, names)), indent=2) + "\n", encoding="utf-8")
        case _:
            sys.exit(__doc__)
