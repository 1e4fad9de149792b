"""Benchmarks through lm-eval: a model that answers, tasks over local files, results as records."""

from xdlm.evaluation.harness.adapter import register
from xdlm.evaluation.harness.responder import Prompt, Reply, Responder
from xdlm.evaluation.harness.writers import WRITERS, Continuation, WriterSettings

__all__ = ["WRITERS", "Continuation", "Prompt", "Reply", "Responder", "WriterSettings", "register"]
