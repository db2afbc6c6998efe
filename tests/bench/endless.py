"""A program that does not end by itself, whatever it is asked."""

import threading

if __name__ == "__main__":
    threading.Event().wait()
