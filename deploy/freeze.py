#!/usr/bin/env python3
"""Rewrites deploy/constraints.txt: the exact versions of everything that an image installs, as pip resolves them now.

Run it with the environment's Python (`.venv/bin/python deploy/freeze.py`) when dependencies in pyproject.toml change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "deploy" / "constraints.txt"
# Extras of the images. Triton comes with torch; mooncake and nixl come from requirements/engines.txt, without what they
# would pull in.
EXTRAS = ("tracing", "kube")
HEADER = """\
# Exact versions for the images; made by deploy/freeze.py. Triton and the libraries of CUDA follow torch, which pins
# them itself.
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "ray[default]"]
    wanted += [spec for extra in EXTRAS for spec in project["optional-dependencies"].get(extra, ())]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--quiet", "--report", str(report), *wanted], check=True)
        found = json.loads(report.read_text())["install"]
    pins = {item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in found}
    lines = [
        f"{name}=={version.split('+')[0]}\n"
        for name, version in sorted(pins.items())
        if not name.startswith(("nvidia-", "cuda-", "triton"))
    ]
    OUT.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
