"""Every noise process that the parametrised tests run over, on a vocabulary of a dozen tokens."""

from __future__ import annotations

import torch

from xdlm import Vocab
from xdlm.noise import Cosine, Gidd, LogLinear, Masked, Mixed, NoiseProcess, Polynomial, Uniform

N = 11
SCHEDULES = {"log-linear": LogLinear(), "cosine": Cosine(), "polynomial": Polynomial(power=1.7)}


def all_processes() -> dict[str, NoiseProcess]:
    """Name -> process; the mask stands first, last and in mid-vocabulary."""
    processes: dict[str, NoiseProcess] = {}
    for name, schedule in SCHEDULES.items():
        processes[f"masked-{name}"] = Masked(Vocab(N, 4), schedule=schedule)
        processes[f"uniform-{name}"] = Uniform(Vocab(N), schedule=schedule)
        processes[f"mixed-{name}"] = Mixed(Vocab(N, 4), k=0.1, schedule=schedule)
    processes["mixed-first"] = Mixed(Vocab(N, 0), k=0.5)
    processes["mixed-last"] = Mixed(Vocab(N, N - 1), k=0.9)
    processes["mixed-tiny-k"] = Mixed(Vocab(N, 6), k=1e-3)
    processes["uniform-with-mask"] = Uniform(Vocab(N, 4))
    processes["two-special"] = Mixed(Vocab(N, 4), k=0.2, mu={4: 0.5, 9: 0.3})
    processes["gidd"] = Gidd(Vocab(N, 4), p_uniform=0.1)
    processes["gidd-last"] = Gidd(Vocab(N, N - 1), p_uniform=0.3, gamma=1.5)
    return processes


PROCESSES = all_processes()


def random_prediction(process: NoiseProcess, seed: int, sharpness: float = 1.5) -> torch.Tensor:
    """Float64 logits [N]; special tokens' are left finite, since the library must ignore them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(process.vocab.size, generator=generator, dtype=torch.float64) * sharpness


def probs_of(process: NoiseProcess, logits: torch.Tensor) -> torch.Tensor:
    special = torch.tensor(process.special_ids, dtype=torch.int64)
    return logits.index_fill(-1, special, -torch.inf).softmax(-1)


def ordinary_tokens(process: NoiseProcess) -> list[int]:
    return [i for i in range(process.vocab.size) if i not in process.special_ids]
