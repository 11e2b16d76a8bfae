"""The command ``trainer``, as ``python -m offloop.trainer``."""

from offloop.trainer.cli.main import main

if __name__ == "__main__":
    main()
