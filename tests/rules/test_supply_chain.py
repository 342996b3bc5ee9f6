"""What is installed for work on hasten is checked, and what is published can be built again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import load_script

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


# -- the environment


def test_each_version_is_locked_with_hashes() -> None:
    lock = load_script("lock")
    entries = lock.locked()
    constraints = lock.versions(lock.CONSTRAINTS.read_text(encoding="utf-8"))
    changed = "requirements-dev.txt is older than constraints.txt: make lock"
    assert lock.versions(lock.LOCK.read_text(encoding="utf-8")) == constraints, changed
    assert [name for name, entry in entries.items() if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    # What pyproject.toml asks for is there: otherwise it would be installed without a hash.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked, names = list(project["dependencies"]), ["dev"]
    while names:
        for requirement in extras[names.pop()]:
            own = re.match(r"hasten\[(.+)\]", requirement)
            names.extend(own[1].split(",") if own else ())
            asked.extend(() if own else (requirement,))
    missing = {name for each in asked if (name := lock.plain(re.split(r"[^\w.-]", each)[0])) not in entries}
    assert missing == set(), "add these to constraints.txt, with what they need, then: make lock"
    assert set(lock.BUILD) <= set(entries)


def test_the_environment_is_installed_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = load_script("lock")
    if reason := lock.without_hashes():
        pytest.skip(reason)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock.txt")
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for digest, is_installed in (("0" * 64, False), (right, True)):
        lock.LOCK.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n", encoding="utf-8")
        if not is_installed:
            with pytest.raises(SystemExit):
                lock.install([])
        else:
            lock.install([])
        assert (tmp_path / "installed" / "tiny.py").exists() == is_installed
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "python scripts/lock.py install\n" in makefile
    assert "--no-build-isolation" in makefile


def test_packages_have_licences_that_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    audit = load_script("audit")
    assert audit.licences() == 0, capsys.readouterr().out
    for expression in ("MIT", "GPL-3.0 OR MIT", "(MIT AND BSD License) OR X", "Apache-2.0 WITH LLVM-exception AND ISC"):
        assert audit.is_allowed(expression), expression
    for expression in ("", "GPL-3.0", "GPL-3.0 AND (MIT OR ISC)", "MIT AND", "(MIT", "MIT) OR ISC", "LicenseRef-Own"):
        assert not audit.is_allowed(expression), expression


KNOWN = [{"id": "PYSEC-1", "fix_versions": ["2"]}]


@pytest.mark.parametrize(
    ("printed", "code", "says"),
    [
        (None, 2, "nothing was checked: no route to the server"),
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages checked, 0 known"),
        ([{"name": "a", "version": "1", "vulns": KNOWN}], 1, "a 1: PYSEC-1, fixed in 2"),
        ([{"name": "a", "skip_reason": "not on PyPI"}], 2, "could not be read: a."),
    ],
)
def test_advisories_that_cannot_be_read_are_no_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    printed: Any,
    code: int,
    says: str,
) -> None:
    program = "import sys\nsys.exit('no route to the server')\n"
    if printed is not None:
        program = f"print({json.dumps({'dependencies': printed})!r})\nraise SystemExit({code != 0:d})\n"
    (tmp_path / "pip_audit.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert load_script("audit").advisories() == code
    assert says in capsys.readouterr().out


def test_the_list_of_packages_is_complete_and_the_same_each_time(tmp_path: Path) -> None:
    audit = load_script("audit")
    wheel = tmp_path / "hasten-1.whl"
    wheel.write_bytes(b"a wheel")
    document = audit.sbom([wheel])
    assert document == audit.sbom([wheel])
    (published,) = document["metadata"]["component"]["externalReferences"]
    assert published["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"a wheel").hexdigest()}]
    scopes = {one["name"]: one["scope"] for one in document["components"]}
    assert set(scopes) == set(audit.installed()) - {"hasten"}
    assert (scopes["torch"], scopes["matplotlib"], scopes["pytest"]) == ("required", "optional", "excluded")
    references = [one["bom-ref"] for one in document["components"]]
    assert len(set(references)) == len(references)
    graph = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    assert graph.keys() == {*references, document["metadata"]["component"]["bom-ref"]}
    assert {name for needed in graph.values() for name in needed} <= set(references)


# -- releases


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="builds a commit: needs a clone")
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = load_script("build")
    wheel, *_ = sorted(build.build_twice("HEAD", tmp_path), key=lambda path: path.suffix, reverse=True)
    # A difference is named by its file.
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(changed, "w") as other:
        for one in archive.infolist():
            other.writestr(one, archive.read(one) + b"#" * one.filename.endswith("hasten/py.typed"))
    assert build.differences(wheel, wheel) == []
    assert build.differences(wheel, changed) == [f"{wheel.name}: hasten/py.typed"]


def jobs(name: str) -> dict[str, Any]:
    """Return the jobs of a workflow."""
    (path,) = (path for path in WORKFLOWS if path.stem == name)
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


def test_a_release_needs_a_signed_tag_and_no_token() -> None:
    release = jobs("release")
    assert "signed" in release["publish"]["needs"]
    assert "if" not in release["signed"]["steps"][0]
    assert ".verification.verified" in release["signed"]["steps"][0]["run"]
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert all("password" not in str(step) for step in release["publish"]["steps"])
    assert [path.name for path in WORKFLOWS if "secrets." in path.read_text(encoding="utf-8")] == []
    # Only the job that publishes can ask PyPI for the right to.
    assert [name for name, job in release.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert "make audit" in str(jobs("test")["audit"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []
