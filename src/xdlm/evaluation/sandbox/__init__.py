"""Programs that nobody has read, run where they can do no harm."""

from xdlm.evaluation.sandbox.runner import Guards, Limits, Run, Verdict, available_guards, run_code

__all__ = ["Guards", "Limits", "Run", "Verdict", "available_guards", "run_code"]
