"""``python -m trainer`` is the command ``trainer``."""

from trainer.cli.main import main

if __name__ == "__main__":
    main()
