"""The slow reference: real N x N matrices in float64, straight from the definitions.

Nothing here uses the scalar forms that the library runs on. The bridge is a linear solve, the
posterior is Bayes' rule, the rates are a matrix derivative taken by automatic differentiation. Use
it with a vocabulary of a dozen tokens, to check anything else against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.noise.methods import Gidd, Stationary
from xdlm.noise.process import NoiseProcess


def forward_matrix(process: NoiseProcess, t: Tensor | float) -> Tensor:
    """`Q_t[i, j] = q(z_t = j | x = i)`, rows sum to 1."""
    t = torch.as_tensor(t, dtype=torch.float64)
    n = process.vocab.size
    eye, ones = torch.eye(n, dtype=torch.float64), torch.ones(n, n, dtype=torch.float64)
    if isinstance(process, Stationary):
        alpha = process.schedule(t).alpha
        kernel = process.k / n * ones
        for token_id, weight in process.mu.items():
            kernel = kernel + weight * _absorb(n, token_id)
        return alpha * eye + (1 - alpha) * kernel
    if isinstance(process, Gidd):
        (mask_id,) = process.special_ids
        gamma, p = process.gamma, process.p_uniform
        bump = 2**gamma * p / (1 - p) * t ** (gamma / 2) * (1 - t) ** (gamma / 2)
        mask = _absorb(n, mask_id)
        uniform = (ones - mask) / (n - 1)
        return ((1 - t) * eye + t * mask + bump * uniform) / (1 + bump)
    coefs = process.coefs(t)
    return coefs.alpha * eye + coefs.b.dense(n) * ones


def transition_matrix(process: NoiseProcess, s: float, t: float) -> Tensor:
    """`Q_{t|s}`, the matrix for which `Q_s Q_{t|s} = Q_t`."""
    return torch.linalg.solve(forward_matrix(process, s), forward_matrix(process, t))


def rate_matrix(process: NoiseProcess, t: float) -> Tensor:
    """The generator `R_t = Q_t^{-1} dQ_t/dt`, rows sum to 0."""
    at = torch.tensor(t, dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(lambda u: forward_matrix(process, u), at)
    return torch.linalg.solve(forward_matrix(process, at), slope)


def posterior(process: NoiseProcess, probs: Tensor, z: int, s: float, t: float) -> Tensor:
    """`q(z_s | z_t = z)` for clean data distributed as `probs` [N]; Bayes' rule, normalised."""
    arrive = transition_matrix(process, s, t)[:, z]
    joint = arrive * (forward_matrix(process, s).T @ probs.double())
    return joint / joint.sum()


def step_kl(process: NoiseProcess, probs: Tensor, x: int, z: int, s: float, t: float) -> Tensor:
    """`KL( q(z_s | z_t, x) || q(z_s | z_t, probs) )` by summing over all tokens."""
    truth = posterior(process, _one_hot(x, process.vocab.size), z, s, t)
    model = posterior(process, probs, z, s, t)
    return torch.xlogy(truth, truth / model).nan_to_num(0.0).sum()


def nelbo(process: NoiseProcess, probs: Tensor, x: int, z: int, t: float) -> Tensor:
    """The continuous-time loss: how the true reverse rates differ from the model's.

    The reverse chain leaves z for e at rate `R(e, z) f(e)/f(z)` with f the marginal at t. The loss is
    `sum_{e != z} model - truth + truth log(truth / model)`.
    """
    rate = rate_matrix(process, t)[:, z]
    q_t = forward_matrix(process, t)
    marginal_truth = q_t[x]
    marginal_model = q_t.T @ probs.double()
    truth = rate * marginal_truth / marginal_truth[z]
    model = rate * marginal_model / marginal_model[z]
    # Where both vanish the term is 0; where only the model's does, it is infinite, as it should be.
    log_ratio = torch.where(truth > 0, (truth / model).log(), 0.0)
    terms = model - truth + truth * log_ratio
    terms[z] = 0.0
    return terms.sum()


def _absorb(n: int, token_id: int) -> Tensor:
    """The matrix that sends every state to one token."""
    matrix = torch.zeros(n, n, dtype=torch.float64)
    matrix[:, token_id] = 1.0
    return matrix


def _one_hot(token: int, n: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), n).double()
