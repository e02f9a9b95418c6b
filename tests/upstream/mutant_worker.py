"""Run mutants of Transformers: a process loads the unchanged modules, and forks once per mutant.

The process reads lines of JSON, {"op": ..., "architectures": [...], "names": [...]}, and writes one line of JSON per
architecture.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from upstream import mutant_models, rewriting  # noqa: E402

SECONDS = 60  # processor time for one architecture in one mutant
GENERAL = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.integrations.sdpa_attention")


class Rewriting(importlib.abc.MetaPathFinder):
    """An import hook that rewrites modules of Transformers in memory; it leaves all other modules unchanged."""

    def __init__(self, mutation: dict[str, Any], seen: set[str]) -> None:
        self.mutation, self.seen = mutation, seen

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of a rewritten module, or None."""
        if not name.startswith("transformers."):
            return None
        home = rewriting.get_original_module(name)
        spec = importlib.machinery.PathFinder.find_spec(home, path)
        if spec is None or spec.submodule_search_locations is not None or not str(spec.origin).endswith(".py"):
            return None
        source = Path(spec.origin).read_text(encoding="utf-8")
        rewritten = rewriting.rewrite(self.mutation, name, source)
        if rewritten is None:
            return None
        self.seen.add(name)
        loader = _Loader(name, rewritten, spec.origin)
        return importlib.util.spec_from_loader(name, loader, origin=spec.origin, is_package=False)


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, name: str, source: str, origin: str) -> None:
        self.source, self.path, self.origin = source, f"<mutant {name}>", origin

    def get_source(self, fullname: str) -> str:
        return self.source

    def exec_module(self, module: Any) -> None:
        for path in (self.path, self.origin):  # code that reads the source gets the mutant
            linecache.cache[path] = (len(self.source), None, self.source.splitlines(keepends=True), path)
        module.__file__ = self.origin
        exec(compile(self.source, self.path, "exec"), vars(module))


def prepare() -> None:
    """Load the modules that no mutation of an architecture's modeling file changes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers.utils

    # `auto_docstring` needs the path of a file, which a mutant does not have.
    transformers.utils.auto_docstring = _as_it_is
    for name in (*GENERAL, "transformers.modeling_layers", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    import attn_variants

    attn_variants.is_command = True  # then the import of the package registers no classes
    import hf_attn_variants  # noqa: F401


def _as_it_is(item: Any = None, **_: Any) -> Any:
    return (lambda entry: entry) if item is None else item


def purge_modules(modules: list[str]) -> None:
    """Remove modules of Transformers and their importers, so that they are loaded again."""
    gone = rewriting.find_importers(
        modules, {name: entry for name, entry in sys.modules.items() if name.startswith("transf")}
    )
    for name in gone:
        module = sys.modules.pop(name)
        parent, _, last = name.rpartition(".")
        vars(sys.modules.get(parent, module)).pop(last, None)
    for module in [entry for name, entry in sys.modules.items() if name.split(".")[0] == "transformers"]:
        cached = [name for name, value in vars(module).items() if getattr(value, "__module__", None) in gone]
        if type(module).__name__ == "_LazyModule":
            for name in cached:
                vars(module).pop(name)


def compute_baseline(architecture: str) -> dict[str, Any]:
    """Return weights and results of each model of an architecture with the unmodified Transformers."""
    results_by_head = {}
    for model in mutant_models.MODELS[architecture]:
        upstream = mutant_models.build(mutant_models.get_transformers_class(architecture, model), model.config)
        results = {"upstream": _compute_results(upstream, model)}
        for name, fields in model.own.items():
            variant_class = mutant_models.get_variant_class(architecture, model)
            try:
                results[name] = _compute_results(mutant_models.build(variant_class, model.config | fields), model)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
        results_by_head[model.head] = results
    return results_by_head


def _compute_results(built: Any, model: Any) -> tuple[list[Any], dict[str, Any]]:
    return [entry.clone() for entry in built.state_dict().values()], mutant_models.measure(built, model.use)


def judge_mutant(architecture: str, mutation: dict[str, Any], before: dict[str, Any]) -> tuple[str, str]:
    """Return the outcome of one architecture in a mutant, and the evidence."""
    worst_verdict = ("equal", "")
    for model in mutant_models.MODELS[architecture]:
        unmutated_results = before[model.head]
        try:
            weights, expected = unmutated_results["upstream"]
            config = model.config
            upstream = mutant_models.build(mutant_models.get_transformers_class(architecture, model), config)
            mutant_models.take(upstream, weights)
            upstream_results = mutant_models.measure(upstream, model.use)
            difference = mutant_models.find_first_difference(
                upstream_results, {} if mutation.get("changes") else expected
            )
        except Exception:
            return "invalid", _format_last_lines()
        if difference:
            return "invalid", f"the model of Transformers differs: {difference}"
        if mutation.get("is_newer"):  # no name has changed, so only the release number shows the change
            importlib.import_module("transformers").__version__ = "5.99.0"
        for name, run in _iterate_variant_checks(
            architecture, model, upstream, upstream_results, unmutated_results, mutation
        ):
            outcome, note = _run_check(run, mutation["names"])
            if ORDER.index(outcome) > ORDER.index(worst_verdict[0]):
                worst_verdict = outcome, f"{model.head} {name}: {note}"
            if outcome in ("raw", "silent"):
                return worst_verdict
    return worst_verdict


ORDER = ("equal", "refused", "refused without its name", "raw", "silent")


def _iterate_variant_checks(
    architecture: str, model: Any, upstream: Any, upstream_results: Any, unmutated_results: Any, mutation: Any
) -> Any:
    """Yield each variant's name and a function that runs it and returns its difference."""

    def loaded(fields: dict[str, Any], generates: bool = True) -> str | None:
        variant_model = mutant_models.build(
            mutant_models.get_variant_class(architecture, model), model.config | fields
        )
        variant_model.load_state_dict(upstream.state_dict())
        return mutant_models.find_first_difference(
            mutant_models.measure(variant_model, model.use, generates), upstream_results
        )

    def talking() -> str | None:
        def read(folder: str) -> Any:
            return mutant_models.get_variant_class(architecture, model).from_pretrained(folder, talking_heads="both")

        variant_model = mutant_models.save_and_load(upstream, read)
        return mutant_models.find_first_difference(mutant_models.measure(variant_model, model.use), upstream_results)

    def own(name: str) -> str | None:
        variant_model = mutant_models.build(
            mutant_models.get_variant_class(architecture, model), model.config | model.own[name]
        )
        if isinstance(unmutated_results[name], str):  # it failed before the mutation
            return mutant_models.find_first_difference(mutant_models.measure(variant_model, model.use), {})
        weights, expected = unmutated_results[name]
        variant_results = mutant_models.measure(mutant_models.take(variant_model, weights), model.use)
        return mutant_models.find_first_difference(variant_results, {} if mutation.get("changes") else expected)

    yield "multi-head", lambda: loaded({})
    yield "exact latents", lambda: loaded(model.exact)
    yield "talking", talking
    for name in model.own:
        yield name, lambda name=name: own(name)


def _run_check(run: Any, names: list[str]) -> tuple[str, str]:
    try:
        difference = run()
    except Exception as error:
        chain = [error]
        while (chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        for entry in chain:
            if type(entry).__name__ == "TransformersChangedError" or _is_our_value_error(entry):
                named = any(name in str(entry) for name in names)
                return "refused" if named else "refused without its name", f"{type(entry).__name__}: {entry}"[:400]
        return "raw", _format_last_lines()
    return ("silent", difference) if difference else ("equal", "")


def _is_our_value_error(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    is_first = error.__cause__ is None and error.__context__ is None
    return type(error) is ValueError and is_first and bool(frames) and "hf_attn_variants" in frames[-1].filename


def _format_last_lines() -> str:
    error, frames = sys.exc_info()[1], traceback.extract_tb(sys.exc_info()[2])
    location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}"
    return f"{type(error).__name__}: {error}"[:300] + f" ({location})"


def run_in_fork(work: Any) -> bytes:
    """Return the result of a function that runs in a fork of this process, or b"" if the fork dies or is too slow."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                result = work()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(result)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


def make_row(architecture: str, outcome: str, note: str, seconds: float) -> bytes:
    """Return a line of JSON."""
    row = {"architecture": architecture, "outcome": outcome, "note": note, "seconds": seconds}
    return (json.dumps(row) + "\n").encode()


def run(mutation: dict[str, Any], before: dict[str, Any]) -> bytes:
    """Return a line of JSON for each architecture of a mutation. This function runs in a fork."""
    seen: set[str] = set()
    sys.meta_path.insert(0, Rewriting(mutation, seen))
    failed = None
    if mutation["op"].get("modules"):
        try:
            purge_modules(mutation["op"]["modules"])
            for name in GENERAL:
                importlib.import_module(name)
        except Exception:
            failed = "invalid", _format_last_lines()

    def one(architecture: str) -> bytes:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # does not depend on the load of the machine
        begun = time.process_time()
        outcome, note = failed or judge_mutant(architecture, mutation, before[architecture])
        if not seen and mutation["op"]["op"] != "nothing":
            outcome, note = "invalid", "nothing was rewritten"
        return make_row(architecture, outcome, note, round(time.process_time() - begun, 2))

    rows = []
    for architecture in mutation["architectures"]:
        lost = make_row(architecture, "raw", f"died, or more than {SECONDS} s", 0.0)
        rows.append(run_in_fork(lambda architecture=architecture: one(architecture)) or lost)
    return b"".join(rows)


def main() -> None:
    """Answer requests until the input ends."""
    prepare()
    before: dict[str, Any] = {}
    for line in sys.stdin:
        mutation = json.loads(line)
        for architecture in mutation["architectures"]:
            if architecture not in before:
                before[architecture] = pickle.loads(run_in_fork(lambda architecture=architecture: _try(architecture)))
        sys.stdout.write(run_in_fork(lambda mutation=mutation: run(mutation, before)).decode())
        sys.stdout.flush()


def _try(architecture: str) -> bytes:
    return pickle.dumps(compute_baseline(architecture))


if __name__ == "__main__":
    main()
