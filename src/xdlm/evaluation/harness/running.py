"""Benchmarks as records: asked through lm-eval, scored, and kept with all that they depend on."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation.generation import mean
from xdlm.evaluation.harness.adapter import register
from xdlm.evaluation.harness.benchmarks import SETS
from xdlm.evaluation.harness.responder import Reply, Responder
from xdlm.evaluation.harness.trials import told_of_runs
from xdlm.evaluation.passing import pass_at_k
from xdlm.evaluation.provenance import provenance
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.sandbox import available_guards
from xdlm.evaluation.subject import OnProgress, Progress

TASKS = Path(__file__).with_name("tasks")
#: Tasks whose answers are programs, which have to be run.
CODE = ("humaneval", "mbpp")
#: lm-eval's own; all of our tasks have fixed examples.
_FEW_SHOT_SEED = 1234
ENDS = ("passed", "wrong", "failed", "out_of_limits")


@dataclass(frozen=True)
class Asking:
    """What is asked of a model."""

    limit: int | None = None
    """So many questions of a task, the first ones; by default all."""
    programs: int = 1
    """Programs per problem, in tasks of code."""
    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k."""
    run_code: bool = False
    """Whether programs that the model wrote may be run."""
    chat: bool = False
    """Whether questions go through the model's chat template, as a message each."""

    def check(self, tasks: Sequence[str]) -> None:
        """What cannot be, before anything is loaded."""
        if not tasks:
            raise UserError(f"which tasks? some of {', '.join(SETS)}")
        for name in tasks:
            if name not in SETS:
                raise UserError(f"unknown task '{name}'{did_you_mean(name, SETS)}")
        if (self.limit is not None and self.limit < 1) or self.programs < 1:
            raise UserError("the limit of questions and the number of programs must be at least 1")
        if not self.pass_at or not all(1 <= k <= self.programs for k in self.pass_at):
            raise UserError(
                f"the k of pass@k must lie in 1..{self.programs}, the programs per problem"
            )
        unread = [name for name in tasks if name in CODE]
        if unread and not self.run_code:
            raise UserError(
                f"{' and '.join(unread)}: the answers are programs that would be run, in a sandbox; "
                "allow it with --run-code"
            )
        if unread:
            available_guards()

    def check_repeats(self, tasks: Sequence[str], responder: Responder) -> None:
        """That several programs of a problem would be several."""
        if self.programs > 1 and set(CODE) & set(tasks) and not responder.repeats_differ:
            raise UserError(
                f"at temperature 0 this sampler writes the same program {self.programs} times: give a "
                "--temperature, or leave --programs out"
            )


@dataclass(frozen=True)
class Asked:
    """A task's results and everything that was said."""

    records: list[EvalRecord]
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class Questions:
    """How many questions there are, and a digest of them and of what is right."""

    n: int
    sha256: str


def questions(responder: Responder, task: str, asking: Asking) -> Questions:
    """What the model would be asked."""
    asking.check([task])
    model_class = register()
    with _quiet(responder.progress):
        wanted = _loaded(task, asking)["tasks"][task]
        model = model_class(responder)
        wanted.build_all_requests(
            limit=asking.limit, apply_chat_template=asking.chat,
            chat_template=model.apply_chat_template if asking.chat else None,
            tokenizer_name=model.tokenizer_name if asking.chat else "",
        )  # fmt: skip
    return _questions_of(wanted)


def planned(
    responder: Responder, name: str, task: str, those: Questions, asking: Asking
) -> list[EvalRecord]:
    """What asking the model called `name` would find out, without the outcome: a record for each figure."""
    writing = responder.writing
    extra = {
        **writing.options,
        **({} if responder.context is None else {"context": responder.context}),
    }
    options = "".join(f", {key} = {value}" for key, value in sorted(extra.items()))
    noise = responder.model.sampled_as
    undone = "" if noise is None else f" as {noise.kind}, k = {noise.k:g}"
    plan = EvalRecord(
        "", None, None, those.n, writing.seed, name, data=task, data_sha256=those.sha256,
        length=writing.length, steps=writing.steps, sampler=writing.sampler + undone + options,
        temperature=writing.temperature, top_p=writing.top_p,
        draws=asking.programs if task in CODE else None, **provenance(responder.model),
    )  # fmt: skip
    metrics = [f"pass@{k}" for k in asking.pass_at] if task in CODE else ["exact_match"]
    return [replace(plan, metric=metric) for metric in metrics]


def ask(responder: Responder, name: str, task: str, asking: Asking) -> Asked:
    """Put a task's questions to the model called `name`."""
    asking.check([task])
    asking.check_repeats([task], responder)
    found, model, wanted = _evaluated(responder, task, asking)
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    said = [_said(sample, task) for sample in samples]
    plans = planned(responder, name, task, _questions_of(wanted), asking)
    about = {"cut_prompts": model.responder.n_cut, "stopped": _share_stopped(model.replies)}
    about |= {"chat": 1.0} if asking.chat else {}
    if task in CODE:
        about |= _ends(samples)
        passed = [int(sample["passed"]) for sample in samples]
        figures = [pass_at_k(passed, asking.programs, k) for k in asking.pass_at]
    else:
        about |= _more(task, samples)
        figures = [mean([float(sample["exact_match"]) for sample in samples])]
    nfe = mean([reply.nfe for reply in model.replies]).value
    records = [
        replace(plan, value=figure.value, stderr=figure.stderr, nfe=nfe, details=about)
        for plan, figure in zip(plans, figures, strict=True)
    ]
    return Asked(records, said)


def _loaded(task: str, asking: Asking) -> Any:
    """A task as lm-eval has it, set up to be asked."""
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_path=str(TASKS), include_defaults=False).load(task)
    wanted = loaded["tasks"][task]
    wanted.config.repeats = asking.programs if task in CODE else 1
    if asking.chat:  # where a line of a text would begin the next example, a message goes on
        stops = wanted.config.generation_kwargs["until"]
        stops[:] = [stop for stop in stops if not stop.startswith("\n")]
    wanted.set_fewshot_seed(_FEW_SHOT_SEED)
    return loaded


def _evaluated(responder: Responder, task: str, asking: Asking) -> tuple[Any, Any, Any]:
    """What lm-eval found, the model as it asked it, and the task."""
    model_class = register()
    with _quiet(responder.progress) as progress:
        import lm_eval

        model = model_class(replace(responder, progress=progress, n_cut=0))
        loaded = _loaded(task, asking)
        # Not `simple_evaluate`: it also asks other programs about this machine, and they speak up.
        with _runs_shown(progress, model):
            found = lm_eval.evaluate(
                model, loaded, limit=asking.limit, bootstrap_iters=0,
                confirm_run_unsafe_code=asking.run_code, apply_chat_template=asking.chat,
            )  # fmt: skip
    return found, model, loaded["tasks"][task]


def _questions_of(wanted: Any) -> Questions:
    """Of a task whose prompts are made."""
    asked = sorted(wanted.instances, key=lambda question: question.doc_id)
    pairs = [(each.arguments[0], str(wanted.doc_to_target(each.doc))) for each in asked]
    digests = " ".join(hashlib.sha256(text.encode()).hexdigest() for pair in pairs for text in pair)
    return Questions(len(asked), hashlib.sha256(digests.encode()).hexdigest())


@contextmanager
def _runs_shown(progress: Progress, model: Any) -> Iterator[None]:
    """A bar for programs that are run, one for each reply; from the first one on, since there is another
    bar before it."""
    done = count(1)
    with ExitStack() as stack:
        bar: list[OnProgress] = []

        def ran() -> None:
            if not bar:
                bar.append(stack.enter_context(progress("running programs")))
            bar[0](next(done), len(model.replies))

        with told_of_runs(ran):
            yield


@contextmanager
def _quiet(progress: Progress) -> Iterator[Progress]:
    """Without lm-eval's own remarks and bars, and with ours."""
    logger, screen = logging.getLogger("lm_eval"), sys.stderr
    level = logger.level

    @contextmanager
    def heard(what: str) -> Iterator[OnProgress]:
        with redirect_stderr(screen), progress(what) as show:
            yield show

    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        logger.setLevel(logging.ERROR)
        try:
            yield heard
        finally:
            logger.setLevel(level)


def _ends(samples: list[dict[str, Any]]) -> dict[str, float]:
    """How programs ended, and what guarded them."""
    ends = {end: math.fsum(sample[end] for sample in samples) for end in ENDS}
    return ends | {f"guard_{name}": float(on) for name, on in asdict(available_guards()).items()}


def _more(task: str, samples: list[dict[str, Any]]) -> dict[str, float]:
    if task == "gsm8k":
        return {"marked_match": mean([sample["marked_match"] for sample in samples]).value}
    if task == "bbh":  # what published tables show: subtasks count alike, whatever their size
        subtasks: dict[str, list[float]] = {}
        for sample in samples:
            subtasks.setdefault(sample["doc"]["subtask"], []).append(sample["exact_match"])
        means = [mean(right).value for right in subtasks.values()]
        return {"mean_of_subtasks": mean(means).value, "subtasks": float(len(means))}
    return {}


def _share_stopped(replies: Sequence[Reply]) -> float:
    """Of answers that ended before their last token."""
    return mean([float(bool(reply.stopped)) for reply in replies]).value


def _said(sample: dict[str, Any], task: str) -> dict[str, Any]:
    """A question, what was said to it, and how that was judged."""
    verdicts = ENDS if task in CODE else ("exact_match",)
    return {
        "number": sample["doc_id"],
        "prompt": sample["arguments"][0][0],
        "answers": [text for reply in sample["resps"] for text in reply],
        "right": sample["target"],
        **{verdict: sample[verdict] for verdict in verdicts},
    }
