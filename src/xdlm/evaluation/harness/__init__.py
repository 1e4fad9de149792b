"""Benchmarks through lm-eval: a model that answers, tasks over local files, results as records."""

from xdlm.evaluation.harness.adapter import register
from xdlm.evaluation.harness.responder import Prompt, Reply, Responder
from xdlm.evaluation.harness.settings import WriterSettings

__all__ = ["Prompt", "Reply", "Responder", "WriterSettings", "register"]
