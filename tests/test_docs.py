"""The documents match files, commands and flags: links resolve, and the commands accept the documented arguments.

tests/test_readme.py runs the examples. Commands that cannot run in a test are parsed here by the real commands.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest
import yaml

from headrace.protos.status import TABLE, Reason
from tests import exclusion_reference, field_reference, format_reference, ovms_reference
from tests.cli_reference import PAGE, commands, page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
COMMANDS = dict(commands())
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
# Options of other programs that documents name in running text.
OF_OTHERS = {
    *("--wait", "--build", "--scale", "--no-recreate", "--profile"),  # docker compose
    *("--user", "--interleave", "--cpunodebind"),  # docker, numactl
    *("--weight-format", "--grpc", "--pairs", "--case"),  # optimum-cli, buf, benchmarks
    *("--num-cpus", "--resources"),  # ray
}


class _Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a Python function, without importing it."""


_Configuration.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)


def identified(values: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in values]


def prose(markdown: str) -> str:
    """A document without its code blocks."""
    return _FENCE.sub("", markdown)


def anchors(path: Path) -> set[str]:
    """The anchors that headings get, as GitHub and the site make them."""
    found = re.findall(r"^#+ (.+)$", prose(path.read_text()), re.MULTILINE)
    bare = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in found)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in bare}


@pytest.mark.parametrize("path", DOCUMENTS, ids=identified(DOCUMENTS))
def test_every_relative_link_resolves(path: Path) -> None:
    for link in _LINK.findall(prose(path.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link} leads nowhere"
        assert not path.is_relative_to(DOCS) or target.is_relative_to(DOCS), f"{link} leaves the site"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, (list, dict)):
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(inner)

    shown = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(), _Configuration)["nav"]))
    assert sorted(shown) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "decisions" / "index.md").read_text()))
    assert listed == {path.name for path in (DOCS / "decisions").glob("*.md")} - {"index.md"}


def test_every_decision_that_sources_name_exists() -> None:
    sources = [
        *DOCUMENTS,
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto", ".js")),
    ]
    wrong = []
    for path in sources:
        for topic, anchor in re.findall(r"docs/decisions/([\w-]+(?:\.md)?)(?:#([\w-]+))?", path.read_text()):
            target = DOCS / "decisions" / topic
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{path.relative_to(ROOT)}: {topic}#{anchor}")
    assert wrong == []


def test_the_results_that_decisions_and_sources_name_exist() -> None:
    results = anchors(ROOT / "benchmarks" / "RESULTS.md")
    for path in (*(DOCS / "decisions").glob("*.md"), *(ROOT / "cli").rglob("*.py")):
        assert set(re.findall(r"benchmarks/RESULTS\.md#([\w-]+)", path.read_text())) <= results, path.name


def test_the_reference_of_the_command_line_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "make docs writes it anew"


def test_the_tables_of_fields_are_those_of_the_gateway() -> None:
    assert field_reference.PAGE.read_text() == field_reference.page(), "make docs writes it anew"


def test_the_tables_of_ovmss_options_are_those_of_the_code() -> None:
    assert ovms_reference.PAGE.read_text() == ovms_reference.page(), "make docs writes it anew"


def test_the_page_of_formats_has_those_of_the_gateway() -> None:
    assert format_reference.PAGE.read_text() == format_reference.page(), "make docs writes it anew"


def test_the_page_of_what_cannot_be_combined_has_the_table() -> None:
    assert exclusion_reference.PAGE.read_text() == exclusion_reference.page(), "make docs writes it anew"


# --- commands ---------------------------------------------------------------------------------------------------------


def shell_lines(markdown: str) -> Iterator[str]:
    """The command lines in a document's shell blocks; in console blocks, those after the prompt."""
    for language, code in _FENCE.findall(markdown):
        if language in ("bash", "sh", "console"):
            lines = code.replace("\\\n", " ").splitlines()
            yield from (
                whole(line[2:] for line in lines if line.startswith("$ ")) if language == "console" else whole(lines)
            )


def whole(lines: Iterable[str]) -> Iterator[str]:
    """Lines, with those joined that a quotation spans."""
    begun = ""
    for line in lines:
        begun = f"{begun}\n{line}" if begun else line
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        yield begun
        begun = ""
    assert not begun, f"no closing quotation: {begun}"


def invocations(line: str) -> Iterator[list[str]]:
    """The arguments of each `headrace` in a command line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not word.strip("|&;"):
            found = [i for i, word in enumerate(words) if re.fullmatch(r"(?:\S*/bin/)?headrace", word)]
            at = found[-1] if found else 0
            if found and (words[0] == "sudo" or all("=" in word for word in words[:at])):
                yield words[at + 1 :]
            words = []
        else:
            words.append(word)


def refuse_unknown(args: list[str]) -> None:
    """Raise click.UsageError, or fail, for what `headrace ARGS` does not take. Files need not exist."""
    usual = getattr(COMMANDS.get(tuple(args[:1])), "default", None)
    if usual is not None and len(args) > 1 and tuple(args[:2]) not in COMMANDS and args[1] != "--help":
        args = [args[0], usual, *args[1:]]
    words = tuple(args[:2]) if tuple(args[:2]) in COMMANDS else tuple(args[:1])
    if not words or args[0].startswith("-"):
        assert args in (["--help"], ["--version"]), f"headrace {' '.join(args)}"
        return
    assert words in COMMANDS, f"there is no headrace {' '.join(args[:2])}"
    command = COMMANDS[words]
    assert not isinstance(command, click.Group) or len(args) == 1, f"there is no headrace {' '.join(args[:2])}"
    context = click.Context(command, info_name=" ".join(words))
    values, _, order = command.make_parser(context).parse_args(args[len(words) :])
    for option in order:
        if not isinstance(option.type, click.Path) and option.nargs != -1 and option.name in values:
            option.type_cast_value(context, values[option.name])


def inline_flags(markdown: str) -> set[str]:
    """Long options in inline code."""
    code = " ".join(re.findall(r"`([^`\n]+)`", prose(markdown)))
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", code))


@pytest.mark.parametrize("path", DOCUMENTS, ids=identified(DOCUMENTS))
def test_every_command_line_is_one_that_headrace_takes(path: Path) -> None:
    for line in shell_lines(path.read_text()):
        for args in invocations(line):
            refuse_unknown(args)


GUIDES = [path for path in DOCUMENTS if "benchmarks" not in path.parts]


@pytest.mark.parametrize("path", GUIDES, ids=identified(GUIDES))
def test_every_flag_in_running_text_exists(path: Path) -> None:
    options = {name for command in COMMANDS.values() for option in command.params for name in option.opts}
    options |= {name for command in COMMANDS.values() for option in command.params for name in option.secondary_opts}
    assert inline_flags(path.read_text()) <= options | OF_OTHERS | {"--help", "--version"}


@pytest.mark.parametrize("path", GUIDES, ids=identified(GUIDES))
def test_every_make_target_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    markdown = path.read_text()
    said = set(re.findall(r"`make ([a-z-]+)", prose(markdown)))
    said |= {line.split()[1] for line in shell_lines(markdown) if line.startswith("make ")}
    assert said <= targets


FOLDERS = (
    "bench",
    "benchmarks",
    "cli",
    "client",
    "common",
    "deploy",
    "docs",
    "examples",
    "gateway",
    "on_ray",
    "plan",
    "protos",
    "router",
    "sim",
    "tests",
    "worker",
)


@pytest.mark.parametrize("path", GUIDES, ids=identified(GUIDES))
def test_every_file_that_is_named_exists(path: Path) -> None:
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./@*-]*)`", prose(path.read_text())):
        assert any(ROOT.glob(name.rstrip("/"))) or any(ROOT.glob(f"{name}.py")), f"there is no {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=identified(DOCUMENTS))
def test_every_module_that_is_to_be_run_exists(path: Path) -> None:
    for name in re.findall(rf"python\s+-m\s+(?:headrace\.)?((?:{'|'.join(FOLDERS)})(?:\.\w+)+)", path.read_text()):
        module = ROOT.joinpath(*name.split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), f"there is no {name}"


def test_the_modules_of_the_architecture_are_those_that_there_are() -> None:
    markdown = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| (?:`((?:worker|router)[\w/]*)`[^|]*|) ?\| (`[^|]*) \|", markdown, re.MULTILINE)
    wing, named_modules = "", set()
    for named, cell in rows:
        wing = named or wing
        named_modules |= {f"{wing}/{module}" for module in re.findall(r"`(\w+)`", cell)}
    modules = {
        str(path.relative_to(ROOT).with_suffix(""))
        for top in ("router", "worker")
        for path in (ROOT / top).rglob("*.py")
    }
    assert named_modules == {module for module in modules if "__" not in module}


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, and methods as `Class.method`."""
    definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, definition)]
    methods = {
        f"{node.name}.{inner.name}"
        for node in top
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, definition)
    }
    return {node.name for node in top} | methods


def test_the_stops_of_the_walk_exist() -> None:
    stops = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (DOCS / "architecture.md").read_text())
    assert len(stops) > 30
    assert [f"{file}: {name}" for file, name in stops if name not in names_in(ROOT / file)] == []


def test_the_classes_of_the_workers_picture_exist() -> None:
    picture = re.search(r"```mermaid\nclassDiagram\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    assert picture is not None
    drawn = set(re.findall(r"\b[A-Z]\w+[a-z]\w*\b", re.sub(r" : .*", "", picture[1])))
    found = set[str]().union(*(names_in(path) for path in (ROOT / "worker").rglob("*.py")))
    assert drawn
    assert drawn <= found


# --- messages ---------------------------------------------------------------------------------------------------------


def literals() -> str:
    """Every string in the product's source, with NUL in place of inserted values."""
    found = []
    for path in (
        path
        for wing in ("cli", "common", "gateway", "protos", "router", "worker")
        for path in (ROOT / wing).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d)?[a-z]", "\0", node.value))
    return "\n".join(found)


def messages() -> list[str]:
    """The longest fixed part of each message that the page explains."""
    told = re.findall(r"^\| (?:\d+ )?(`[^|]*`)[^|`]*(?= \|)", TROUBLESHOOTING.read_text(), re.MULTILINE)
    texts = [text for cell in told for text in re.findall(r"`([^`]+)`", cell) if " " in text]
    return [
        max(re.split(r"\b[A-Z]{1,9}\b|\.\.\.|(?<= )/?[A-Z]+(?=/)", text), key=len).strip(" :;,'()") for text in texts
    ]


PRODUCT = ("cli", "common", "gateway", "protos", "router", "worker")
TROUBLESHOOTING = DOCS / "how-to" / "troubleshooting.md"


def test_every_message_that_is_explained_is_one_of_ours() -> None:
    source = literals()
    explained = messages()
    assert len(explained) > 60
    assert [text for text in explained if text not in source] == []


def test_the_reference_of_errors_is_the_table_of_errors() -> None:
    rows = re.findall(
        r"^\| ([A-Z_]+) \| ([A-Z_]+) \| (\d+) \| (\S+) \|", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE
    )
    told = {name: (code, int(status), own.strip("`")) for name, code, status, own in rows}
    assert told == {
        reason.name: (row.grpc_code.name, row.http_status, row.openai_code or "null")
        for reason, row in TABLE.items()
        if reason is not Reason.GIVEN_BACK
    }


# --- the checks themselves --------------------------------------------------------------------------------------------


def test_a_heading_has_the_anchor_of_its_words(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# A `b` of [c](d.md), e\n\n```bash\n# no heading\n```\n")
    assert anchors(document) == {"a-b-of-c-e"}


@pytest.mark.parametrize(
    ("line", "args"),
    [
        ("headrace status --json | python -m json.tool", [["status", "--json"]]),
        ("sudo -u a X=1 /opt/headrace/bin/headrace status && headrace chat  # talk", [["status"], ["chat"]]),
        ("cd headrace; make serve", []),
        ("pip install 'headrace[otel]'", []),
    ],
)
def test_invocations_are_found_in_a_line(line: str, args: list[list[str]]) -> None:
    assert list(invocations(line)) == args


@pytest.mark.parametrize(
    "args", [["serve", "--no-such-flag"], ["serve", "--port", "x"], ["nothing"], ["keys", "forget"], ["--flag"]]
)
def test_what_headrace_does_not_take_is_noticed(args: list[str]) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        refuse_unknown(args)


def test_what_headrace_takes_is_accepted() -> None:
    refuse_unknown(["serve", "smollm2-135m", "--port", "8123", "--tls-cert", "not-here.pem"])
    refuse_unknown(["keys", "create", "alice", "--file", "api-keys"])
