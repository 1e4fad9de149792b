"""What a run did, for people: on the terminal, as a web page, as figures."""

from xdlm.report.colours import LOOKS, MASK, Look
from xdlm.report.html import page_data, trajectory_page
from xdlm.report.pictures import trajectory_gif
from xdlm.report.pieces import visible
from xdlm.report.plots import plot_loss, plot_overview, plot_scan, plot_speed, plot_transitions
from xdlm.report.recording import Recording, read_recording
from xdlm.report.terminal import frame_text, trajectory_panel

__all__ = [
    "LOOKS",
    "MASK",
    "Look",
    "Recording",
    "frame_text",
    "page_data",
    "plot_loss",
    "plot_overview",
    "plot_scan",
    "plot_speed",
    "plot_transitions",
    "read_recording",
    "trajectory_gif",
    "trajectory_page",
    "trajectory_panel",
    "visible",
]
