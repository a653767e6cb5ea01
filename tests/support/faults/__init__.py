"""Every fault that an argument can have, as data: (argument, what to put there, words)."""
