"""What a release says of itself is true, and every address comes from `addresses.toml`."""

import email
import http.server
import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest

import torchzero_clip

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE_UP = {
    "repository": "https://code.example/someone/torchzero_clip",
    "documentation": "https://pages.example/torchzero_clip",
    "branch": "main",
}
MODULES = {path.stem for path in (ROOT / "torchzero_clip").iterdir()}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ISSUES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def hatch_build():
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_yaml(path):
    return pytest.importorskip("yaml", reason="the docs extra is not installed").safe_load(path.read_text())


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("docs/chain.md", "https://pages.example/torchzero_clip/chain/"),
        ("docs/chain.md#target", "https://pages.example/torchzero_clip/chain/#target"),
        ("docs/index.md#which-transform", "https://pages.example/torchzero_clip/#which-transform"),
        ("docs/img/norms.png", "https://pages.example/torchzero_clip/img/norms.png"),
        ("CONTRIBUTING.md", "https://code.example/someone/torchzero_clip/blob/main/CONTRIBUTING.md"),
        ("#try-it", None),
    ],
)
def test_an_address_is_made_from_the_file_of_addresses(target, address):
    assert hatch_build().absolute(target, MADE_UP) == address


def test_files_are_taken_from_the_repository_where_the_pages_are_not_known():
    absolute = hatch_build().absolute
    only = {"repository": MADE_UP["repository"] + "/", "branch": "trunk"}
    assert absolute("docs/chain.md", only) == "https://code.example/someone/torchzero_clip/blob/trunk/docs/chain.md"
    assert absolute("docs/img/a.png", only) == "https://code.example/someone/torchzero_clip/raw/trunk/docs/img/a.png"
    assert absolute("docs/chain.md", {"branch": "main"}) is None


def test_links_of_the_description_are_absolute():
    text = hatch_build().with_absolute_links(README, MADE_UP)
    assert len(links(text)) >= 10
    assert [link for link in links(text) if not link.startswith("https://")] == []
    assert "![" in text


def test_links_without_an_address_become_words():
    text = hatch_build().with_absolute_links("![A figure](docs/a.png)\n[`x`](docs/b.md) [web](https://a.example)", {})
    assert text == "\n`x` [web](https://a.example)"
    described = hatch_build().with_absolute_links(README, {"branch": "main"})
    assert [link for link in links(described) if not link.startswith("https://")] == []
    assert "```python" in described


def test_links_beside_the_description():
    urls = hatch_build().urls
    assert urls({"branch": "main"}) == {}
    assert urls(MADE_UP) == {
        "Documentation": "https://pages.example/torchzero_clip",
        "Source": "https://code.example/someone/torchzero_clip",
        "Issues": "https://code.example/someone/torchzero_clip/issues",
        "Changelog": "https://pages.example/torchzero_clip/changelog/",
    }


@pytest.mark.slow
def test_the_built_package(tmp_path):
    """With made-up addresses: the source distribution has what its own build needs, and the wheel only the package."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    copy, dist = tmp_path / "copy", tmp_path / "dist"
    left_out = shutil.ignore_patterns("__pycache__", ".*_cache", ".venv", ".git", "site", "dist")
    shutil.copytree(ROOT, copy, ignore=left_out)
    addresses = "\n".join(f'{key} = "{value}"' for key, value in MADE_UP.items())
    (copy / "addresses.toml").write_text(f'{addresses}\nauthors = [{{ name = "A. Tester" }}]\n')

    def build(folder, target):
        program = f"import hatchling.build; hatchling.build.build_{target}({str(dist)!r})"
        subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)

    build(copy, "sdist")
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    source = next((tmp_path / "unpacked").iterdir())
    assert not (source / ".git").exists()
    assert {"README.md", "tests", "docs", "examples", "CITATION.cff", "LICENSE", ".ci"} <= {
        path.name for path in source.iterdir()
    }
    build(source, "wheel")
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        names = archive.namelist()
        described = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("METADATA"))))
    assert {name.split("/")[0].split("-")[0] for name in names} == {"torchzero_clip"}
    assert "torchzero_clip/py.typed" in names
    assert described["Author"] == "A. Tester"
    assert described["Version"] == torchzero_clip.__version__
    assert described.get_all("Project-URL")[0] == "Documentation, https://pages.example/torchzero_clip"
    assert "https://pages.example/torchzero_clip/img/" in described.get_payload()


def test_the_changelog_says_in_one_section_what_the_first_release_has():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 120] == []
    (title,) = (line for line in lines if line.startswith("## "))
    assert re.fullmatch(r"## (Unreleased|" + re.escape(torchzero_clip.__version__) + r" - \d{4}-\d\d-\d\d)", title)
    needs = [line for line in lines if line.startswith("### ")]
    assert len(set(needs)) == len(needs) >= 10
    assert needs[-1] == "### Known limits"
    named = set(re.findall(r"`(\w+)", "\n".join(lines)))
    public = {name for name in dir(torchzero_clip) if not name.startswith("_") and name not in MODULES}
    assert public - named == set()


def test_classifiers_name_the_versions_that_were_tested():
    table = re.findall(r"^\| (3\.\d+) \| 2\.", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    prefix = "Programming Language :: Python :: "
    named = [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(f"{prefix}3.")]
    assert sorted(set(table)) == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_citation_names_this_version():
    citation = read_yaml(ROOT / "CITATION.cff")
    addresses = tomllib.loads((ROOT / "addresses.toml").read_text())
    assert citation["version"] == torchzero_clip.__version__
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in addresses["authors"]]
    assert citation.get("repository-code") == addresses.get("repository")
    assert {"cff-version", "message", "type", "abstract"} <= set(citation)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_only_call_commands_of_this_repository(path):
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split()[0] for step in steps if "run" in step]
    assert [command for command in commands if not (ROOT / command).is_file()] == []
    assert all(command.startswith(".ci/") and (ROOT / command).stat().st_mode & 0o100 for command in commands)
    used = [step["uses"] for step in steps if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name)] == []
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_there_is_a_workflow_for_each_occasion():
    triggers = {path.stem: set(read_yaml(path)[True]) for path in WORKFLOWS}  # YAML reads `on` as True
    assert triggers == {
        "pages": {"push", "workflow_dispatch"},
        "publish": {"push"},
        "pull_request": {"pull_request", "push"},
        "nightly": {"schedule", "workflow_dispatch"},
        "systems": {"schedule", "workflow_dispatch"},
        "versions": {"schedule", "workflow_dispatch"},
    }


@pytest.mark.parametrize("path", [path for path in ISSUES if path.name != "config.yml"], ids=lambda path: path.name)
def test_issue_templates_have_what_their_host_asks_for(path):
    template = read_yaml(path)
    assert template["name"]
    assert template["description"]
    fields = [entry for entry in template["body"] if entry["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_large_files_are_found(tmp_path):
    command = [sys.executable, ROOT / ".ci/large_files", tmp_path]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "small.txt").write_text("a")
    assert subprocess.run(command, check=False).returncode == 0
    (tmp_path / "large.bin").write_bytes(bytes(700_000))
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "large.bin has 700,000 bytes, and the limit is 600,000\n"


def test_only_the_tag_of_this_version_is_published():
    done = subprocess.run([ROOT / ".ci/publish", "v99.0"], text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stdout == f"the tag is 'v99.0', and the version of the package is {torchzero_clip.__version__}\n"


class Answers(http.server.BaseHTTPRequestHandler):
    """Knows one page, and refuses programs on another."""

    def do_GET(self):
        self.send_response({"/page": 200, "/private": 403}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_):
        pass


def test_foreign_addresses_without_a_page_are_found(monkeypatch):
    loader = importlib.machinery.SourceFileLoader("links", str(ROOT / ".ci/links"))
    links = importlib.util.module_from_spec(importlib.util.spec_from_loader("links", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(links)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = f"http://127.0.0.1:{server.server_port}"
        assert links.trouble(f"{own}/page") is None
        assert links.trouble(f"{own}/private") is None
        assert links.trouble(f"{own}/gone") == "HTTP 404"
        server.shutdown()
    assert links.trouble(f"{own}/page") is not None
    found = links.addresses(ROOT)
    assert "docs/transforms/clip_norm.md" not in found  # addresses, not files
    assert "torchzero_clip/clipping/clip_norm.py" in found["https://arxiv.org/abs/1211.5063"]
    assert not [address for address in found if address.endswith((".", ",", ")"))]
