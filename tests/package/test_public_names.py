"""What `import jaxamp` gives: its names, in silence, and little more than its dependencies cost."""

import ast
import subprocess
import sys
import textwrap

import pytest
from helpers import ROOT, raises, with_the_package

import jaxamp


def in_a_process(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=with_the_package(), check=True, capture_output=True, text=True).stdout


def test_all_has_each_exported_name_and_no_other():
    tree = ast.parse((ROOT / "jaxamp/__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exported = [name.asname for node in imports for name in node.names if not name.asname.startswith("_")]
    assert sorted(jaxamp.__all__) == sorted([*exported, "default_amp_policy"])


def test_dir_and_a_star_give_the_names_in_all():
    public = [name for name in dir(jaxamp) if not name.startswith("_")]
    assert sorted(public) == sorted(jaxamp.__all__)
    namespace: dict[str, object] = {}
    exec("from jaxamp import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(jaxamp.__all__)
    assert "__version__" in dir(jaxamp)


@pytest.mark.parametrize("name", ["TYPE_CHECKING", "Any", "optmi"])
def test_a_name_that_is_not_there_is_an_attribute_error(name):
    with raises(AttributeError, f"module 'jaxamp' has no attribute '{name}'"):
        getattr(jaxamp, name)


def test_importing_is_silent_and_leaves_all_modules_for_later():
    code = """
        import sys, jaxamp
        print(*sorted(name for name in sys.modules if name.startswith('jaxamp.')))
        print(jaxamp.optim.flash_adamw.__name__, jaxamp.mpx.filter_grad.__name__, jaxamp.amp_report.__name__)
        print('amp_report' in vars(jaxamp))
    """
    modules, *rest = in_a_process(textwrap.dedent(code), "-W", "error").splitlines()
    assert modules == ""
    assert rest == ["flash_adamw filter_grad amp_report", "True"]


def test_each_name_can_be_the_first_that_is_asked_for():
    code = """
        import os, jax, equinox, optax, jaxamp
        for name in jaxamp.__all__:
            child = os.fork()  # a process that has imported JAX, and of jaxamp nothing
            if not child:
                getattr(jaxamp, name)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                print(name)
    """
    assert in_a_process(textwrap.dedent(code)) == ""


def test_names_may_first_be_asked_for_in_a_trace():
    code = """
        import jax, jax.numpy as jnp, jaxamp

        def loss(x):
            return jnp.sum(jnp.tanh(x @ x))

        @jax.jit
        def gradient(x):
            found = [getattr(jaxamp, name) for name in jaxamp.__all__]
            return jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16))(x)

        with jax.checking_leaks():
            gradient(jnp.ones((4, 4)))
        fp8 = jaxamp.amp(loss, amp_policy='fp8', compute_dtype=jnp.bfloat16)
        print(jax.jit(jax.grad(fp8))(jnp.ones((16, 16))).dtype)
    """
    assert in_a_process(textwrap.dedent(code)).split() == ["float32"]
