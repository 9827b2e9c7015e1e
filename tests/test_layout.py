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
# Who may import whom: each layer its own and the ones before it.
# errors, files, progress: leaves that everybody may use.
LAYERS = {"errors": 0, "files": 0, "progress": 0, "kernels": 0, "core": 1, "data": 2, "train": 3, "eval": 3, "cli": 4}
CLI = {"cli", "run", "demo", "zoo_packing"}
"""And whatever ends in _cli."""


def sources() -> list[Path]:
    return [file for folder in ("eagle", *LINKED) for file in (ROOT / folder).rglob("*.py") if not file.is_symlink()]


def layer_of(module: str) -> int:
    parts = module.split(".")
    if len(parts) < 2:
        return LAYERS["core"]
    if parts[1] in LAYERS:
        return LAYERS[parts[1]]
    return LAYERS["cli"] if parts[1] in CLI or parts[1].endswith("_cli") else LAYERS["core"]


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
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] == "eagle" and layer_of(name) > layer_of(module):
                    wrong.append(f"{module} imports {name}")
                assert name.split(".")[0] not in LINKED, f"{module} imports the bare name {name}"
    assert not wrong


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
        "from eagle.checkpoint import load_head; from eagle.zoo.catalogue import zoo_names;"
        "assert zoo_names(); print([load_head(name).version for name in zoo_names()])"
    )
    python = tmp_path / "venv" / "bin" / "python"
    out = subprocess.run([python, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip().startswith(str(site))
    version = subprocess.run(
        [python, "-m", "eagle.cli", "--version"], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert "0.1" in version.stdout
