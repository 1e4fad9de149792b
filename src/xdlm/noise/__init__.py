"""Noise processes: forward laws, priors, bridges and posteriors, from coefficients alone."""

from xdlm.noise.checking import check_process
from xdlm.noise.methods import Gidd, Masked, Mixed, Stationary, Uniform
from xdlm.noise.process import NoiseProcess
from xdlm.noise.schedules import Alpha, Cosine, LogLinear, Polynomial, Schedule

__all__ = [
    "Alpha",
    "Cosine",
    "Gidd",
    "LogLinear",
    "Masked",
    "Mixed",
    "NoiseProcess",
    "Polynomial",
    "Schedule",
    "Stationary",
    "Uniform",
    "check_process",
]

#: What a configuration may name. A new process or schedule is one class and one line here.
PROCESSES: dict[str, type[NoiseProcess]] = {
    "masked": Masked,
    "uniform": Uniform,
    "mixed": Mixed,
    "gidd": Gidd,
}
SCHEDULES: dict[str, type] = {
    "log-linear": LogLinear,
    "cosine": Cosine,
    "polynomial": Polynomial,
}
