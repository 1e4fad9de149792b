"""`python -m xdlm VERB ...` is `xdlm VERB ...`."""

from xdlm.cli.main import main

if __name__ == "__main__":
    main()
