"""Builds a real API server of Kubernetes: `python -m tests.infra.build_api_server DIRECTORY`

No registry has one as a package. Debian has its sources with all that they need (1.20.2), the Go that builds them, and
etcd. All is unpacked into DIRECTORY and nothing is installed. It takes up to 11 minutes of CPU time and 3 GB of disk,
of which DIRECTORY/bin stays: kube-apiserver, etcd and etcdctl.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fetch_tools import Unavailable

BUILT = Path(__file__).parents[2] / ".make/kubernetes/bin"
"""Where the Makefile has the programs put."""
_SUITE = "bookworm"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_VERSION = "1.20.2"
_PACKAGES = (
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-modern-go-reflect2-dev",
    "etcd-server",
    "etcd-client",
)


class _Apt:
    """Debian's packages and sources of one suite, with lists of its own."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("apt-get") is None or not Path(_KEYRING).exists():
            raise Unavailable("there is no apt-get, or no keyring of Debian")
        for name in ("lists/partial", "cache/archives/partial"):
            (directory / name).mkdir(parents=True)
        sources = directory / "sources.list"
        entry = f"[signed-by={_KEYRING}] {_mirror()} {_SUITE} main"
        sources.write_text(f"deb {entry}\ndeb-src {entry}\n")
        settings = {
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": directory / "lists",
            "Dir::Cache": directory / "cache",
            "APT::Sandbox::User": "root",
        }
        self._options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        self.run("update", "-qq", cwd=directory)

    def run(self, *command: str, cwd: Path) -> None:
        """Run apt-get in a directory, into which it downloads."""
        _run("apt-get", *self._options, *command, cwd=cwd)


def _mirror() -> str:
    """The mirror of Debian that this machine uses."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        origin, _, uri = line.partition(" ")
        if origin == "Debian" and "security" not in uri:
            return uri
    raise Unavailable("apt knows no mirror of Debian; apt-get update may mend that")


def build(directory: Path) -> None:
    """Make the programs in DIRECTORY/bin. Raises `Unavailable`."""
    directory = directory.resolve()
    work, programs = directory / "build", directory / "bin"
    for leftover in (work, programs):
        shutil.rmtree(leftover, ignore_errors=True)
        leftover.mkdir(parents=True)
    apt = _Apt(work)
    packages, root = work / "packages", work / "root"
    packages.mkdir()
    apt.run("download", "-qq", *_PACKAGES, cwd=packages)
    apt.run("source", "-qq", "--download-only", "kubernetes", cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        _run("dpkg-deb", "-x", str(package), str(root))
    source = work / "go/src/k8s.io/kubernetes"
    source.mkdir(parents=True)
    (archive,) = packages.glob("kubernetes_*.orig.tar.gz")
    _run("tar", "-xzf", str(archive), "-C", str(source), "--strip-components", "1")
    _replace_reflect2(source, root)
    _compile(source, work, root, programs / "kube-apiserver")
    for name in ("etcd", "etcdctl"):
        shutil.copy2(root / "usr/bin" / name, programs / name)
    shutil.rmtree(work)


def _replace_reflect2(source: Path, root: Path) -> None:
    """The reflect2 of the sources reads maps as Go had them before 1.18, and the server dies of it."""
    there = "github.com/modern-go/reflect2"
    shutil.rmtree(source / "vendor" / there)
    shutil.copytree(root / "usr/share/gocode/src" / there, source / "vendor" / there)


def _compile(source: Path, work: Path, root: Path, program: Path) -> None:
    """Generate the description of the API, which the sources lack, and compile."""
    environment = {
        **os.environ,
        "HOME": str(work),
        "GOROOT": str(root / "usr/lib/go-1.19"),
        "GOPATH": str(work / "go"),
        "GOCACHE": str(work / "go-cache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "PATH": os.pathsep.join((str(root / "usr/lib/go-1.19/bin"), os.environ.get("PATH", os.defpath))),
    }

    def run(*command: str) -> None:
        _run(*command, cwd=source, environment=environment)

    generator = work / "openapi-gen"
    run("go", "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    run(
        str(generator),
        "--logtostderr",
        *("-i", ",".join(f"k8s.io/kubernetes/{directory}" for directory in described(source))),
        *("-p", "k8s.io/kubernetes/pkg/generated/openapi"),
        *("-O", "zz_generated.openapi"),
        *("-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"),
        *("-r", str(work / "violations")),
    )
    major, minor, _ = _VERSION.split(".")
    names = {"gitVersion": f"v{_VERSION}", "gitMajor": major, "gitMinor": minor}
    told = " ".join(
        f"-X k8s.io/kubernetes/vendor/k8s.io/{package}/version.{name}={value}"
        for package in ("component-base", "client-go/pkg")
        for name, value in names.items()
    )
    # Without the libraries of cloud providers, which would be half of the work.
    flags = ("-tags", "providerless", "-ldflags", f"-s -w {told}")
    run("go", "build", *flags, "-o", str(program), "./cmd/kube-apiserver")


def described(source: Path) -> list[str]:
    """The directories whose types are in the description of the API, as the server imports them."""
    mark = re.compile(r"^// *\+k8s:openapi-gen=", re.MULTILINE)
    found = set()
    for top in ("cmd", "pkg", "plugin", "staging/src/k8s.io"):
        for file in (source / top).glob("**/*.go"):
            if mark.search(file.read_text(encoding="utf-8", errors="replace")):
                found.add(file.parent.relative_to(source).as_posix().replace("staging/src", "vendor", 1))
    left_out = ("vendor/k8s.io/code-generator/", "vendor/k8s.io/sample-apiserver/")
    return sorted(name for name in found if not name.startswith(left_out))


def _run(*command: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)[:300]} fails: {(done.stderr or done.stdout).strip()[-2000:]}")


def main() -> int:
    """Build. Ends with 1 where that is impossible, and says why."""
    if len(sys.argv) != 2:
        print("usage: python -m tests.infra.build_api_server DIRECTORY", file=sys.stderr)
        return 2
    try:
        build(Path(sys.argv[1]))
    except Unavailable as error:
        print(f"the API server cannot be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
