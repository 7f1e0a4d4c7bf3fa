"""The main job on a real checkpoint and a real text: `make quickstart`, or `python -m examples.quickstart` anywhere."""
