"""The repository's layout: links, one-way dependencies, file sizes, and a plain installation in a clean environment."""

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("data", "train", "eval", "kernels", "configs")
# Who may import whom: a folder itself and those of earlier lines.
ORDER = (
    ("base",),
    ("kernels", "plots"),
    ("target", "sample"),
    ("heads",),
    ("formats",),
    ("draft.tree",),
    ("verify",),
    ("draft",),
    ("decode",),
    ("data",),
    ("train", "eval"),
    ("cli",),
)
"""base: the files in eagle/ itself, which everybody may use."""
PLACE = {name: place for place, line in enumerate(ORDER) for name in line}


def sources() -> list[Path]:
    return [file for folder in ("eagle", *LINKED) for file in (ROOT / folder).rglob("*.py") if not file.is_symlink()]


def folder_of(module: str) -> str:
    parts = module.split(".")[1:]
    if ".".join(parts[:2]) in PLACE:
        return ".".join(parts[:2])
    return parts[0] if parts and parts[0] in PLACE else "base"


def test_every_folder_has_its_place() -> None:
    folders = {path.name for path in (ROOT / "eagle").iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == {name.split(".")[0] for name in PLACE} - {"base"}


def may_import(module: str, name: str) -> bool:
    ours, theirs = folder_of(module), folder_of(name)
    return ours == theirs or PLACE[theirs] < PLACE[ours]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "eagle" else ("eagle", *parts))


def test_folders_are_linked_into_the_package() -> None:
    for name in LINKED:
        link = ROOT / "eagle" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        # A regular package at the root would shadow other projects' (Hugging Face ships one named `kernels`).
        assert not (ROOT / name / "__init__.py").exists()


def test_dependencies_point_one_way() -> None:
    wrong = []
    for file in sources():
        module = module_of(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith("eagle.") and not may_import(module, name):
                    wrong.append(f"{module} imports {name}")
                assert name.split(".")[0] not in LINKED, f"{module} imports the bare name {name}"
    assert not wrong


def test_an_import_turned_round_is_found() -> None:
    assert may_import("eagle.decode.decoder", "eagle.draft.by_head")
    assert not may_import("eagle.draft.by_head", "eagle.decode.decoder")
    assert not may_import("eagle.eval.harness", "eagle.train.loop")
    assert not may_import("eagle.verify.coupled", "eagle.draft.dynamic_tree")
    assert may_import("eagle.verify.coupled", "eagle.draft.tree.DraftTree")


def test_source_files_stay_under_400_lines() -> None:
    long = {str(file.relative_to(ROOT)): n for file in sources() if (n := len(file.read_text().splitlines())) > 400}
    assert not long


@pytest.mark.slow
def test_a_plain_installation_imports_and_leaves_other_names_alone(tmp_path: Path) -> None:
    """Not editable, into an environment of its own that borrows this one's dependencies."""
    # pip builds inside the source tree: in a copy of it, then.
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "*.egg-info", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=ignored)
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(site),
            str(tmp_path / "source"),
        ],
        check=True,
        cwd=tmp_path,
    )
    borrowed = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    installed = {entry.name for entry in site.iterdir()}
    assert not installed & {"kernels", "data", "train", "eval", "configs", "tests"}
    # borrowed packages come after: ours must be the installed copy
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    code = (
        "import eagle, eagle.data.prepare, eagle.train.loop, eagle.eval.harness, eagle.kernels.tree_attention.reference;"
        "from importlib.resources import files; print(eagle.__file__);"
        "assert (files('eagle') / 'configs' / 'demo-smollm2.yaml').is_file();"
        "assert any((files('eagle') / 'data' / 'shipped').iterdir());"
        "from eagle.formats.checkpoint import load_head; from eagle.formats.zoo.catalogue import zoo_names;"
        "assert zoo_names(); print([load_head(name).version for name in zoo_names()])"
    )
    python = tmp_path / "venv" / "bin" / "python"
    out = subprocess.run([python, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip().startswith(str(site))
    version = subprocess.run(
        [python, "-m", "eagle.cli.main", "--version"], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert "0.1" in version.stdout
