"""lm-eval's own command line, which knows the model `xdlm` (see `adapter`)."""

import sys

from xdlm.errors import UserError
from xdlm.evaluation.harness.adapter import register


def main() -> None:
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f"xdlm: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
