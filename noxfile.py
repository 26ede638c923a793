"""Every task that a person runs. Each session builds the wheels and installs those, never the source tree.

python -m nox -s quickstart               the main job, into runs/quickstart; overrides go after `--`
python -m nox -s tests                    every test; a path or -k after `--` narrows it
python -m nox -s "plugin(fsdp)"           one distribution's tests, with only what it needs installed
python -m nox -s tests_vllm tests_sglang  the tests of these engines' plugins on them, in environments of their own
python -m nox -s tests_trackers           the trackers' tests with every library that they write to
python -m nox -s tests_environments       rollcast-agents' tests with textarena, gem-llm and reasoning-gym
python -m nox -s tests_verifiers          the same for verifiers' tasksets; installing verifiers takes four minutes
python -m nox -s tests_verl               rollcast-verl's tests with verl, and verl's own of its worker groups
python -m nox -s lint types docs
python -m nox -s dev                      an editable environment of all distributions, in .venv
python -m nox -s wheels                   every wheel and source distribution into dist/, with their metadata checked
python -m nox -s release -- 0.2.0         the same after this version was written everywhere
python -m nox -s config_docs              write the tables of configuration keys into the docs
python -m nox -s index                    write the core's index of the plugins of this repository, known.json
python -m nox -s bench bench_peers        all benchmarks but the long ones; the names of some after `--`
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
#: Versions to install: of everything on a machine without a GPU; and where the trackers' libraries are too.
CPU, TRACKERS = (ROOT / ".ci" / f"constraints-{name}.txt" for name in ("cpu", "trackers"))
FOLDERS = [ROOT / "core", *sorted(ROOT.glob("plugins/rollcast-*")), *sorted(ROOT.glob("contrib/rollcast-*"))]
TEST_TOOLS = [
    *("pytest", "pytest-timeout", "pytest-xdist"),
    *("hypothesis", "psutil", "hatchling"),
]
PYTEST = ["-m", "pytest", "-q"]
#: Failed tests of a whole run that get a second attempt; more of them are no accident.
RETRIED = 10
#: Libraries behind extras that a distribution's tests use; tests of others are skipped without theirs.
TEST_LIBRARIES = {
    "rollcast-agents": ["httpx", "mcp>=2,<3", "openai", "renderers"],
    "rollcast-automap": ["aiconfigurator-core>=0.12,<0.13"],
    "rollcast-fsdp": ["peft"],
    "rollcast-rewards": ["math-verify[antlr4_9_3]"],
    "rollcast-trackers": ["tensorboard"],
}
QUICKSTART = "rollcast-quickstart"
#: Distributions whose engine has pins of its own.
ENGINES = ("rollcast-vllm", "rollcast-sglang")
#: Wheels by the checksum of their sources.
WHEELS = ROOT / ".nox" / "wheels"
#: The environment of the trainer whose replicas run in an engine's environment; the same for each engine.
TRAINER = ROOT / ".nox" / "trainer"
#: Of tests/benchmarks, those that need no other project.
BENCHMARKS = (
    *("controller", "plain_loop", "rewards", "algorithms", "resume"),
    *("weight_sync", "replica_kill"),
    *("fsdp_step", "megatron_step", "packing", "logprob_memory", "export", "mapping_search"),
)
#: Benchmarks that run only where they are named, since each takes more than ten minutes.
LONG_BENCHMARKS = ("quickstart_seeds",)
#: What verl's controller and its algorithms import; the rest of what verl requires is for its trainers.
VERL_NEEDS = [
    *("torch", "ray", "tensordict", "transformers", "hydra-core", "codetiming", "pandas", "numpy", "packaging"),
    "orjson",
]
VERL = "verl==0.9.1"

nox.needs_version = ">=2024.4.15"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]


def project(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


DISTRIBUTIONS = {str(project(folder)["name"]): folder for folder in FOLDERS}


def requirements(name: str) -> set[str]:
    """A distribution with the first-party ones that it needs."""
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found.add(current)
        for line in project(DISTRIBUTIONS[current]).get("dependencies", ()):
            other = Requirement(line).name
            if other in DISTRIBUTIONS:
                waiting.append(other)
    return found


def test_requirements(name: str) -> set[str]:
    """What a distribution's tests need beside it: the group `test` of its pyproject.toml."""
    groups = tomllib.loads((DISTRIBUTIONS[name] / "pyproject.toml").read_text()).get("dependency-groups", {})
    return set().union(*(requirements(other) for other in groups.get("test", ())))


def workspace(session: nox.Session) -> Path:
    """Return a folder of the session's own.

    Not nox's: that would become TMPDIR, and Ray's workers refuse to start with their files inside a
    virtual environment.
    """
    return Path(session.virtualenv.location) / "rollcast"


def environment(session: nox.Session) -> None:
    """Hide the caller's Python from the session's processes, and give them caches of their own."""
    session.env["PYTHONPATH"] = ""
    session.env["XDG_CACHE_HOME"] = str(workspace(session) / "cache")
    session.env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"


def digest(folder: Path) -> str:
    """Return a checksum of what a distribution's wheel is built from."""
    found = hashlib.sha256()
    files = [
        *(folder / name for name in ("pyproject.toml", "README.md", "LICENSE")),
        *sorted((folder / "src").rglob("*")),
    ]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            found.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Keep other processes of nox from writing to ``place`` meanwhile."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_wheels(session: nox.Session, names: set[str], python: str = "python") -> list[Path]:
    """Return the wheels of ``names``; a wheel is built once, for all sessions and runs, until its sources change."""
    wanted = {name: WHEELS / digest(DISTRIBUTIONS[name]) for name in sorted(names)}
    with locked(WHEELS):
        missing = [name for name, place in wanted.items() if not list(place.glob("*.whl"))]
        if missing:
            fresh = WHEELS / f"new-{os.getpid()}"
            folders = [str(DISTRIBUTIONS[name]) for name in missing]
            pip = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(fresh)]
            session.run_install(*pip, *folders, external=True)
            for name in missing:
                (wheel,) = fresh.glob(f"{name.replace('-', '_')}-*.whl")
                wanted[name].mkdir(parents=True, exist_ok=True)
                wheel.replace(wanted[name] / wheel.name)
            fresh.rmdir()
    return [next(place.glob("*.whl")) for place in wanted.values()]


def what_is_installed(names: set[str], tools: Iterable[str], pins: Path | None) -> str:
    """Return what an environment's marker says: the pins, the tools, and each distribution's checksum."""
    fixed = hashlib.sha256(pins.read_bytes()).hexdigest() if pins else ""
    return "\n".join([fixed, *sorted(tools), *(f"{name} {digest(DISTRIBUTIONS[name])}" for name in sorted(names))])


def install(session: nox.Session, names: set[str], *tools: str, pins: Path | None = CPU) -> None:
    """Install the wheels of ``names`` with their dependencies and the tools, unless the session has just these."""
    environment(session)
    pinned = ["-c", str(pins)] if pins else []
    marker = workspace(session) / "installed"
    wanted = what_is_installed(names, tools, pins)
    wheels = workspace(session) / "wheels"
    session.env["ROLLCAST_WHEELS"] = str(wheels)
    if marker.is_file() and marker.read_text() == wanted:
        return
    marker.unlink(missing_ok=True)
    session.install("-q", *pinned, "hatchling")
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    built = [shutil.copy(wheel, wheels) for wheel in build_wheels(session, names)]
    session.install("-q", *pinned, *map(str, built), *tools)
    # A wheel of the same version would otherwise be taken for the one that is there.
    session.install("-q", "--no-deps", "--force-reinstall", *map(str, built))
    marker.write_text(wanted)


def pins_without(session: nox.Session, *names: str) -> Path:
    """Return a copy of the CPU pins that leaves the versions of these packages to pip."""
    kept = [line for line in CPU.read_text().splitlines() if line.partition("==")[0] not in names]
    pins = workspace(session) / "constraints.txt"
    pins.parent.mkdir(parents=True, exist_ok=True)
    pins.write_text("\n".join(kept) + "\n")
    return pins


def run_tests(session: nox.Session, *folders: str, spread: Iterable[str] = (), python: str = "python") -> None:
    """Run pytest, with the options ``spread`` over processes; try the failed tests again, alone and in a new process.

    Both attempts are printed: a test that passes only at its second depends on time, load or another test. What the
    user wrote after ``--`` replaces ``spread`` and runs once.
    """
    if session.posargs:
        session.run(python, *PYTEST, *folders, *session.posargs, external=True)
        return
    cache = workspace(session) / "pytest-cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [python, *PYTEST, "-o", f"cache_dir={cache}"]
    try:
        session.run(*command, *spread, *folders, external=True)
    except CommandFailed:
        failures = cache / "v" / "cache" / "lastfailed"
        failed = json.loads(failures.read_text()) if failures.is_file() else {}
        if not 0 < len(failed) <= RETRIED:
            raise
        session.warn(f"second attempt for {', '.join(failed)}")
        session.run(*command, "--last-failed", "--last-failed-no-failures", "none", *folders, external=True)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train the quick start's model; `-- trainer.seed=3` and the like are passed on."""
    install(session, requirements(QUICKSTART))
    session.run("rollcast", "train", "recipe=quickstart", "trainer.resume_mode=disable", *session.posargs)


def count_processes() -> int:
    """Return how many processes run tests: a third of the time they wait for others that they started."""
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(3 * (os.cpu_count() or 1) // 2, gigabytes // 5))


@nox.session
def tests(session: nox.Session) -> None:
    """Every distribution's tests and those that cross them, on installed wheels."""
    install(session, set(DISTRIBUTIONS), *TEST_TOOLS, *chain.from_iterable(TEST_LIBRARIES.values()))
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, spread=["-n", str(count_processes()), "--dist", "loadfile", "--no-loadscope-reorder"])


@nox.session
@nox.parametrize("name", [nox.param(name, id=name.partition("-")[2] or "core") for name in DISTRIBUTIONS])
def plugin(session: nox.Session, name: str) -> None:
    """One distribution's own tests, with nothing installed but what it and they require."""
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *TEST_LIBRARIES.get(name, []))
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"))


@nox.session
def tests_vllm(session: nox.Session) -> None:
    """rollcast-vllm's tests on vLLM itself, which has pins of its own; for a machine without a GPU."""
    engine_tests(session, "rollcast-vllm")


@nox.session
def tests_sglang(session: nox.Session) -> None:
    """rollcast-sglang's tests on SGLang itself, which has pins of its own; for a machine without a GPU."""
    engine_tests(session, "rollcast-sglang")


@nox.session
def tests_environments(session: nox.Session) -> None:
    """rollcast-agents' tests with textarena, gem-llm and reasoning-gym, a part of which needs a C compiler."""
    name = "rollcast-agents"
    extras = project(DISTRIBUTIONS[name])["optional-dependencies"]
    libraries = [*extras["textarena"], *extras["reasoning-gym"], *TEST_LIBRARIES[name], "msgspec"]
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries)
    # It requires an antlr that hydra excludes, and older versions of what the extras name.
    session.install("-q", "--no-deps", "gem-llm==0.1.0")
    session.env["OMP_NUM_THREADS"] = "1"
    files = [DISTRIBUTIONS[name] / "tests" / f"test_{part}.py" for part in ("games", "sources", "commands")]
    run_tests(session, *map(str, files))


@nox.session
def tests_verifiers(session: nox.Session) -> None:
    """rollcast-agents' tests of verifiers' tasksets, with verifiers, which pins older versions of mcp and openai."""
    name = "rollcast-agents"
    pins = pins_without(session, "mcp", "mcp-types", "openai")
    libraries = project(DISTRIBUTIONS[name])["optional-dependencies"]["verifiers"]
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries, pins=pins)
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[name] / "tests" / "test_verifiers.py"))


@nox.session
def tests_verl(session: nox.Session) -> None:
    """rollcast-verl's tests with verl, among them verl's own tests of its worker groups, which its wheel has."""
    name = "rollcast-verl"
    libraries = project(DISTRIBUTIONS[name])["optional-dependencies"]["verl"]
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries)
    # Its requirements pin older versions of torch's and transformers' companions; what these tests import is above.
    session.install("-q", "--no-deps", VERL)
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"), "tests/test_verl_page.py")


@nox.session
def tests_trackers(session: nox.Session) -> None:
    """rollcast-trackers' tests with every library that it writes to."""
    name = "rollcast-trackers"
    libraries = chain.from_iterable(project(DISTRIBUTIONS[name])["optional-dependencies"].values())
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries, pins=TRACKERS)
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"))


def engine_tests(session: nox.Session, name: str) -> None:
    """A distribution's tests with its engine, installed as its requirements files say."""
    folder = DISTRIBUTIONS[name]
    environment(session)
    session.install("-q", "-r", str(folder / "requirements-cpu.txt"))
    session.install("-q", "--no-deps", "-r", str(folder / "requirements-cpu-no-deps.txt"))
    install(
        session, requirements(name) | test_requirements(name) | requirements("rollcast-serving"), *TEST_TOOLS, pins=None
    )
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(folder / "tests"))
    if not session.posargs:
        train_elsewhere(session, name)


def train_elsewhere(session: nox.Session, name: str) -> None:
    """A trainer in an environment of its own, with replicas in the session's."""
    trainer = install_trainer(session)
    session.env["ROLLCAST_ROLLOUT"] = name.removeprefix("rollcast-")
    session.env["ROLLCAST_REPLICA_PYTHON"] = str(Path(session.virtualenv.location) / "bin" / "python")
    run_tests(session, "tests/engines", python=str(trainer))


def install_trainer(session: nox.Session) -> Path:
    """Return the Python of the trainer's environment, with the plugins of every engine and none of the engines."""
    python = TRAINER / "bin" / "python"
    marker = TRAINER / "installed"
    names = requirements(QUICKSTART) | set(ENGINES)
    tools = ["pytest", "pytest-timeout", "peft"]
    wanted = what_is_installed(names, tools, CPU)
    with locked(TRAINER):
        if not marker.is_file() or marker.read_text() != wanted:
            shutil.rmtree(TRAINER, ignore_errors=True)
            session.run_install("python", "-m", "venv", str(TRAINER))
            built = [str(wheel) for wheel in build_wheels(session, names)]
            pip = [str(python), "-m", "pip", "install", "-q", "-c", str(CPU)]
            session.run_install(*pip, *built, *tools, external=True)
            marker.write_text(wanted)
    return python


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and format."""
    environment(session)
    session.install("-q", "-c", str(CPU), "ruff")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    session.install("-q", "check-jsonschema>=0.33", "pre-commit>=4")
    check = ["check-jsonschema", "-q", "--builtin-schema"]
    session.run(*check, "vendor.github-workflows", *map(str, sorted(Path(".github/workflows").glob("*.yml"))))
    session.run("pre-commit", "validate-config")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over every distribution's source."""
    install(session, set(DISTRIBUTIONS), "mypy", *TEST_TOOLS)
    sources = [folder / "src" for folder in FOLDERS]
    session.env["MYPYPATH"] = os.pathsep.join(map(str, sources))
    session.run("mypy", *(str(package) for source in sources for package in source.iterdir() if package.is_dir()))


@nox.session(default=False, venv_backend="none")
def dev(session: nox.Session) -> None:
    """Install every distribution, editable, with the tools of a contributor into .venv, or the folder after `--`.

    `--gpu` leaves the versions of torch and the rest to pip.
    """
    folder = Path(next((each for each in session.posargs if not each.startswith("-")), ".venv"))
    pins = [] if "--gpu" in session.posargs else ["-c", str(CPU)]
    session.run("python", "-m", "venv", str(folder))
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "install", "-q", *pins]
    tools = [*TEST_TOOLS, "editables", "ruff", "mypy", "nox", "pre-commit"]
    session.run(*pip, *tools, *chain.from_iterable(TEST_LIBRARIES.values()))
    session.run(*pip, "--no-build-isolation", *chain.from_iterable(("-e", str(folder)) for folder in FOLDERS))


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel and source distribution into dist/ and check their metadata; `-- --tag v0.2.0` checks a tag."""
    environment(session)
    session.install("-q", "build", "hatchling", "twine", "packaging")
    if session.posargs:
        session.run("python", ".ci/release.py", *session.posargs)
    shutil.rmtree("dist", ignore_errors=True)
    for folder in FOLDERS:
        session.run("python", "-m", "build", "-q", "--no-isolation", "--outdir", "dist", str(folder))
    session.run("twine", "check", "--strict", *map(str, sorted(Path("dist").iterdir())))


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Write the version after `--` into every distribution and the change log, and build all of it."""
    if len(session.posargs) != 1:
        session.error("say the version: nox -s release -- 0.2.0")
    session.install("-q", "packaging")
    session.run("python", ".ci/release.py", *session.posargs)
    session.posargs.clear()
    wheels(session)


@nox.session(default=False, venv_backend="none")
def config_docs(session: nox.Session) -> None:
    """Write the tables of configuration keys into the docs, from the schemas."""
    session.run("python", ".ci/config_tables.py", *session.posargs)


@nox.session(default=False, venv_backend="none")
def index(session: nox.Session) -> None:
    """Write the index of plugins and their distributions that the core reads for its hints."""
    session.run("python", ".ci/index.py")


@nox.session
def surface(session: nox.Session) -> None:
    """Rewrite tests/surface.txt and docs/api.md from the declared surface; a change needs a line in the change log."""
    install(session, {"rollcast"})
    session.run("python", "tests/surface.py")


@nox.session
def bench(session: nox.Session) -> None:
    """The controller and the quick start's step against what the machine can do; the rest."""
    install(
        session,
        requirements(QUICKSTART) | requirements("rollcast-megatron") | requirements("rollcast-testing"),
        "psutil",
    )
    for name in chosen(session, *BENCHMARKS, *LONG_BENCHMARKS) if session.posargs else BENCHMARKS:
        session.run("python", f"tests/benchmarks/bench_{name}.py")


@nox.session
def bench_peers(session: nox.Session) -> None:
    """The quick start's step against TRL; controller and algorithms against verl, in an environment of its own."""
    names = chosen(session, "verl", "verl_algorithms", "trl")
    install(session, requirements(QUICKSTART), *(["trl==1.16.*"] if "trl" in names else []))
    if peers := [name for name in names if name.startswith("verl")]:
        theirs = Path(session.virtualenv.location) / "verl"
        session.run("python", "-m", "venv", str(theirs))
        pip = [str(theirs / "bin" / "python"), "-m", "pip", "install", "-q"]
        session.run(*pip, "-c", str(CPU), *VERL_NEEDS, external=True)
        session.run(*pip, "--no-deps", VERL, external=True)
        python = str(theirs / "bin" / "python")
        for name in peers:
            session.run("python", f"tests/benchmarks/bench_{name}.py", "--verl-python", python)
    if "trl" in names:
        session.run("python", "tests/benchmarks/bench_trl.py")


def chosen(session: nox.Session, *names: str) -> list[str]:
    """Those of the benchmarks that are named after `--`; all by default."""
    unknown = set(session.posargs) - set(names)
    if unknown:
        session.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [name for name in names if name in session.posargs or not session.posargs]


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into site/; `-- serve` shows it."""
    environment(session)
    session.install("-q", "-c", str(CPU), "mkdocs-material")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device, with the machine's own torch (no CPU pins)."""
    install(session, set(DISTRIBUTIONS), *TEST_TOOLS, pins=None)
    session.run("python", *PYTEST, "-m", "gpu", *session.posargs)
