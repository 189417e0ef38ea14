"""Build the sdist, the wheel from it, and check that the wheel holds the package: all of it and nothing else.

Run as a script (`make wheel`); exits 1 with the list of differences. The oracle is the source tree itself: a
package that is missing from pyproject.toml's list, or a data file that no pattern there matches, is found here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("modules", "data", "train", "eval", "configs", "launch")
TOP_FILES = ("__init__.py", "__main__.py", "py.typed")


def is_source(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return path.is_file() and "__pycache__" not in parts and not any(part.startswith(".") for part in parts)


def expected_files() -> set[str]:
    """Paths inside the wheel that the source tree asks for."""
    nested = {p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if is_source(p)}
    return {f"draftsmith/{name}" for name in TOP_FILES} | {
        f"draftsmith/{p.relative_to(ROOT).as_posix()}" for p in nested
    }


def build_wheel(out_dir: Path) -> Path:
    """The sdist first and the wheel from it: leftovers of an earlier build in the tree cannot get in."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out_dir), str(ROOT)], check=True, stdout=sys.stderr)
    (wheel,) = out_dir.glob("*.whl")
    return wheel


def differences(wheel: Path) -> list[str]:
    """One line for each way in which the wheel differs from what a user must get; empty when it is right."""
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename for info in archive.infolist() if not info.is_dir()}
        metadata = {name.split("/", 1)[1]: name for name in names if ".dist-info/" in name}
        entry_points = archive.read(metadata["entry_points.txt"]).decode() if "entry_points.txt" in metadata else ""
    packaged = {name for name in names if ".dist-info/" not in name}
    expected = expected_files()
    found = [f"missing from the wheel: {name}" for name in sorted(expected - packaged)]
    found += [f"in the wheel, not part of the package: {name}" for name in sorted(packaged - expected)]
    if "draftsmith = draftsmith.launch.cli:main" not in entry_points:
        found.append("the wheel has no entry point draftsmith = draftsmith.launch.cli:main")
    if "licenses/LICENSE" not in metadata:
        found.append("the wheel has no license text")
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as out_dir:
        wheel = build_wheel(Path(out_dir))
        found = differences(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(expected_files())} files expected")
    for line in found:
        print(line)
    print("wheel contents: " + (f"{len(found)} problems" if found else "right"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
