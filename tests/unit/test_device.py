"""Which device a name means, on a machine with several GPUs."""

from __future__ import annotations

import pytest
import torch

from xdlm import UserError
from xdlm.training.device import pick_device, pick_own_device


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As if there were 8 of them; gives those that were made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def make_current(device: torch.device) -> None:
        if device.index is None:  # as torch does
            raise ValueError("Expected a torch.device with a specified index or an integer")
        current.append(device)

    monkeypatch.setattr(torch.cuda, "set_device", make_current)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return current


@pytest.mark.parametrize("name", ["cuda:8", "cuda:256", "cuda:99999999999999999999"])
def test_a_gpu_that_is_not_there(name: str, chosen: list[torch.device]) -> None:
    with pytest.raises(UserError, match=f"no device '{name}': there are 8"):
        pick_device(name)
    assert not chosen


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:07", "CUDA", "gpu", "", " cpu"])
def test_no_device_at_all(name: str) -> None:
    with pytest.raises(UserError, match="unknown device"):
        pick_device(name)


@pytest.mark.parametrize(
    ("name", "rank", "device"),
    [("auto", "11", "cuda:3"), ("cuda", "5", "cuda:5"), ("cuda:2", "5", "cuda:2"), ("cpu", "5", "cpu"),
     ("auto", None, "cuda"), ("cuda", None, "cuda"), ("cuda:7", None, "cuda:7")],
)  # fmt: skip
def test_processes_that_train_together_take_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch,
    chosen: list[torch.device],
    name: str,
    rank: str | None,
    device: str,
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    wanted = torch.device(device)
    assert pick_own_device(name) == wanted
    assert chosen == ([] if wanted.index is None else [wanted])
