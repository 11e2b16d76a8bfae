"""The command ``offloop``, also called ``bus``. Begin with ``main``."""
