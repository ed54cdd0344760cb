"""Declares the study of language models: how fast they write new tokens after a prompt.

Each run, batch, prompt and format of weights is one job, which times all forms in turn.
"""

import json
from collections.abc import Iterator
from itertools import product

from tnp.bench.language_forms import FORMS, WEIGHTS
from tnp.llm.sizes import MODELS
from workflow import settings, sources
from workflow.faults import Fault, listed, not_among
from workflow.settings import ABSENT, Section
from workflow.studies import Config, Here, Job, Study

START = "tnp.bench.language:measure_language"
DTYPE = "bfloat16"  # of activations and the cache, whatever the weights' format


class Run(Section):
    """Holds the sizes of calls: prompts of equal lengths, and new tokens after each."""

    model: str
    batch: settings.unique(settings.Size, 1)
    prompt: settings.unique(settings.Size, 1)
    # A token's time is the difference of two calls, of which the shorter writes one.
    new: settings.checked(lambda n: n < 2 and "must be at least 2", settings.Size)
    forms: settings.SomeNames | None = None  # in place of the study's


class Settings(settings.Study):
    runs: settings.some(Run)
    weights: settings.unique(settings.one_of(*WEIGHTS), 1)
    forms: settings.SomeNames
    timing: settings.Briefly = ABSENT


class LanguageModels(Study):
    section = "language_models"
    holds = Settings
    kind = "generation"
    rule = "language_model"
    tables = ("generations", "samples", "code", "environments")
    said = ("token_ms_p50", "form")

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            timing = here.timing(spec.timing.given() if spec.timing else {})
            for name, run in spec.runs.items():
                for batch, n_prompt, weights in product(run.batch, run.prompt, spec.weights):
                    named = run.forms or spec.forms
                    forms = [form for form in named if weights in FORMS[form].weights]
                    if not forms:
                        continue
                    operators: dict[str, str] = {}
                    for form in forms:
                        operators |= FORMS[form].operators
                    yield here.job(
                        f"{study}--{name}--b{batch}_p{n_prompt}_{weights}",
                        study,
                        spec,
                        timing=timing,
                        shape=name,
                        model=run.model,
                        weights=weights,
                        batch=batch,
                        n_prompt=n_prompt,
                        n_new=run.new,
                        dtype=DTYPE,
                        forms=forms,
                        operators=json.dumps(operators),
                    )

    def faults(self, config: Config) -> Iterator[Fault]:
        spec = self.spec(config)
        if spec is None:
            return
        yield from not_among((self.section, "forms"), "form", spec.forms, FORMS)
        for index, name in enumerate(spec.forms):
            formats = FORMS[name].weights if name in FORMS else spec.weights
            if not set(formats) & set(spec.weights):
                what = f"{name!r} has weights in {listed(formats)} alone: name that in `weights`"
                yield Fault((self.section, "forms", index), what)
        for name, run in spec.runs.items():
            place = (self.section, "runs", name)
            yield from not_among((*place, "forms"), "form", run.forms or (), FORMS)
            if run.model not in MODELS:
                yield from not_among((*place, "model"), "model", [run.model], MODELS)
                continue
            longest, length = MODELS[run.model].sizes.longest, max(run.prompt) + run.new
            if length > longest:
                what = f"{max(run.prompt)} and {run.new} new tokens are {length}"
                yield Fault(place, f"{what}: {run.model} takes at most {longest}", ("prompt",))

    def gates(self, job: Job) -> list[str]:
        found = (gate for form in job["forms"] for gate in FORMS[form].gates(job["model"]))
        return list(dict.fromkeys(found))

    def code(self, job: Job) -> sources.Found:
        found: sources.Found = {}
        for form in job["forms"]:
            found |= of_form(form)
        return found

    def completed(self, job: Job) -> Job:
        """Returns a job with the `definitions` of each form."""
        return job | {"definitions": {form: sources.code(of_form(form)) for form in job["forms"]}}


def of_form(form: str) -> sources.Found:
    """Returns the code of one form, without that of the others."""
    timing = sources.reached(START, ("tnp.bench.language_forms",))
    return timing | sources.reached(FORMS[form].start, ("tnp.bench.language_forms",))
