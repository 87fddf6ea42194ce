"""The documentation as a site, and the package as others get it: a wheel and a source distribution."""

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from browser import opened

import build_site
import reference
from paceline.core.optional import is_installed

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)


def listed(page: Path) -> list[str]:
    """The pages below a page of the site."""
    lines = "".join(TOCTREE.findall(page.read_text("utf-8"))).splitlines()
    return [line for line in lines if line and not line.startswith(":")]


def test_every_page_is_in_the_contents() -> None:
    top = listed(DOCS / "index.md")
    pages = [*top, *(f"reference/{name}" for name in listed(DOCS / "reference" / "index.md")), "index"]
    assert len(set(pages)) == len(pages)
    found = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert found - {path for path in found if path.startswith("plots/")} == set(pages)


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "".join(path.read_text("utf-8") for path in reference.FOLDER.glob("*.md"))
    names = re.findall(r"auto(?:class|function):: (\w+)", text)
    assert sorted(names) == sorted(reference.paceline._HOMES)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("sphinx"), reason="needs sphinx")
def test_versions_of_the_site_lead_to_each_other(tmp_path: Path) -> None:
    """Two tags with a page that only one has, opened from the disk; a page that is missing leads to the start."""
    repository, output = tmp_path / "repository", tmp_path / "a site"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    (repository / "docs").mkdir(parents=True)
    subprocess.run([*git, "init", "-q"], check=True)
    for tag, pages in (("v1.9", ["index"]), ("release/v1.10", ["index", "new"])):
        for name in pages:
            more = "```{toctree}\nnew\n```\n" if pages[1:] and name == "index" else ""
            (repository / "docs" / f"{name}.md").write_text(f"# {name} of {tag}\n\n{more}")
        for words in (["add", "-A"], ["commit", "-qm", tag], ["tag", tag]):
            subprocess.run([*git, *words], check=True)
    first = build_site.build_refs(repository, ["release/v1.10", "v1.9"], output)
    build_site.write_entry(output, first)
    assert "url=release-v1.10/index.html" in (output / "index.html").read_text()
    for ref in ("v3", "--all"):
        with pytest.raises(build_site.BuildError, match="no tag, branch or commit"):
            build_site.build_refs(repository, [ref], output)
    with pytest.raises(build_site.BuildError, match="same folder"):
        build_site.build_refs(repository, ["a/b", "a-b"], output)

    page = output / "release-v1.10" / "new.html"
    done = opened(page.as_uri(), tmp_path, "--virtual-time-budget=5000")
    assert "CONSOLE" not in done.stderr
    options = re.findall(r'<option value="(.*?)"( selected="")?>(.*?)</option>', done.stdout)
    assert options == [
        ("./../release-v1.10/new.html", ' selected=""', "release-v1.10"),
        ("./../v1.9/index.html", "", "v1.9"),
    ]
    choose = """<script>addEventListener("load", () => setTimeout(() => {
      const select = document.querySelector(".versions select");
      select.value = select.options[1].value;
      select.dispatchEvent(new Event("change"));
    }, 500))</script>"""
    page.write_text(page.read_text("utf-8").replace("</body>", f"{choose}</body>"), "utf-8")
    assert "index of v1.9" in opened(page.as_uri(), tmp_path, "--virtual-time-budget=9000").stdout


def test_versions_are_listed_newest_first() -> None:
    names = ["v1.9", "main", "v1.10", "0.1.0", "develop-2"]
    assert sorted(names, key=build_site.newest_first) == ["develop-2", "main", "v1.10", "v1.9", "0.1.0"]


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("sphinx"), reason="needs sphinx")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "hyperparameter_search" in (tmp_path / "reference" / "training.html").read_text("utf-8")
    assert "gradient_accumulation_steps" in (tmp_path / "searchindex.js").read_text("utf-8")
    loaded = re.findall(
        r"<(?:script|img|link)[^>]*(?:src|href)=\"https?://[^\"]*", (tmp_path / "index.html").read_text()
    )
    assert not loaded  # it can be read without a network


USE = """
from paceline import {names}

args = TrainingArguments("runs", learning_rate=1e-3)
rate: float = args.learning_rate
name: int = args.run_name
"""


@pytest.mark.slow
def test_a_wheel_and_a_source_distribution_are_whole(tmp_path: Path) -> None:
    """Built from a clean copy, and the wheel installed and used from elsewhere; its types are seen by mypy."""
    copy = tmp_path / "copy"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    for hook in ("build_sdist", "build_wheel"):
        call = f"from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", call], cwd=copy, capture_output=True, check=True)
    (source,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(source) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"docs/index.md", "examples/averages.py", "CHANGELOG.md", "src/paceline/py.typed"} <= inside
    installed = tmp_path / "site"
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed), str(wheel)]
    subprocess.run([sys.executable, *command], check=True)
    packed = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "paceline").rglob("*")}
    wanted = {name for name in sources if not name.endswith((".pyc", "/")) and (ROOT / "src" / name).is_file()}
    assert wanted <= packed, "not in the wheel: see package-data in pyproject.toml"

    job = tmp_path / "job"
    job.mkdir()
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for words in (["init", "module", "job.yaml"], ["train", "job.yaml", "--max_steps", "2", "--report_to", "none"]):
        command = [sys.executable, "-m", "paceline", *words]
        done = subprocess.run(command, cwd=job, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (job / "runs" / "job" / "run.json").exists()

    torch_names = [name for name, home in reference.paceline._HOMES.items() if "tensorflow" not in home]
    (job / "use.py").write_text(USE.format(names=", ".join(torch_names)))
    command = [sys.executable, "-m", "mypy", "--strict", "use.py"]
    typed = subprocess.run(
        command, cwd=job, env={**environment, "MYPYPATH": str(installed)}, capture_output=True, text=True, check=False
    )
    assert re.findall(r"use\.py:(\d+): error", typed.stdout) == ["6"], typed.stdout + typed.stderr


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("pyright"), reason="needs pyright")
def test_pyright_sees_the_types_from_another_project(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE.format(names=", ".join(reference.paceline._HOMES)))
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "use.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    told = {(each["rule"], each["range"]["start"]["line"]) for each in found if each["severity"] == "error"}
    unused = {each for each in told if each[0] == "reportUnusedImport"}
    assert told - unused == {("reportAssignmentType", 5)}, found
