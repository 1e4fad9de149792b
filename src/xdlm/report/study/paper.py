"""The paper's own figures, as they stand in its tables, each under the label that the table has there.

Models are called as this library calls them: XDLM(k=1e-3) is `XDLM k=0.001`.
"""

from __future__ import annotations

from dataclasses import dataclass

METHODS = (
    "MDLM", "GIDD", "XDLM k=0.001", "XDLM k=0.1", "XDLM k=0.5", "XDLM k=0.9", "UDLM",
)  # fmt: skip


@dataclass(frozen=True)
class PaperTable:
    """A line of figures per model, or per kind of run."""

    label: str
    about: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    """Figures with the digits that the paper gives them."""

    def value(self, row: str, column: str | int) -> float | None:
        """None where the paper has no such figure."""
        name = str(column)
        if row not in self.rows or name not in self.columns:
            return None
        return float(self.rows[row][self.columns.index(name)])

    def column(self, column: str | int) -> dict[str, float]:
        found = {row: self.value(row, column) for row in self.rows}
        return {row: value for row, value in found.items() if value is not None}


def _table(label: str, about: str, columns: str, text: str) -> PaperTable:
    names = tuple(columns.split())
    rows = {}
    for line in text.strip().splitlines():
        name, figures = line.split(" | ")
        rows[name] = tuple(figures.split())
        assert len(rows[name]) == len(names), f"{label}, {name}"
    return PaperTable(label, about, names, rows)


VALIDATION = _table(
    "tab:app_owt_valppl", "validation perplexity on OpenWebText after 1M training steps", "PPL",
    """
MDLM | 23.321
GIDD | 23.136
XDLM k=0.001 | 23.495
XDLM k=0.1 | 24.097
XDLM k=0.5 | 24.818
XDLM k=0.9 | 25.731
UDLM | 25.937
""",
)  # fmt: skip

ZERO_SHOT = _table(
    "tab:app_owt_zsppl", "zero-shot perplexity of models trained on OpenWebText",
    "ag_news:test lambada:test lm1b:test ptb:test arxiv:test pubmed:test wikitext2:test zero-shot",
    """
MDLM | 61.374 47.967 65.629 89.049 37.457 41.981 32.093 53.650
GIDD | 60.607 47.811 65.898 86.911 39.019 42.634 30.809 53.384
XDLM k=0.001 | 62.247 45.982 65.944 89.575 38.294 42.206 31.809 53.722
XDLM k=0.1 | 62.768 45.608 68.229 90.796 37.232 41.391 32.748 54.110
XDLM k=0.5 | 67.352 47.966 71.252 91.683 38.460 43.373 33.570 56.236
XDLM k=0.9 | 71.791 49.094 74.116 97.266 39.658 44.701 35.175 58.829
UDLM | 69.402 51.272 75.572 95.986 42.671 47.181 34.933 59.574
""",
)  # fmt: skip

_TRAINED = "100,000 200,000 300,000 400,000 500,000 600,000 700,000 800,000 900,000 1,000,000"

ZERO_SHOT_COURSE = _table(
    "tab:owt_zsppl_vs_steps", "mean zero-shot perplexity by training step", _TRAINED,
    """
MDLM | 64.209 59.315 57.411 56.129 55.434 54.943 54.466 54.201 53.839 53.650
GIDD | 61.097 57.900 56.326 55.389 54.848 54.294 53.960 53.807 53.258 53.384
XDLM k=0.001 | 63.748 59.097 57.319 56.374 55.576 54.937 54.577 54.336 53.977 53.722
XDLM k=0.1 | 64.847 60.187 58.253 57.201 56.288 55.797 55.271 54.872 54.500 54.110
XDLM k=0.5 | 68.074 62.524 60.489 59.353 58.396 57.881 57.437 56.976 56.530 56.236
XDLM k=0.9 | 70.264 65.384 63.147 61.758 60.977 60.263 59.723 59.438 58.915 58.829
UDLM | 71.220 65.789 63.692 62.320 61.258 60.937 60.577 60.192 59.711 59.574
""",
)  # fmt: skip

_OWT_STEPS = "8 16 32 64 128 256 512 1024"

OWT_QUALITY = _table(
    "tab:owt_performance", "OpenWebText, perplexity under GPT-2 Large by sampling steps", _OWT_STEPS,
    """
MDLM | 711.382 288.157 156.576 106.098 80.198 64.376 51.756 41.545
GIDD | 654.841 273.829 151.331 102.558 77.548 62.077 49.822 39.981
XDLM k=0.001 | 613.647 253.897 146.567 104.090 80.301 65.245 52.650 42.797
XDLM k=0.1 | 301.640 161.724 114.795 94.837 83.205 73.824 63.888 52.609
XDLM k=0.5 | 218.572 127.335 98.817 86.956 81.051 77.155 73.503 66.136
XDLM k=0.9 | 189.750 117.234 93.239 84.068 80.614 79.456 78.707 78.238
UDLM | 183.991 111.237 88.632 79.509 76.611 74.019 73.345 106.666
""",
)  # fmt: skip

OWT_ENTROPY = _table(
    "tab:owt_performance", "OpenWebText, entropy by sampling steps", _OWT_STEPS,
    """
MDLM | 5.872 5.767 5.687 5.614 5.543 5.472 5.387 5.287
GIDD | 5.832 5.748 5.675 5.605 5.534 5.462 5.370 5.269
XDLM k=0.001 | 5.837 5.746 5.673 5.613 5.546 5.475 5.393 5.298
XDLM k=0.1 | 5.662 5.630 5.600 5.573 5.548 5.516 5.467 5.390
XDLM k=0.5 | 5.574 5.565 5.555 5.547 5.538 5.525 5.514 5.476
XDLM k=0.9 | 5.546 5.547 5.548 5.548 5.548 5.547 5.544 5.542
UDLM | 5.536 5.539 5.543 5.535 5.536 5.531 5.524 5.769
""",
)  # fmt: skip

_LM1B_STEPS = "4 8 16 32 64 128"

LM1B_QUALITY = _table(
    "tab:lm1b_performance", "LM1B, perplexity under GPT-2 Large by sampling steps", _LM1B_STEPS,
    """
MDLM | 377.177 215.579 152.939 124.731 112.049 102.142
GIDD | 392.002 215.873 151.824 124.014 110.247 101.211
XDLM k=0.001 | 343.246 199.457 146.612 124.444 111.960 103.544
XDLM k=0.1 | 246.134 155.487 123.129 113.006 105.509 101.983
XDLM k=0.5 | 232.702 141.121 116.063 106.182 103.419 100.754
UDLM | 232.403 136.914 110.575 102.072 98.571 96.385
""",
)  # fmt: skip

LM1B_ENTROPY = _table(
    "tab:lm1b_performance", "LM1B, entropy by sampling steps", _LM1B_STEPS,
    """
MDLM | 4.405 4.379 4.366 4.357 4.353 4.347
GIDD | 4.401 4.373 4.361 4.359 4.354 4.348
XDLM k=0.001 | 4.382 4.363 4.357 4.358 4.354 4.351
XDLM k=0.1 | 4.326 4.329 4.334 4.342 4.345 4.346
XDLM k=0.5 | 4.309 4.315 4.325 4.335 4.340 4.342
UDLM | 4.303 4.305 4.320 4.327 4.334 4.336
""",
)  # fmt: skip

LM1B_COURSE = _table(
    "tab:lm1b_train_dynamic", "LM1B, perplexity of texts of 128 sampling steps by training step", _TRAINED,
    """
MDLM | 113.218 107.864 106.735 105.839 104.594 104.106 103.559 103.174 102.769 102.142
GIDD | 107.366 103.473 103.386 101.854 102.367 101.745 101.904 101.957 101.490 101.211
XDLM k=0.001 | 112.628 108.381 106.406 104.913 105.156 103.817 103.624 102.731 103.638 103.544
XDLM k=0.1 | 119.632 110.803 109.017 106.265 105.428 104.572 103.645 103.348 102.223 101.983
XDLM k=0.5 | 117.846 111.024 108.130 105.955 104.953 103.048 102.464 101.040 102.015 100.754
UDLM | 116.021 107.800 104.508 102.466 101.480 99.958 99.660 98.147 97.503 96.385
""",
)  # fmt: skip

#: Counted from the colours of its words, which stand for what happened since the line before.
TRAJECTORY = _table(
    "tab:case_lm1b_progress", "one text of 128 tokens under XDLM k=0.1, 32 steps; changes up to a step",
    "1 8 16 24 32",
    """
unmask | 15 30 28 32 34
refine | 0 3 3 5 3
remask | 12 9 3 1 0
""",
)  # fmt: skip

#: The three controls; figures are scores, higher is better.
ADAPTATION = _table(
    "tab:llada_performance", "LLaDA-8B continued for 600 steps, scores at 32 sampling steps",
    "BBH GSM8K MATH HumanEval MBPP",
    """
untouched | 42.68 24.49 4.80 5.49 6.80
XDLM sampler only | 41.74 24.26 4.86 1.22 5.40
continued as MDLM | 43.21 24.41 2.70 6.71 4.40
continued as XDLM k=0.1 | 42.76 29.26 4.72 10.98 15.00
""",
)  # fmt: skip

_CIFAR_STEPS = "32 128 512"

CIFAR_FID = _table(
    "tab:cifar10_performance_wocfg", "CIFAR-10, FID by sampling steps", _CIFAR_STEPS,
    """
MDLM | 211.983 69.151 33.961
GIDD | 193.487 72.579 41.809
XDLM k=0.001 | 164.040 50.638 29.079
XDLM k=0.1 | 77.985 48.702 43.210
XDLM k=0.5 | 56.299 37.307 33.030
UDLM | 41.027 27.822 25.144
""",
)  # fmt: skip

CIFAR_FID_GUIDED = _table(
    "tab:cifar10_performance_cfg1.0", "CIFAR-10 under guidance 2, FID by sampling steps", _CIFAR_STEPS,
    """
MDLM | 181.453 51.113 22.762
GIDD | 179.916 60.443 30.812
XDLM k=0.001 | 130.106 35.980 19.877
XDLM k=0.1 | 59.600 36.889 32.444
XDLM k=0.5 | 40.850 27.445 24.445
UDLM | 30.328 20.720 18.592
""",
)  # fmt: skip

_IMAGENET_STEPS = "4 8 16 32"

IMAGENET_FID = _table(
    "tab:imnet_performance_wocfg", "ImageNet at 256 x 256, FID by sampling steps", _IMAGENET_STEPS,
    """
MDLM | 80.752 47.732 28.785 18.928
GIDD | 86.842 54.933 35.403 24.588
XDLM k=0.001 | 81.992 52.590 35.046 25.637
XDLM k=0.1 | 54.085 34.109 25.774 22.187
XDLM k=0.5 | 45.808 29.362 23.417 21.486
UDLM | 49.861 30.144 26.242 25.661
""",
)  # fmt: skip

IMAGENET_FID_GUIDED = _table(
    "tab:imnet_performance_cfg1.0", "ImageNet under guidance 2, FID by sampling steps", _IMAGENET_STEPS,
    """
MDLM | 33.468 11.144 6.725 7.485
GIDD | 41.000 15.151 7.076 6.314
XDLM k=0.001 | 32.876 12.872 7.612 7.588
XDLM k=0.1 | 13.550 8.956 8.625 8.914
XDLM k=0.5 | 11.945 9.038 8.790 8.939
UDLM | 14.055 9.718 8.980 8.650
""",
)  # fmt: skip
