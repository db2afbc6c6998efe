"""Makes a release of a committed tree: its section of the changelog, its version, and in `dist/`
the source distribution, a wheel for each platform, those of this one tried in a new environment
without a compiler, their SHA-256 sums, what an installation consists of (SBOM) and the notes.

    make release VERSION=0.2.0

Everything is built from `git archive` of one commit, with its time, so that a second run makes the
same bytes. Nothing is uploaded or tagged: the workflow `release` uploads what a tag names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools import how_tested, wheels

ROOT = Path(__file__).resolve().parents[1]

INIT = Path("src/cadenza/__init__.py")
CHANGELOG = Path("CHANGELOG.md")
CITATION = Path("CITATION.cff")
DETAILS = Path("docs/changes")
UNRELEASED = "## [Unreleased]"
DETAILED = ("### Changed", "### Fixed", "### Added", "### Removed")
"""The sections that list everything; what stands before them is the page that a reader is given."""
MOST_LINES = 90
NAME = "cadenza"
ALL = ("sdist", "linux-x86_64", "linux-aarch64", "macos-arm64")


class ReleaseError(Exception):
    """The tree or the version is not one that can be released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A changelog that was cut: the new CHANGELOG.md, the notes of the version, and all its entries
    for docs/changes."""

    changelog: str
    notes: str
    details: str


def main(arguments: list[str] | None = None) -> int:
    """0 when everything is in `--out` and the wheels of this platform were tried."""
    parser = argparse.ArgumentParser(description="Make a release.")
    parser.add_argument("version", help="X.Y.Z, or X.Y.ZrcN")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL, help="what to build")
    parser.add_argument(
        "--dry-run", action="store_true", help="commit nothing; build the last commit as it is"
    )
    asked = parser.parse_args(arguments)
    try:
        check_version(asked.version)
        check_tree(ROOT)
        check_index(asked.version)
        if not asked.dry_run and not is_cut(ROOT, asked.version):
            commit_version(ROOT, asked.version)
        return make(ROOT, asked.version, asked.out, tuple(asked.only))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1


def make(root: Path, version: str, out: Path, parts: tuple[str, ...]) -> int:
    """Builds the commit that is checked out."""
    commit, date = git(root, "rev-parse", "HEAD"), git(root, "log", "-1", "--format=%ct")
    source = root / "build" / "release"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    export(root, commit, source)
    if version_of(source) != version:
        raise ReleaseError(f"the commit has the version {version_of(source)}, not {version}")
    os.environ |= {"SOURCE_DATE_EPOCH": date, "CADENZA_BUILD_COMMIT": commit}
    if wheels.main([*parts, "--source", str(source), "--out", str(out)]):
        return 1
    for wheel in sorted(out.glob("*.whl")):
        if wheels.runs_here(wheel):
            subprocess.run([root / "tools" / "check_wheel.sh", wheel, sys.executable], check=True)
        else:
            print(f"{wheel.name}: not tried, this machine is another platform")
    write_sbom(root, out / f"{NAME}-{version}.cdx.json")
    (out / "NOTES.md").write_text(notes_of((source / CHANGELOG).read_text("utf-8"), version))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in built(out)]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(sums))
    print(f"\n{out} has release {version} of {commit[:12]}.")
    print(f"Next: git tag -s v{version} && git push origin main v{version}")
    return 0


def built(out: Path) -> list[Path]:
    return sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")


def is_cut(root: Path, version: str) -> bool:
    """Whether the commit is that of this release already: a second run builds it again."""
    changelog = (root / CHANGELOG).read_text(encoding="utf-8")
    return version_of(root) == version and f"## [{version}]" in changelog


def check_version(version: str) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise ReleaseError(f"VERSION={version} is not X.Y.Z or X.Y.ZrcN")


def check_tree(root: Path) -> None:
    changed = git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(f"the tree has changes that are not committed:\n{changed}")


def check_index(version: str) -> None:
    """Ends the release if the index has this version; says whether it has the name at all."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", NAME]
    ran = subprocess.run(pip, capture_output=True, text=True, check=False)
    listed = re.search(r"Available versions: (.*)", ran.stdout)
    if listed is None:
        print(f"the index has no package {NAME}, or it cannot be asked: this is its first release")
    elif version in re.split(r",\s*", listed[1].strip()):
        raise ReleaseError(f"the index already has {NAME} {version}; choose another version")
    else:
        print(f"the index has {NAME} {listed[1].split(',')[0]}: see that it is this project's")


def commit_version(root: Path, version: str) -> None:
    """Sets the version, cuts the changelog, and commits both."""
    day = datetime.now(UTC).date().isoformat()
    cut = cut_changelog((root / CHANGELOG).read_text("utf-8"), version, day)
    (root / CHANGELOG).write_text(cut.changelog, encoding="utf-8")
    (root / DETAILS).mkdir(exist_ok=True)
    (root / DETAILS / f"{version}.md").write_text(cut.details, encoding="utf-8")
    replace_once(root / DETAILS / "index.md", r":maxdepth: 1\n\n", f":maxdepth: 1\n\n{version}\n")
    replace_once(root / INIT, r'__version__ = "[^"]+"', f'__version__ = "{version}"')
    replace_once(root / CITATION, r"(?m)^version: .*$", f"version: {version}")
    replace_once(root / CITATION, r"(?m)^date-released: .*$", f"date-released: {day}")
    how_tested.main()
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", f"release: {version}")


def replace_once(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, path.read_text("utf-8"))
    if count != 1:
        raise ReleaseError(f"{path} has {count} places like {pattern}, not one")
    path.write_text(changed, encoding="utf-8")


def cut_changelog(text: str, version: str, day: str) -> Cut:
    """The page of the unreleased section stays in CHANGELOG.md under `version`, its lists go.

    Raises:
        ReleaseError: there is nothing unreleased, the version has a section, or the page is absent
            or longer than `MOST_LINES`.
    """
    if f"## [{version}]" in text:
        raise ReleaseError(f"{CHANGELOG} has a section of {version}")
    head, found, rest = text.partition(UNRELEASED + "\n")
    unreleased, rule, older = rest.partition("\n## [")
    first = min((at for name in DETAILED if (at := unreleased.find(name + "\n")) >= 0), default=-1)
    page = unreleased[:first].strip() if first >= 0 else unreleased.strip()
    if not found or not page:
        raise ReleaseError(
            f"{CHANGELOG} needs a page before its lists, under {UNRELEASED}: what a reader can do "
            f"now, by what they do with it"
        )
    if len(page.splitlines()) > MOST_LINES:
        raise ReleaseError(f"the page of {version} is longer than {MOST_LINES} lines")
    link = f"Everything that changed: [{version}]({DETAILS}/{version}.md)."
    notes = f"{page}\n\n{link}"
    return Cut(
        changelog=f"{head}{UNRELEASED}\n\n## [{version}] – {day}\n\n{notes}\n{rule}{older}",
        notes=notes,
        details=f"# Changes in {version}\n\n{from_details(unreleased[first:].strip())}\n"
        if first >= 0
        else f"# Changes in {version}\n\nSee CHANGELOG.md.\n",
    )


def from_details(text: str) -> str:
    """Entries of CHANGELOG.md as they are on a page of docs/changes: links from there, titles below
    the page's."""
    text = re.sub(r"(?m)^### ", "## ", text)
    return re.sub(r"\]\((?!https?:|#)(?:docs/(\S+?)|(\S+?))\)", _moved_link, text)


def _moved_link(link: re.Match[str]) -> str:
    return f"](../{link[1]})" if link[1] else f"](../../{link[2]})"


def notes_of(changelog: str, version: str) -> str:
    """The section of `version`; of the unreleased one where a dry run has none."""
    for title in (rf"## \[{re.escape(version)}\]", re.escape(UNRELEASED)):
        section = re.search(rf"(?ms)^{title}.*?\n(.*?)(?=^## \[|\Z)", changelog)
        if section and section[1].strip():
            return section[1].strip() + "\n"
    return ""


def version_of(root: Path) -> str:
    found = re.search(r'__version__ = "([^"]+)"', (root / INIT).read_text("utf-8"))
    return found[1] if found else ""


def export(root: Path, commit: str, folder: Path) -> None:
    """The files of `commit`."""
    folder.mkdir(parents=True)
    packed = folder.with_suffix(".tar")
    git(root, "archive", "--format=tar", f"--output={packed}", commit)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    packed.unlink()


def write_sbom(root: Path, path: Path) -> None:
    """What an installation consists of at run time, in the versions of requirements.lock."""
    wanted = runtime_requirements(root)
    listed = path.with_suffix(".txt")
    listed.write_text("\n".join(wanted) + "\n")
    tool = Path(sys.executable).with_name("cyclonedx-py")
    command = [tool, "requirements", listed, "--output-reproducible", "--output-file", path]
    subprocess.run(command, check=True)
    listed.unlink()


def runtime_requirements(root: Path) -> list[str]:
    """`name==version --hash=…` of what an installation has at run time, as pip resolves it with
    requirements.lock."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    lock = ["--constraint", str(root / "requirements.lock")]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    report = ["--dry-run", "--ignore-installed", "--report", "-"]
    ran = subprocess.run(
        [*pip, *report, *lock, *project["dependencies"]],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ReleaseError(f"pip finds no set of libraries: {ran.stderr.strip()}")
    found = json.loads(ran.stdout)["install"]
    return sorted(
        f"{each['metadata']['name'].lower()}=={each['metadata']['version']}"
        f" --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}"
        for each in found
    )


def git(root: Path, *arguments: str) -> str:
    command = [shutil.which("git") or "git", "-C", root, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ReleaseError(f"git {arguments[0]}: {ran.stderr.strip()}")
    return ran.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
