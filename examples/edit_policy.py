"""Edit a policy: read what the default does, write a table that changes two things, and look at what they cost.

    pip install -e '.[examples]' && python examples/edit_policy.py --precision bfloat16

The function is one layer of a mixture of experts. Its router weighs the experts for each token with a softmax, which
turns absolute errors of its logits into relative ones of the weights. The table extends the default policy and keeps
the router, and every `tanh`, in float32. The script prints what the two policies say differently, and compares
decisions, memory and errors under both. (With `--precision float32` nothing is low, and all errors are zero.)
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich import print
from rich.progress import track
from rich.table import Table

import jaxamp
from jaxamp.__main__ import main as jaxamp_command

MINE = """\
description = "the default, with a careful router"
extends = "default"

[rules]                # rule = primitives, as a jaxpr prints them
float32 = ["tanh"]

[scopes]               # scope = rule
router = "float32"
"""


def loss_fn(params, x, y):
    with jax.named_scope("router"):
        weights = jax.nn.softmax(x @ params["router"])
    with jax.named_scope("experts"):
        hidden = jnp.tanh(jnp.einsum("td,edh->teh", x, params["up"]))
        written = jnp.einsum("teh,ehd->ted", hidden, params["down"])
    with jax.named_scope("mix"):
        return jnp.mean((jnp.einsum("te,ted->td", weights, written) - y) ** 2)


def draw(reports, errors, precision, path):
    plt.switch_backend("Agg")
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    scopes, height = ("router", "experts", "mix"), 0.8 / len(reports)
    for k, (name, report) in enumerate(reports.items()):
        at = np.arange(len(scopes)) + k * height
        rows = [(row.scope.split("/")[0], row.flops, report.is_low(row)) for row in report.matmuls]
        work = {scope: sum(flops for where, flops, _ in rows if where == scope) for scope in scopes}
        low = [sum(flops for where, flops, low in rows if where == scope and low) / work[scope] for scope in scopes]
        left.barh(at, low, height, label=name)
        right.bar(np.arange(len(errors[name])) + k * height, errors[name].values(), height, label=name)
    left.set_yticks(np.arange(len(scopes)) + height / 2, scopes)
    left.set(xlabel=f"share of the matmul FLOPs in {precision}", title="Decisions", xlim=(0, 1.02))
    right.set_xticks(np.arange(len(errors[name])) + height / 2, errors[name])
    right.set(
        ylabel="relative error against float32", title="Gradients", yscale="linear" if precision == "float32" else "log"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend()
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--small", action="store_true", help="few tokens and narrow experts")
    parser.add_argument("--table", help="where to write the policy; without it, to a folder that is removed again")
    parser.add_argument("--out", default="policy.png", help="where to save the picture of decisions and errors")
    options = parser.parse_args()
    tokens, width, experts = (64, 16, 4) if options.small else (512, 128, 8)

    keys = jax.random.split(jax.random.key(0), 5)
    sizes = {"router": (width, experts), "up": (experts, width, 2 * width), "down": (experts, 2 * width, width)}
    params = {n: jax.random.normal(key, s) / np.sqrt(s[-2]) for key, (n, s) in zip(keys, sizes.items(), strict=False)}
    params["router"] *= 8  # a router that is sure of its choice
    x, y = jax.random.normal(keys[3], (tokens, width)), jax.random.normal(keys[4], (tokens, width))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.table or Path(folder) / "mine.toml")
        path.write_text(MINE)
        print(f"[bold]jaxamp diff default {path.name}[/bold]")
        jaxamp_command(["diff", "default", str(path)])
        policies = {"default": jaxamp.load_policy("default"), path.name: jaxamp.load_policy(path)}

    reports, errors, kept = {}, {}, {}
    for name, policy in track(policies.items(), f"policies, {options.precision}"):
        how = {"compute_dtype": options.precision, "amp_policy": policy}
        reports[name] = jaxamp.amp_report(loss_fn, **how)(params, x, y)
        found = jaxamp.compare(loss_fn, **how)(params, x, y)
        gradients = {row.name.strip("[']"): row.error.relative for row in found.gradients}
        errors[name] = dict(sorted(gradients.items()))
        kept[name] = jaxamp.bytes_kept(loss_fn, **how)(params, x, y).after
        assert not jaxamp.unmatched_keys(loss_fn, **how)(params, x, y)  # a misspelt scope would be named here

    table = Table("", *policies, title="What the edit changes")
    table.add_row("matmul FLOPs that run low", *(f"{report.low_share:.1%}" for report in reports.values()))
    table.add_row("casts", *(f"{report.cast_count}" for report in reports.values()))
    table.add_row("kept for the backward pass", *(f"{size / 1024:.0f} KiB" for size in kept.values()))
    for leaf in errors["default"]:
        table.add_row(f"error of the gradient of {leaf}", *(f"{each[leaf]:.1e}" for each in errors.values()))
    print(table)
    draw(reports, errors, options.precision, options.out)
    print(f"Picture of decisions and errors: {options.out}")


if __name__ == "__main__":
    main()
