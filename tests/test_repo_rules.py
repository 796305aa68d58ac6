"""Rules of the repository: small files, few macros, comments with reasons, no leftovers, links that lead somewhere."""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("deepinfer_ops", "csrc", "nki")
TEXT = {".py", ".cpp", ".h", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".sh", ".cfg", ""}


def tracked() -> list[Path]:
    """Text files under version control; without git, all that a build or a test run did not make."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        names = output.split("\0")
    except (OSError, subprocess.CalledProcessError):
        made = re.compile(r"(^|/)(\.|build|dist|__pycache__|.*\.egg-info)")
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if not made.search(str(p.relative_to(ROOT)))]
    paths = [ROOT / name for name in names if name]
    return [p for p in paths if p.is_file() and not p.is_symlink() and p.suffix in TEXT and p.name != "LICENSE"]


FILES = tracked()
SOURCES = [path for path in FILES if path.suffix in (".py", ".cpp", ".h")]
PRODUCT_SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PRODUCT]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def comments(path: Path) -> dict[int, str]:
    """Text of every line that holds a comment or belongs to a docstring, by line number."""
    text = path.read_text()
    lines = text.splitlines()
    if path.suffix != ".py":
        return {i: line.split("//", 1)[1] for i, line in enumerate(lines, 1) if "//" in line}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {token.start[0]: token.string.lstrip("#") for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {i: lines[i - 1] for i in range(node.lineno, node.end_lineno + 1) if lines[i - 1].strip()}
    return found


def test_the_list_of_files_is_not_empty_and_holds_every_part():
    assert len(FILES) > 100
    assert {path.relative_to(ROOT).parts[0] for path in PRODUCT_SOURCES} == set(PRODUCT)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_median_product_file_has_at_most_120_lines(record_property):
    lengths = [len(path.read_text().splitlines()) for path in PRODUCT_SOURCES]
    record_property("median lines", statistics.median(lengths))
    assert statistics.median(lengths) <= 120


def share_of_comments(paths: list[Path]) -> float:
    lines = sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())
    return sum(len(comments(path)) for path in paths) / lines


def test_comments_and_docstrings_take_a_share_that_carries_reasons_and_no_more():
    """15 to 25 % of non-empty lines; kernels for NKI, whose docstrings are contracts, may reach 60 %."""
    nki = [path for path in PRODUCT_SOURCES if path.relative_to(ROOT).parts[0] == "nki"]
    others = [path for path in PRODUCT_SOURCES if path not in nki]
    assert 0.15 <= share_of_comments(others) <= 0.25
    assert 0.15 <= share_of_comments(nki) <= 0.60
    for folder in ("deepinfer_ops", "csrc"):
        paths = [path for path in others if path.relative_to(ROOT).parts[0] == folder]
        assert share_of_comments(paths) >= 0.10, folder


def test_csrc_has_at_most_three_function_like_macros_and_none_steers_control_flow():
    macros = []
    for path in SOURCES:
        if path.suffix != ".py":
            joined = path.read_text().replace("\\\n", " ")
            macros += re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\((.*)", joined, re.MULTILINE)
    assert len(macros) <= 3, macros
    for macro, body in macros:
        assert not re.search(r"\b(return|if|else|for|while|goto|break|continue|throw|switch)\b", body), macro


LEFTOVERS = re.compile("|".join(("TO" + "DO", "FIX" + "ME", r"\bXXX\b", r"\bHA" + r"CK\b", "breakpoint" + r"\(\)")))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_leftover_marks(path):
    assert not LEFTOVERS.search(path.read_text())


def is_python(text: str) -> bool:
    """Whether a comment reads as a statement; prose and formulas do not parse, or parse as a bare expression."""
    text = text.strip()
    if not re.search(r"[=(\[:]|^(import|return|raise|del|assert)\b", text):
        return False
    try:
        (statement,) = ast.parse(text + (" pass" if text.endswith(":") else "")).body
    except (SyntaxError, ValueError):
        return False
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return not isinstance(statement, ast.AnnAssign) or statement.value is not None


def is_cpp(text: str) -> bool:
    """Whether a comment reads as a statement: an assignment, a call or a declaration that ends as one."""
    return bool(re.search(r"([\w\])]\s*=[^=].*;|\)\s*;|\)\s*\{|^\s*[{}]|^\s*(return|break|continue)\b.*;)\s*$", text))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_code_is_commented_out(path):
    text = path.read_text().splitlines()
    check = is_python if path.suffix == ".py" else is_cpp
    mark = "#" if path.suffix == ".py" else "//"
    whole_lines = {i: c for i, c in comments(path).items() if text[i - 1].lstrip().startswith(mark)}
    assert not {i: c for i, c in whole_lines.items() if check(c)}


@pytest.mark.parametrize(
    ("text", "python", "cpp"),
    [
        ("x = f(y)", True, False),
        ("import torch", True, False),
        ("for i in range(3):", True, False),
        ("out.copy_(x)", True, False),
        ("float x = f(y);", False, True),
        ("for (int i = 0; i < n; ++i) {", False, True),
        ("return x;", True, True),
        ("a reason, with a number: 2^-22", False, False),
        ("[b, s_q, h_q, 512] bf16", False, False),
        ("shape: [n, 3]; elements", False, False),
    ],
)
def test_the_search_for_commented_code_tells_code_from_prose(text, python, cpp):
    assert (is_python(text), is_cpp(text)) == (python, cpp)


MACHINE = re.compile(
    r"(?<![\w.])/(work|tmp|root|home/\w+|mnt|opt|Users)/|\b(10|172\.(1[6-9]|2\d|3[01])|192\.168)\.\d+\.\d+\b|"
    r"https?://[^\s)\"']*(artifact|nexus|registry|mirror|simple/|index-url|proxy)|--(extra-)?index-url|PIP_INDEX",
)


@pytest.mark.parametrize("path", [p for p in FILES if p != Path(__file__)], ids=name)
def test_no_path_of_a_machine_and_no_registry_host(path):
    assert not MACHINE.search(path.read_text())


@pytest.mark.parametrize("module", ["oracle.py", "pack.py"])
def test_oracle_and_encoders_import_nothing_of_the_product(module):
    """Not even through another module of the tests."""
    seen: set[str] = set()

    def follow(path: Path) -> None:
        for node in ast.walk(ast.parse(path.read_text())):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for imported in found:
                local = path.parent / f"{imported}.py"
                if imported not in seen:
                    seen.add(imported)
                    if local.exists():
                        follow(local)

    source = Path(__file__).with_name(module)
    follow(source)
    assert "numpy" in seen
    assert not [imported for imported in seen if imported.split(".")[0] == "deepinfer_ops"]
    assert "torch.ops" not in source.read_text()


MARKDOWN = [path for path in FILES if path.suffix == ".md"]


def headings(path: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+\s+(.+?)\s*$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", MARKDOWN, ids=name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), f"{target} does not exist"
        assert not anchor or anchor in headings(linked), f"{target}: no such heading"


@pytest.mark.parametrize("path", [*MARKDOWN, *PRODUCT_SOURCES, ROOT / "CMakeLists.txt", ROOT / "Makefile"], ids=name)
def test_every_file_of_the_project_that_is_mentioned_exists(path):
    """X, an operator's name, and * stand for several: one file that fits is enough."""
    folders = "csrc|deepinfer_ops|nki|tests|docs|benchmarks|examples"
    mentioned = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./*-]*\w\.(?:py|cpp|h|md))\b", path.read_text())
    for mention in mentioned:
        pattern = re.sub(r"\bX(?=[_.])", "*", mention)
        assert list(ROOT.glob(pattern)), f"{mention} does not exist"


def test_the_version_stands_in_one_place():
    version = re.search(r'__version__ = "(.+)"', (ROOT / "deepinfer_ops/version.py").read_text())[1]
    holders = [name(path) for path in FILES if f'"{version}"' in path.read_text()]
    assert holders == ["deepinfer_ops/version.py"]


def test_no_tests_fail_to_be_collected_for_their_name():
    """A module of tests is called test_*.py; helpers define no tests."""
    for path in FILES:
        if path.parent == ROOT / "tests" and path.suffix == ".py" and not path.name.startswith("test_"):
            assert not re.search(r"^def test_", path.read_text(), re.MULTILINE), name(path)


def test_no_test_asserts_a_time():
    clock = re.compile(r"assert[^\n]*\b(perf_counter|time\.time|monotonic|elapsed|seconds|duration)\b")
    for path in FILES:
        if path.parent == ROOT / "tests" and path.suffix == ".py" and path != Path(__file__):
            assert not clock.search(path.read_text()), name(path)
