"""``python -m offloop.trainer`` is the command ``trainer``."""

from offloop.trainer.cli.main import main

if __name__ == "__main__":
    main()
