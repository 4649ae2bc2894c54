"""Whether code starts a JAX backend, asked in a process of its own."""

import os
import subprocess
import sys


def starts_no_backend(code: str) -> bool:
    code = f"import jax; {code}; print('done'); jax.devices()"
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere"}  # starting a backend fails
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    return out.stdout == "done\n" and "Unable to initialize backend 'nowhere'" in out.stderr
