"""What a sampler reports while it runs: a record of every state, and calls to those who asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xdlm.sampling.trajectory import Trajectory


class Watch:
    """Is shown the state after every step, and keeps all of them where they are to be recorded."""

    def __init__(
        self,
        z: Tensor,
        n_steps: int,
        *,
        record: bool,
        on_step: Callable[[int, int], None] | None,
        on_frame: Callable[[Tensor], None] | None,
    ) -> None:
        self._n_steps, self._record = n_steps, record
        self._on_step, self._on_frame = on_step, on_frame
        self._done = 0
        self._frames, self._times = [z.to(torch.int32)], [1.0]
        self._probs: list[Tensor] = []

    def show(self, z: Tensor, time: float, probs: Tensor | None) -> None:
        """`probs` [B, L] are the probabilities of the tokens that the model wrote, for a record."""
        self._done += 1
        if self._record:
            assert probs is not None
            self._frames.append(z.to(torch.int32))
            self._probs.append(probs)
            self._times.append(time)
        if self._on_frame is not None:
            self._on_frame(z)
        if self._on_step is not None:
            self._on_step(self._done, self._n_steps)

    def trajectory(self, special_ids: tuple[int, ...]) -> Trajectory | None:
        """None where nothing was recorded."""
        if not self._record:
            return None
        frames, probs = torch.stack(self._frames).cpu(), torch.stack(self._probs).cpu()
        return Trajectory(frames, tuple(self._times), special_ids, probs)
