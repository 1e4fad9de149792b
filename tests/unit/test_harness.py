"""Benchmarks: a model that is told the answers gets them right, through lm-eval and offline."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from test_chat import templated
from test_cli import complaint
from told import told

from xdlm import UserError
from xdlm.api import Model
from xdlm.cli.main import main
from xdlm.data import data_root
from xdlm.evaluation.harness import Responder, benchmarks, register
from xdlm.evaluation.harness.running import CODE, Asked, Asking, ask
from xdlm.evaluation.records import read_records
from xdlm.evaluation.sandbox import available_guards
from xdlm.tokens import TextTokenizer


def test_programs_run_on_request_alone(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "eval", "llm", "--tasks", "gsm8k", "mbpp", "humaneval")
    assert "mbpp and humaneval" in line and "--run-code" in line


@pytest.mark.parametrize(("words", "message"), [
    (["--tasks", "gsm9k"], "did you mean 'gsm8k'"), (["--limit", "0"], "at least 1"),
    (["--pass-at", "2"], "must lie in 1..1"), (["--block-length", "4"], "no meaning"),
    (["--steps"], "at least one number"),
    (["--sampler", "confidence", "--block-length", "8", "--steps", "64", "4"], "4 steps cannot fill 32"),
    (["--tasks", "mbpp", "--run-code", "--programs", "2", "--sampler", "confidence"],
     "writes the same program 2 times: give a --temperature"),
])  # fmt: skip
def test_bad_commands(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in complaint(capsys, "eval", "llm", *words)


def test_missing_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDLM_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"gsm8k/train\.jsonl; put the benchmarks there"):
        benchmarks.gsm8k()


PROBLEM = {"problem": "What is $1 + 1$?", "level": "Level 1", "solution": r"It is $\boxed{2}$."}
SOLUTION = "def double(x):\r\n    return 2 * x"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few rows of each set, in the files' layout."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    root = tmp_path / "benchmarks"
    gsm = [
        {"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"}
        for i in range(6)
    ]
    problems = [
        {**PROBLEM, "type": f"Subject {i}", "problem": f"{PROBLEM['problem']} ({i})"}
        for i in range(7)
    ]
    programs = [
        {"task_id": i, "text": f"Write {i}.", "code": SOLUTION, "test_setup_code": "",
         "test_list": [f"assert double({j}) == {2 * j}" for j in range(3)]}
        for i in range(1, 511)
    ]  # fmt: skip
    functions = [{
        "task_id": "HumanEval/0", "prompt": 'def half(x):\n    """Half."""\n', "entry_point": "half",
        "canonical_solution": "    return x / 2\n",
        "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    }]  # fmt: skip
    files = {
        "gsm8k/train.jsonl": gsm[:4], "gsm8k/test.jsonl": gsm, "mbpp/mbpp.jsonl": programs,
        "math/test.jsonl": problems, "math/math500_test.jsonl": problems[4:6],
    }  # fmt: skip
    for name, rows in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "humaneval").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in functions)
    (root / "humaneval/HumanEval.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for part in ("bbh", "cot-prompts"):
        (root / "bbh" / part).mkdir(parents=True)
    for name in ("a_task", "b_task"):
        rows = [{"input": f"{name} {i}?", "target": "(A)"} for i in range(3)]
        (root / f"bbh/bbh/{name}.json").write_text(json.dumps({"examples": rows}))
        (root / f"bbh/cot-prompts/{name}.txt").write_text("canary\n-----\nThink.\n\nQ: x\nA: So.")
    monkeypatch.setenv("XDLM_DATA", str(tmp_path))
    return tmp_path


NUMBER = re.compile(r"What is (\d+)")
RIGHT: dict[str, Callable[[str], str]] = {
    "gsm8k": lambda prompt: f" {2 * int(NUMBER.findall(prompt)[-1])}\nQuestion: 7",
    "math": lambda prompt: r" So $\boxed{2}$",
    "bbh": lambda prompt: "So the answer is (A).",
    "humaneval": lambda prompt: "    return x / 2\ndef more(): pass",
    "mbpp": lambda prompt: SOLUTION + "\n[DONE]",
}


def answering(model: Model, answer: Callable[[str], str]) -> Responder:
    return Responder(told(model, lambda prompt: answer(model.tokenizer.decode(prompt))))


@pytest.mark.parametrize("task", RIGHT)
def test_right_answers_count(task: str, local: Path, pocket: Model) -> None:
    """End to end through lm-eval: prompt, stop strings, extraction, sandbox, record."""
    asking = Asking(limit=4, run_code=True)
    asked = ask(answering(pocket, RIGHT[task]), "told", task, asking)
    (record,) = asked.records
    assert (record.value, record.nfe, record.data) == (1.0, 3.0, task)
    assert record.metric == ("pass@1" if task in CODE else "exact_match")
    assert (
        record.n == len(asked.samples) == (1 if task == "humaneval" else 3 if task == "math" else 4)
    )
    other = ask(answering(pocket, lambda prompt: "I do not know"), "told", task, asking)
    assert other.records[0].value == 0.0


def test_ends_of_programs_are_split(local: Path, pocket: Model) -> None:
    """Passed, wrong and failed in turn: pass@k over the three of each problem, and how they ended."""
    turns = iter([SOLUTION, "def double(x):\n    return x + 1", "def double(x:"] * 2)
    shown: list[tuple[str, int, int]] = []

    @contextmanager
    def progress(what: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: shown.append((what, done, total))

    responder = replace(answering(pocket, lambda prompt: next(turns)), progress=progress)
    asking = Asking(limit=2, programs=3, pass_at=(1, 3), run_code=True)
    one, three = ask(responder, "told", "mbpp", asking).records
    assert shown == [("running programs", done, 6) for done in range(1, 7)]
    assert one.value == pytest.approx(1 / 3) and three.value == 1.0
    assert [one.details[end] for end in ("passed", "wrong", "failed")] == [2, 2, 2]
    assert one.details["guard_hook"] == available_guards().hook
    assert (one.metric, three.metric, one.draws) == ("pass@1", "pass@3", 3)


def test_questions_go_through_a_chat_template(local: Path, pocket: Model, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    tokenizer = TextTokenizer.load(templated(tmp_path / "tokens"))
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        return RIGHT["gsm8k"](prompt)

    talker = replace(pocket, tokenizer=tokenizer)
    asked = ask(answering(talker, answer), "told", "gsm8k", Asking(limit=2, chat=True))
    (record,) = asked.records
    assert record.value == 1.0 and record.details["chat"] == 1.0
    for prompt in seen:
        assert prompt.startswith("<user>Question: What is 0")
        assert prompt.endswith("Answer:<|endoftext|><assistant>")
    plain = ask(answering(talker, RIGHT["gsm8k"]), "told", "gsm8k", Asking(limit=2))
    assert plain.records[0].data_sha256 != record.data_sha256, "other prompts, another question"


CHATTY: dict[str, Callable[[str], str]] = {
    "humaneval": lambda prompt: "Sure!\n\n```python\ndef half(x):\n    return x / 2\n```\nDone.",
    "bbh": lambda prompt: "Let me think.\n\nIt is A. So the answer is (A).",
    "mbpp": lambda prompt: f"Here:\n\n```python\n{SOLUTION}\n```",
}


@pytest.mark.parametrize("task", CHATTY)
def test_a_message_may_have_paragraphs_and_fences(
    task: str, local: Path, pocket: Model, tmp_path: Path
) -> None:
    """What would begin another example after a text is a part of the answer in a conversation."""
    (tmp_path / "tokens").mkdir()
    tokenizer = TextTokenizer.load(templated(tmp_path / "tokens"))
    responder = answering(replace(pocket, tokenizer=tokenizer), CHATTY[task])
    asked = ask(responder, "told", task, Asking(limit=1, chat=True, run_code=True))
    assert asked.records[0].value == 1.0


def test_chat_needs_a_template(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "eval", "llm", "--tasks", "gsm8k", "--chat")
    assert "no chat template" in line and "leave --chat out" in line


def test_damaged_files_are_named(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (local / "benchmarks/gsm8k/test.jsonl").write_text("{no json")
    (local / "benchmarks/humaneval/HumanEval.jsonl.gz").write_bytes(b"junk")
    quick = ("--steps", "1", "--length", "2", "--limit", "1", "--run-code")
    for task, file in (("gsm8k", "test.jsonl"), ("humaneval", "HumanEval.jsonl.gz")):
        assert f"{file} is damaged" in complaint(capsys, "eval", "llm", "--tasks", task, *quick)


def test_examples_are_never_asked(local: Path) -> None:
    for name, rows in benchmarks.SETS.items():
        examples, questions = rows()
        if name != "gsm8k":  # its examples come from a file of their own
            assert not [row for row in questions if row in examples]
    assert [row["task_id"] for row in benchmarks.mbpp()[1]] == list(range(11, 511))
    assert [row["subtask"][0] for row in benchmarks.bbh()[1]] == list("ababab")


def test_command(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The bundled model, for real: records, samples and a table; and nothing else is said, by nobody."""
    monkeypatch.chdir(tmp_path)
    records, samples = tmp_path / "results.jsonl", tmp_path / "samples"
    main(["eval", "llm", "--tasks", "gsm8k", "mbpp", "--steps", "2", "--length", "8", "--limit",
          "1", "--run-code", "--records", str(records), "--samples", str(samples)])  # fmt: skip
    captured = capfd.readouterr()
    assert "pass@1" in captured.out and "rlimits" in captured.out
    assert "it/s" not in captured.err and "fatal" not in captured.err
    found = read_records(records)
    assert [(r.data, r.steps, r.nfe) for r in found] == [("gsm8k", 2, 3.0), ("mbpp", 2, 3.0)]
    assert all(r.length == 8 and r.sampler == "ancestral" for r in found)
    main(["report", "--records", str(records), "--out", str(tmp_path / "report")])
    report = capfd.readouterr().out
    assert "| mbpp failed / wrong / passed |" in report and "| 1 / 0 / 0 |" in report
    (line,) = (samples / "mbpp-steps-00002.jsonl").read_text().splitlines()
    said = json.loads(line)
    assert said["prompt"].endswith("[BEGIN]\n") and len(said["answers"]) == 1


def test_what_the_records_hold_is_not_asked_again(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until something is asked that is not there: another task, other prompts, or the answers."""
    asked: list[tuple[str, int]] = []

    def counted(responder: Responder, name: str, task: str, asking: Asking) -> Asked:
        asked.append((task, responder.writing.steps))
        return ask(responder, name, task, asking)

    monkeypatch.setattr("xdlm.cli.measures.llm.ask", counted)
    records = tmp_path / "results.jsonl"
    command = ["eval", "llm", "--length", "8", "--limit", "2", "--records", str(records), "--tasks"]
    code = ("--run-code", "--programs", "2", "--pass-at", "1", "2")
    main([*command, "gsm8k", "--steps", "1"])
    main([*command, "gsm8k", "mbpp", "--steps", "1", "2", *code])
    assert asked == [("gsm8k", 1), ("mbpp", 1), ("gsm8k", 2), ("mbpp", 2)]
    held = records.read_text()
    assert "5 results measured, 1 taken from" in capsys.readouterr().out

    main([*command, "mbpp", "gsm8k", "--steps", "2", "1", *code])
    out = capsys.readouterr().out
    assert "0 results measured, 6 taken from" in out and out.count("pass@2") == 2
    main([*command, "gsm8k", "--steps", "1", "--samples", str(tmp_path / "samples")])
    assert asked[4:] == [("gsm8k", 1)] and (tmp_path / "samples/gsm8k-steps-00001.jsonl").is_file()
    assert records.read_text() == held, "no result twice"

    main([*command, "gsm8k", "--steps", "1", "--context", "20"])
    main([*command, "gsm8k", "--steps", "1", "--limit", "1"])
    assert asked[5:] == [("gsm8k", 1)] * 2
    cut, short = read_records(records)[6:]
    assert cut.sampler == "ancestral, context = 20" and cut.details["cut_prompts"] == 2
    assert short.n == 1


def test_registered_model_answers_choices(local: Path, tmp_path: Path) -> None:
    """By its name, on a multiple choice and on a text, as any task of lm-eval might ask."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.py").write_text(
        "def rows(**_):\n    from datasets import Dataset\n"
        "    return {'test': Dataset.from_list([{'text': 'He sat', 'right': ' down'}])}\n"
    )
    shared = "custom_dataset: !function rows.rows\ntest_split: test\nnum_fewshot: 0\n"
    (folder / "choice.yaml").write_text(
        f"task: choice\n{shared}output_type: multiple_choice\ndoc_to_text: '{{{{text}}}}'\n"
        "doc_to_choice: [' down', ' zebra']\ndoc_to_target: 0\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    (folder / "whole.yaml").write_text(
        f"task: whole\n{shared}output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}]\n"
    )
    register()
    found = lm_eval.simple_evaluate(
        "xdlm", model_args="model=pocket,draws=16,device=cpu", tasks=["choice", "whole"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    assert found["results"]["choice"]["acc,none"] == 1.0
    assert found["results"]["whole"]["word_perplexity,none"] > 1
    assert found["config"]["log_likelihood"] == "lower bound from 16 draws"
    assert found["config"]["log_likelihood_stderr"] > 0


def test_arguments_of_lm_eval_reach_the_sampler(local: Path) -> None:
    """All of them as a string, those of one sampler too; what nobody knows is named."""
    made = register().create_from_arg_string(
        "model=pocket-mdlm,sampler=confidence,block_length=4,guidance=1.5,steps=6,length=8,k=0.1,"
        "draws=3,context=64",
        {"batch_size": 1, "device": "cuda:0", "max_batch_size": None},  # as its command has it
    )
    responder = made.responder
    assert (responder.draws, responder.context, responder.writing.length) == (3, 64, 8)
    assert responder.writing.how == {
        "sampler": "confidence", "steps": 6, "temperature": 0.0, "top_p": 1.0, "block_length": 4,
        "guidance": 1.5,
    }  # fmt: skip
    assert responder.model.sampled_as.k == made.get_model_info()["sampled_as"]["k"] == 0.1
    for arguments, says in (
        ("stpes=4", "model_args: unknown key 'stpes'; did you mean 'steps'"),
        ("steps=four", "model_args: steps: expected a whole number, got 'four'"),
        ("steps=2.5", "model_args: steps: expected a whole number, got 2.5"),
        ("k=x", "model_args: k: expected a number, got 'x'"),
        ("sampler=confident", "did you mean 'confidence'"),
        ("device=cuda:99", "no CUDA device|cuda:99"),
        ("block_length=4", "no meaning for the ancestral sampler"),
        ("k=2", "must lie in"),
    ):
        with pytest.raises(UserError, match=says):
            register().create_from_arg_string(f"model=pocket,{arguments}")


def test_command_line_of_lm_eval(
    local: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own command knows the model; what is wrong is said in one line."""
    from lm_eval.api.registry import get_model

    from xdlm.evaluation.harness.__main__ import main as lm_eval_main

    def command() -> None:
        get_model("xdlm").create_from_arg_string("model=pocket,stpes=1")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", command)
    with pytest.raises(SystemExit) as stop:
        lm_eval_main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("xdlm: model_args: unknown key 'stpes'")


@pytest.fixture
def published() -> None:
    if not (Path(data_root()) / "benchmarks").is_dir():
        pytest.skip("the benchmarks are not in the folder of local data")


@pytest.mark.parametrize(
    ("task", "solution"), [("humaneval", "canonical_solution"), ("mbpp", "code")]
)
def test_published_programs_pass(task: str, solution: str, published: None) -> None:
    """The sets' own solutions live within the sandbox's limits; every fifth is tried."""
    from xdlm.evaluation.harness.tasks import functions

    _, questions = benchmarks.SETS[task]()
    score = getattr(functions, f"score_{task}")
    assert all(score(row, [[row[solution]]])["passed"] == 1.0 for row in questions[::5])


@pytest.mark.parametrize("task", ["gsm8k", "math500", "bbh"])
def test_published_answers_count(task: str, published: None) -> None:
    """The sets' own solutions are right, where the files are there."""
    from xdlm.evaluation.harness.tasks import functions

    _, questions = benchmarks.SETS[task]()
    score = {"math500": functions.score_math}.get(task) or getattr(functions, f"score_{task}")
    said = {"gsm8k": "answer", "math500": "solution", "bbh": "target"}[task]
    lead = "So the answer is " if task == "bbh" else ""
    assert all(score(row, [f"{lead}{row[said]}"])["exact_match"] == 1.0 for row in questions)
