"""A sampling run on the terminal: a few of its frames, coloured by what each step did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from xdlm.errors import UserError
from xdlm.report.colours import LOOKS, MASK
from xdlm.report.pieces import visible
from xdlm.report.recording import Speller
from xdlm.sampling import Change, Trajectory

MASK_BLOCK = "░"

_MASK_STYLE = Style(color=MASK.colour)
_STYLES = {kind: Style(color=look.colour, bold=True) for kind, look in LOOKS.items()}


def frame_text(trajectory: Trajectory, pieces: Sequence[str], frame: int, sample: int = 0) -> Text:
    """One frame, each position coloured by what it did in the step that led here.

    `pieces` is the text of each position of this frame, as `TextTokenizer.pieces` gives it. What
    changed is bold as well, so that a terminal without colours shows it too. The first frame has no
    step before it, so nothing in it counts as changed.
    """
    ids = trajectory.frames[frame, sample].tolist()
    text = Text(overflow="fold")
    for token_id, piece, change in zip(
        ids, pieces, changes_into(trajectory, frame, sample), strict=True
    ):
        masked = token_id in trajectory.special_ids
        plain = _MASK_STYLE if masked else Style.null()
        text.append(MASK_BLOCK if masked else visible(piece), _STYLES.get(change, plain))
    return text


def trajectory_panel(
    trajectory: Trajectory, tokenizer: Speller, sample: int = 0, n_frames: int = 6
) -> RenderableType:
    """The first frame, the last, and evenly spaced ones between, with what their steps changed."""

    def draw(frame: int) -> Text:
        pieces = tokenizer.pieces(trajectory.frames[frame, sample].tolist())
        return frame_text(trajectory, pieces, frame, sample)

    return frames_panel(trajectory, sample, n_frames, draw, "text")


def frames_panel(
    trajectory: Trajectory, sample: int, n_frames: int, draw: Callable[[int], RenderableType],
    what: str,
) -> Panel:  # fmt: skip
    """Some frames of a run, each below its heading."""
    parts: list[RenderableType] = []
    for frame in _selection(trajectory.steps, n_frames):
        parts += [heading(trajectory, frame, sample), draw(frame), Text()]
    title = f"from noise to {what}"
    return Panel(Group(*parts[:-1]), title=title, subtitle=legend(), padding=(1, 2))


def _selection(steps: int, n_frames: int) -> list[int]:
    """At most `n_frames` frame numbers, ends included; one frame is the finished one."""
    if n_frames < 1:
        raise UserError(f"n_frames must be at least 1, got {n_frames}")
    if n_frames == 1:
        return [steps]
    return sorted({round(i * steps / (n_frames - 1)) for i in range(n_frames)})


def heading(trajectory: Trajectory, frame: int, sample: int) -> Text:
    time = f"t = {trajectory.times[frame]:.3f}"
    text = Text(f"step {frame}/{trajectory.steps}  {time}", style="bold")
    changes = changes_into(trajectory, frame, sample)
    for kind, look in LOOKS.items():
        if count := changes.count(kind):
            text.append(f"  {count} {look.name}", Style(color=look.colour, bold=False))
    return text


def legend() -> Text:
    text = Text().append(f"{MASK_BLOCK} {MASK.name}", _MASK_STYLE)
    for kind, look in LOOKS.items():
        text.append("   ").append(f"■ {look.name}", _STYLES[kind])
    return text


def changes_into(trajectory: Trajectory, frame: int, sample: int) -> list[Change]:
    """What each position did in the step that led to a frame."""
    if frame == 0:
        return [Change.NONE] * trajectory.frames.shape[-1]
    # One step of one sequence is all that is needed here, however long the run.
    pair = trajectory.frames[frame - 1 : frame + 1, sample : sample + 1]
    step = replace(trajectory.only(sample), frames=pair)
    return [Change(code) for code in step.changes()[0, 0].tolist()]
