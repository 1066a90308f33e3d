"""``python -m minivllm``, and the ``mini-vllm`` command: ``minivllm.cli``, and Ctrl-C while it is loaded."""

import sys


def main() -> None:
    """Entry point. Importing the command line takes a moment, in which Ctrl-C is to be as quiet as later."""
    try:
        from minivllm import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
