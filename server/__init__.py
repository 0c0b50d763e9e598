"""Text and HTTP: an OpenAI-compatible server in front of the engine process.

`python -m ultraflash.server` is the door. Three kinds of processes live here: gunicorn (HTTP and
text), the supervisor, and the engine process (`worker.py`), the only one that drives the engine.
"""
